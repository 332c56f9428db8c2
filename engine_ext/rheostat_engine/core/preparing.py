"""Preparations: tables that are built before the first request that uses them.

Why before
    A worker installs a request in the step that first schedules it, and the whole step waits. So
    the server has expensive tables built between earlier steps. Each call does a bounded part. The
    server starts the request once its tables are complete.

Invariant: the tables of a preparation stay until the preparation is released by its name.
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
    """The state of a preparation."""

    done: bool
    """Whether the tables are complete."""
    error: str
    """The reason why they cannot be built; empty if they can. Nothing is held after an error."""


@dataclass
class _Pin:
    captures: CaptureSet | None = None
    acts: Sealed | None = None
    """Acts whose table has not been read."""
    arrangement: Arrangement | None = None


class Preparations:
    """The preparations of a worker, by the server's names."""

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
        """The number of preparations."""
        return len(self._pins)

    def go_on(self, name: str, wire: object, budget: int) -> Prepared:
        """Builds a part of a plan's tables.

        Args:
            name: of the preparation.
            wire: `Plan.to_wire` of a plan with the tables; ignored if the preparation exists.
            budget: the effort after which it stops.
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
        """Releases a preparation; nothing if there is none with the name."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return
        if pin.arrangement is not None:
            self._steering.arrangements.release(pin.arrangement)
        if pin.captures is not None and self._captures is not None:
            self._captures.sets.release(pin.captures)

    def _use_captures(self, pin: _Pin, captures: Sealed | None) -> int:
        """Builds the table of captures, all at once; the cost."""
        if captures is None or self._captures is None:
            return 0
        sets = self._captures.sets
        cost = sets.cost(captures)
        pin.captures = sets.use(captures)
        return cost

    def _use_acts(self, pin: _Pin, acts: Sealed) -> int:
        """Reads the table of acts; the cost."""
        pin.arrangement = self._steering.use(acts)
        pin.acts = None
        return pin.arrangement.table.read_effort
