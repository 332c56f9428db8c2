"""Gates as rows of numbers, as the device reads them.

A gate has a term for each column of each condition. Terms are lanes of `MAX_TERMS`.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.gates import MAX_TERMS, NEVER, Condition, Gate, Hold, Pool


class Ints(IntEnum):
    """Rows of a gate's integers. The first holds the lanes of `Head`."""

    HEAD = 0
    COLUMN = 1
    CONDITION = 2
    """Index of the term's condition; -1 in lanes without a term."""
    POOL = 3
    COMBINE = 4
    FOR_TOKENS = 5
    DECIDED_AT = 6


class Head(IntEnum):
    """Lanes of the first row of a gate's integers."""

    CONDITIONS = 0
    COMBINE = 1
    FORM = 2
    HOLD = 3
    TOKENS = 4
    INVERT = 5
    LATE = 6
    """As `Gate.late`."""
    TERMS = 7
    """Number of terms."""
    OWN_ROW = 8
    """Whether it follows from the readings of the token alone, if all or none of its columns were
    read."""
    END = 9
    """As `Gate.end`; 0: it is not recorded."""


class Floats(IntEnum):
    """Rows of a gate's floats. The first holds `a`, `b` and `factor`."""

    HEAD = 0
    ABOVE = 1
    BELOW = 2
    STAYS_ABOVE = 3
    STAYS_BELOW = 4


class State(IntEnum):
    """Rows of the state of a sample's gate. The first holds the lanes of `Held`."""

    HEAD = 0
    VALUE = 1
    """The last value, their sum rounded to float32, or the largest."""
    COUNT = 2
    """Readings so far."""
    RUN = 3
    """How many of the last readings in a row lay between the bounds."""
    LOW = 4
    """The sum less `VALUE`, so that chunks don't change what a sum is."""


class Held(IntEnum):
    """Lanes of the first row of a state."""

    OPENNESS = 0
    """How far the gate is held open."""
    UNTIL = 1
    """Up to which position."""
    FOLDED = 2
    """The first position that was not taken into the state yet."""
    RECORD = 3
    """Of a recorded gate: how many states behind this one its record begins. A record has a bit for
    each position from `Gate.late` on: whether the gate was open there."""


RECORDED = len(State) * MAX_TERMS * 32
"""Positions of a record for which a state has room."""


def states_of(gate: Gate) -> int:
    """How many states each sample needs for a gate: one, and those of its record."""
    return 1 + (-(-max(0, gate.end - gate.late) // RECORDED) if gate.recorded else 0)


def gate_rows(gate: Gate) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """A gate's integers, [7, MAX_TERMS], and floats, [5, MAX_TERMS]."""
    ints = np.zeros((len(Ints), MAX_TERMS), np.int32)
    floats = np.zeros((len(Floats), MAX_TERMS), np.float32)
    ints[Ints.CONDITION] = -1
    ints[Ints.DECIDED_AT] = NEVER
    head = (
        len(gate.conditions),
        gate.combine,
        gate.form,
        gate.hold,
        gate.tokens,
        gate.invert,
        gate.late,
        len(gate.columns),
        _follows_from_own_row(gate),
        gate.end if gate.recorded else 0,
    )
    ints[Ints.HEAD, : len(head)] = head
    floats[Floats.HEAD, :3] = gate.a, gate.b, gate.factor
    lane = 0
    for number, condition in enumerate(gate.conditions):
        for column in condition.columns:
            ints[1:, lane] = (
                column,
                number,
                condition.pool,
                condition.combine,
                condition.for_tokens,
                condition.decided_at,
            )
            above, below = condition.above, condition.below
            stays = condition.stays_above, condition.stays_below
            floats[1:, lane] = (
                above,
                below,
                above if stays[0] is None else stays[0],
                below if stays[1] is None else stays[1],
            )
            lane += 1
    return ints, floats


def _follows_from_own_row(gate: Gate) -> bool:
    """See `Head.OWN_ROW`."""
    return gate.hold is Hold.TOKEN and all(
        condition.pool is Pool.LAST
        and condition.for_tokens == 1
        and condition.decided_at == NEVER
        and not _lags(condition)
        for condition in gate.conditions
    )


def _lags(condition: Condition) -> bool:
    """Whether the bounds depend on whether the value counts already."""
    return condition.stays_above is not None or condition.stays_below is not None
