"""Direct launches use the compiled kernel that Triton's JIT would launch, with the same arguments.

Triton's own JIT looks the kernels up here; only the compiler and the device are fakes. So a key
that misses anything that Triton specializes on makes a test fail.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import create_function_from_signature

from rheostat_engine.sites import kernels
from rheostat_engine.sites.kernels import launch_site
from rheostat_engine.worker import expand_kernel
from rheostat_engine.worker.expand_kernel import launch_expand
from rheostat_engine.worker.instructions import Instructions
from rheostat_engine.worker.state import kernel_launcher
from rheostat_engine.worker.state.buffers import Buffers, FoldColumn, GateBuffers, SiteBuffers
from rheostat_engine.worker.state.kernel_launcher import FixedTensors, KernelLauncher
from rheostat_engine.worker.steering import gate_kernels
from rheostat_engine.worker.steering.gate_kernels import launch_fold
from rheostat_engine.worker.steering.programs import FLOATS, INTS

from ...instructions import buffers
from ...no_gates import no_gates

CUDA, HIP = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTH, TOKENS = 48, 6
SITE_TENSORS = [name for name in SiteBuffers._fields if name != "gates"]
GATE_TENSORS = [name for name in GateBuffers._fields if name not in ("step", "folded")]


@triton.jit
def _kernel(a_ptr, b_ptr, first, second, number, SIZE: tl.constexpr, FLAG: tl.constexpr):
    pass


class Launch(NamedTuple):
    """A launch that reached the driver."""

    kernel: object
    """By what the JIT finds the kernel."""
    grid: tuple[int, ...]
    stream: int
    arguments: list[object]


class Device:
    """Replaces Triton's driver, and keeps what was launched."""

    def __init__(self, target: GPUTarget = CUDA) -> None:
        self.number, self.stream = 0, 7
        self.target = target
        self.launches: list[Launch] = []
        self.lookups = 0
        """Launches through the JIT."""

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return self.stream + 100 * device

    def jit(self, kernel: triton.JITFunction) -> triton.JITFunction:
        """Triton's JIT of a kernel, with nothing compiled yet."""
        made = triton.JITFunction(kernel.fn, do_not_specialize=kernel.do_not_specialize)
        backend = backends["nvidia"].compiler(CUDA)
        for number in (0, 1):
            binder = create_function_from_signature(made.signature, made.params, backend)
            made.device_caches[number] = ({}, {}, CUDA, backend, binder)

        def compile_kernel(key: str, *_: object) -> CompiledKernel:
            found = self._compiled((self.number, key))
            made.device_caches[self.number][0][key] = found
            return found

        made._do_compile = compile_kernel
        made.add_pre_run_hook(self._count)
        return made

    def _count(self, *_: object, **__: object) -> None:
        self.lookups += 1

    def _compiled(self, key: object) -> CompiledKernel:
        """A compiled kernel without code."""
        made = object.__new__(CompiledKernel)
        made.metadata, made.src, made.name = SimpleNamespace(target=self.target), None, "kernel"
        made.module, made._module_pid = "loaded", None
        made.function, made.packed_metadata, made._run = key, (), self._run
        return made

    def _run(self, x: int, y: int, z: int, stream: int, function: object, *rest: Any) -> None:
        _metadata, _launch_metadata, enter, leave, *arguments = rest
        assert callable(enter)  # hooks of profilers
        assert callable(leave)
        addresses = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments]
        self.launches.append(Launch(function, (x, y, z), stream, addresses))


