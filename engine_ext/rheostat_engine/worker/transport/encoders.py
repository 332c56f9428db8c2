"""Encodes captured rows on the device, so that fewer bytes leave it.

Invariants: encoded rows are uint8 [n, bytes of a row], little-endian, each row by itself. Shapes
alone decide their size, so nothing here waits for the device. `offset + scale * code` is within
half a scale of the number, where scale and offset are the float32 numbers of the row. If a row has
a number that is not finite, its scale and offset are NaN and its codes 0.
"""

import math
from typing import NamedTuple

import torch

_LARGEST_INDEX = 2**32 - 1

_SIGNS_AT_ONCE = 1 << 18
"""Signs of a random projection that are made at once. Meanwhile, each takes 32 bytes."""


class Codes(NamedTuple):
    """Rows of 8-bit codes."""

    scales: torch.Tensor
    """float32 [n]."""
    offsets: torch.Tensor
    """float32 [n]."""
    codes: torch.Tensor
    """uint8 [n, numbers]."""


def cast(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts elements, rounded to nearest: [n, W] -> uint8 [n, W * itemsize]."""
    return rows.to(dtype).contiguous().view(torch.uint8)


def full8(rows: torch.Tensor) -> torch.Tensor:
    """Every number in 8 bits of its row's range: [n, W] of any float type -> uint8 [n, 8 + W].

    Works in float64, since the range of float32 numbers can exceed float32's.
    """
    codes = quantised(rows.float())
    return _joined(codes.scales[:, None], codes.offsets[:, None], codes.codes)


def rp8(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """A random projection in 8 bits per number: [n, W] -> uint8 [n, 8 + K].

    Args:
        rows: of any float type.
        matrix: float32 [K, W]; see `random_signs`.
    """
    return full8(projected(rows, matrix))


def topk8(rows: torch.Tensor, kept: int) -> torch.Tensor:
    """The K elements of largest magnitude per row: [n, W] -> uint8 [n, 8 + 5 * K].

    Indices ascend. Of equal magnitudes the lower index is kept; NaN and infinities are larger than
    any number.
    """
    numbers = rows.float()
    indices = largest(numbers, kept)
    codes = quantised(numbers.gather(1, indices))
    return _joined(
        codes.scales[:, None],
        codes.offsets[:, None],
        indices.to(torch.int32),
        codes.codes,
    )


def projected(rows: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """x.d for every row x [n, W] and direction d [D, W], in float32: [n, D].

    As precise as `torch.get_float32_matmul_precision` says; vLLM sets it, by default to "highest".
    """
    return rows.float() @ directions.float().T


def random_signs(kept: int, width: int, seed: int, device: torch.device) -> torch.Tensor:
    """The [K, W] float32 matrix of RP8; `Quantization.seed` in tensor.proto says how it is made."""
    size = 1 / math.sqrt(kept)
    signs = torch.empty(kept * width, dtype=torch.float32, device=device)
    for first in range(0, len(signs), _SIGNS_AT_ONCE):
        part = signs[first : first + _SIGNS_AT_ONCE]
        # int64 wraps as uint64 does; its right shift copies the sign, which the masks take off.
        state = torch.arange(first + 1, first + 1 + len(part), dtype=torch.int64, device=device)
        state.mul_(_signed(0x9E3779B97F4A7C15)).add_(_signed(seed))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state.bitwise_xor_((state >> shift).bitwise_and_((1 << (64 - shift)) - 1))
            state.mul_(_signed(factor))
        odd = (state >> 31).bitwise_xor_(state).bitwise_and_(1)
        part.copy_(1 - 2 * odd).mul_(size)
    return signs.view(kept, width)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def quantised(rows: torch.Tensor) -> Codes:
    """Codes over each row's own range; float32 [n, numbers], at least one number."""
    low, high = torch.aminmax(rows, dim=1)
    reach = high.double() - low
    scales = _scales(reach)
    finite = reach.isfinite()
    # -0 becomes 0
    offsets = torch.where(finite, low + 0.0, torch.nan)
    divisors = torch.where(scales > 0, scales, 1.0).double()
    steps = rows.double().sub_(offsets[:, None]).div_(divisors[:, None]).round_()
    codes = steps.clamp_(max=255).nan_to_num_(nan=0.0).to(torch.uint8)
    return Codes(scales, offsets, codes)


def _scales(reach: torch.Tensor) -> torch.Tensor:
    """The largest float32 whose 255th multiple is not above the range, so that none overflows.

    Among denormal numbers that may not reach the range's end to half a scale; then the next one.
    """
    reach = torch.where(reach.isfinite(), reach, torch.nan)
    scales = (reach / 255).float()
    scales = torch.where(
        scales.double() > reach / 255, scales.nextafter(torch.zeros_like(scales)), scales
    )
    above = scales.nextafter(torch.full_like(scales, torch.inf))
    return torch.where(scales.double() * 255.5 < reach, above, scales)


def largest(rows: torch.Tensor, kept: int) -> torch.Tensor:
    """Ascending indices of each row's K elements of largest magnitude, int64 [n, K]."""
    magnitudes = rows.view(torch.int32).bitwise_and(0x7FFFFFFF).long()
    columns = torch.arange(rows.shape[1], device=rows.device)
    # No two keys are equal, so the choice doesn't depend on how they are sorted.
    keys = (magnitudes << 32) + (_LARGEST_INDEX - columns)
    return keys.topk(kept, dim=1, sorted=False).indices.sort(dim=1).values


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    """The bytes of a row's parts, side by side."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
