"""Gates in Triton; see `gate_reference`.

Invariant: they equal the reference up to the order of float32 sums.
"""

import torch
import triton
import triton.language as tl

from rheostat_engine.plan.gate_table import Floats, Head, Held, Ints, State
from rheostat_engine.plan.gates import (
    MAX_COLUMNS,
    MAX_CONDITIONS,
    MAX_TERMS,
    Combine,
    Form,
    Hold,
    Pool,
)
from rheostat_engine.worker.state.buffers import GateBuffers, TokenRow

_TERMS = tl.constexpr(MAX_TERMS)
_CONDITIONS = tl.constexpr(MAX_CONDITIONS)
_COLUMNS = tl.constexpr(MAX_COLUMNS)
_INT_ROWS = tl.constexpr(len(Ints))
_FLOAT_ROWS = tl.constexpr(len(Floats))
_STATE_ROWS = tl.constexpr(len(State))
_COLUMN = tl.constexpr(int(Ints.COLUMN) * MAX_TERMS)
_CONDITION = tl.constexpr(int(Ints.CONDITION) * MAX_TERMS)
_POOL = tl.constexpr(int(Ints.POOL) * MAX_TERMS)
_COMBINE = tl.constexpr(int(Ints.COMBINE) * MAX_TERMS)
_FOR_TOKENS = tl.constexpr(int(Ints.FOR_TOKENS) * MAX_TERMS)
_DECIDED_AT = tl.constexpr(int(Ints.DECIDED_AT) * MAX_TERMS)
_ABOVE = tl.constexpr(int(Floats.ABOVE) * MAX_TERMS)
_BELOW = tl.constexpr(int(Floats.BELOW) * MAX_TERMS)
_STAYS_ABOVE = tl.constexpr(int(Floats.STAYS_ABOVE) * MAX_TERMS)
_STAYS_BELOW = tl.constexpr(int(Floats.STAYS_BELOW) * MAX_TERMS)
_VALUE = tl.constexpr(int(State.VALUE) * MAX_TERMS)
_COUNT = tl.constexpr(int(State.COUNT) * MAX_TERMS)
_RUN = tl.constexpr(int(State.RUN) * MAX_TERMS)
_HEAD_COMBINE = tl.constexpr(int(Head.COMBINE))
_HEAD_FORM = tl.constexpr(int(Head.FORM))
_HEAD_HOLD = tl.constexpr(int(Head.HOLD))
_HEAD_TOKENS = tl.constexpr(int(Head.TOKENS))
_HEAD_INVERT = tl.constexpr(int(Head.INVERT))
_HEAD_LATE = tl.constexpr(int(Head.LATE))
_HELD = tl.constexpr(int(Held.OPENNESS))
_REMAINING = tl.constexpr(int(Held.REMAINING))
_DECIDED = tl.constexpr(int(Held.DECIDED))
_LAST, _MEAN = tl.constexpr(int(Pool.LAST)), tl.constexpr(int(Pool.MEAN))
_ALL, _ANY, _SUM = (
    tl.constexpr(int(Combine.ALL)),
    tl.constexpr(int(Combine.ANY)),
    tl.constexpr(int(Combine.SUM)),
)
_STEP, _SIGMOID = tl.constexpr(int(Form.STEP)), tl.constexpr(int(Form.SIGMOID))
_FOR_TOKEN, _FOR_NEXT, _FOR_TOKENS_HELD, _FOR_REST = (
    tl.constexpr(int(Hold.TOKEN)),
    tl.constexpr(int(Hold.NEXT_TOKEN)),
    tl.constexpr(int(Hold.TOKENS)),
    tl.constexpr(int(Hold.REST)),
)


