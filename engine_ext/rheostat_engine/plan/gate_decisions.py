"""When all gates of a plan are decided for good, and which worker reports what to the scheduler.

A gate whose conditions are all decided at one position p keeps its decision: no later token changes
what is read for it. If all gates of a plan are of this kind, there is a position from which on each
of them stays as far open as it is there. If all are shut at this position, no act of theirs changes
a token there or later. And none has changed a token before, because each gate was shut before p,
and a gate that opens for one token only must be read at that token.

Invariant: `decided_once` returns a position only if openness 0 of all its gates at this position
implies that no gated act changes any token of the sample.
"""

from typing import NamedTuple

from rheostat_engine.plan.gates import NEVER, Gate, Hold
from rheostat_engine.plan.tables import SteeringTable


class DecidedOnce(NamedTuple):
    """The gates of a plan, if they are decided once."""

    position: int
    """Where their openness shows whether they stay shut."""
    gates: tuple[int, ...]
    """Their numbers in the plan."""


class DecisionQuery(NamedTuple):
    """Asks the workers whether the gates of a request are shut at a position of a step."""

    decided: DecidedOnce
    preemptions: int
    """How often the request had been preempted when the step was scheduled. A report of an earlier
    computation says nothing about a later one."""


def decided_once(table: SteeringTable) -> DecidedOnce | None:
    """The gates of a table's acts; None if there are none, or if one may open at any later token.

    Gates of acts that can't change a token don't matter.
    """
    gates = tuple(
        dict.fromkeys(act.gate for act in table.acts if act.gate is not None and act.strong)
    )
    if not gates or not all(map(_decides_once, gates)):
        return None
    position = max(gate.opens_from for gate in gates)
    if any(gate.hold is not Hold.REST and gate.opens_from < position for gate in gates):
        return None  # it may have opened and shut again before
    return DecidedOnce(position, tuple(map(table.gates.index, gates)))


def _decides_once(gate: Gate) -> bool:
    """Whether a gate is decided at one position, and shut before."""
    (position, *others) = {condition.decided_at for condition in gate.conditions}
    if others or position == NEVER or gate.invert:
        return False
    return not gate.late or gate.late > position
