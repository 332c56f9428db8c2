"""Plans with gates, and what they do, position after position in float64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import assume
from hypothesis import strategies as st

from rheostat_engine import Act, Kind, Plan
from rheostat_engine.plan.gates import (
    NEVER,
    Activation,
    Combine,
    Form,
    Gate,
    GateCondition,
    Hold,
    Normalise,
    Pool,
    Reading,
)

from .cpu_worker import stream_at, token_at
from .naive import Row, Vectors, applied, projected_cosine
from .strategies import DIGESTS, EVERYWHERE, LAST, LIMIT, SITES, acts, selects, spans
from .tables import VECTORS

READ_SITES = (0, 1)
"""Gates read there, and act behind."""

Columns = dict[int, float]
"""What was read of a token, by column."""

_NEAR = 1e-3
"""Examples in which a number is so near to a bound are not used: float32 may decide otherwise."""


@st.composite
def _readings(draw: st.DrawFn) -> tuple[Act, ...]:
    """Some acts that read, with a column for each site."""
    found: list[Act] = []
    column = 0
    mean_at = draw(st.integers(0, LIMIT))
    for _ in range(draw(st.integers(1, 3))):
        of_mean = draw(st.booleans())
        sites = draw(st.sampled_from([(0,), (1,), READ_SITES]))
        reading = Reading(
            draw(st.sampled_from(Normalise)),
            draw(st.sampled_from(Activation)),
            draw(st.sampled_from((0.0, 0.5, -1.0))),
            draw(st.sampled_from((0.0, 0.25))),
            column,
            mean_at if of_mean else NEVER,
        )
        selected = draw(st.just(EVERYWHERE) | spans())
        if of_mean:
            ends = [(start, min(end, mean_at + 1)) for start, end in selected]
            selected = tuple((start, end) for start, end in ends if start < end)
        row = draw(st.integers(0, 1))
        found.append(
            Act(
                Kind.READ,
                (draw(st.sampled_from(DIGESTS)),),
                tuple((site, (row,)) for site in sites),
                selected,
                reading=reading,
            )
        )
        column += len(sites)
    return tuple(found)


@st.composite
def conditions(draw: st.DrawFn, columns: int) -> GateCondition:
    """Any condition on some of so many columns."""
    chosen = draw(st.sets(st.integers(0, columns - 1), min_size=1))
    middle = draw(st.sampled_from((-0.5, 0.3, 0.9)))
    above, below = draw(
        st.sampled_from([(middle, math.inf), (-math.inf, middle), (middle, middle + 1)])
    )
    combine = draw(st.sampled_from(Combine))
    if combine is Combine.SUM:
        above, below = -math.inf, math.inf
    return GateCondition(
        tuple(sorted(chosen)),
        draw(st.sampled_from(Pool)),
        combine,
        above,
        below,
        1 if combine is Combine.SUM else draw(st.integers(1, 3)),
        draw(st.just(NEVER) | st.integers(0, LIMIT)),
        above - 0.4 if math.isfinite(above) and draw(st.booleans()) else None,
        below + 0.4 if math.isfinite(below) and draw(st.booleans()) else None,
    )


@st.composite
def gates(draw: st.DrawFn, columns: int, holds: Sequence[Hold] = tuple(Hold)) -> Gate:
    """Any gate on so many columns."""
    a = draw(st.sampled_from((0.1, 0.6, -0.7)))
    hold = draw(st.sampled_from(holds))
    chosen = draw(st.lists(conditions(columns), min_size=1, max_size=3))
    late = 0 if hold is Hold.TOKEN else draw(st.just(0) | st.integers(1, LIMIT + 1))
    once = late > 0 and draw(st.booleans())
    if late:
        chosen = [
            one._replace(decided_at=late - 1 if once else min(one.decided_at, late - 1))
            for one in chosen
        ]
    recorded = late > 0 and any(one.decided_at == NEVER for one in chosen)
    return Gate(
        tuple(chosen),
        draw(st.sampled_from(Combine)),
        Form.STEP if recorded else draw(st.sampled_from(Form)),
        a,
        a + draw(st.sampled_from((0.5, 2.0))),
        hold,
        draw(st.integers(1, 4)) if hold is Hold.TOKENS else 0,
        draw(st.booleans()),
        late,
        LIMIT + 4 if recorded else 0,
        draw(st.sampled_from((0.0, 0.5, 2.0))),
    )


@st.composite
def gated_plans(draw: st.DrawFn, request_id: str = "r") -> Plan:
    """A plan whose acts read at the first sites, and have gates at the others."""
    readings = draw(_readings())
    columns = sum(len(act.rows) for act in readings)
    known = draw(st.lists(gates(columns), min_size=1, max_size=3))
    others: list[Act] = []
    for act in draw(st.lists(acts(), min_size=1, max_size=4)):
        behind = tuple((site, rows) for site, rows in act.rows if site not in READ_SITES)
        gate = draw(st.sampled_from([None, *known]))
        rows = act.rows if gate is not None and gate.late else behind
        others.append(act if gate is None else replace(act, rows=rows, gate=gate))
    return Plan(request_id, draw(st.permutations([*readings, *others])))


class _Values(NamedTuple):
    """What a column says at a position."""

    number: float
    run: int
    """Readings in a row of which the pooled value lay between the bounds."""


Check = Callable[..., object]
"""Called with a number and the bounds that it must not be near, where rounding would decide."""


def _assume_apart(number: float, *bounds: float) -> None:
    assume(apart(number, bounds, _NEAR))


def apart(number: float, bounds: Sequence[float], margin: float) -> bool:
    """Whether a number is further than a margin from all bounds."""
    return all(abs(number - bound) > margin for bound in bounds if math.isfinite(bound))


def _values(
    condition: GateCondition, column: int, history: Sequence[Columns], first: int, check: Check
) -> _Values | None:
    """What a column of a condition says at the last position of a history, if anything."""
    once = condition.decided_at != NEVER
    last = first + len(history) - 1
    if once and last < condition.decided_at:
        return None
    read = [
        columns[column]
        for position, columns in enumerate(history, first)
        if column in columns and not (once and position > condition.decided_at)
    ]
    if not read:
        return None
    pooled = [
        {Pool.LAST: read[n], Pool.MEAN: float(np.mean(read[: n + 1])), Pool.MAX: max(read[: n + 1])}
        for n in range(len(read))
    ]
    numbers = [one[condition.pool] for one in pooled]
    run = 0
    stays_above = condition.above if condition.stays_above is None else condition.stays_above
    stays_below = condition.below if condition.stays_below is None else condition.stays_below
    for number in numbers:
        check(number, condition.above, condition.below, stays_above, stays_below)
        stays = run >= condition.for_tokens and stays_above < number < stays_below
        run = run + 1 if stays or condition.above < number < condition.below else 0
    return _Values(numbers[-1], run)


def _combined(numbers: Sequence[float], combine: Combine) -> float:
    match combine:
        case Combine.ALL:
            return min(numbers)
        case Combine.ANY:
            return max(numbers)
        case Combine.SUM:
            return sum(numbers)
    return float(np.mean(numbers))


def _opened(gate: Gate, history: Sequence[Columns], first: int, check: Check) -> float:
    """How far a gate opens at the last position of a history."""
    parts = []
    for condition in gate.conditions:
        values = [_values(condition, column, history, first, check) for column in condition.columns]
        if condition.combine is Combine.SUM:
            if None in values:
                return 0.0
            scores = [one.number for one in values if one is not None]
        else:
            scores = [float(one is not None and one.run >= condition.for_tokens) for one in values]
        parts.append(_combined(scores, condition.combine))
    evidence = _combined(parts, gate.combine)
    if gate.form is Form.STEP:
        check(evidence, gate.a)
        return float(evidence > gate.a)
    if gate.form is Form.SIGMOID:
        return 1 / (1 + math.exp(-gate.b * (evidence - gate.a)))
    check(evidence, gate.a)
    return min(max((evidence - gate.a) / (gate.b - gate.a), 0.0), 1.0)


def openings(
    gate: Gate, history: Sequence[Columns], first: int, check: Check = _assume_apart
) -> list[float]:
    """How far a gate is open at each position of a history.

    Args:
        gate: the gate.
        history: what was read of each token.
        first: the position of the first of them.
        check: called with every number that is compared.
    """
    opened: dict[int, float] = {}
    """By position, at the events: how far it opens there."""
    for position, columns in enumerate(history, first):
        event = any(
            position == one.decided_at
            if one.decided_at != NEVER
            else any(column in columns for column in one.columns)
            for one in gate.conditions
        )
        if event:
            opened[position] = _opened(gate, history[: position - first + 1], first, check)
    return [_openness(gate, opened, last) for last in range(first, first + len(history))]


def openness(gate: Gate, history: Sequence[Columns], first: int) -> float:
    """How far a gate is open at the last position of a history. Arguments as in `openings`."""
    return openings(gate, history, first)[-1]


def _openness(gate: Gate, opened: dict[int, float], last: int) -> float:
    """How far a gate is open at a position, after it has opened so far at others."""
    opened = {position: one for position, one in opened.items() if position <= last}
    if gate.late:  # what is read of a token counts behind it alone
        opened = {position: one for position, one in opened.items() if position < last}
        opened = opened if last >= gate.late else {}
    some = {position: one for position, one in opened.items() if one > 0}
    match gate.hold:
        case Hold.TOKEN:
            found = opened.get(last, 0.0)
        case Hold.NEXT_TOKEN:
            found = some.get(last - 1, 0.0)
        case Hold.TOKENS:
            recent = [position for position in some if last - position <= gate.tokens]
            found = some[max(recent)] if recent else 0.0
        case Hold.REST:
            found = some[min(some)] if some else 0.0
        case Hold.UNTIL_READ:
            found = opened[max(opened)] if opened else 0.0
    return 1 + (gate.factor - 1) * found if gate.invert else found


def _read(act: Act, rows: tuple[int, ...], x: Row, vectors: Vectors) -> float:
    assert act.reading is not None
    vector = vectors[act.vectors[0]][rows[0]].astype(np.float64)
    z = float(x @ vector)
    if act.reading.normalise is not Normalise.NONE:
        z /= float(np.linalg.norm(vector))
    if act.reading.normalise is Normalise.COSINE:
        z /= float(np.linalg.norm(x))
    if act.reading.normalise is Normalise.PROJECTED_COSINE:
        z = projected_cosine(x, vector)
    z += act.reading.bias
    match act.reading.activation:
        case Activation.RELU:
            return max(z, 0.0)
        case Activation.JUMP_RELU:
            _assume_apart(z, act.reading.theta)
            return z if z > act.reading.theta else 0.0
        case Activation.TANH:
            return math.tanh(z)
    return z


def column_at(act: Act, site: int) -> int:
    """The column to which an act reads at a site."""
    assert act.reading is not None
    return act.reading.column + [one for one, _ in act.rows].index(site)


class Gated(NamedTuple):
    """What a plan with gates does to a request."""

    streams: dict[tuple[int, int], Row]
    """By (position, site): what leaves the site."""
    opened: list[tuple[float, ...]]
    """By position: how far the gates of the plan's acts are open, in the order of the acts."""
    history: list[Columns]
    """By position: what was read."""


