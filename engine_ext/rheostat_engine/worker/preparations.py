"""Preparations: tables built before the first request that uses them.

Why before
    A worker adds a request in the step that first schedules it, which delays the whole step. So the
    workers build expensive tables between earlier steps, a bounded part in each call. The server
    starts the request once its tables are complete.

Invariant: the tables of a preparation stay until `release`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from rheostat_engine.plan.plan import EncodedTable, read_plan
from rheostat_engine.worker.capture.capture_sets import CaptureSet
from rheostat_engine.worker.capture.captures import Captures
from rheostat_engine.worker.state.id_allocators import BankError
from rheostat_engine.worker.steering.built_tables import BuiltTable
from rheostat_engine.worker.steering.steering import Steering


class Prepared(NamedTuple):
    """The state of a preparation."""

    done: bool
    """Whether the tables are complete."""
    error: str
    """Why they can't be built; empty if they can. After an error, the preparation is released."""


@dataclass
class _Preparation:
    captures: CaptureSet | None = None
    acts: EncodedTable | None = None
    """Acts whose table is not parsed yet."""
    built_table: BuiltTable | None = None


class Preparations:
    """A worker's preparations, by the server's names."""

    def __init__(self, steering: Steering, captures: Captures | None) -> None:
        """`captures` is None on a rank that doesn't report."""
        self._steering = steering
        self._captures = captures
        self._preparations: dict[str, _Preparation] = {}

    def __len__(self) -> int:
        return len(self._preparations)

    def build_part(self, name: str, wire: object, budget: int) -> Prepared:
        """Builds a part of a plan's tables.

        Args:
            name: the preparation's name.
            wire: `Plan.to_wire` of a plan with the tables; ignored if the preparation exists.
            budget: the cost after which it stops.
        """
        try:
            preparation = self._preparations.get(name)
            if preparation is None:
                plan = read_plan(wire)
                preparation = self._preparations[name] = _Preparation(acts=plan.acts)
                if plan.captures is not None and self._captures is not None:  # built at once
                    before = self._captures.sets.built
                    preparation.captures = self._captures.sets.use(plan.captures)
                    budget -= self._captures.sets.built - before
            if preparation.acts is not None and budget > 0:
                preparation.built_table = self._steering.built_tables.use(preparation.acts)
                preparation.acts = None
                budget -= preparation.built_table.table.read_cost
            if preparation.built_table is not None and budget > 0:
                self._steering.built_tables.build(preparation.built_table, budget)
            complete = preparation.built_table is None or preparation.built_table.work is None
            return Prepared(preparation.acts is None and complete, "")
        except (BankError, ValueError) as error:
            self.release(name)
            return Prepared(True, str(error))

    def release(self, name: str) -> None:
        """Releases a preparation, if it exists."""
        preparation = self._preparations.pop(name, None)
        if preparation is None:
            return
        if preparation.built_table is not None:
            self._steering.built_tables.release(preparation.built_table)
        if preparation.captures is not None and self._captures is not None:
            self._captures.sets.release(preparation.captures)
