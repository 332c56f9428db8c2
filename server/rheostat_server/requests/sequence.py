"""A sequence that the engine generates for a request: its tokens, state and updates.

Invariant: every wait for the engine ends once, at the latest when the engine releases the sequence.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from rheostat_engine import (
    OPEN_END,
    Attached,
    ControllerDisabled,
    Gained,
    Installed,
    Released,
    Report,
)
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.admission.baseline import watched_sampling
from rheostat_server.delivery.items import SequenceKey
from rheostat_server.engine.admission_queue import Reservation
from rheostat_server.engine.backend import Ending, Job, WorkerStats
from rheostat_server.engine.pace import Pace
from rheostat_server.errors import EngineLost
from rheostat_server.requests.token_hold import TokenHold
from rheostat_server.steering.interventions import Intervention
from rheostat_server.subscriptions.pending_changes import PendingChange
from rheostat_server.tasks.rare_event import RareEvent
from rheostat_server.tasks.shared_query import SharedQuery
from rheostat_wire.v1 import types_pb2

_LOG = logging.getLogger(__name__)

FINISH_REASONS = {
    Ending.STOP: types_pb2.FINISH_REASON_STOP,
    Ending.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    Ending.ABORTED: types_pb2.FINISH_REASON_ABORTED,
    Ending.RULE: types_pb2.FINISH_REASON_RULE,
    Ending.WATCH: types_pb2.FINISH_REASON_WATCH,
}
"""Finish reasons in messages."""


RELEASE_GRACE = 60.0
"""Seconds that the engine has to release a sequence that it has run."""

UNSCHEDULED_GRACE = 2.0
"""Seconds after which a sequence without any event of the engine counts as never scheduled."""

_ABORT_GRACE = 0.05
"""Seconds that an aborted sequence has to be released before the workers are asked. All requests
that wait for an answer share it, so a cancelled sweep asks only a few times."""

_REPORT_GRACE = 0.1
"""Seconds that a report may be on its way which a worker sent before it answered."""


class SequenceKind(Enum):
    """The purpose of a sequence."""

    OWN = ""
    """A sample of the request."""
    BASELINE = "b"
    """The same sample without the request's steering."""
    SCORE = "s"
    """The baseline computes log-probabilities of the tokens that a sample has generated."""


class SteeringChange(NamedTuple):
    """A change of a sample's steering while it ran."""

    update_id: int
    """The session's update; 0: a watch changed it."""
    first: int
    """The first position on which it acts."""
    interventions: tuple[Intervention, ...]
    """All interventions from there on, server-wide ones first."""
    work: int
    """Bytes that `offload` counts for each pass over them."""


class SampleGains(NamedTuple):
    """The gains of a sample from a position on."""

    first: int
    """The position."""
    source: tuple[str, int]
    """`Intervention.source` of the interventions that they multiply."""
    gains: tuple[float, ...]
    """The gain of each intervention of that list."""


class _PendingGain(NamedTuple):
    """A change of a sample's gains that the engine has not reported."""

    change: int
    resolve: "Callable[[EngineSequence, int | None], None]"
    """Is called with the first position; None if the sample has ended."""


_LAST_GAINS = 32
"""Changes of gains that are kept with their positions, for the rows that the engine computes beyond
the last token of a sample. If the server ends a sample, up to 16 tokens still wait for later ones
(see `Pace`), and the engine runs a few steps more."""


