"""Gates in Triton; see `gate_reference` for the terms.

Invariant: the results equal the reference's up to the order of float32 sums. Readings are summed in
float64, so their order does not change a float32 result.

Why rows are read in blocks
    A step may compute thousands of tokens of a prompt, and a gate may depend on the readings of all
    of them. So each token's program loads the readings of the earlier tokens, `_ROWS` tokens at a
    time, and its own last. If the openness depends only on the token's own readings, or is decided
    at another position, the program loads no others. The fold kernel loads the readings of all
    tokens once, and stores the openness at each.
"""

import torch
import triton
import triton.language as tl

from rheostat_engine.plan.acts import Kind
from rheostat_engine.plan.gate_table import Floats, Head, Held, Ints, State
from rheostat_engine.plan.gates import (
    MAX_COLUMNS,
    MAX_CONDITIONS,
    MAX_GATES,
    MAX_TERMS,
    Combine,
    Form,
    Hold,
    Pool,
)
from rheostat_engine.worker.state.buffers import FoldColumn, GateBuffers, TokenColumn
from rheostat_engine.worker.state.kernel_launcher import KernelLauncher
from rheostat_engine.worker.steering.programs import INTS
from rheostat_engine.worker.steering.readout_kernels import read_mean

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
_ROWS = tl.constexpr(256)
"""Tokens whose readings are loaded at once."""
_FAR = tl.constexpr(1 << 30)
"""More than any number of readings in a row."""
_GATES = tl.constexpr(MAX_GATES)
_INTS = tl.constexpr(INTS)
_GATE = tl.constexpr(int(Kind.GATE))
_READ_MEAN = tl.constexpr(int(Kind.READ_MEAN))
_STATE_COLUMN = tl.constexpr(int(TokenColumn.STATE))
_FIRST = tl.constexpr(int(TokenColumn.FIRST))
_PER_TOKEN = tl.constexpr(len(TokenColumn))
_POSITION = tl.constexpr(int(TokenColumn.POSITION))
_FOLD = tl.constexpr(len(FoldColumn))
_FOLD_STATE = tl.constexpr(int(FoldColumn.STATE))
_FOLD_GATE = tl.constexpr(int(FoldColumn.GATE))
_FOLD_NUMBER = tl.constexpr(int(FoldColumn.NUMBER))
_FOLD_FIRST = tl.constexpr(int(FoldColumn.FIRST))
_FOLD_COUNT = tl.constexpr(int(FoldColumn.COUNT))
_FOLD_POSITION = tl.constexpr(int(FoldColumn.POSITION))
_FOLD_ONE_TERM = tl.constexpr(int(FoldColumn.ONE_TERM))
_VALUE = tl.constexpr(int(State.VALUE) * MAX_TERMS)
_COUNT = tl.constexpr(int(State.COUNT) * MAX_TERMS)
_RUN = tl.constexpr(int(State.RUN) * MAX_TERMS)
_LOW = tl.constexpr(int(State.LOW) * MAX_TERMS)
_HEAD_COMBINE = tl.constexpr(int(Head.COMBINE))
_HEAD_FORM = tl.constexpr(int(Head.FORM))
_HEAD_HOLD = tl.constexpr(int(Head.HOLD))
_HEAD_TOKENS = tl.constexpr(int(Head.TOKENS))
_HEAD_INVERT = tl.constexpr(int(Head.INVERT))
_HEAD_LATE = tl.constexpr(int(Head.LATE))
_HEAD_TERMS = tl.constexpr(int(Head.TERMS))
_HEAD_OWN = tl.constexpr(int(Head.OWN_ROW))
_HEAD_END = tl.constexpr(int(Head.END))
_WORD = tl.constexpr(32)
"""Positions that one number of a record has bits for."""
_HELD = tl.constexpr(int(Held.OPENNESS))
_UNTIL = tl.constexpr(int(Held.UNTIL))
_FOLDED = tl.constexpr(int(Held.FOLDED))
_RECORD = tl.constexpr(int(Held.RECORD))
_STATE_GATE = tl.constexpr(int(Held.GATE))
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
def _pooled_both(x, n, pool, y, m, same_pool):
    """Joins x, the pooled value of n readings, with y, that of the next m readings."""
    both = tl.where(pool == _MEAN, x + y, tl.where(pool == _LAST, y, tl.maximum(x, y)))
    return tl.where(m == 0, x, tl.where(n == 0, y, both)), n + m, same_pool


