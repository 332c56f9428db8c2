"""The layout of gates and of their states in device memory.

A gate has a term for each column of each condition. It is a small table of integers and one of
floats, with `MAX_TERMS` lanes in each row. Row 0 has the gate's own numbers; in the other rows,
lane i belongs to term i.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.gates import MAX_TERMS, NEVER, Gate, Hold, Pool


class Ints(IntEnum):
    """Rows of a gate's integers. The lanes of the first are those of `Head`."""

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
    """Whether the openness at a token depends only on the token's own readings, if all or none of
    the gate's columns were read there."""
    END = 9
    """As `Gate.end`; 0: it is not recorded."""


class Floats(IntEnum):
    """Rows of a gate's floats. The first lanes of row 0 are `a`, `b` and `factor` of `Gate`."""

    HEAD = 0
    ABOVE = 1
    BELOW = 2
    STAYS_ABOVE = 3
    STAYS_BELOW = 4


class State(IntEnum):
    """Rows of the state of a sample's gate. The lanes of the first are those of `Held`."""

    HEAD = 0
    VALUE = 1
    """By `Pool`: the last reading, the sum of the readings rounded to float32, or the largest."""
    COUNT = 2
    """Number of readings."""
    RUN = 3
    """Number of readings between the bounds since the last that was not."""
    LOW = 4
    """The sum minus `VALUE`: its lower digits, so that a sum is the same for all chunks."""


class Held(IntEnum):
    """Lanes of the first row of a state."""

    OPENNESS = 0
    """The openness with which the gate last opened."""
    UNTIL = 1
    """The last position at which it has this openness."""
    FOLDED = 2
    """The first position whose readings the state does not include."""
    RECORD = 3
    """If the gate is recorded: its record begins so many states after this one. A record has a bit
    for each position from `Gate.late` on: whether the gate was open there."""
    GATE = 4
    """The gate, as a row of the table of gates. The host writes this and `RECORD`, and kernels the
    other lanes."""


RECORDED = len(State) * MAX_TERMS * 32
"""Positions that a state's memory can record."""


def states_of(gate: Gate) -> int:
    """How many states each sample needs for a gate: one, and those that store its record."""
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
        # Other bounds while the value counts would depend on earlier readings.
        and condition.stays_above is None
        and condition.stays_below is None
        for condition in gate.conditions
    )
