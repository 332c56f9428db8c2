"""The Triton kernel of a site's op. Each of its programs (thread blocks) computes one token.

Invariants: the results equal those of `run_site` bit for bit if rows are only added, replaced and
copied; otherwise up to the order of float32 sums. Rows of a token without instructions at the site
are neither read nor written.
"""

from collections.abc import Collection

import torch
import triton
import triton.language as tl

from rheostat_engine.plan.acts import Kind
from rheostat_engine.plan.gains import MAX_GAINS
from rheostat_engine.plan.gates import MAX_COLUMNS, MAX_GATES, Normalise
from rheostat_engine.sites.reference import limits
from rheostat_engine.worker.expand_kernel import launch_expand
from rheostat_engine.worker.instructions import Instructions
from rheostat_engine.worker.state.buffers import Buffers, FoldColumn, SiteBuffers
from rheostat_engine.worker.state.kernel_launcher import FixedTensors, KernelLauncher
from rheostat_engine.worker.steering.gate_kernels import launch_fold, open_gates
from rheostat_engine.worker.steering.programs import FLOATS, GAIN_UNIT, INTS, ROW_UNIT
from rheostat_engine.worker.steering.readout_kernels import (
    activated,
    block_of,
    launch_read_means,
    number_of,
    read_row,
)

_ADD = tl.constexpr(int(Kind.ADD))
_NORM_ADD = tl.constexpr(int(Kind.NORM_ADD))
_COSINE = tl.constexpr(int(Normalise.COSINE))
_COLUMNS = tl.constexpr(MAX_COLUMNS)
_GATES = tl.constexpr(MAX_GATES)
_GAINS = tl.constexpr(MAX_GAINS)
_GAIN_UNIT = tl.constexpr(GAIN_UNIT)
_ROW_UNIT = tl.constexpr(ROW_UNIT)
_REPLACE = tl.constexpr(int(Kind.REPLACE))
_ADD_LAST = tl.constexpr(int(Kind.ADD_LAST))
_INTS = tl.constexpr(INTS)
_FLOATS = tl.constexpr(FLOATS)


@triton.jit
def _measure(dose_slot_ptr, factor, moved, norm):
    """Adds a change of a row of norm `norm` to a dose slot.

    `moved` is |change|, or the factor of an addition; see `worker/steering/doses`.
    """
    share = tl.where(norm > 0, moved / norm, 0.0)
    tl.atomic_add(dose_slot_ptr, tl.where(factor > 0, 1.0, 0.0), sem="relaxed")
    tl.atomic_add(dose_slot_ptr + 1, moved, sem="relaxed")
    tl.atomic_add(dose_slot_ptr + 2, share, sem="relaxed")
    tl.atomic_max(dose_slot_ptr + 3, share, sem="relaxed")


@triton.jit
def _factor(openness_ptr, gains_ptr, token, factors):
    """The factor on the strength of a step; `factors` as in `Programs.ints`."""
    gate = factors % _GAIN_UNIT
    gain = factors // _GAIN_UNIT
    openness = tl.load(openness_ptr + token * _GATES + gate - 1, mask=gate > 0, other=1.0)
    return openness * tl.load(gains_ptr + token * _GAINS + gain - 1, mask=gain > 0, other=1.0)


@triton.jit
def _factor_of_code(openness_ptr, gains_ptr, token, code):
    """The factor of the row that a code names; see `addition_code`."""
    number = code // _ROW_UNIT
    is_gate = (number > 0) & (number <= _GATES)
    openness = tl.load(openness_ptr + token * _GATES + number - 1, mask=is_gate, other=1.0)
    gain = number - _GATES
    return openness * tl.load(gains_ptr + token * _GAINS + gain - 1, mask=gain > 0, other=1.0)


