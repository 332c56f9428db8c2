"""Launches Triton kernels without Triton's own lookup of the compiled kernel.

Why
    Triton's JIT looks a kernel up at each launch: it binds the arguments, describes each of them,
    and compares the constants of all modules that the kernel uses. On an H200's host a launch of
    the site's kernel took 55 us, and a launch of the compiled kernel itself 17 us. A prefill step
    larger than the largest CUDA graph launches a kernel at every active site.

What decides which compiled kernel the JIT launches
    On CUDA, Triton compiles a kernel for each combination of:

    * the current device;
    * the dtype of each tensor, and whether its address is a multiple of 16;
    * whether each integer is 1, a multiple of 16 or neither, and how wide it is;
    * the constants, and the options. Our callers set no option but the number of warps.

    `KernelLauncher` keeps a compiled kernel under a key of all of these.

Invariant: the kernel that is launched is the one that the JIT would launch, with the same
arguments, on the same stream. There are two exceptions: the JIT notices if a constant of a module
or a setting of Triton (`triton.knobs`) changes while the process runs, and the launcher does not.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver

_VERIFIED_VERSIONS = {(3, 6), (3, 9)}
"""Versions of Triton whose sources were read for this module. Other versions launch by the JIT."""
_ALIGNMENT = 16


def _form_of(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> tuple[object, ...]:
    """What Triton compiles a kernel for, of tensors on a CUDA device."""
    return (
        *[tensor.dtype for tensor in tensors],
        *[address % _ALIGNMENT == 0 for address in addresses],
    )


class FixedTensors:
    """Tensors that never move. Their addresses, dtypes and alignments are read once, here."""

    _forms: ClassVar[dict[tuple[object, ...], int]] = {}

    def __init__(self, *tensors: torch.Tensor) -> None:
        """`tensors` must keep their storage while this object is used."""
        self.tensors = tensors
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        form = _form_of(tensors, self.addresses)
        self.form = self._forms.setdefault(form, len(self._forms))
        """The same number for all tensors of the same dtypes and alignments, because a number is
        hashed faster."""


_NO_TENSORS = FixedTensors()


class KernelLauncher:
    """Launches one kernel. Its parameters are tensors, integers, floats and constants in turn."""

    def __init__(self, jit: triton.JITFunction) -> None:
        """No kernel is compiled yet."""
        self._jit = jit
        self._compiled: dict[tuple[object, ...], CompiledKernel] = {}
        version = tuple(map(int, triton.__version__.split(".")[:2]))
        # Triton's interpreter makes a JIT function of another type, which compiles nothing.
        self._direct = isinstance(jit, triton.JITFunction) and version in _VERIFIED_VERSIONS

    def launch(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        fixed: FixedTensors = _NO_TENSORS,
        *,
        varying: tuple[int, ...] = (),
        integers: tuple[int, ...] = (),
        floats: tuple[float, ...] = (),
        constants: tuple[int, ...] = (),
        num_warps: int = 4,
    ) -> None:
        """Launches the kernel on the current stream. The JIT compiles it if needed.

        Args:
            grid: the number of programs in each dimension.
            tensors: the first tensors, on the current device. Only their addresses are passed.
            fixed: the tensors after them, likewise.
            varying: integers that change often, each of which fits into 32 bits. The key has what
                Triton distinguishes: 1, a multiple of 16, or another.
            integers: integers that rarely change. The key has their values.
            floats: Python floats. An int would be another type to Triton.
            constants: the values of `constexpr` parameters.
            num_warps: warps of each program.
        """
        numbers = (*varying, *integers, *floats, *constants)
        if not self._direct:
            self._jit[grid](*tensors, *fixed.tensors, *numbers, num_warps=num_warps)
            return
        active = driver.active
        device = active.get_current_device()
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = (
            device,
            fixed.form,
            integers,
            constants,
            num_warps,
            *_form_of(tensors, addresses),
            *[0 if number % _ALIGNMENT == 0 else 1 if number == 1 else 2 for number in varying],
        )
        compiled = self._compiled.get(key)
        if compiled is not None:
            # Addresses, because for a tensor Triton asks the driver whether the device has it.
            stream = active.get_current_stream(device)
            compiled[grid](*addresses, *fixed.addresses, *numbers, stream=stream)
            return
        compiled = self._jit[grid](*tensors, *fixed.tensors, *numbers, num_warps=num_warps)
        # For AMD devices, Triton also distinguishes tensors by their size.
        if isinstance(compiled, CompiledKernel) and compiled.metadata.target.backend == "cuda":
            self._compiled[key] = compiled
