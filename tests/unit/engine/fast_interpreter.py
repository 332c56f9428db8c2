"""Triton's interpreter on a CPU, adapted so that it takes less time."""

import math
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

SCAN = interpreter.ScanOps.generic_scan
"""How Triton scans."""


def interpret_faster() -> None:
    """Adapts Triton's language to the interpreter once, until the process ends.

    Triton adapts it at each call of a function within a kernel, `tl.sum` for example, and then goes
    through hundreds of names. Triton also makes a table of all types, and a shape, for each value
    that it computes.
    """
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    numpy_dtype, found = interpreter._get_np_dtype, dict[str, np.dtype]()

    def dtype_of(of: tl.dtype) -> np.dtype:
        scalar = of.scalar
        if scalar.name not in found:
            found[scalar.name] = numpy_dtype(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = dtype_of
    tl.tensor.__init__ = init_tensor


def init_tensor(value: tl.tensor, handle: interpreter.TensorHandle, of: tl.dtype) -> None:
    """What Triton does, except that tensors of equal sizes have the same shape."""
    value.handle, value.type, value.dtype = handle, of, of.scalar
    value.numel, value.shape = shape_of(*of.shape) if of.is_block() else shape_of()


@cache
def shape_of(*sizes: int) -> tuple[tl.constexpr, tl.tuple]:
    """The number of elements of a tensor, and its shape."""
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


def scan_all_rows(scan: interpreter.ScanOps, parts: Sequence[tl.tensor]) -> list[tl.tensor]:
    """Scans in log2(n) rounds of all rows, as a GPU does.

    Triton's interpreter calls the function that combines two rows n times.
    """
    found = [part.handle.data for part in parts]
    dtypes = [part.dtype for part in parts]
    (count,) = found[0].shape
    distance = 1
    while distance < count:
        earlier = [np.roll(data, distance) for data in found]
        joined = scan.combine_fn.fn(*map(scan.to_tensor, earlier + found, dtypes + dtypes))
        alone = np.arange(count) < distance
        found = [
            np.where(alone, data, one.handle.data) for data, one in zip(found, joined, strict=True)
        ]
        distance *= 2
    return [*map(scan.to_tensor, found, dtypes)]