@triton.jit
def _run_chain(
    step,
    x,  # [BLOCK] float32
    dose_slot,
    token,
    rows_ptr,
    directions_ptr,
    ints_ptr,
    floats_ptr,
    openness_ptr,
    gains_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A chain's change of x; its first step that acts last, or 0; and the next dose slot."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    delta = tl.zeros([BLOCK], tl.float32)
    before = delta
    kind = tl.load(ints_ptr + step * _INTS)
    while (step > 0) & (kind < _REPLACE):
        number = tl.load(ints_ptr + step * _INTS + 1).to(tl.int64)
        last = tl.load(ints_ptr + step * _INTS + 3)
        factors = tl.load(ints_ptr + step * _INTS + 5)
        factor = _factor(openness_ptr, gains_ptr, token, factors)
        y = x + delta
        if kind == _ADD:
            row = tl.load(rows_ptr + number * WIDTH + column, mask=inside, other=0.0)
            delta = delta + factor * row.to(tl.float32)
        else:
            unit = tl.load(directions_ptr + number * WIDTH + column, mask=inside, other=0.0)
            floats = floats_ptr + step * _FLOATS
            strength = tl.load(floats + 2) * factor
            if kind == _NORM_ADD:
                amount = strength * tl.sqrt(tl.sum(y * y))
            else:
                low = tl.load(floats)
                high = tl.load(floats + 1)
                settings = tl.load(ints_ptr + step * _INTS + 4)
                along = number_of(y, unit, settings, floats)
                amount = strength * (tl.minimum(tl.maximum(along, low), high) - along)
                amount = amount * tl.load(floats + 3)
                amount = tl.where(((settings >> 8) != 0) & (along == 0), 0.0, amount)
                write = tl.load(ints_ptr + step * _INTS + 6).to(tl.int64)
                if write != 0:
                    unit = tl.load(directions_ptr + write * WIDTH + column, mask=inside, other=0.0)
            # A norm may be infinite, and a strength of 0 must change nothing even then.
            delta = delta + tl.where(strength != 0, amount, 0.0) * unit
        if last != 0:
            start = x + before
            norm = tl.sqrt(tl.sum(start * start))
            moved = factor
            if kind != _ADD:
                change = delta - before
                moved = tl.sqrt(tl.sum(change * change))
            _measure(dose_slot, factor, moved, norm)
            before = delta
            dose_slot += 4
        step = tl.load(ints_ptr + step * _INTS + 2).to(tl.int64)
        kind = tl.load(ints_ptr + step * _INTS)
    return delta, step, dose_slot


@triton.jit
def _run_replacements(
    step,
    stream,  # [BLOCK] float32
    dose_slot,
    token,
    rows_ptr,
    ints_ptr,
    floats_ptr,
    openness_ptr,
    gains_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The stream, [BLOCK], after the steps that act last, and the next step or 0."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    kind = tl.load(ints_ptr + step * _INTS)
    while (kind == _REPLACE) | (kind == _ADD_LAST):
        number = tl.load(ints_ptr + step * _INTS + 1).to(tl.int64)
        mask = tl.load(ints_ptr + step * _INTS + 4).to(tl.int64)
        row = tl.load(rows_ptr + number * WIDTH + column, mask=inside, other=0.0)
        wanted = row.to(tl.float32)
        change = wanted - stream
        differs = stream.to(rows_ptr.dtype.element_ty) != row
        if kind == _ADD_LAST:
            change = wanted
            wanted = stream + change
            differs = inside
        factor = _factor(openness_ptr, gains_ptr, token, tl.load(ints_ptr + step * _INTS + 5))
        strength = tl.load(floats_ptr + step * _FLOATS + 2) * factor
        weight = tl.full([BLOCK], 1.0, tl.float32) * strength
        if mask != 0:
            masked = tl.load(rows_ptr + mask * WIDTH + column, mask=inside, other=0.0)
            weight = weight * masked.to(tl.float32)
        new = tl.where(weight == 1, wanted, stream + weight * change)
        changes = (weight != 0) & differs & (new == new)
        new = tl.where(changes, new, stream)
        norm = tl.sqrt(tl.sum(stream * stream))
        moved = tl.sqrt(tl.sum((new - stream) * (new - stream)))
        _measure(dose_slot, factor, moved, norm)
        stream = new
        dose_slot += 4
        step = tl.load(ints_ptr + step * _INTS + 2).to(tl.int64)
        kind = tl.load(ints_ptr + step * _INTS)
    return stream, step


@triton.jit
def _direction(step, directions_ptr, ints_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The unit vector of a reading's step, [BLOCK]; zeros for step 0."""
    column = tl.arange(0, BLOCK)
    number = tl.load(ints_ptr + step * _INTS + 1).to(tl.int64)
    present = column < tl.where(step > 0, WIDTH, 0)
    return tl.load(directions_ptr + number * WIDTH + column, mask=present, other=0.0)


@triton.jit
def _readout(step, ints_ptr, floats_ptr):
    """Settings, column + 1, bias, theta and factor of a reading; all 0 for step 0."""
    ints = ints_ptr + step * _INTS
    floats = floats_ptr + step * _FLOATS
    return (
        tl.load(ints + 4),
        tl.load(ints + 5),
        tl.load(floats + 4),
        tl.load(floats + 5),
        tl.load(floats + 6),
    )


@triton.jit
def _is_cosine(readout):
    return (readout[0] & 15) == _COSINE


@triton.jit
def _store_reading(readings_ptr, z, norm, readout):
    """Stores the number of a reading in a token's columns. `z` is x.u, with the unit vector u."""
    settings, column, bias, theta, factor = readout
    number = activated(z * factor, norm, settings, bias, theta)
    tl.store(readings_ptr + column - 1, number, mask=column > 0)


@triton.jit
def _next_readings(step, ints_ptr):
    """The three readings after a reading; 0 if there is none."""
    line = ints_ptr + step * _INTS
    return (
        tl.load(line + 2).to(tl.int64),
        tl.load(line + 3).to(tl.int64),
        tl.load(line + 6).to(tl.int64),
    )


@triton.jit
def _run_readings(
    step,
    x,  # [BLOCK] float32
    token,
    directions_ptr,
    ints_ptr,
    floats_ptr,
    readings_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the readings of x, four at a time. `step` is the first of them.

    The kernel mostly waits for loads. So it loads four directions at once, together with the
    parameters of the next four readings. If fewer are left, step 0 is used for the others: its
    direction is zero, and it stores nothing. A single reading does not take the loop of four.
    """
    own_ptr = readings_ptr + token * _COLUMNS
    second, third, fourth = _next_readings(step, ints_ptr)
    if second == 0:
        alone = _direction(step, directions_ptr, ints_ptr, WIDTH, BLOCK)
        readout = _readout(step, ints_ptr, floats_ptr)
        norm = 1.0
        if _is_cosine(readout):
            norm = tl.sqrt(tl.sum(x * x))
        _store_reading(own_ptr, tl.sum(x * alone), norm, readout)
        step = second
    while step > 0:
        a = _direction(step, directions_ptr, ints_ptr, WIDTH, BLOCK)
        b = _direction(second, directions_ptr, ints_ptr, WIDTH, BLOCK)
        c = _direction(third, directions_ptr, ints_ptr, WIDTH, BLOCK)
        d = _direction(fourth, directions_ptr, ints_ptr, WIDTH, BLOCK)
        readout_a = _readout(step, ints_ptr, floats_ptr)
        readout_b = _readout(second, ints_ptr, floats_ptr)
        readout_c = _readout(third, ints_ptr, floats_ptr)
        readout_d = _readout(fourth, ints_ptr, floats_ptr)
        step = tl.load(ints_ptr + fourth * _INTS + 2).to(tl.int64)
        second, third, fourth = _next_readings(step, ints_ptr)
        cosines = _is_cosine(readout_a) | _is_cosine(readout_b)
        norm = 1.0
        if cosines | _is_cosine(readout_c) | _is_cosine(readout_d):
            norm = tl.sqrt(tl.sum(x * x))
        _store_reading(own_ptr, tl.sum(x * a), norm, readout_a)
        _store_reading(own_ptr, tl.sum(x * b), norm, readout_b)
        _store_reading(own_ptr, tl.sum(x * c), norm, readout_c)
        _store_reading(own_ptr, tl.sum(x * d), norm, readout_d)


@triton.jit
def _site_kernel(
    h_ptr,  # [T, W]
    residual_ptr,  # [T, W]
    code_ptr,  # [T] int32
    cap_ptr,  # [T] int32
    dose_slot_ptr,  # [T] int32
    rows_ptr,  # [R, W]
    directions_ptr,  # [D, W] float32
    ints_ptr,  # [S, INTS] int32
    floats_ptr,  # [S, FLOATS] float32
    readings_ptr,  # this and the next eight: see `GateBuffers`
    openness_ptr,
    gains_ptr,
    tokens_ptr,
    states_ptr,
    gate_ints_ptr,
    gate_floats_ptr,
    row_sums_ptr,
    row_sum_names_ptr,
    doses_ptr,  # [C, 4] float32
    ring_ptr,  # [N, W]
    h_stride,
    residual_stride,
    ring_stride,
    gain,
    inverse,  # 1 / gain
    limit,  # see `Limits.stream`
    own_limit,  # see `Limits.own`
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    code = tl.load(code_ptr + token).to(tl.int64)
    target = tl.load(cap_ptr + token).to(tl.int64)
    dose_slot = doses_ptr + tl.load(dose_slot_ptr + token).to(tl.int64) * 4
    if (code != 0) | (target != 0):
        # All loads are issued before the first use, to overlap their latencies. Row 0 is zero.
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        added = tl.maximum(code, 0)
        row = tl.load(rows_ptr + added % _ROW_UNIT * WIDTH + column, mask=inside, other=0.0)
        h = tl.load(h_ptr + token * h_stride + column, mask=inside, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(
                residual_ptr + token * residual_stride + column, mask=inside, other=0.0
            )
        # After the loads above, because this multiplies what it loads, and must wait for it.
        factor = _factor_of_code(openness_ptr, gains_ptr, token, added)
        step = tl.maximum(-code, 0)
        if step > 0:
            step = open_gates(
                step,
                token,
                directions_ptr,
                ints_ptr,
                floats_ptr,
                readings_ptr,
                openness_ptr,
                tokens_ptr,
                states_ptr,
                gate_ints_ptr,
                gate_floats_ptr,
                row_sums_ptr,
                row_sum_names_ptr,
                WIDTH,
                BLOCK,
            )
        x = h.to(tl.float32) * gain
        if HAS_RESIDUAL:
            residual = residual.to(tl.float32)
            x = x + residual
        delta = factor * row.to(tl.float32)
        first_step = step
        if code < 0:
            delta, step, dose_slot = _run_chain(
                step,
                x,
                dose_slot,
                token,
                rows_ptr,
                directions_ptr,
                ints_ptr,
                floats_ptr,
                openness_ptr,
                gains_ptr,
                WIDTH,
                BLOCK,
            )
        # False if the chain has only readings and steps that act last: they change nothing here.
        if (code > 0) | (step != first_step):
            # Elements stay as they are if the change is NaN (from infinity times 0), or if the
            # element was not finite.
            changes = (delta != 0) & (delta == delta) & (tl.abs(x) < float("inf"))
            down = tl.minimum(x, -limit) - x
            up = tl.maximum(x, limit) - x
            limited = tl.minimum(tl.maximum(delta, down), up)
            changed = h.to(tl.float32) + limited * inverse
            changed = tl.minimum(tl.maximum(changed, -own_limit), own_limit)
            h = tl.where(changes, changed.to(h_ptr.dtype.element_ty), h)
            tl.store(h_ptr + token * h_stride + column, h, mask=inside)
        if code > 0:
            norm = tl.sqrt(tl.sum(x * x))
            _measure(dose_slot, factor, factor, norm)
        if step > 0:
            stream = h.to(tl.float32) * gain
            if HAS_RESIDUAL:
                stream = stream + residual
            value, step = _run_replacements(
                step,
                stream,
                dose_slot,
                token,
                rows_ptr,
                ints_ptr,
                floats_ptr,
                openness_ptr,
                gains_ptr,
                WIDTH,
                BLOCK,
            )
            replaced = inside & (value != stream) & (value == value)
            finite = tl.where(stream == stream, stream, 0.0)
            value = tl.maximum(value, tl.minimum(finite, -limit))
            value = tl.minimum(value, tl.maximum(finite, limit))
            if HAS_RESIDUAL:
                kept = value.to(residual_ptr.dtype.element_ty)
                tl.store(residual_ptr + token * residual_stride + column, kept, mask=replaced)
                residual = tl.where(replaced, kept.to(tl.float32), residual)
                own = tl.zeros([BLOCK], tl.float32)
            else:
                own = tl.minimum(tl.maximum(value * inverse, -own_limit), own_limit)
            h = tl.where(replaced, own.to(h_ptr.dtype.element_ty), h)
            tl.store(h_ptr + token * h_stride + column, h, mask=replaced)
        if step > 0:
            stream = h.to(tl.float32) * gain
            if HAS_RESIDUAL:
                stream = stream + residual
            step = read_row(
                step,
                stream,
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
            _run_readings(
                step,
                stream,
                token,
                directions_ptr,
                ints_ptr,
                floats_ptr,
                readings_ptr,
                WIDTH,
                BLOCK,
            )
        if target != 0:
            stream = h.to(tl.float32) * gain
            if HAS_RESIDUAL:
                stream = stream + residual
            stream = stream.to(ring_ptr.dtype.element_ty)
            tl.store(ring_ptr + target * ring_stride + column, stream, mask=inside)


_LAUNCHER = KernelLauncher(_site_kernel)
_TENSORS: dict[int, tuple[SiteBuffers, FixedTensors]] = {}
"""Sites and their tensors by the id of the site."""
_MOST_SITES = 1024
"""More sites than a worker has. Tests make any number of sites, which must not stay in memory."""


def launch_site(
    h: torch.Tensor, residual: torch.Tensor | None, site: SiteBuffers, gain: float = 1.0
) -> None:
    """The site's op on a CUDA device; see `run_site`.

    The number of warps depends on the width, not on the number of tokens. The number of warps
    determines the order of the addends of a sum, and so its rounding. If it depended on the tokens
    of a step, a request's result would depend on the other requests of the batch. The price: at a
    width of 4,096 on an H200, half as many warps took up to a third less time for 256 and 8,192
    tokens, but more time for 1 to 128.
    """
    width = h.shape[-1]
    rows = h if h.dim() == 2 else h.view(-1, width)
    residual_rows = rows
    if residual is not None:
        residual_rows = residual if residual.dim() == 2 else residual.view(-1, width)
    block, num_warps = block_of(width)
    _LAUNCHER.launch(
        (rows.shape[0], 1, 1),
        (rows, residual_rows),
        _tensors_of(site),
        integers=(rows.stride(0), residual_rows.stride(0), site.ring.stride(0)),
        floats=(float(gain), 1 / gain, *limits(rows.dtype)),
        constants=(width, block, residual is not None),
        num_warps=num_warps,
    )


def _tensors_of(site: SiteBuffers) -> FixedTensors:
    """The kernel's arguments that belong to the site; the buffers of a site never move."""
    known = _TENSORS.get(id(site))
    if known is not None:
        return known[1]
    gates = site.gates
    tensors = FixedTensors(
        site.code,
        site.cap_row,
        site.dose_slot,
        site.rows,
        site.directions,
        site.ints,
        site.floats,
        gates.readings,
        gates.openness,
        gates.gains,
        gates.tokens,
        gates.states,
        gates.ints,
        gates.floats,
        gates.row_sums,
        gates.row_sum_names,
        site.doses,
        site.ring,
    )
    if len(_TENSORS) >= _MOST_SITES:
        _TENSORS.clear()
    _TENSORS[id(site)] = site, tensors  # with the site, so that no other object gets its id
    return tensors


def warm_up(
    buffers: Buffers, instructions: Instructions, narrow: Collection[tuple[int, torch.dtype]] = ()
) -> None:
    """Compiles every variant of the kernels, so that no request waits for compilation.

    Args:
        buffers: the kernels' arguments; all instructions in them are still 0.
        instructions: those of a step with one token and no effect.
        narrow: widths and dtypes of router logits.
    """
    site = buffers.of(0)
    row = torch.zeros_like(buffers.ring[:1])
    for residual in (None, row, row.float()):
        launch_site(row, residual, site)
    for width, dtype in narrow:
        launch_site(torch.zeros(1, width, dtype=dtype, device=row.device), None, site)
    ids = torch.zeros(1, dtype=torch.int32, device=row.device)
    base = torch.zeros(1, buffers.sites, dtype=torch.int32, device=row.device)
    for with_ids in (None, ids):
        for with_base in (None, base):
            launch_expand(instructions._replace(ids=with_ids, base=with_base), buffers)
    launch_fold(buffers.gates, ids.new_zeros(1, len(FoldColumn)))
    launch_read_means(site, ids.new_zeros(1, 2))