def gated(
    plan: Plan,
    request_id: str,
    first: int,
    length: int,
    vectors: Vectors = VECTORS,
    gain_at: Callable[[int, int], float] = lambda index, position: 1.0,
) -> Gated:
    """One position after the other, one site after the other, one act after the other.

    `gain_at` returns the gain of an act, by its index, at a position.
    """
    history: list[Columns] = []
    summed: dict[int, list[Row]] = {}
    """By column: the rows of which a mean is read."""
    found = Gated({}, [], history)
    for position in range(first, length):
        columns: Columns = {}
        history.append(columns)
        token = token_at(request_id, position)
        present = [pair for pair in enumerate(plan.acts) if selects(pair[1], position, token)]
        present.sort(key=lambda pair: (pair[1].kind is Kind.READ, pair[1].kind in LAST))
        opened: dict[Gate, float] = {}
        for site in range(SITES):
            x: npt.NDArray[np.float64] = stream_at(request_id, position, site).astype(np.float64)
            for index, act in present:
                rows = dict(act.rows).get(site)
                if rows is None:
                    continue
                if act.reading is not None:
                    if act.reading.of_mean:
                        summed.setdefault(column_at(act, site), []).append(x)
                    else:
                        columns[column_at(act, site)] = _read(act, rows, x, vectors)
                    continue
                if act.gate is not None and act.gate not in opened:
                    opened[act.gate] = openness(act.gate, history, first)
                weight = 1.0 if act.gate is None else opened[act.gate]
                x = applied(act, x, rows, vectors, weight * gain_at(index, position))
            for act in plan.acts:
                rows = dict(act.rows).get(site)
                if rows is None or act.reading is None or act.reading.mean_at != position:
                    continue
                if read := summed.get(column_at(act, site)):
                    mean = np.mean(read, axis=0)
                    columns[column_at(act, site)] = _read(act, rows, mean, vectors)
            found.streams[position, site] = x
        found.opened.append(tuple(opened.values()))
    return found
