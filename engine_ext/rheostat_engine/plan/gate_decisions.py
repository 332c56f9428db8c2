"""Finds the position at which all gates of a plan are decided for good.

Some gates are decided once: all their conditions are decided at one position p, and no later token
changes the numbers that they depend on. Such a gate is shut before p. If all gates of a plan are
decided once, the plan is decided at the largest `Gate.opens_from` among them. If all gates are shut
there, no gated act changes any token of the sample:

* Later tokens: a gate that is decided and shut does not open again.
* Earlier tokens: each gate was shut before its own `opens_from`. A gate that may shut again must
  have the largest `opens_from`. Otherwise it could have been open in between.

Invariant: `decided_once` returns a position only if openness 0 of all its gates at this position
implies that no gated act changes any token of the sample.
"""

from typing import NamedTuple

from rheostat_engine.plan.gates import NEVER, Gate, Hold
from rheostat_engine.plan.tables import SteeringTable


class DecidedOnce(NamedTuple):
    """The gates of a plan that are all decided once."""

    position: int
    """If all gates are shut at this position, they are shut at every token."""
    gates: tuple[int, ...]
    """The indices of the gates in `SteeringTable.gates`."""


class DecisionQuery(NamedTuple):
    """Asks the workers whether a request's gates are shut at a position that a step computes."""

    decided: DecidedOnce
    preemptions: int
    """`Request.num_preemptions` when the step was scheduled. If it has grown, the report is
    ignored, because the request computes its gates again."""


def decided_once(table: SteeringTable) -> DecidedOnce | None:
    """The gates of a table's acts, with the position that decides them; None if there is none.

    A table without gates has no such position, nor has one with a gate that may open at any later
    token. Gates of acts that can't change a token are left out.
    """
    gates = tuple(
        dict.fromkeys(act.gate for act in table.acts if act.gate is not None and act.strong)
    )
    if not gates or not all(map(_decides_once, gates)):
        return None
    position = max(gate.opens_from for gate in gates)
    if any(gate.hold is not Hold.REST and gate.opens_from < position for gate in gates):
        return None  # such a gate may have opened and shut again before `position`
    return DecidedOnce(position, tuple(map(table.gates.index, gates)))


def _decides_once(gate: Gate) -> bool:
    """Whether all conditions of a gate are decided at one position, and it is shut before."""
    (position, *others) = {condition.decided_at for condition in gate.conditions}
    if others or position == NEVER or gate.invert:
        return False
    return not gate.late or gate.late > position
