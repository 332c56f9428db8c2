"""Tables that are put together before the first request that has them comes.

Why before
    A request is taken up in the step that vLLM schedules it in, and the step waits for it. What is
    expensive about it must be done by then. The server has it done between earlier steps, in calls
    that each do a bounded part of it, and lets the request start when all of it is there.

Invariant: what was prepared under a name stays until it is let go of under that name.
"""

from dataclasses import dataclass
from typing import NamedTuple

from rheostat_engine.core.arrangements import Arrangement
from rheostat_engine.core.capture_sets import CaptureSet
from rheostat_engine.core.captures import Captures
from rheostat_engine.core.steering import Steering
from rheostat_engine.core.vectors import BankError
from rheostat_engine.plan import Sealed, read


class Prepared(NamedTuple):
    """How far a plan has come."""

    done: bool
    """Whether nothing is left to do."""
    error: str
    """Why it can't be done; empty if it can. Nothing is held then."""


@dataclass
class _Pin:
    captures: CaptureSet | None = None
    acts: Sealed | None = None
    """Acts whose table has not been read."""
    arrangement: Arrangement | None = None


class Preparations:
    """The plans whose tables are prepared, by the server's names for that."""

    def __init__(self, steering: Steering, captures: Captures | None) -> None:
        """There is none.

        Args:
            steering: acts in force.
            captures: captures in force; None on a rank that doesn't report.
        """
        self._steering = steering
        self._captures = captures
        self._pins: dict[str, _Pin] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._pins)

    def go_on(self, name: str, wire: object, budget: int) -> Prepared:
        """Does a part of what a plan's tables need.

        Args:
            name: of the preparation.
            wire: `Plan.to_wire` of a plan with the tables; not looked at if the name is known.
            budget: how much is done at most, in units of `effort`; the last thing may exceed it.
        """
        try:
            if name not in self._pins:
                plan = read(wire)
                self._pins[name] = _Pin(acts=plan.acts)
                budget -= self._use_captures(self._pins[name], plan.captures)
            pin = self._pins[name]
            if pin.acts is not None and budget > 0:
                budget -= self._use_acts(pin, pin.acts)
            if pin.arrangement is not None and budget > 0:
                self._steering.arrangements.build(pin.arrangement, budget)
            complete = pin.arrangement is None or pin.arrangement.work is None
            return Prepared(pin.acts is None and complete, "")
        except (BankError, ValueError) as error:
            self.forget(name)
            return Prepared(True, str(error))

    def forget(self, name: str) -> None:
        """Lets go of what was prepared; nothing if there is none."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return
        if pin.arrangement is not None:
            self._steering.arrangements.release(pin.arrangement)
        if pin.captures is not None and self._captures is not None:
            self._captures.sets.release(pin.captures)

    def _use_captures(self, pin: _Pin, captures: Sealed | None) -> int:
        """Builds the table of captures, which is built at once; what that cost."""
        if captures is None or self._captures is None:
            return 0
        sets = self._captures.sets
        cost = sets.cost(captures)
        pin.captures = sets.use(captures)
        return cost

    def _use_acts(self, pin: _Pin, acts: Sealed) -> int:
        """Reads the table of acts; what that cost."""
        pin.arrangement = self._steering.use(acts)
        pin.acts = None
        return pin.arrangement.table.read_effort
