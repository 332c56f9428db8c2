"""One sequence of tokens that the engine generates for a request: its state and its updates.

Invariant: everything that waits for the engine to answer is answered once, at the latest when the
engine releases the sequence.
"""

import asyncio
from enum import Enum
from typing import NamedTuple

from rheostat_engine import OPEN_END, Attached
from rheostat_server.delivery.items import SequenceKey
from rheostat_server.engine.backend import Ending, Job
from rheostat_server.steering.interventions import Intervention
from rheostat_server.subscriptions.pending_changes import PendingChange
from rheostat_wire.v1 import types_pb2

FINISH_REASONS = {
    Ending.STOP: types_pb2.FINISH_REASON_STOP,
    Ending.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    Ending.ABORTED: types_pb2.FINISH_REASON_ABORTED,
}
"""How the wire says why a sample ended."""


class SequenceKind(Enum):
    """What something runs for."""

    OWN = ""
    """A sample of the request."""
    BASELINE = "b"
    """The same sample without the request's steering."""
    SCORE = "s"
    """The baseline reading what a sample has generated."""


class SteeringChange(NamedTuple):
    """A change of a sample's steering while it ran."""

    update_id: int
    """The update."""
    first: int
    """The first position on which it acts."""
    interventions: tuple[Intervention, ...]
    """What acts from there on, server-wide ones first."""


class EngineSequence:
    """One sample in the engine."""

    def __init__(self, job: Job, kind: SequenceKind, sample: int) -> None:
        """A sample that has not started.

        Args:
            job: as the engine gets it.
            kind: what it runs for.
            sample: which of the request's samples it is or concerns.
        """
        self.job = job
        self.kind = kind
        self.sample = sample
        self.key = SequenceKey(sample, kind is SequenceKind.BASELINE)
        """The name of its tokens and rows within the request."""
        self.steering_changes: list[SteeringChange] = []
        self.started = False
        """Whether the engine gets it."""
        self.ended = False
        self.ending: Ending | None = None
        """How it ended, once it has."""
        self.has_output = False
        self.installed = False
        """Whether the engine has handled its plan."""
        self.install_failed = False
        """Whether the engine could not put its plan in force."""
        self.held_back = False
        """Whether tokens of it may have come before `installed` was set."""
        self.tokens: list[int] = []
        """What it has generated."""
        self.capture_changes = 0
        """How often what is captured of it was changed."""
        self.answered_changes = 0
        """The last of these changes of which the engine has said what became of it."""
        self.pending_changes: list[PendingChange] = []
        """Those that somebody waits for."""
        self.installed_or_ended = asyncio.Event()
        """Set once the engine holds it or never will."""
        self.engine_done = False
        """Whether the engine has finished it, and reports nothing of it any more."""
        self.released = asyncio.Event()
        if not job.has_plan:
            self.released.set()

    @property
    def plan_id(self) -> str:
        """Under which the engine knows it."""
        return self.job.plan.request_id

    @property
    def in_force(self) -> bool:
        """Whether its plan is in force, if it has one, so that its tokens may be sent."""
        return not self.job.has_plan or (self.installed and not self.install_failed)

    def on_attached(self, attached: Attached) -> None:
        """The engine has changed what is captured of it, or it ended before."""
        self.answered_changes = max(self.answered_changes, attached.change)
        self.resolve_changes(attached)
        if attached.first == OPEN_END and not self.job.has_plan:
            self.engine_done = True
            self.released.set()

    def resolve_changes(self, attached: Attached) -> None:
        """Whoever waits for a change, or an earlier one, hears what became of it."""
        for one in [one for one in self.pending_changes if one.change <= attached.change]:
            self.pending_changes.remove(one)
            one.tell(self.key, attached)

    def release(self) -> None:
        """The engine has reported that it released the sample, which it does once."""
        self.engine_done = True
        self.released.set()
        self.resolve_all_changes()

    def resolve_all_changes(self) -> None:
        """The engine holds it no more: nothing becomes of changes that wait."""
        self.resolve_changes(Attached(self.plan_id, self.capture_changes, OPEN_END, ""))
