"""Encodes captured rows on the device, to copy fewer bytes to the host.

Invariants: encoded rows are uint8 [n, bytes of a row], little-endian, each row alone. Their size
depends only on shapes, so no function waits for the device. `offset + scale * code`, with the row's
float32 scale and offset, is within half a scale of the number. If a row has a number that is not
finite, its scale and offset are NaN and its codes 0.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from rheostat_engine.plan.gates import Activation, Normalise, Readout

_LARGEST_INDEX = 2**32 - 1

_SIGNS_AT_ONCE = 1 << 18
"""Signs of a random projection computed at once. Each takes 32 bytes meanwhile."""


class Codes(NamedTuple):
    """Rows of 8-bit codes."""

    scales: torch.Tensor
    """float32 [n]."""
    offsets: torch.Tensor
    """float32 [n]."""
    codes: torch.Tensor
    """uint8 [n, numbers]."""


def cast(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts elements, rounding to nearest: [n, W] -> uint8 [n, W * itemsize]."""
    return rows.to(dtype).contiguous().view(torch.uint8)


def full8(rows: torch.Tensor) -> torch.Tensor:
    """Quantizes to 8 bits over each row's range: [n, W] of any float dtype -> uint8 [n, 8 + W].

    Computes in float64, because the range of float32 numbers can exceed float32.
    """
    codes = quantize(rows.float())
    return _concat_bytes(codes.scales[:, None], codes.offsets[:, None], codes.codes)


def rp8(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """A random projection in 8 bits per number: [n, W] of any float dtype -> uint8 [n, 8 + K].

    `matrix` is float32 [K, W]; see `random_signs`.
    """
    return full8(project(rows, matrix))


def topk8(rows: torch.Tensor, kept: int) -> torch.Tensor:
    """The K elements of largest magnitude of each row: [n, W] -> uint8 [n, 8 + 5 * K].

    Indices ascend. Of equal magnitudes, the lower index is kept. NaN and infinities are larger than
    any number.
    """
    numbers = rows.float()
    indices = largest_indices(numbers, kept)
    codes = quantize(numbers.gather(1, indices))
    return _concat_bytes(
        codes.scales[:, None],
        codes.offsets[:, None],
        indices.to(torch.int32),
        codes.codes,
    )


def project(rows: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """x.d for every row x [n, W] and direction d [D, W], in float32: [n, D].

    The precision is `torch.get_float32_matmul_precision`, which vLLM sets, by default to "highest".
    """
    return rows.float() @ directions.float().T


class Readouts(NamedTuple):
    """What numbers are made of scalar products x.d: [D] each."""

    scales: torch.Tensor
    """float32: 1 / |d|, or 1."""
    cosine: torch.Tensor
    """bool: whether the number is divided by |x|."""
    bias: torch.Tensor
    """float32."""
    activation: torch.Tensor
    """int32: an `Activation`."""
    theta: torch.Tensor
    """float32."""


def readouts_of(readouts: Sequence[Readout], directions: torch.Tensor) -> Readouts:
    """The readouts with directions d [D, W], on their device."""
    device = directions.device
    norms = directions.double().square().sum(1).sqrt()
    scaled = torch.tensor(
        [readout.normalise != Normalise.NONE for readout in readouts], device=device
    )
    cosine = [readout.normalise == Normalise.COSINE for readout in readouts]
    return Readouts(
        torch.where(scaled & (norms > 0), 1 / norms, 1.0).float(),
        torch.tensor(cosine, device=device),
        torch.tensor([readout.bias for readout in readouts], device=device),
        torch.tensor(
            [readout.activation for readout in readouts], dtype=torch.int32, device=device
        ),
        torch.tensor([readout.theta for readout in readouts], device=device),
    )


def read(rows: torch.Tensor, products: torch.Tensor, readouts: Readouts) -> torch.Tensor:
    """The numbers of rows [n, W] and their products x.d [n, D], in float32: [n, D]."""
    z = products * readouts.scales
    norms = rows.float().square().sum(1, keepdim=True).sqrt()
    cosines = torch.where(norms > 0, z / norms, 0.0)
    z = torch.where(readouts.cosine, cosines, z) + readouts.bias
    activation = readouts.activation
    z = torch.where(activation == Activation.RELU, z.clamp(min=0), z)
    shut = (activation == Activation.JUMP_RELU) & (z <= readouts.theta)
    z = torch.where(shut, 0.0, z)
    return torch.where(activation == Activation.TANH, z.tanh(), z)


def random_signs(kept: int, width: int, seed: int, device: torch.device) -> torch.Tensor:
    """The [K, W] float32 matrix of RP8; `Quantization.seed` in tensor.proto defines it."""
    size = 1 / math.sqrt(kept)
    signs = torch.empty(kept * width, dtype=torch.float32, device=device)
    for first in range(0, len(signs), _SIGNS_AT_ONCE):
        part = signs[first : first + _SIGNS_AT_ONCE]
        # int64 wraps like uint64. Its right shift copies the sign, which the masks remove.
        state = torch.arange(first + 1, first + 1 + len(part), dtype=torch.int64, device=device)
        state.mul_(_to_int64(0x9E3779B97F4A7C15)).add_(_to_int64(seed))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state.bitwise_xor_((state >> shift).bitwise_and_((1 << (64 - shift)) - 1))
            state.mul_(_to_int64(factor))
        odd = (state >> 31).bitwise_xor_(state).bitwise_and_(1)
        part.copy_(1 - 2 * odd).mul_(size)
    return signs.view(kept, width)


def _to_int64(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def quantize(rows: torch.Tensor) -> Codes:
    """Quantizes float32 [n, numbers] over each row's range; at least one number."""
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
    """The largest float32 whose 255th multiple does not exceed the range, so that none overflows.

    Among denormal numbers, that may miss the end of the range by over half a scale. Then it is the
    next larger float32.
    """
    reach = torch.where(reach.isfinite(), reach, torch.nan)
    scales = (reach / 255).float()
    scales = torch.where(
        scales.double() > reach / 255, scales.nextafter(torch.zeros_like(scales)), scales
    )
    above = scales.nextafter(torch.full_like(scales, torch.inf))
    return torch.where(scales.double() * 255.5 < reach, above, scales)


def largest_indices(rows: torch.Tensor, kept: int) -> torch.Tensor:
    """Ascending indices of each row's K elements of largest magnitude, int64 [n, K]."""
    magnitudes = rows.view(torch.int32).bitwise_and(0x7FFFFFFF).long()
    columns = torch.arange(rows.shape[1], device=rows.device)
    # The keys are distinct, so the result doesn't depend on the sorting algorithm.
    keys = (magnitudes << 32) + (_LARGEST_INDEX - columns)
    return keys.topk(kept, dim=1, sorted=False).indices.sort(dim=1).values


def _concat_bytes(*parts: torch.Tensor) -> torch.Tensor:
    """Concatenates the bytes of each row's parts."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