class EngineSequence:
    """A sequence in the engine. Used on the event loop alone."""

    def __init__(self, job: Job, kind: SequenceKind, sample: int) -> None:
        """Makes a sequence that has not started.

        Args:
            job: the prompt, plan and settings for the engine.
            kind: its purpose.
            sample: index of the request's sample that it is, or is compared with.
        """
        self.job = job
        self.kind = kind
        self.sample = sample
        self.key = SequenceKey(sample, kind is SequenceKind.BASELINE)
        """Identifies its tokens and rows within the request."""
        self.steering_changes: list[SteeringChange] = []
        self.started = False
        """Whether it was added to the engine, or will be soon."""
        self.ended = False
        self.ending: Ending | None = None
        """How it ended; None while it runs."""
        self.has_output = False
        """Whether the engine has sent output."""
        self.engine_ended = False
        """Whether the engine has ended it, so that it need not be aborted."""
        self.installed = False
        """Whether the engine has installed its plan, or failed to."""
        self.install_failed = False
        """Whether the engine could not install its plan."""
        self.token_hold: TokenHold | None = None
        """Its tokens that are not released; None: every token is released at once."""
        self.fired_row = -1
        """The position of the row at which a rule stopped it; -1: none did."""
        self.held_back = False
        """Whether the response may wait with its tokens until `installed` is set."""
        self.tokens: list[int] = []
        """The generated tokens."""
        self.capture_changes = 0
        """Number of changes of its captures. A change is named by its number."""
        self.answered_changes = 0
        """The last change that the engine has answered."""
        self.pending_changes: list[PendingChange] = []
        """The changes that other parts of the server wait for."""
        self.gains: deque[SampleGains] = deque(maxlen=_LAST_GAINS)
        """The last changes of its gains, in order."""
        self.last_gains: dict[tuple[str, int], tuple[float, ...]] = {}
        """The last gains of each list of interventions, by `SampleGains.source`."""
        self.controller_disabled: ControllerDisabled | None = None
        """The report that its controller was disabled."""
        self.gain_count = 0
        """Number of gains that were applied to it."""
        self._gain_changes = 0
        """Number of changes of its gains. A change is named by its number."""
        self._pending_gains: deque[_PendingGain] = deque()
        self.installed_or_ended = RareEvent()
        """Set once the engine has installed its plan, or never will."""
        self.engine_done = False
        """Whether the engine has finished it and sends no more events."""
        self.released = RareEvent()
        if not job.has_plan:
            self.released.set()

    @property
    def plan_id(self) -> str:
        """Its id in the engine."""
        return self.job.plan.request_id

    @property
    def in_force(self) -> bool:
        """Whether its plan was installed, if it has one, so that its tokens may be sent."""
        return not self.job.has_plan or (self.installed and not self.install_failed)

    def finish_reason(self, *, failed: bool) -> types_pb2.FinishReason.ValueType:
        """How it ended, of a request that may have failed; aborted if it still runs."""
        if failed:
            return types_pb2.FINISH_REASON_ERROR
        return FINISH_REASONS[self.ending or Ending.ABORTED]

    def on_attached(self, attached: Attached) -> None:
        """Handles the answer to a change of its captures."""
        self.answered_changes = max(self.answered_changes, attached.change)
        self.resolve_changes(attached)
        # A sample that was observed before is released as any other, after its last rows.
        if attached.first == OPEN_END and not self.job.has_plan and not self.installed:
            self.engine_done = True
            self.released.set()

    def resolve_changes(self, attached: Attached) -> None:
        """Ends the wait for a change, and for all earlier changes."""
        for pending in [*self.pending_changes]:
            if pending.change <= attached.change:
                self.pending_changes.remove(pending)
                pending.resolve(self.key, attached)

    def await_gain(self, resolve: "Callable[[EngineSequence, int | None], None]") -> int:
        """Returns the number of a new change of its gains.

        `resolve` is called once the engine has reported the change, with its first position, or
        with None once the engine has released the sequence.
        """
        self._gain_changes += 1
        self._pending_gains.append(_PendingGain(self._gain_changes, resolve))
        return self._gain_changes

    def on_controller_disabled(self, event: ControllerDisabled) -> bool:
        """Handles the report that its controller was disabled.

        Returns whether the controller had yet to decide about one of its positions.
        """
        # The last token is no input, and the engine may run a sample on for some steps.
        if self.ended and event.first >= len(self.job.prompt) + len(self.tokens) - 1:
            return False
        self.controller_disabled = event
        return True

    def note_gains(self, gains: SampleGains) -> None:
        """Notes its gains from a position on."""
        if self.gains and self.gains[-1].first == gains.first:
            self.gains.pop()
        self.gains.append(gains)
        self.last_gains[gains.source] = gains.gains

    def resolve_gains(self, change: int, first: int | None) -> None:
        """Ends the wait for a change of its gains, and for all earlier changes.

        `first` is the first position on which they act; None if the sample has ended.
        """
        while self._pending_gains and self._pending_gains[0].change <= change:
            self.gain_count += first is not None
            self._pending_gains.popleft().resolve(self, first)

    def release(self, gains: Iterable[tuple[int, tuple[float, ...]]] = ()) -> None:
        """Takes the engine's report that it has released the sequence, which comes once.

        `gains` are (first position, gains) of a sample with a controller.
        """
        for first, own in gains:
            self.note_gains(SampleGains(first, ("", 0), own))
        self.engine_done = True
        self.released.set()
        self.resolve_all_changes()
        self.resolve_gains(self._gain_changes, None)

    def on_dropped(self, report: Report) -> None:
        """Ends the waits for a report that could not be handled; the engine does not repeat it."""
        if isinstance(report, Installed):
            self.installed = self.install_failed = True
        elif isinstance(report, Released):
            self.release()
        elif isinstance(report, Attached):
            error = "the server could not handle the engine's answer"
            self.on_attached(replace(report, error=error))
        elif isinstance(report, Gained):
            self.resolve_gains(report.change, report.first)

    def resolve_all_changes(self) -> None:
        """Ends the wait for changes of captures, because the engine no longer has the sequence."""
        if self.pending_changes:
            self.resolve_changes(Attached(self.plan_id, self.capture_changes, OPEN_END, ""))


