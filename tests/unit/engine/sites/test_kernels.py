"""The Triton kernels compute what their plain twins do, and Triton can compile them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton import JITFunction
from triton._C.libtriton import ir
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

from rheostat_engine.sites import kernels
from rheostat_engine.worker import expand_kernel
from rheostat_engine.worker.steering import gate_kernels, readout_kernels

from ..interpreted_kernels import PARTS

GATE_FLOATS = ("readings_ptr", "openness_ptr", "gains_ptr", "states_ptr", "gate_floats_ptr")


@pytest.mark.parametrize("part", PARTS)
def test_interpreted_kernels_equal_their_twins(part: str) -> None:
    # Triton reads TRITON_INTERPRET when it is imported, hence a process of its own.
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.engine.interpreted_kernels", part],
        cwd=Path(__file__).parents[4],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "kernels equal their twins\n"), done.stderr


def compile_front(kernel: JITFunction, types: dict[str, str], constants: dict[str, object]) -> None:
    """Compiles a kernel as far as no GPU is needed: to Triton's own intermediate code.

    Args:
        kernel: the kernel.
        types: of arguments by name; int32 if there is none, and a pointer to int32 of a pointer.
        constants: its `constexpr` arguments.

    Raises:
        CompilationError: it is no kernel, though Triton may interpret it.
    """
    compiler = backends["nvidia"].compiler(GPUTarget("cuda", 90, 32))
    options = compiler.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    compiler.load_dialects(context)
    signature = {
        name: "constexpr" if name in constants else types.get(name, pointer(name))
        for name in kernel.arg_names
    }
    ASTSource(kernel, signature, constants).make_ir(
        compiler.target,
        options,
        compiler.get_codegen_implementation(options),
        compiler.get_module_map(),
        context,
    )


def pointer(name: str) -> str:
    return "*i32" if name.endswith("_ptr") else "i32"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("residual", ["", "bf16", "fp32"])
def test_the_kernel_of_a_site_can_be_compiled(dtype, residual) -> None:
    """The interpreter lets a variable change its type, which the compiler refuses."""
    own = dict.fromkeys(["h_ptr", "rows_ptr", "ring_ptr"], f"*{dtype}")
    floats = dict.fromkeys(["directions_ptr", "floats_ptr", "doses_ptr", *GATE_FLOATS], "*fp32")
    numbers = dict.fromkeys(["gain", "inverse", "limit", "own_limit"], "fp32")
    types = {**own, **floats, **numbers, "residual_ptr": f"*{residual or dtype}"}
    types["row_sums_ptr"] = "*fp64"
    sizes = {"WIDTH": 100, "BLOCK": 128, "HAS_RESIDUAL": bool(residual)}
    compile_front(kernels._site_kernel, types, sizes)


def test_the_kernel_that_folds_readings_can_be_compiled() -> None:
    compile_front(gate_kernels._fold_kernel, dict.fromkeys(GATE_FLOATS, "*fp32"), {})


def test_the_kernel_that_reads_means_can_be_compiled() -> None:
    floats = dict.fromkeys(["directions_ptr", "floats_ptr", "readings_ptr"], "*fp32")
    types = {**floats, "row_sums_ptr": "*fp64"}
    compile_front(readout_kernels._read_means_kernel, types, {"WIDTH": 100, "BLOCK": 128})


@pytest.mark.parametrize("rules", [False, True])
@pytest.mark.parametrize("captures", [False, True])
def test_the_kernel_that_expands_instructions_can_be_compiled(rules, captures) -> None:
    constants = {"RULES": rules, "CAPTURES": captures, "BLOCK": 128}
    compile_front(expand_kernel._expand_kernel, {"bits_ptr": "*u8"}, constants)