class Twin:
    """Launches each kernel as the engine does and through the JIT alone, and compares the two."""

    def __init__(self, device: Device, kernel: triton.JITFunction) -> None:
        self._device = device
        self._launcher = KernelLauncher(device.jit(kernel))
        self._plain = KernelLauncher(device.jit(kernel))
        self._plain._direct = False
        self.lookups: list[int] = []
        """By launch: how often the engine's launcher asked the JIT."""

    def launch(self, *arguments: Any, **options: Any) -> None:
        before = self._device.lookups
        self._launcher.launch(*arguments, **options)
        self.lookups.append(self._device.lookups - before)
        self._plain.launch(*arguments, **options)
        one, other = self._device.launches[-2:]
        assert one == other
        assert [*map(type, one.arguments)] == [*map(type, other.arguments)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device on which nothing is compiled."""
    made = Device()
    monkeypatch.setattr(driver, "_active", made)
    return made


@pytest.fixture
def twins(device: Device, monkeypatch: pytest.MonkeyPatch) -> dict[str, Twin]:
    """Compares the launches of the engine's kernels."""
    made = {}
    for name, module, kernel in (
        ("site", kernels, kernels._site_kernel),
        ("expand", expand_kernel, expand_kernel._expand_kernel),
        ("fold", gate_kernels, gate_kernels._fold_kernel),
    ):
        made[name] = Twin(device, kernel)
        monkeypatch.setattr(module, "_LAUNCHER", made[name])
    return made


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """An equal tensor whose address is no multiple of 16."""
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    made = storage[1:].view(tensor.shape)
    assert made.data_ptr() % 16
    return made.copy_(tensor)


def strided(stride: int, dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS) -> torch.Tensor:
    """Rows of a stream that lie `stride` elements apart."""
    return torch.zeros(tokens, stride, dtype=dtype)[:, :WIDTH]


def a_site(dtype: torch.dtype = torch.bfloat16) -> SiteBuffers:
    none = [0] * TOKENS
    return buffers(WIDTH, dtype=dtype, codes=none, captured=none, programs=[])


class Call(NamedTuple):
    """The arguments of a launch."""

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    offsets: tuple[int, ...] = (0, 0)
    """The addresses of the tensors, in bytes beyond a multiple of 64."""
    varying: int = 3
    integer: int = 5
    number: float = 0.5
    constants: tuple[int, ...] = (16, 0)
    num_warps: int = 4
    device: int = 0

    def tensors(self) -> list[torch.Tensor]:
        """One element of each tensor."""
        made = []
        for dtype, offset in zip(self.dtypes, self.offsets, strict=True):
            storage = torch.zeros(192, dtype=torch.uint8)
            begin = -storage.data_ptr() % 64 + offset
            made.append(storage[begin : begin + 64 - offset].view(dtype))
        return made


INTEGERS = (0, 1, 2, 8, 16, 17, -1, -16, 4096, 2**31 - 1, 2**31 - 16, -(2**31))
WIDE = (2**31, 2**31 + 1, 2**32 + 1, 2**40, -(2**31) - 1, -(2**31) - 16)
BASE = Call()
CALLS = [
    BASE,
    *(BASE._replace(dtypes=(one, torch.float32)) for one in (torch.float16, torch.int32)),
    *(BASE._replace(dtypes=(torch.bfloat16, one)) for one in (torch.float64, torch.int32)),
    *(BASE._replace(offsets=(one, 0)) for one in (2, 4, 8, 16, 32, 48)),
    *(BASE._replace(offsets=(0, one)) for one in (4, 8, 16, 24, 32)),
    *(BASE._replace(varying=one) for one in INTEGERS),
    *(BASE._replace(integer=one) for one in (*INTEGERS, *WIDE)),
    *(BASE._replace(number=one) for one in (0.0, 1.0, 16.0)),
    *(BASE._replace(constants=one) for one in ((16, 1), (32, 0))),
    BASE._replace(num_warps=8),
    BASE._replace(device=1),
]
"""Calls that differ from the first in one argument."""


def test_the_kernel_is_the_one_that_the_jit_would_launch(device: Device) -> None:
    twin = Twin(device, _kernel)
    for call in CALLS + CALLS[::-1]:
        device.number = call.device
        first, second = call.tensors()
        twin.launch(
            (3, 2, 1),
            (first,),
            FixedTensors(second),
            varying=(call.varying,),
            integers=(call.integer,),
            floats=(call.number,),
            constants=call.constants,
            num_warps=call.num_warps,
        )
    assert not any(twin.lookups[len(CALLS) :])


def test_a_second_launch_skips_the_jit(twins) -> None:
    site, h = a_site(), strided(WIDTH)
    for tokens in (TOKENS, 1, 3, 16):
        launch_site(strided(WIDTH, tokens=tokens), None, site)
    launch_site(h, None, a_site(), gain=0.25)
    launch_site(h.view(2, -1, WIDTH), None, site)
    assert twins["site"].lookups == [1, 0, 0, 0, 0, 0]


def test_launches_go_to_the_current_stream(device, twins) -> None:
    site, h = a_site(), strided(WIDTH)
    for stream in (7, 8):
        device.stream = stream
        launch_site(h, h.clone(), site)
    assert [launch.stream for launch in device.launches] == [7, 7, 8, 8]
    assert twins["site"].lookups == [1, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_form_of_a_stream_has_its_kernel(twins, dtype: torch.dtype) -> None:
    site, lookups = a_site(dtype), []
    residuals = [None, *(strided(WIDTH, one) for one in DTYPES)]
    for _ in range(2):
        for residual in residuals:
            launch_site(strided(WIDTH, dtype), residual, site)
            lookups.append(twins["site"].lookups[-1])
    assert lookups == [1] * 4 + [0] * 4


@pytest.mark.parametrize("name", SITE_TENSORS)
def test_a_tensor_of_a_site_may_be_misaligned(twins, name: str) -> None:
    site, h = a_site(), strided(WIDTH)
    other = site._replace(**{name: misaligned(getattr(site, name))})
    for one in (site, other, site, other):
        launch_site(h, None, one)
    assert twins["site"].lookups == [1, 1, 0, 0]


@pytest.mark.parametrize("name", GATE_TENSORS)
def test_a_tensor_of_gates_may_be_misaligned(twins, name: str) -> None:
    site, h = a_site(), strided(WIDTH)
    gates = site.gates._replace(**{name: misaligned(getattr(site.gates, name))})
    for one in (site.gates, gates, site.gates, gates):
        launch_site(h, None, site._replace(gates=one))
    assert twins["site"].lookups == [1, 1, 0, 0]


def test_a_stream_may_be_misaligned(twins) -> None:
    site, h, residual = a_site(), strided(WIDTH), strided(WIDTH)
    for _ in range(2):
        launch_site(h, residual, site)
        launch_site(misaligned(h), residual, site)
        launch_site(h, misaligned(residual), site)
    assert twins["site"].lookups == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("part", ["h", "residual", "ring"])
def test_each_stride_may_be_odd(twins, part: str) -> None:
    site, h = a_site(), strided(WIDTH)
    for stride in (WIDTH, WIDTH + 1, WIDTH + 16, WIDTH + 17) * 2:
        rows = strided(stride)
        launch_site(
            rows if part == "h" else h,
            rows if part == "residual" else h.clone(),
            site._replace(ring=rows if part == "ring" else site.ring),
        )
    assert twins["site"].lookups == [1] * 4 + [0] * 4


def test_narrower_rows_have_a_kernel_of_their_own(twins) -> None:
    site = a_site()
    for _ in range(2):
        for width in (WIDTH, 16, 1):
            launch_site(torch.zeros(TOKENS, width, dtype=torch.bfloat16), None, site)
    assert twins["site"].lookups == [1, 1, 1, 0, 0, 0]


def test_a_gain_may_be_an_int(twins) -> None:
    site, h = a_site(), strided(WIDTH)
    for gain in (0.5, 2, 1):
        launch_site(h, None, site, gain)
    assert twins["site"].lookups == [1, 0, 0]


def test_few_sites_stay_in_memory(twins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_MOST_SITES", 3)
    monkeypatch.setattr(kernels, "_TENSORS", {})
    sites = [a_site() for _ in range(8)]
    for site in sites * 2:
        launch_site(strided(WIDTH), None, site)
        assert len(kernels._TENSORS) <= 3


def test_each_device_has_its_kernel(device, twins) -> None:
    site, h = a_site(), strided(WIDTH)
    for number in (0, 1, 0, 1):
        device.number = number
        launch_site(h, None, site)
    assert twins["site"].lookups == [1, 1, 0, 0]


def test_instructions_and_folds_skip_the_jit_too(twins) -> None:
    made = Buffers(
        tokens=8,
        rows=torch.zeros(4, WIDTH),
        directions=torch.zeros(3, WIDTH),
        ints=torch.zeros(2, INTS, dtype=torch.int32),
        floats=torch.zeros(2, FLOATS),
        gates=no_gates(8),
        doses=torch.zeros(5, 20, 4),
        ring=torch.zeros(6, WIDTH),
    )

    def tables(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    step = Instructions(
        tables(5, 3), None, tables(2, 7).byte(), tables(4, 2), tables(5, 6), None, 0
    )
    steps: Sequence[Instructions] = [
        step,
        step._replace(packed=tables(5, 5), first_row=5),
        step._replace(ids=tables(5)),
        step._replace(base=tables(1, 5), first_row=5),
        step._replace(base=tables(1, 5), first_row=7),
    ]
    for one in steps:
        launch_expand(one, made)
    assert twins["expand"].lookups == [1, 1, 1, 1, 0]
    for count in (3, 1, 2):
        launch_fold(made.gates, tables(count, len(FoldColumn)))
    assert twins["fold"].lookups == [1, 0, 0]


def test_the_installed_triton_is_one_that_was_read() -> None:
    # Read how another version looks kernels up and launches them, then add it.
    assert kernels._LAUNCHER._direct


@pytest.mark.parametrize(
    "reason", ["another Triton", "another backend", "a hook skips compilation"]
)
def test_the_jit_launches_if_nothing_else_may(
    device: Device, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "another Triton":
        monkeypatch.setattr(kernel_launcher.triton, "__version__", "3.5.1+git1")
    if reason == "another backend":
        device.target = HIP
    jit = device.jit(_kernel)
    if reason == "a hook skips compilation":
        jit._do_compile = lambda *_: None
    launcher = KernelLauncher(jit)
    for _ in range(3):
        launcher.launch(
            (1, 1, 1),
            (torch.zeros(4),),
            FixedTensors(torch.zeros(4)),
            integers=(2, 3),
            floats=(1.0,),
            constants=(16, False),
        )
    assert device.lookups == 3