async def until_released(
    sequences: Sequence[EngineSequence], workers: SharedQuery[WorkerStats]
) -> None:
    """Returns once the engine has released each sequence, or has never scheduled it.

    If no event comes, the engine may never have scheduled a sequence, or it may be busy. But it
    handles messages in order. Once it answers a query, it has handled the abort that was sent
    before. It has also reported which of the sequences it had scheduled.

    Args:
        sequences: the sequences.
        workers: a query that every worker answers.
    """
    waiting = await _unreleased_after(_ABORT_GRACE, sequences)
    if not all(sequence.installed for sequence in waiting):
        with contextlib.suppress(EngineLost):
            await workers.fresh()
        waiting = await _unreleased_after(_REPORT_GRACE, waiting)
        waiting = [sequence for sequence in waiting if sequence.installed]
    for sequence in await _unreleased_after(RELEASE_GRACE, waiting):
        _LOG.error("the engine never released %s", sequence.plan_id)


async def _unreleased_after(
    seconds: float, sequences: Sequence[EngineSequence]
) -> list[EngineSequence]:
    """Waits at most `seconds` until all sequences are released. Returns the unreleased ones."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for sequence in sequences:
                await sequence.released.wait()
    return [sequence for sequence in sequences if not sequence.released.is_set()]


def make_sequences(
    admitted: AdmittedRequest,
    plan_id: Callable[[int, SequenceKind], str],
    pace: Pace | None,
    count: Callable[[int], None],
) -> list[EngineSequence]:
    """The samples of a request, then those of its baseline.

    The samples hold tokens if rules, watches or the client of the request need it. The server must
    know these tokens at once. So they wait for later ones in the response queue, once they are
    released, and not in the engine's client.

    Args:
        admitted: the request.
        plan_id: the id of a sample's plan.
        pace: lets their tokens wait for later ones. None: they don't.
        count: is called with the number of bytes of tokens that are held in addition; negative if
            fewer are held.
    """
    baseline = admitted.baseline
    stops = admitted.signals is not None and admitted.signals.stops
    watched = any(part.watch.holds_if_lost for part in admitted.watch_parts)
    holds = stops or watched or admitted.hold_back > 0
    kinds = [(SequenceKind.OWN, admitted.plan, admitted.sampling)]
    if baseline is not None:
        compared = watched_sampling(admitted.sampling, baseline)
        kinds = [
            (SequenceKind.OWN, admitted.plan, compared),
            (SequenceKind.BASELINE, baseline.plan, admitted.sampling),
        ]
    sequences = [
        EngineSequence(
            Job(
                plan.for_request(
                    plan_id(sample, kind),
                    plan.epoch,
                    admitted.windows[sample] if admitted.windows else None,
                ),
                admitted.prompt.token_ids,
                sampling,
                sample,
                admitted.lora,
                admitted.background,
                None if holds else pace,
            ),
            kind,
            sample,
        )
        for kind, plan, sampling in kinds
        for sample in range(sampling.samples)
    ]
    for sequence in sequences if holds else ():
        if sequence.kind is SequenceKind.OWN:
            sequence.token_hold = TokenHold(
                admitted.prompt_len, watched=stops, hold_back=admitted.hold_back, count=count
            )
    return sequences


def reservations(sequences: Sequence[EngineSequence], scoring_id: str) -> list[Reservation]:
    """The capacity for samples, for baselines, and for scoring the samples.

    Args:
        sequences: from `make_sequences`.
        scoring_id: the id of a plan that scores a sample.
    """
    if not any(sequence.job.plan.acts or sequence.job.plan.captures for sequence in sequences):
        return []  # as for most requests; a baseline captures what its sample captures
    if len(sequences) == 1:
        return [Reservation(sequences[0].job.plan)]
    samples = sum(sequence.kind is SequenceKind.OWN for sequence in sequences)
    plans = {sequence.kind: sequence.job.plan for sequence in reversed(sequences)}
    if SequenceKind.BASELINE in plans:
        plans[SequenceKind.SCORE] = replace(
            plans[SequenceKind.BASELINE], request_id=scoring_id, captures=()
        )
    return [Reservation(plan, samples) for plan in plans.values() if plan.acts or plan.captures]
