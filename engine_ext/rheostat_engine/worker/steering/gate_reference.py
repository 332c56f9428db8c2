"""Gates in numpy. They run on a CPU, and are the reference for the kernels.

To fold readings means to add them to a gate's state, in the order of positions. A fold is the part
of a step for one gate of one sample.

Why all tokens at once
    A step may compute hundreds of tokens of a prompt, and a plan may have dozens of gates. A few
    operations for each token and gate would take longer than the model. So folds with the same
    number of tokens are computed together, and values are accumulated along the tokens. The cost is
    about a hundred numpy operations for each distinct number of tokens.

Arrays are [T, F] by token and fold, or [T, L] by token and term, where the terms of all folds
follow one another. Sums are float64, so their order does not change a float32 result.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.plan.gate_table import Floats, Head, Held, Ints, State
from rheostat_engine.plan.gates import NEVER, Combine, Form, Hold, Pool
from rheostat_engine.worker.state.buffers import FoldColumn, GateBuffers, TokenColumn
from rheostat_engine.worker.state.position_functions import Int32, Int64

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_WORD = 32
"""Positions in an int32 of a record: one in each bit."""
_FOLDS = [FoldColumn.STATE, FoldColumn.GATE, FoldColumn.FIRST, FoldColumn.COUNT]
"""The columns of `_Folds`."""
_MOST = 1 << 18
"""Approximate number of readings that are computed at once. It limits the memory of a step."""


class _Folds(NamedTuple):
    """Folds, each column [F]."""

    states: Int64
    gates: Int64
    """Rows of the gates in `GateBuffers.ints`."""
    firsts: Int64
    """The first token of the sample in the step."""
    counts: Int64
    """The number of tokens."""

    def by_count(self, gates: GateBuffers) -> Iterator[tuple[int, Int64]]:
        """Yields each number of tokens, with the indices of the folds that have this number."""
        terms = gates.ints.numpy()[self.gates, Ints.HEAD, Head.TERMS].astype(np.int64)
        for count in np.unique(self.counts).tolist():
            (own,) = np.nonzero(self.counts == count)
            parts = np.cumsum(terms[own] * count) // _MOST
            for part in np.unique(parts).tolist():
                yield count, own[parts == part]

    def take(self, which: Int64) -> "_Folds":
        """Some of the folds."""
        return _Folds(*(column[which] for column in self))


def open_gates(gates: GateBuffers, numbers: torch.Tensor, tokens: torch.Tensor) -> None:
    """Computes the openness of gates at tokens.

    Also folds the readings up to these tokens, all of which the forward pass has made before. Late
    gates depend on their states before the step, so their readings are not folded here.

    Args:
        gates: the buffers.
        numbers: [n]: numbers of the gates in the plans of the tokens.
        tokens: [n]: indices of the tokens in the step. Each pair of number and token occurs once.
    """
    number, token = (indices.numpy().astype(np.int64) for indices in (numbers, tokens))
    state, first = gates.tokens.numpy()[token, :2].astype(np.int64).T
    state += number
    states, at, fold = np.unique(state, return_index=True, return_inverse=True)
    counts = np.zeros(len(states), np.int64)
    np.maximum.at(counts, fold, token - first + 1)
    rows = gates.states.numpy()[states, State.HEAD, Held.GATE].astype(np.int64)
    folds = _Folds(states, rows, first[at], counts)
    late = gates.ints.numpy()[folds.gates, Ints.HEAD, Head.LATE] > 0
    _fold(gates, folds.take(np.flatnonzero(~late)))
    folds, own = folds.take(np.flatnonzero(late)), np.flatnonzero(late[fold])
    openness = gates.openness.numpy()
    for count, which in folds.by_count(gates):
        opened = _scan(gates, folds.take(which), count, store=False)
        mine = own[np.isin(state[own], folds.states[which])]
        column = np.searchsorted(folds.states[which], state[mine])
        openness[token[mine], number[mine]] = opened[token[mine] - first[mine], column]


def fold_step(gates: GateBuffers, folds: torch.Tensor) -> None:
    """Folds the readings of a step, except those that `open_gates` has already folded.

    Stores the openness of each gate at all tokens of its sample, also if no act has the gate. If a
    sample has one token, its position is advanced, so that a step that repeats this one needs no
    copy to the device.

    Args:
        gates: the buffers.
        folds: [n, columns of `FoldColumn`] int32.
    """
    table = folds.numpy()
    every = _Folds(*table[:, _FOLDS].astype(np.int64).T)
    _fold(gates, every)
    gates.folded.numpy()[every.states] = 0
    single = every.counts == 1
    table[single, FoldColumn.POSITION] += 1
    firsts = every.firsts[single]
    gates.tokens.numpy()[firsts, TokenColumn.POSITION] = table[single, FoldColumn.POSITION]


def _fold(gates: GateBuffers, folds: _Folds) -> None:
    """Folds the first `counts` tokens, except those that an earlier call has folded."""
    folded, openness = gates.folded.numpy(), gates.openness.numpy()
    done = folded[folds.states]
    folds = folds._replace(firsts=folds.firsts + done, counts=folds.counts - done)
    folds = folds.take(np.flatnonzero(folds.counts > 0))
    numbers = folds.states - gates.tokens.numpy()[folds.firsts, TokenColumn.STATE]
    for count, which in folds.by_count(gates):
        opened = _scan(gates, folds.take(which), count, store=True)
        tokens = folds.firsts[which] + np.arange(count)[:, None]
        openness[tokens, numbers[which]] = opened
    folded[folds.states] += folds.counts


def _scan(gates: GateBuffers, folds: _Folds, count: int, *, store: bool) -> Float32:
    """[T, F]: the openness of gates at each of `count` tokens.

    If `store`, the readings are added to the states.
    """
    states = gates.states.numpy()
    head = gates.ints.numpy()[folds.gates, Ints.HEAD]
    held = states[folds.states, State.HEAD]
    tokens = folds.firsts + np.arange(count)[:, None]
    at = gates.tokens.numpy()[tokens, TokenColumn.POSITION]
    late = head[:, Head.LATE] > 0
    fresh = ~late | (at >= held[:, Held.FOLDED])
    openness = np.zeros(at.shape, np.float32)
    if late.any():
        openness = _late(states, folds, head, held, at)
        if store:
            _record(states, folds, head, held, at, fresh)
    if store or not late.all():
        event, opened = _decided(gates, folds, head, tokens, at, fresh, store=store)
        now, then, until = _hold(head, held, at, event, opened)
        openness = np.where(late, openness, now)
        if store:
            held[:, Held.OPENNESS], held[:, Held.UNTIL] = then, until
            held[:, Held.FOLDED] = np.maximum(held[:, Held.FOLDED], at[-1] + 1)
            states[folds.states, State.HEAD] = held
    factors = gates.floats.numpy()[folds.gates, Floats.HEAD, 2]
    return np.where(head[:, Head.INVERT] > 0, 1 + (factors - 1) * openness, openness)


def _decided(
    gates: GateBuffers,
    folds: _Folds,
    head: Int32,
    tokens: Int64,
    at: Int32,
    fresh: Bool,
    *,
    store: bool,
) -> tuple[Bool, Float32]:
    """[T, F] each: whether a gate is decided at a token, and the openness that its form gives.

    Args:
        gates: the buffers.
        folds: the folds.
        head: [F, MAX_TERMS]: see `Head`.
        tokens: [T, F].
        at: [T, F]: the tokens' positions.
        fresh: [T, F]: whether the state does not include the token yet.
        store: whether the readings are added to the states.
    """
    sizes = head[:, Head.TERMS]
    begins = np.cumsum(sizes) - sizes
    fold = np.repeat(np.arange(len(sizes)), sizes)
    lane = np.arange(len(fold)) - begins[fold]
    gate, state, kept = folds.gates[fold], folds.states[fold], gates.states.numpy()
    column, condition, pool, combine, for_tokens, decided_at = gates.ints.numpy()[gate, 1:, lane].T
    above, below, stays_above, stays_below = gates.floats.numpy()[gate, 1:, lane].T
    _, value, count, run, low = kept[state, :, lane].T
    at, fresh, once = at[:, fold], fresh[:, fold], decided_at != NEVER
    z = gates.readings.numpy()[tokens[:, fold], column]
    read = fresh & ~np.isnan(z) & (~once | (at <= decided_at))
    counts = count + np.cumsum(read, axis=0)
    values = _pooled(pool, value + low.astype(np.float64), count > 0, z, read)
    number = values.astype(np.float32)
    mean = number / np.maximum(counts, 1).astype(np.float32)
    number = np.where(pool == Pool.MEAN, mean, number)
    some = counts > 0
    inside = some & (number > above) & (number < below)
    stays = some & (number > stays_above) & (number < stays_below)
    lags = (stays_above != above) | (stays_below != below)
    runs = _runs(run, for_tokens, read, inside, stays, lags)
    seen = some & (~once | (at >= decided_at))
    summed = combine == Combine.SUM
    holds = seen & (runs >= for_tokens)
    score = np.where(summed, np.where(seen, number, 0), holds).astype(np.float32)
    (conditions,) = np.nonzero((lane == 0) | (np.diff(condition, prepend=-1) != 0))
    parts = _combined(score, conditions, combine[conditions])
    numbers = head[:, Head.CONDITIONS]
    evidence = _combined(parts, np.cumsum(numbers) - numbers, head[:, Head.COMBINE])
    a, b = gates.floats.numpy()[folds.gates, Floats.HEAD, :2].T
    opened = _form(head[:, Head.FORM], evidence, a, b)
    unknown = np.logical_or.reduceat(summed & ~seen, begins, axis=1)
    decides = (read & ~once) | (fresh & once & (at == decided_at))
    event = np.logical_or.reduceat(decides, begins, axis=1)
    if store:
        high = values[-1].astype(np.float32)
        rest = np.where(np.isfinite(high), values[-1] - high, 0)
        kept[state, State.VALUE, lane], kept[state, State.LOW, lane] = high, rest
        kept[state, State.COUNT, lane], kept[state, State.RUN, lane] = counts[-1], runs[-1]
    return event, np.where(event & ~unknown, opened, 0)


def _pooled(pool: Int32, value: Float64, some: Bool, z: Float32, read: Bool) -> Float64:
    """[T, L]: the values of terms. With `Pool.MEAN` they are sums.

    Args:
        pool: [L]: see `Pool`.
        value: [L]: the values before the step; 0 if there was no reading.
        some: [L]: whether there was a reading before the step.
        z: [T, L]: the readings.
        read: [T, L]: whether they count.
    """
    numbers = np.concatenate([value[None], z])
    row = np.arange(1, len(numbers))[:, None]
    latest = np.maximum.accumulate(np.where(read, row, 0), axis=0)
    values: Float64 = np.take_along_axis(numbers, latest, axis=0)
    if (own := np.flatnonzero(pool == Pool.MEAN)).size:
        numbers[1:, own] = np.where(read[:, own], numbers[1:, own], 0)
        values[:, own] = np.cumsum(numbers[:, own], axis=0)[1:]
    if (own := np.flatnonzero(pool == Pool.MAX)).size:
        counts = np.concatenate([some[None, own], read[:, own]])
        largest = np.maximum.accumulate(np.where(counts, numbers[:, own], -np.inf), axis=0)[1:]
        values[:, own] = np.where(some[own] | (latest[:, own] > 0), largest, value[own])
    return values


def _runs(
    run: Float32, for_tokens: Int32, read: Bool, inside: Bool, stays: Bool, lags: Bool
) -> Float64:
    """[T, L]: the number of last readings in a row with values between the bounds.

    Args:
        run: [L]: this number before the step.
        for_tokens: [L]: a value counts from this number on.
        read: [T, L]: whether there is a reading.
        inside: [T, L]: whether the value is between the bounds.
        stays: [T, L]: whether it is between the bounds for a value that already counts.
        lags: [L]: whether these bounds are other ones.
    """
    more = np.cumsum(read & inside, axis=0)
    ended = np.where(read & ~inside, more, -run.astype(np.float64))
    runs: Float64 = more - np.maximum.accumulate(ended, axis=0)
    if (own := np.flatnonzero(lags)).size:
        last = run[own].astype(np.float64)
        for row in range(len(runs)):
            counts = last >= for_tokens[own]
            longer = np.where(np.where(counts, stays[row, own], inside[row, own]), last + 1, 0)
            runs[row, own] = last = np.where(read[row, own], longer, last)
    return runs


def _combined(numbers: Float32, begins: Int64, combine: Int32) -> Float32:
    """[T, n]: n groups of the columns of `numbers`, which begin at `begins`, combined."""
    least = np.minimum.reduceat(numbers, begins, axis=1)
    largest = np.maximum.reduceat(numbers, begins, axis=1)
    total = np.add.reduceat(numbers, begins, axis=1, dtype=np.float64).astype(np.float32)
    mean = total / np.diff(begins, append=numbers.shape[1]).astype(np.float32)
    ways = [combine == Combine.ALL, combine == Combine.ANY, combine == Combine.SUM]
    return np.select(ways, [least, largest, total], mean)


def _form(form: Int32, evidence: Float32, a: Float32, b: Float32) -> Float32:
    """[T, F]: the openness for the evidence; `form`, `a` and `b` are [F]."""
    e, a, b = evidence.astype(np.float64), a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):  # both formulas are computed for gates of all forms
        ramp = np.clip((e - a) / (b - a), 0, 1)
        sigmoid = 1 / (1 + np.exp(-b * (e - a)))
    forms = [form == Form.STEP, form == Form.SIGMOID]
    return np.select(forms, [e > a, sigmoid], ramp).astype(np.float32)


def _hold(
    head: Int32, held: Float32, at: Int32, event: Bool, opened: Float32
) -> tuple[Float32, Float32, Float32]:
    """The openness of gates that are not late, [T, F]; and their new `Held.OPENNESS` and `UNTIL`.

    Args:
        head: [F, MAX_TERMS]: see `Head`.
        held: [F, MAX_TERMS]: see `Held`; before the step.
        at: [T, F]: positions.
        event: [T, F]: whether a gate is decided there.
        opened: [T, F]: the openness that its form gives there.
    """
    hold = head[:, Head.HOLD]
    opens = event & ((opened > 0) | (hold == Hold.UNTIL_READ)) & (hold != Hold.TOKEN)
    rest = hold == Hold.REST
    opens &= ~rest | (at > held[:, Held.UNTIL]) | (held[:, Held.OPENNESS] == 0)
    opens &= ~rest | (np.cumsum(opens, axis=0) == 1)
    # Row t: the row of the last opening before token t, from 1; 0: it is as before the step.
    row = np.arange(1, len(at) + 1)[:, None]
    latest = np.maximum.accumulate(np.where(opens, row, 0), axis=0)
    before = np.concatenate([np.zeros_like(latest[:1]), latest])
    which = np.where(hold == Hold.NEXT_TOKEN, before[:-1], before[1:])
    lasts = np.select(
        [hold == Hold.NEXT_TOKEN, hold == Hold.TOKENS], [1, head[:, Head.TOKENS]], math.inf
    )
    numbers = np.concatenate([held[None, :, Held.OPENNESS], opened])
    untils = np.concatenate([held[None, :, Held.UNTIL], (at + lasts).astype(np.float32)])
    then = np.take_along_axis(numbers, which, axis=0)
    still = np.where(at <= np.take_along_axis(untils, which, axis=0), then, 0)
    openness = np.where(hold == Hold.TOKEN, opened, still)
    fold = np.arange(len(hold))
    return openness, numbers[latest[-1], fold], untils[latest[-1], fold]


def _late(states: Float32, folds: _Folds, head: Int32, held: Float32, at: Int32) -> Float32:
    """[T, F]: the openness of late gates, from their states before the step; see `_hold`."""
    still = np.where(at <= held[:, Held.UNTIL], held[:, Held.OPENNESS], 0)
    kept = (at >= head[:, Head.LATE]) & (at < held[:, Held.FOLDED]) & (at < head[:, Head.END])
    words, index, bit = _recorded(states, folds, head, held, at)
    open_then = words[np.where(kept, index, 0)] >> bit & 1
    return np.where(at < head[:, Head.LATE], 0, np.where(kept, open_then, still)).astype(np.float32)


def _record(
    states: Float32, folds: _Folds, head: Int32, held: Float32, at: Int32, fresh: Bool
) -> None:
    """Records where late gates are open, from their states before the step."""
    is_open = (at <= held[:, Held.UNTIL]) & (held[:, Held.OPENNESS] > 0) & fresh
    is_open &= (at >= head[:, Head.LATE]) & (at < head[:, Head.END])
    words, index, bit = _recorded(states, folds, head, held, at)
    np.bitwise_or.at(words, index[is_open], np.int32(1) << bit[is_open])


def _recorded(
    states: Float32, folds: _Folds, head: Int32, held: Float32, at: Int32
) -> tuple[Int32, Int64, Int32]:
    """All states as words; and, [T, F] each, the word and the bit that record each position."""
    begins = (folds.states + held[:, Held.RECORD].astype(np.int64)) * states[0].size
    word, bit = np.divmod(at - head[:, Head.LATE], _WORD)
    return states.view(np.int32).reshape(-1), begins + word, bit.astype(np.int32)
