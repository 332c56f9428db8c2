"""Numbers that are read of rows, in Triton; see `readout_reference`.

Invariant: they equal the reference up to the order of float32 sums. Rows are added to sums in
float64, so the order in which programs add them does not change the result; see `row_sums`.

Why a mean has no kernel of its own at a site
    Each captured graph would have one more node for each site, and a node costs half a microsecond
    even if it is disabled. So the site's kernel adds rows, with an atomic addition for each
    element, and a later site's kernel reads the number.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from rheostat_engine.plan.acts import Kind
from rheostat_engine.plan.gates import MAX_COLUMNS, Activation, Normalise
from rheostat_engine.worker.state.buffers import SiteBuffers, TokenColumn
from rheostat_engine.worker.state.kernel_launcher import KernelLauncher
from rheostat_engine.worker.steering.programs import FLOATS, INTS

_COSINE = tl.constexpr(int(Normalise.COSINE))
_PROJECTED = tl.constexpr(int(Normalise.PROJECTED_COSINE))
_RELU = tl.constexpr(int(Activation.RELU))
_JUMP_RELU = tl.constexpr(int(Activation.JUMP_RELU))
_TANH = tl.constexpr(int(Activation.TANH))
_SUM = tl.constexpr(int(Kind.SUM))
_READ_ALONE = tl.constexpr(int(Kind.READ_ALONE))
_INTS = tl.constexpr(INTS)
_FLOATS = tl.constexpr(FLOATS)
_COLUMNS = tl.constexpr(MAX_COLUMNS)
_PER_TOKEN = tl.constexpr(len(TokenColumn))
_ROW_SUM = tl.constexpr(int(TokenColumn.ROW_SUM))
_NEAR = tl.constexpr(0.25)
"""Below this |x|, a series of four terms has float32's precision; the exponential formula loses
digits by cancellation."""


@triton.jit
def _tanh(x):
    square = x * x
    series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315)))
    far = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    return tl.where(tl.abs(x) < _NEAR, x * series, far)


@triton.jit
def number_of(x, unit, settings, floats_ptr):
    """The number that a step reads of x along a unit vector; `floats_ptr` has its floats."""
    bias = tl.load(floats_ptr + 4)
    theta = tl.load(floats_ptr + 5)
    z = tl.sum(x * unit) * tl.load(floats_ptr + 6)
    norm = 1.0
    if (settings & 15) == _COSINE:
        norm = tl.sqrt(tl.sum(x * x))
    if (settings & 15) == _PROJECTED:
        projected = _tanh(z * unit)
        norm = tl.sqrt(tl.sum(x * x) * tl.sum(projected * projected))
        z = tl.sum(x * projected)
    return activated(z, norm, settings, bias, theta)


@triton.jit
def activated(z, norm, settings, bias, theta):
    """Divides a cosine z by `norm`, then applies bias and activation."""
    normalise = settings & 15
    cosine = tl.where(norm > 0, z / norm, 0.0)
    z = tl.where((normalise == _COSINE) | (normalise == _PROJECTED), cosine, z) + bias
    activation = (settings >> 4) & 15
    result = tl.where(activation == _RELU, tl.maximum(z, 0.0), z)
    result = tl.where((activation == _JUMP_RELU) & (z <= theta), 0.0, result)
    return tl.where(activation == _TANH, 2.0 / (1.0 + tl.exp(-2.0 * z)) - 1.0, result)


@triton.jit
def read_row(
    step,
    x,  # [BLOCK] float32
    token,
    directions_ptr,
    ints_ptr,
    floats_ptr,
    readings_ptr,  # [T, COLUMNS] float32
    tokens_ptr,  # [tokens, 4] int32; see `TokenColumn`
    row_sums_ptr,  # [sums, WIDTH + 1] float64
    row_sum_names_ptr,  # [names] int32
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds x to sums, and reads numbers of x one by one; returns the next step."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    kind = tl.load(ints_ptr + step * _INTS)
    while (kind == _SUM) | (kind == _READ_ALONE):
        number = tl.load(ints_ptr + step * _INTS + 1).to(tl.int64)
        if kind == _SUM:
            name = tl.load(tokens_ptr + token * _PER_TOKEN + _ROW_SUM) + number
            row = tl.load(row_sum_names_ptr + name).to(tl.int64)
            sums = row_sums_ptr + row * (WIDTH + 1)
            tl.atomic_add(sums + column, x.to(tl.float64), mask=inside, sem="relaxed")
            one = tl.full((), 1.0, tl.float64)
            tl.atomic_add(sums + WIDTH, one, sem="relaxed")
        else:
            unit = tl.load(directions_ptr + number * WIDTH + column, mask=inside, other=0.0)
            settings = tl.load(ints_ptr + step * _INTS + 4)
            read = number_of(x, unit, settings, floats_ptr + step * _FLOATS)
            to = tl.load(ints_ptr + step * _INTS + 5)
            tl.store(readings_ptr + token * _COLUMNS + to - 1, read)
        step = tl.load(ints_ptr + step * _INTS + 2).to(tl.int64)
        kind = tl.load(ints_ptr + step * _INTS)
    return step


@triton.jit
def read_mean(
    step,
    token,
    directions_ptr,
    ints_ptr,
    floats_ptr,
    readings_ptr,
    tokens_ptr,
    row_sums_ptr,
    row_sum_names_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reads the number of a mean at a token, unless it was read. A mean of no rows is not read.

    So a gate and what is sent have the same bits, though different code may compute them.
    """
    to = tl.load(ints_ptr + step * _INTS + 5)
    reading_ptr = readings_ptr + token * _COLUMNS + to - 1
    known = tl.load(reading_ptr)
    name = tl.load(tokens_ptr + token * _PER_TOKEN + _ROW_SUM)
    name += tl.load(ints_ptr + step * _INTS + 6)
    sums = row_sums_ptr + tl.load(row_sum_names_ptr + name).to(tl.int64) * (WIDTH + 1)
    count = tl.load(sums + WIDTH)
    if count > 0:
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        number = tl.load(ints_ptr + step * _INTS + 1).to(tl.int64)
        unit = tl.load(directions_ptr + number * WIDTH + column, mask=inside, other=0.0)
        total = tl.load(sums + column, mask=inside, other=0.0)
        mean = (total / count).to(tl.float32)
        settings = tl.load(ints_ptr + step * _INTS + 4)
        read = number_of(mean, unit, settings, floats_ptr + step * _FLOATS)
        # Programs of several tokens may do this at once, if the sample computes tokens behind the
        # prompt again. So `known` may differ between the warps of a program, and no branch with
        # sums over the row may depend on it. All programs of a kernel store the same bits.
        tl.store(reading_ptr, read, mask=known != known)