@triton.jit
def _run_both(least, more, other, least_then, more_then, other_then):
    """Composes two functions of a run r: r + `more` if r >= `least`, else `other`."""
    after = tl.where(other >= least_then, other + more_then, other_then)
    return tl.maximum(least, least_then - more), more + more_then, after


@triton.jit
def _latest(index, number, later_index, later_number):
    """The number with the later index; index -1 means that there is none."""
    return tl.maximum(index, later_index), tl.where(later_index >= 0, later_number, number)


@triton.jit
def _opened(evidence, unknown, form, a, b):
    """The openness for a gate's evidence; 0 if a part of the evidence is unknown."""
    ramp = tl.minimum(tl.maximum((evidence - a) / (b - a), 0.0), 1.0)
    sigmoid = 1.0 / (1.0 + tl.exp(-b * (evidence - a)))
    step = (evidence > a).to(tl.float32)
    opened = tl.where(form == _STEP, step, tl.where(form == _SIGMOID, sigmoid, ramp))
    return tl.where(unknown != 0, 0.0, opened)


@triton.jit
def _late_openness(at, held, until, folded, late, end, record, within):
    """The openness of a late gate at positions, from its state before the step."""
    openness = tl.where(at.to(tl.float32) <= until, held, 0.0)
    kept = within & (at >= late) & (at < folded) & (at < end)
    word = tl.load(record + (at - late) // _WORD, mask=kept, other=0.0).to(tl.int32, bitcast=True)
    bit = (word >> ((at - late) % _WORD)) & 1
    openness = tl.where(kept, bit.to(tl.float32), openness)
    return tl.where(at >= late, openness, 0.0)


@triton.jit
def scan(
    one_term,  # whether the gate has a single term
    gate,
    number,  # of the gate in the plan
    first,
    end,
    position,  # of token `first`
    state_ptr,  # [rows, TERMS] float32
    readings_ptr,  # [tokens, COLUMNS] float32
    openness_ptr,  # [tokens, GATES] float32
    gate_ints_ptr,
    gate_floats_ptr,
    STORE: tl.constexpr,
):
    """Folds the readings of tokens [first, end) of a sample, of which there is at least one.

    Stores the gate's openness at the last of them. With `STORE` it also stores the openness at all
    others, and the new state.

    Most gates have one term. For them a variant without sums and maxima over terms is faster.
    """
    if one_term != 0:
        _scan(
            gate,
            number,
            first,
            end,
            position,
            state_ptr,
            readings_ptr,
            openness_ptr,
            gate_ints_ptr,
            gate_floats_ptr,
            STORE=STORE,
            LANES=1,
        )
    else:
        _scan(
            gate,
            number,
            first,
            end,
            position,
            state_ptr,
            readings_ptr,
            openness_ptr,
            gate_ints_ptr,
            gate_floats_ptr,
            STORE=STORE,
            LANES=_TERMS,
        )


@triton.jit
def _scan(
    gate,
    number,
    first,
    end,
    position,
    state_ptr,
    readings_ptr,
    openness_ptr,
    gate_ints_ptr,
    gate_floats_ptr,
    STORE: tl.constexpr,
    LANES: tl.constexpr,
):
    """As `scan`, for a gate with at most `LANES` terms."""
    lane = tl.arange(0, LANES)
    ints = gate_ints_ptr + gate * (_INT_ROWS * _TERMS)
    floats = gate_floats_ptr + gate * (_FLOAT_ROWS * _TERMS)
    column = tl.load(ints + _COLUMN + lane)
    condition = tl.load(ints + _CONDITION + lane)
    pool = tl.load(ints + _POOL + lane)
    combine = tl.load(ints + _COMBINE + lane)
    for_tokens = tl.load(ints + _FOR_TOKENS + lane)
    decided_at = tl.load(ints + _DECIDED_AT + lane)
    above = tl.load(floats + _ABOVE + lane)
    below = tl.load(floats + _BELOW + lane)
    stays_above = tl.load(floats + _STAYS_ABOVE + lane)
    stays_below = tl.load(floats + _STAYS_BELOW + lane)
    conditions = tl.load(ints)
    gate_combine = tl.load(ints + _HEAD_COMBINE)
    form = tl.load(ints + _HEAD_FORM)
    hold = tl.load(ints + _HEAD_HOLD)
    invert = tl.load(ints + _HEAD_INVERT)
    late = tl.load(ints + _HEAD_LATE)
    record_end = tl.load(ints + _HEAD_END)
    terms = tl.load(ints + _HEAD_TERMS)
    own_row = tl.load(ints + _HEAD_OWN)
    a = tl.load(floats)
    b = tl.load(floats + 1)
    factor = tl.load(floats + 2)
    value = tl.load(state_ptr + _VALUE + lane).to(tl.float64)
    value += tl.load(state_ptr + _LOW + lane).to(tl.float64)
    count = tl.load(state_ptr + _COUNT + lane).to(tl.int32)
    run = tl.load(state_ptr + _RUN + lane).to(tl.int32)
    held = tl.load(state_ptr + _HELD)
    until = tl.load(state_ptr + _UNTIL)
    folded = tl.load(state_ptr + _FOLDED).to(tl.int32)
    record = state_ptr + tl.load(state_ptr + _RECORD).to(tl.int64) * (_STATE_ROWS * _TERMS)
    lasts = tl.where(hold == _FOR_NEXT, 1.0, float("inf"))
    lasts = tl.where(hold == _FOR_TOKENS_HELD, tl.load(ints + _HEAD_TOKENS).to(tl.float32), lasts)
    present = condition >= 0
    once = decided_at >= 0
    decision = tl.max(decided_at, 0)
    # Readings of this step don't count for a late gate.
    late_held, late_until = held, until
    last = end - 1
    last_at = position + (last - first).to(tl.int32)
    z = tl.load(readings_ptr + last * _COLUMNS + column, mask=present, other=float("nan"))

    stop = last
    if not STORE:
        first_decision = tl.min(tl.where(present, decided_at, _FAR), 0)
        # Rows after the decision are not needed, because later readings don't count. Before the
        # decision, and for late gates, no row is needed.
        ahead = (first_decision >= 0) & (last_at < first_decision)
        decided = first + tl.maximum(decision - position + 1, 0)
        stop = tl.where(first_decision >= 0, tl.minimum(stop, decided), stop)
        missing = tl.sum((present & (z != z)).to(tl.int32), 0)
        alone = (own_row != 0) & ((missing == 0) | (missing == terms))
        stop = tl.where(ahead | alone | (late != 0), first, stop)

    index = tl.arange(0, _ROWS)
    row = first
    while row < stop:
        rows = row + index
        within = rows < stop
        at = position + (rows - first).to(tl.int32)
        neutral = tl.where(gate_combine == _ANY, float("-inf"), 0.0)
        neutral = tl.where(gate_combine == _ALL, float("inf"), neutral)
        evidence = tl.zeros([_ROWS], tl.float32) + neutral
        least = tl.full([_ROWS], float("inf"), tl.float32)
        most = tl.full([_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([_ROWS], tl.float32)
        size = tl.zeros([_ROWS], tl.float32)
        unknown = tl.zeros([_ROWS], tl.int32)
        event = tl.zeros([_ROWS], tl.int32)
        term = conditions * 0
        while term < terms:
            its_column = tl.load(ints + _COLUMN + term)
            its_condition = tl.load(ints + _CONDITION + term)
            its_pool = tl.load(ints + _POOL + term)
            its_combine = tl.load(ints + _COMBINE + term)
            its_tokens = tl.load(ints + _FOR_TOKENS + term)
            its_decision = tl.load(ints + _DECIDED_AT + term)
            ends = tl.load(ints + _CONDITION + term + 1, mask=term + 1 < terms, other=-1)
            ends = ends != its_condition
            its_once = its_decision >= 0
            x = tl.load(
                readings_ptr + rows * _COLUMNS + its_column, mask=within, other=float("nan")
            )
            fresh = (late == 0) | (at >= folded)
            read = fresh & (x == x) & ((at <= its_decision) | (its_decision < 0))
            x = tl.where(read, x, 0.0).to(tl.float64)
            pools = tl.zeros([_ROWS], tl.int32) + its_pool
            x, counted, pools = tl.associative_scan((x, read.to(tl.int32), pools), 0, _pooled_both)
            had = tl.sum(tl.where(lane == term, count, 0), 0)
            old = tl.sum(tl.where(lane == term, value, 0.0), 0)
            x, counted, pools = _pooled_both(old, had, its_pool, x, counted, pools)
            mean = tl.div_rn(x.to(tl.float32), tl.maximum(counted, 1).to(tl.float32))
            pooled = tl.where(its_pool == _MEAN, mean, x.to(tl.float32))
            known = counted > 0
            strictly = known & (pooled > tl.load(floats + _ABOVE + term))
            strictly = strictly & (pooled < tl.load(floats + _BELOW + term))
            stays = known & (pooled > tl.load(floats + _STAYS_ABOVE + term))
            stays = stays & (pooled < tl.load(floats + _STAYS_BELOW + term))
            from_run = tl.where(strictly, 0, tl.where(stays, its_tokens, _FAR))
            from_run = tl.where(read, from_run, 0)
            more = (read & (strictly | stays)).to(tl.int32)
            from_run, more, other = tl.associative_scan(
                (from_run, more, tl.zeros([_ROWS], tl.int32)), 0, _run_both
            )
            ran = tl.sum(tl.where(lane == term, run, 0), 0)
            ran = tl.where(ran >= from_run, ran + more, other)
            seen = known & ((at >= its_decision) | (its_decision < 0))
            holds = (seen & (ran >= its_tokens)).to(tl.float32)
            summed = its_combine == _SUM
            score = tl.where(summed, tl.where(seen, pooled, 0.0), holds)
            unknown = unknown | (summed & (seen == 0)).to(tl.int32)
            decides = fresh & tl.where(its_once, at == its_decision, read)
            event = event | (within & decides).to(tl.int32)
            least = tl.minimum(least, score)
            most = tl.maximum(most, score)
            total += score
            size += 1.0
            part = tl.where(its_combine == _ANY, most, tl.where(summed, total, total / size))
            part = tl.where(its_combine == _ALL, least, part)
            joined = tl.where(gate_combine == _ANY, tl.maximum(evidence, part), evidence + part)
            joined = tl.where(gate_combine == _ALL, tl.minimum(evidence, part), joined)
            evidence = tl.where(ends, joined, evidence)
            least = tl.where(ends, float("inf"), least)
            most = tl.where(ends, float("-inf"), most)
            total = tl.where(ends, 0.0, total)
            size = tl.where(ends, 0.0, size)
            own_lane = lane == term
            at_end = index == _ROWS - 1
            value = tl.where(own_lane, tl.sum(tl.where(at_end, x, 0.0), 0), value)
            count = tl.where(own_lane, tl.sum(tl.where(at_end, counted, 0), 0), count)
            run = tl.where(own_lane, tl.sum(tl.where(at_end, ran, 0), 0), run)
            term += 1
        voted = (gate_combine != _ALL) & (gate_combine != _ANY) & (gate_combine != _SUM)
        evidence = tl.where(voted, evidence / conditions.to(tl.float32), evidence)
        opened = _opened(evidence, unknown, form, a, b)
        events = event != 0
        opens = events & ((opened > 0) | (hold > _FOR_REST)) & (hold != _FOR_TOKEN)
        # With `Hold.REST` only the first opening counts.
        alone = hold == _FOR_REST
        never = (held == 0).to(tl.int32)
        earliest = tl.where(never != 0, tl.min(tl.where(opens, index, _ROWS), 0), _ROWS)
        opens = opens & ((alone == 0) | (index == earliest))
        latest = tl.max(tl.where(opens, index, -1), 0)
        if STORE:
            which, number_of = tl.associative_scan((tl.where(opens, index, -1), opened), 0, _latest)
            open_until = (position + (row - first).to(tl.int32) + which).to(tl.float32) + lasts
            open_until = tl.where(which >= 0, open_until, until)
            still = tl.where(which >= 0, number_of, held)
            # With `Hold.NEXT_TOKEN` each row decides the openness at the next row.
            shift = (hold == _FOR_NEXT) & (late == 0)
            there = at + shift.to(tl.int32)
            openness = tl.where(there.to(tl.float32) <= open_until, still, 0.0)
            openness = tl.where(hold == _FOR_TOKEN, tl.where(events, opened, 0.0), openness)
            lately = _late_openness(
                at, late_held, late_until, folded, late, record_end, record, within
            )
            openness = tl.where(late != 0, lately, openness)
            openness = tl.where(invert != 0, 1.0 + (factor - 1.0) * openness, openness)
            target = openness_ptr + (rows + shift.to(tl.int64)) * _GATES + number
            tl.store(target, openness, mask=within)
            if shift & (row == first):
                begins = tl.where(position.to(tl.float32) <= until, held, 0.0)
                begins = tl.where(invert != 0, 1.0 + (factor - 1.0) * begins, begins)
                tl.store(openness_ptr + row * _GATES + number, begins)
        some = latest >= 0
        latest_at = position + (row - first).to(tl.int32) + latest
        held = tl.where(some, tl.sum(tl.where(index == latest, opened, 0.0), 0), held)
        until = tl.where(some, latest_at.to(tl.float32) + lasts, until)
        row += _ROWS

    # The last row, all terms at once.
    x = z.to(tl.float64)
    fresh_last = (late == 0) | (last_at >= folded)
    read = fresh_last & present & (z == z) & ((once == 0) | (last_at <= decided_at))
    x, counted, _ = _pooled_both(value, count, pool, x, read.to(tl.int32), pool)
    value = x
    count = counted
    mean = tl.div_rn(value.to(tl.float32), tl.maximum(count, 1).to(tl.float32))
    pooled = tl.where(pool == _MEAN, mean, value.to(tl.float32))
    counts = run >= for_tokens
    low = tl.where(counts, stays_above, above)
    high = tl.where(counts, stays_below, below)
    inside = (count > 0) & (pooled > low) & (pooled < high)
    run = tl.where(read, tl.where(inside, run + 1, 0), run)
    seen = (count > 0) & ((once == 0) | (last_at >= decided_at))
    holds = seen & (run >= for_tokens)
    summed = combine == _SUM
    score = tl.where(summed, tl.where(seen, pooled, 0.0), holds.to(tl.float32))
    unknown = tl.max((present & summed & (seen == 0)).to(tl.int32), 0)
    if LANES == 1:
        evidence = tl.sum(score, 0)  # any combination of one score
    else:
        numbers = tl.arange(0, _CONDITIONS)
        own = condition[None, :] == numbers[:, None]
        size = tl.sum(own.to(tl.float32), 1)
        how = tl.max(tl.where(own, combine[None, :], 0), 1)
        used = numbers < conditions
        scores = tl.broadcast_to(score[None, :], (_CONDITIONS, LANES))
        least = tl.min(tl.where(own, scores, float("inf")), 1)
        most = tl.max(tl.where(own, scores, float("-inf")), 1)
        total = tl.sum(tl.where(own, scores, 0.0), 1)
        part = tl.where(how == _SUM, total, total / tl.maximum(size, 1.0))
        part = tl.where(how == _ALL, least, tl.where(how == _ANY, most, part))
        sums = tl.sum(tl.where(used, part, 0.0), 0)
        evidence = tl.where(gate_combine == _SUM, sums, sums / conditions.to(tl.float32))
        smallest = tl.min(tl.where(used, part, float("inf")), 0)
        largest = tl.max(tl.where(used, part, float("-inf")), 0)
        evidence = tl.where(gate_combine == _ANY, largest, evidence)
        evidence = tl.where(gate_combine == _ALL, smallest, evidence)
    opened = _opened(evidence, unknown, form, a, b)
    decides_last = fresh_last & present & once & (last_at == decided_at)
    event = tl.max(((read & (once == 0)) | decides_last).to(tl.int32), 0) != 0
    time = last_at.to(tl.float32)
    before = tl.where(time <= until, held, 0.0)
    opens = event & ((opened > 0) | (hold > _FOR_REST))
    opens = opens & ((hold != _FOR_REST) | (before == 0))
    openness = tl.where(opens & (hold != _FOR_NEXT), opened, before)
    openness = tl.where(hold == _FOR_TOKEN, tl.where(event, opened, 0.0), openness)
    opens = opens & (hold != _FOR_TOKEN)
    lately = _late_openness(
        last_at, late_held, late_until, folded, late, record_end, record, late != 0
    )
    openness = tl.where(late != 0, lately, openness)
    openness = tl.where(invert != 0, 1.0 + (factor - 1.0) * openness, openness)
    tl.store(openness_ptr + last * _GATES + number, openness)
    if STORE:
        high = value.to(tl.float32)
        rest = (value - high.to(tl.float64)).to(tl.float32)
        tl.store(state_ptr + _VALUE + lane, high)
        tl.store(state_ptr + _LOW + lane, tl.where(tl.abs(high) < float("inf"), rest, 0.0))
        tl.store(state_ptr + _COUNT + lane, count.to(tl.float32))
        tl.store(state_ptr + _RUN + lane, run.to(tl.float32))
        tl.store(state_ptr + _HELD, tl.where(opens, opened, held))
        tl.store(state_ptr + _UNTIL, tl.where(opens, time + lasts, until))
        tl.store(state_ptr + _FOLDED, tl.maximum(folded, last_at + 1).to(tl.float32))
        # Add the positions of this step to the record, one word at a time.
        begin = tl.maximum(tl.maximum(folded, position), late) - late
        behind = tl.minimum(last_at + 1, record_end) - late
        word = begin // _WORD
        while word * _WORD < behind:
            place = word * _WORD + tl.arange(0, _WORD)
            there_open = tl.where((place + late).to(tl.float32) <= late_until, late_held, 0.0)
            is_open = (there_open > 0) & (place >= begin) & (place < behind)
            bits = tl.sum(is_open.to(tl.int32) << tl.arange(0, _WORD), 0)
            bits = bits | tl.load(record + word).to(tl.int32, bitcast=True)
            tl.store(record + word, bits.to(tl.float32, bitcast=True))
            word += 1


@triton.jit
def open_gates(
    step,
    token,
    directions_ptr,
    ints_ptr,
    floats_ptr,
    readings_ptr,  # [T, COLUMNS] float32
    openness_ptr,  # [T, GATES] float32
    tokens_ptr,  # [tokens, 4] int32; see `TokenColumn`
    states_ptr,
    gate_ints_ptr,
    gate_floats_ptr,
    row_sums_ptr,
    row_sum_names_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the openness of the gates at the beginning of a chain; returns the step after."""
    kind = tl.load(ints_ptr + step * _INTS)
    if kind >= _GATE:
        start = tl.load(tokens_ptr + token * _PER_TOKEN + _STATE_COLUMN)
        first = tl.load(tokens_ptr + token * _PER_TOKEN + _FIRST).to(tl.int64)
        position = tl.load(tokens_ptr + token * _PER_TOKEN + _POSITION)
        position -= (token - first).to(tl.int32)
        while (kind == _GATE) | (kind == _READ_MEAN):
            if kind == _READ_MEAN:
                # Read the mean if its position is in this step, and not after this token.
                row = first + tl.load(ints_ptr + step * _INTS + 3) - position
                if (row >= first) & (row <= token):
                    read_mean(
                        step,
                        row,
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
                    tl.debug_barrier()  # so that the whole block sees the number
            else:
                one_term = tl.load(ints_ptr + step * _INTS + 4)
                number = tl.load(ints_ptr + step * _INTS + 5) - 1
                state_ptr = states_ptr + (start + number).to(tl.int64) * (_STATE_ROWS * _TERMS)
                gate = tl.load(state_ptr + _STATE_GATE).to(tl.int64)
                scan(
                    one_term,
                    gate,
                    number,
                    first,
                    token + 1,
                    position,
                    state_ptr,
                    readings_ptr,
                    openness_ptr,
                    gate_ints_ptr,
                    gate_floats_ptr,
                    STORE=False,
                )
            step = tl.load(ints_ptr + step * _INTS + 2).to(tl.int64)
            kind = tl.load(ints_ptr + step * _INTS)
        tl.debug_barrier()  # so that the whole block sees them
    return step


@triton.jit
def _fold_kernel(
    folds_ptr,  # [n, columns of `FoldColumn`] int32
    tokens_ptr,  # [tokens, 4] int32; see `TokenColumn`
    states_ptr,
    readings_ptr,
    openness_ptr,
    gate_ints_ptr,
    gate_floats_ptr,
):
    fold = folds_ptr + tl.program_id(0) * _FOLD
    state = tl.load(fold + _FOLD_STATE).to(tl.int64)
    gate = tl.load(fold + _FOLD_GATE).to(tl.int64)
    number = tl.load(fold + _FOLD_NUMBER)
    first = tl.load(fold + _FOLD_FIRST).to(tl.int64)
    count = tl.load(fold + _FOLD_COUNT)
    position = tl.load(fold + _FOLD_POSITION)
    one_term = tl.load(fold + _FOLD_ONE_TERM)
    if gate > 0:  # `warm_up` launches it without a gate
        scan(
            one_term,
            gate,
            number,
            first,
            first + count,
            position,
            states_ptr + state * (_STATE_ROWS * _TERMS),
            readings_ptr,
            openness_ptr,
            gate_ints_ptr,
            gate_floats_ptr,
            STORE=True,
        )
        if count == 1:
            tl.store(fold + _FOLD_POSITION, position + 1)
            tl.store(tokens_ptr + first * _PER_TOKEN + _POSITION, position + 1)


_LAUNCHER = KernelLauncher(_fold_kernel)


def launch_fold(gates: GateBuffers, folds: torch.Tensor) -> None:
    """Folds the readings of a step into the states of its samples; see `fold_step`."""
    _LAUNCHER.launch(
        (len(folds), 1, 1),
        (
            folds,
            gates.tokens,
            gates.states,
            gates.readings,
            gates.openness,
            gates.ints,
            gates.floats,
        ),
    )