@triton.jit
def scan(
    gate,
    first,
    end,
    position,  # of token `first`
    state_ptr,  # [rows, TERMS] float32
    readings_ptr,  # [tokens, COLUMNS] float32
    gate_ints_ptr,
    gate_floats_ptr,
    STORE: tl.constexpr,
):
    """Takes the readings of tokens [first, end) into a state, which is stored if `STORE`.

    Returns how far the gate is open at the last of them.
    """
    lane = tl.arange(0, _TERMS)
    ints = gate_ints_ptr + gate * (_INT_ROWS * _TERMS)
    floats = gate_floats_ptr + gate * (_FLOAT_ROWS * _TERMS)
    column = tl.load(ints + _COLUMN + lane)
    condition = tl.load(ints + _CONDITION + lane)
    pool = tl.load(ints + _POOL + lane)
    combine = tl.load(ints + _COMBINE + lane)
    for_tokens = tl.load(ints + _FOR_TOKENS + lane).to(tl.float32)
    decided_at = tl.load(ints + _DECIDED_AT + lane)
    above = tl.load(floats + _ABOVE + lane)
    below = tl.load(floats + _BELOW + lane)
    stays_above = tl.load(floats + _STAYS_ABOVE + lane)
    stays_below = tl.load(floats + _STAYS_BELOW + lane)
    conditions = tl.load(ints)
    gate_combine = tl.load(ints + _HEAD_COMBINE)
    form = tl.load(ints + _HEAD_FORM)
    hold = tl.load(ints + _HEAD_HOLD)
    tokens = tl.load(ints + _HEAD_TOKENS).to(tl.float32)
    invert = tl.load(ints + _HEAD_INVERT)
    late = tl.load(ints + _HEAD_LATE)
    a = tl.load(floats)
    b = tl.load(floats + 1)
    value = tl.load(state_ptr + _VALUE + lane)
    count = tl.load(state_ptr + _COUNT + lane)
    run = tl.load(state_ptr + _RUN + lane)
    held = tl.load(state_ptr + _HELD)
    remaining = tl.load(state_ptr + _REMAINING)
    was_decided = tl.load(state_ptr + _DECIDED)
    decision = tl.max(decided_at, 0)
    present = condition >= 0
    once = decided_at >= 0
    summed = combine == _SUM
    number_of = tl.arange(0, _CONDITIONS)
    own = condition[None, :] == number_of[:, None]
    size = tl.sum(own.to(tl.float32), 1)
    how = tl.max(tl.where(own, combine[None, :], 0), 1)
    used = number_of < conditions
    openness = value.sum() * 0.0
    row = first
    if not STORE:
        row = tl.where(late != 0, end, row)  # what is read in this step does not count
    while row < end:
        at = position + (row - first).to(tl.int32)
        z = tl.load(readings_ptr + row * _COLUMNS + column, mask=present, other=float("nan"))
        read = present & (z == z) & ((once == 0) | (at <= decided_at))
        pooled = tl.where(pool == _MEAN, value + z, tl.maximum(value, z))
        value = tl.where(read, tl.where((pool == _LAST) | (count == 0), z, pooled), value)
        count += read.to(tl.float32)
        seen = (count > 0) & ((once == 0) | (at >= decided_at))
        number = tl.where(pool == _MEAN, value / tl.maximum(count, 1.0), value)
        counts = run >= for_tokens
        low = tl.where(counts, stays_above, above)
        high = tl.where(counts, stays_below, below)
        inside = (count > 0) & (number > low) & (number < high)
        run = tl.where(read, tl.where(inside, run + 1, 0.0), run)
        holds = seen & (run >= for_tokens)
        unknown = tl.max((present & summed & (seen == 0)).to(tl.int32), 0)
        score = tl.where(summed, tl.where(seen, number, 0.0), holds.to(tl.float32))
        scores = tl.broadcast_to(score[None, :], (_CONDITIONS, _TERMS))
        least = tl.min(tl.where(own, scores, float("inf")), 1)
        most = tl.max(tl.where(own, scores, float("-inf")), 1)
        total = tl.sum(tl.where(own, scores, 0.0), 1)
        mean = total / tl.maximum(size, 1.0)
        part = tl.where(how == _ALL, least, tl.where(how == _ANY, most, mean))
        part = tl.where(how == _SUM, total, part)
        evidence = tl.sum(tl.where(used, part, 0.0), 0)
        if gate_combine == _ALL:
            evidence = tl.min(tl.where(used, part, float("inf")), 0)
        elif gate_combine == _ANY:
            evidence = tl.max(tl.where(used, part, float("-inf")), 0)
        elif gate_combine != _SUM:
            evidence = evidence / conditions.to(tl.float32)
        opened = tl.minimum(tl.maximum((evidence - a) / (b - a), 0.0), 1.0)
        if form == _STEP:
            opened = (evidence > a).to(tl.float32)
        elif form == _SIGMOID:
            opened = 1.0 / (1.0 + tl.exp(-b * (evidence - a)))
        opened = tl.where(unknown != 0, 0.0, opened)
        decided = present & once & (at == decided_at)
        event = tl.max(((read & (once == 0)) | decided).to(tl.int32), 0) != 0
        before = tl.where(remaining > 0, held, 0.0)
        opens = event & (opened > 0)
        lasts = tl.where(hold == _FOR_NEXT, 1.0, float("inf"))
        lasts = tl.where(hold == _FOR_TOKENS_HELD, tokens, lasts)
        if hold == _FOR_REST:
            opens = opens & (before == 0)
        elif hold > _FOR_REST:  # until the next reading
            opens = event
        keeps = opens & (hold != _FOR_TOKEN)
        if late != 0:
            keeps = event & (was_decided == 0)
            was_decided = tl.where(event, 1.0, was_decided)
        else:
            remaining = tl.maximum(remaining - 1.0, 0.0)
        held = tl.where(keeps, opened, held)
        remaining = tl.where(keeps, lasts, remaining)
        openness = tl.where(opens & (hold != _FOR_NEXT), opened, before)
        openness = tl.where(hold == _FOR_TOKEN, tl.where(event, opened, 0.0), openness)
        row += 1
    if late != 0:
        behind = position + (end - 1 - first).to(tl.int32) - decision
        within = (was_decided != 0) & (behind > 0) & (behind.to(tl.float32) <= remaining)
        openness = tl.where(within, held, 0.0)
    openness = tl.where(invert != 0, 1.0 - openness, openness)
    if STORE:
        tl.store(state_ptr + _VALUE + lane, value)
        tl.store(state_ptr + _COUNT + lane, count)
        tl.store(state_ptr + _RUN + lane, run)
        tl.store(state_ptr + _HELD, held)
        tl.store(state_ptr + _REMAINING, remaining)
        tl.store(state_ptr + _DECIDED, was_decided)
    return openness


@triton.jit
def _fold_kernel(
    folds_ptr,  # [n, 4] int32: state, gate, first token, number of tokens
    positions_ptr,  # [tokens] int32
    states_ptr,
    readings_ptr,
    gate_ints_ptr,
    gate_floats_ptr,
):
    fold = folds_ptr + tl.program_id(0) * 4
    state = tl.load(fold).to(tl.int64)
    gate = tl.load(fold + 1).to(tl.int64)
    first = tl.load(fold + 2).to(tl.int64)
    count = tl.load(fold + 3)
    scan(
        gate,
        first,
        first + count,
        tl.load(positions_ptr + first),
        states_ptr + state * (_STATE_ROWS * _TERMS),
        readings_ptr,
        gate_ints_ptr,
        gate_floats_ptr,
        STORE=True,
    )


def launch_fold(gates: GateBuffers, folds: torch.Tensor) -> None:
    """Takes the readings of a step into the states of its samples; see `fold_step`."""
    _fold_kernel[(len(folds),)](
        folds,
        gates.tokens[TokenRow.POSITION],
        gates.states,
        gates.readings,
        gates.ints,
        gates.floats,
        num_warps=2,
    )