@triton.jit
def _read_means_kernel(
    due_ptr,  # [n, 2] int32
    directions_ptr,  # [D, W] float32
    ints_ptr,  # [S, INTS] int32
    floats_ptr,  # [S, FLOATS] float32
    readings_ptr,
    tokens_ptr,
    row_sums_ptr,
    row_sum_names_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.load(due_ptr + tl.program_id(0) * 2).to(tl.int64)
    step = tl.load(due_ptr + tl.program_id(0) * 2 + 1).to(tl.int64)
    while step > 0:
        read_mean(
            step,
            token,
            directions_ptr,
            ints_ptr,
            floats_ptr,
            readings_ptr,
            tokens_ptr,
            row_sums_ptr,
            row_sum_names_ptr,
            WIDTH,
            BLOCK,
        )
        step = tl.load(ints_ptr + step * _INTS + 2).to(tl.int64)


_LAUNCHER = KernelLauncher(_read_means_kernel)


def launch_read_means(site: SiteBuffers, due: torch.Tensor) -> None:
    """Reads numbers of means after a forward pass.

    Args:
        site: the buffers of any site.
        due: [n, 2] int32: tokens in the step, and the first step of the readings of each.
    """
    gates, width = site.gates, site.directions.shape[1]
    block, num_warps = block_of(width)
    _LAUNCHER.launch(
        (len(due), 1, 1),
        (
            due,
            site.directions,
            site.ints,
            site.floats,
            gates.readings,
            gates.tokens,
            gates.row_sums,
            gates.row_sum_names,
        ),
        constants=(width, block),
        num_warps=num_warps,
    )


@cache
def block_of(width: int) -> tuple[int, int]:
    """The elements and the warps of a program that holds a row of `width` elements."""
    block = triton.next_power_of_2(width)
    return block, min(16, max(4, block // 512))
