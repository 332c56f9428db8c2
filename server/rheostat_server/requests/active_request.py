"""A running request: its sequences, and one queue of everything that they produce.

Invariant: nothing is put into the queue after an error or `close`.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from rheostat_engine import (
    Attached,
    ControllerDisabled,
    Dropped,
    Gained,
    Installed,
    Released,
    Report,
)
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.delivery.byte_budget import Share
from rheostat_server.delivery.response_rows import ResponseRows
from rheostat_server.engine.admission_queue import Reservation
from rheostat_server.engine.backend import Backend, Delta, Ending, Start, StoppedBy
from rheostat_server.engine.held_samples import HeldSamples
from rheostat_server.engine.pace import Pace
from rheostat_server.engine.preparations import Preparation
from rheostat_server.errors import Defect, RheostatError, RowsLost
from rheostat_server.monitors.parts import WatchedPart
from rheostat_server.requests.policy_audit import PolicyAudit
from rheostat_server.requests.request_holds import RequestHolds
from rheostat_server.requests.request_outputs import RequestOutputs
from rheostat_server.requests.response_queue import (
    Entry,
    Message,
    Notice,
    ResponseItem,
    ResponseQueue,
    Sign,
)
from rheostat_server.requests.sequence import (
    EngineSequence,
    SequenceKind,
    make_sequences,
    reservations,
)
from rheostat_server.requests.signals import Fired, RequestSignals
from rheostat_server.requests.steering_change import Control
from rheostat_server.requests.token_hold import TokenHold
from rheostat_server.steering.controlled import disabled_error
from rheostat_server.subscriptions.observer_captures import Attachment
from rheostat_server.tasks.futures import keep
from rheostat_server.tasks.turns import Turns
from rheostat_wire.v1 import types_pb2

_LOG = logging.getLogger(__name__)

_START_WORK = 1024
_ITERATION_WORK = 16 << 10
"""The work of starting samples, in prompt tokens. A sample costs `_START_WORK` and its prompt. A
request spends at most `_ITERATION_WORK` in an iteration of the event loop, because vLLM copies the
prompt there for each sample: 1 ms for the longest prompt."""

_NUMBERS = itertools.count()
"""Numbers of requests, because a later request may have the id of an earlier one."""


class ActiveRequest:
    """A running request."""

    def __init__(
        self,
        admitted: AdmittedRequest,
        share: Share,
        pace: Pace,
        wake_turns: Turns,
        row_turns: Turns,
        held_samples: HeldSamples,
        audit: PolicyAudit,
    ) -> None:
        """The request has not started.

        Args:
            admitted: the request.
            share: the memory for its waiting rows and tokens.
            pace: counts its streams, and limits how often their tokens are sent.
            wake_turns: limits how many readers of responses wake in an iteration of the event loop.
            row_turns: limits how many requests send rows in an iteration of the event loop.
            held_samples: holds its samples in the engine.
            audit: logs where rules of the policy fire.
        """
        self.admitted = admitted
        self.admitted_at = time.monotonic()
        self.completed = False
        self.failed = False
        self.aborted = False
        self.unobserved = False
        """Whether observers get no rows, because the engine could not hold their captures."""
        self.capacity_reserved = False
        """Whether everything that the request needs of the engine is reserved."""
        self.pending_notices = 0
        """Number of updates whose notices `next` has not returned."""
        self.control: Control | None = None
        """Changes its steering; None if that cannot change."""
        self.pinned: list[bytes] = []
        """Digests of the vectors that the store must not evict while the request runs."""
        self.reserved: list[str] = []
        """Ids of the request's entries in the ledger."""
        self.prepared: list[Preparation | None] = []
        """Tables that the workers have built for the request."""
        self.share = share
        self.outputs = RequestOutputs()
        """Destinations of captured rows."""
        self.queue = ResponseQueue(share, self.overflow, pace, wake_turns)
        """Messages that wait for the reader of the response."""
        self.interrupt: Callable[[RheostatError], None] = lambda _: None
        """Ends the call, even if its client does not read."""
        wake = partial(self.queue.put, Sign.ROWS)
        self.response_rows = ResponseRows(partial(row_turns.call_later, wake))
        """Captured rows of the response, sent an iteration of the loop after the step's tokens."""
        self.capture_lock = asyncio.Lock()
        """Held during changes of captures, so that two changes do not reserve the same capacity."""
        self.attachments: list[Attachment] = []
        """Subscriptions that were attached while the request ran."""
        self.attachment_attempts: set[str] = set()
        """Ids of subscriptions that were attached, or could not be."""
        self._number = next(_NUMBERS)
        self.pace = None if admitted.in_session else pace
        """Limits how often its tokens are sent. None in a session, whose client reacts to them."""
        self.sequences = make_sequences(
            admitted, self.plan_id, self.pace, self.queue.byte_counter.add_tokens
        )
        self.own_samples = [own for own in self.sequences if own.kind is SequenceKind.OWN]
        """The request's own samples, without baselines."""
        self.queue.paced = self.pace is not None and self.own_samples[0].token_hold is not None
        self.signals: RequestSignals | None = None
        """What its probes read. None if it has no signals, or if only watches use its signals."""
        if admitted.signals is not None and not admitted.signals.for_watches:
            self.signals = RequestSignals(
                admitted.signals,
                len(self.own_samples),
                share,
                partial(self.queue.put, Sign.SIGNALS),
                admitted.request_id,
                audit,
            )
        self.holds = RequestHolds(self.sequences, held_samples, self.fail, self._accept)
        """The watches that hold it."""
        self.watched: tuple[WatchedPart, ...] = ()
        """The watches that read it, until it ends."""
        self.closed = False
        """Whether the sequences were stopped, so that nothing more is put into the queue."""
        self._backend: Backend | None = None
        self._starting: set[asyncio.Task[None]] = set()
        """Tasks that add samples to the engine."""
        self._aborting: set[asyncio.Task[None]] = set()
        """Tasks that abort samples in the engine."""

    @property
    def unanswered(self) -> bool:
        """Whether a change of its steering was not answered, or its notice was not returned."""
        return bool(self.pending_notices) or (self.control is not None and self.control.pending)

    @property
    def settled(self) -> bool:
        """Whether the engine has released the started sequences, and no rows are being written."""
        return (
            not self._changing
            and not self._starting
            and not self._aborting
            and not self.outputs.writing
            and all(sequence.released.is_set() for sequence in self.sequences if sequence.started)
        )

    @property
    def released(self) -> bool:
        """Whether the engine has released all sequences, and no more will start."""
        return (self.closed or self.admitted.baseline is None) and all(
            (self.closed or sequence.ended) and sequence.released.is_set()
            for sequence in self.sequences
        )

    @property
    def touches_kv(self) -> bool:
        """Whether a sequence was started whose interventions change its KV cache."""
        return any(sequence.started and sequence.job.plan.touches_kv for sequence in self.sequences)

    @property
    def reservations(self) -> list[Reservation]:
        """The capacity for samples, for baselines, and for scoring the samples."""
        return reservations(self.sequences, self.plan_id(0, SequenceKind.SCORE))

    def never_scheduled(self, sequence: EngineSequence) -> bool:
        """Whether a sample was aborted before the engine reported anything about it."""
        aborted = self.aborted or sequence.ending in (Ending.RULE, Ending.WATCH)
        return aborted and not sequence.installed and not sequence.has_output

    def plan_id(self, sample: int | str, kind: SequenceKind = SequenceKind.OWN) -> str:
        """An id that no plan of another request in this process has."""
        return f"{self.admitted.request_id}#{sample}{kind.value}@{self._number}"

    async def start(self, backend: Backend, *, epoch: int) -> None:
        """Starts the samples. Their KV blocks are cached under `epoch`; see `Plan.epoch`.

        When this returns, the first samples wait to be sent to the engine with those of other
        requests of this iteration of the event loop. A task adds further samples.
        """
        if self._may_start(self.sequences, epoch):
            paced = max(1, _ITERATION_WORK // (self.admitted.prompt_len + _START_WORK))
            at_once = len(self.sequences) if self.admitted.windows else paced  # in one message
            self._backend = backend
            await self._add(backend, self.sequences[:at_once])
            if later := self.sequences[at_once:]:
                keep(self._starting, self._add_in_turns(backend, later, at_once))

    def start_later(self, backend: Backend, sequence: EngineSequence, *, epoch: int) -> None:
        """Starts one more sequence, in a task."""
        if self._may_start([sequence], epoch):
            keep(self._starting, self._add(backend, [sequence]))

    def _may_start(self, sequences: Sequence[EngineSequence], epoch: int) -> bool:
        """Marks sequences as started, unless the request was closed."""
        if self.closed:
            for sequence in sequences:
                sequence.released.set()
            return False
        for sequence in sequences:
            plan = sequence.job.plan
            if plan.epoch != epoch:
                sequence.job = replace(sequence.job, plan=plan.for_request(plan.request_id, epoch))
            sequence.started = True
        return True

    async def stopped(self) -> None:
        """Returns once no more samples start or change, and all aborts were sent to the engine."""
        while tasks := self._starting | self._aborting | self._changing:
            await asyncio.wait(tasks)

    @property
    def _changing(self) -> set[asyncio.Task[None]]:
        """The task that changes its steering, if there is one."""
        task = None if self.control is None else self.control.task
        return set() if task is None else {task}

    async def next(self) -> Message:
        """Waits for the next message of the queue.

        Raises:
            RheostatError: the request has failed.
        """
        return self._taken(await self.queue.get())

    def take_plain(self, may_send: Callable[[EngineSequence], bool]) -> Message | None:
        """As `ResponseQueue.take_plain`."""
        entry = self.queue.take_plain(may_send)
        return None if entry is None else self._taken(entry)

    def _taken(self, entry: Entry) -> Message:
        if isinstance(entry, RheostatError):
            raise entry
        if not isinstance(entry, (ResponseItem, Sign)):
            self.pending_notices -= 1
        return entry

    def deliver(
        self,
        sequence: EngineSequence,
        event: Installed | Released | Attached | Gained | ControllerDisabled | Dropped,
    ) -> None:
        """Handles an event of the engine, unless it is rows or signals.

        `outputs` takes rows, and `add_signals` signals.
        """
        if isinstance(event, Installed):
            sequence.installed = True
            sequence.installed_or_ended.set()
            if event.error:
                sequence.install_failed = True
                _LOG.error("plan %s is not in force: %s", event.request_id, event.error)
                self.fail(Defect("the engine could not install the request's plan"))
            if not sequence.held_back:
                return  # no token waits for the plan, so the reader need not wake up
        elif isinstance(event, Released):
            sequence.release(event.gains)
            if sequence.token_hold is not None:
                sequence.token_hold.no_more_signals()
                self._check_hold(sequence.token_hold)
            if sequence.kind is not SequenceKind.SCORE:
                self.outputs.release(sequence.key, event)
            self._close_outputs()
        elif isinstance(event, Attached):
            sequence.on_attached(event)
            self._close_outputs()
            return
        elif isinstance(event, Gained):
            sequence.resolve_gains(event.change, event.first)
            return
        elif isinstance(event, ControllerDisabled):
            undecided = sequence.on_controller_disabled(event)
            if undecided and not self.admitted.outlives_controller:
                self.fail(disabled_error(event.controller, event.reason))
            return
        else:
            self._drop(sequence, event.report)
            return
        if sequence.job.has_plan:
            self._put(ResponseItem(sequence, event))

    def add_signals(
        self,
        sequence: EngineSequence,
        first: int,
        count: int,
        values: npt.NDArray[np.float32] | None,
        readings: int,
        *,
        opened: bool,
    ) -> None:
        """Handles the signals of a step; see `SignalRows`.

        If the request is closed, its signals are only noted in the audit log. The engine may have
        computed them before it received the abort.

        Args:
            sequence: a sample of the request.
            first: the first position.
            count: the number of positions.
            values: [count, readings + gates]; None: they are lost.
            readings: the number of columns of readings.
            opened: whether a gate is open at any of the positions.
        """
        signals, hold = self.signals, sequence.token_hold
        if signals is None or sequence.kind is not SequenceKind.OWN:
            return
        if values is None:
            signals.lose(sequence.sample, first, count)
            if signals.plan.stops and not self.closed:
                self.fail(RowsLost.no_signals(count))
            return
        fired = signals.add(sequence.sample, first, values, readings, opened)
        if hold is None or self.closed:
            return
        if fired is not None:
            self._stop_at(sequence, hold, fired)
        for delta in hold.advance(first + count):
            self._accept(sequence, delta)

    def unobserve(self) -> None:
        """Removes all captures that only observers asked for."""
        self.unobserved = True
        for sequence in self.sequences:
            plan = sequence.job.plan.with_captures_of(self.admitted.unobserved)
            sequence.job = replace(sequence.job, plan=plan)

    def finish(self) -> None:
        """Closes the outputs that the receipt needs. Attached observers may still get rows."""
        if all(sequence.released.is_set() for sequence in self.sequences):
            self.close_outputs()
        else:
            self.outputs.close(
                self._reasons(), excluding={attachment.feed for attachment in self.attachments}
            )

    def close_outputs(self) -> None:
        """Closes all outputs with the finish reasons of the samples."""
        if self.outputs:
            self.outputs.close(self._reasons())
        if self.watched:
            reasons = self._reasons()
            for watched_part in self.watched:
                watched_part.part.watch.end(watched_part.watched, reasons)
            self.watched = ()

    def discard_outputs(self, error: RheostatError) -> None:
        """Discards the outputs of a request that cannot start.

        Subscriptions that have announced the request to their clients report its end instead.
        """
        announced = {attachment.feed for attachment in self.attachments if attachment.named}
        self.outputs.abandon(error, excluding=announced)
        self.close_outputs()

    def notify(self, notice: Notice) -> None:
        """Puts the result of an update into the queue."""
        self._put(notice)

    def on_answered(self) -> None:
        """Wakes the reader, which waits for the answers to changes once all samples have ended."""
        if all(sequence.ended for sequence in self.own_samples):
            self._put(Sign.ANSWERED)

    def fail(self, error: RheostatError) -> None:
        """Ends the request with an error. After the first error, later errors are ignored."""
        self.failed = True
        self._put(error)
        self.close()

    def overflow(self, error: RheostatError) -> None:
        """Discards all waiting messages, and ends the request with an error at once."""
        self.queue.close()
        self.fail(error)
        self.interrupt(error)

    def abort(self) -> None:
        """Ends every sample that still runs, as aborted, and all holds."""
        self.aborted = True
        self.holds.close()
        running = [sequence for sequence in self.sequences if not sequence.ended]
        for sequence in running:
            sequence.ended = True
            sequence.ending = Ending.ABORTED
            sequence.installed_or_ended.set()
            if sequence.token_hold is not None:
                sequence.token_hold.drop()
            self._put(ResponseItem(sequence, Delta(ending=Ending.ABORTED)))
        self._abort(running)

    def close(self) -> None:
        """Stops the samples. Nothing more is put into the queue."""
        if not self.closed:
            # A sample may have ended here while the engine still runs it.
            running = [one for one in self.sequences if not (self.completed and one.engine_ended)]
            self._abort([one for one in running if not (one.ended and one.released.is_set())])
        self.closed = True
        self.holds.close()
        if self.control is not None:
            self.control.cancel()
        self.response_rows.close()
        if self.signals is not None:
            self.signals.close()
        self.outputs.drop_runs()
        for sequence in self.sequences:
            sequence.installed_or_ended.set()

    def _drop(self, sequence: EngineSequence, report: Report) -> None:
        """Fails the request because a report of the engine could not be handled."""
        sequence.on_dropped(report)
        self.fail(Defect("the server could not handle a report of the engine"))
        self._close_outputs()

    def _close_outputs(self) -> None:
        """Closes the outputs once all sequences with captures have ended and were released.

        A failed request does not wait until its client has read the error. Otherwise its sinks
        would keep rows, files and threads until then.
        """
        capturing = [one for one in self.sequences if one.kind is not SequenceKind.SCORE]
        if all((one.ended or self.failed) and one.released.is_set() for one in capturing):
            self.close_outputs()

    def _reasons(self) -> list[types_pb2.FinishReason.ValueType]:
        return [sequence.finish_reason(failed=self.failed) for sequence in self.own_samples]

    def _put(self, entry: Entry) -> None:
        if not self.closed:
            self.queue.put(entry)

    async def _add_in_turns(
        self, backend: Backend, sequences: Sequence[EngineSequence], at_once: int
    ) -> None:
        """Adds samples to the engine, `at_once` in each iteration of the event loop."""
        for first in range(0, len(sequences), at_once):
            if first:
                await asyncio.sleep(0)
            await self._add(backend, sequences[first : first + at_once])

    async def _add(self, backend: Backend, sequences: Sequence[EngineSequence]) -> None:
        """Adds samples to the engine: together if they have windows, else one by one."""
        for group in [sequences] if self.admitted.windows else [[one] for one in sequences]:
            await self.holds.none()
            adding = [] if self.closed else [one for one in group if not one.ended]
            starts = [
                Start(one.job, partial(self._receive, one), partial(self._fail_sample, one))
                for one in adding
            ]
            try:
                await backend.add_requests(starts)
            except Exception as error:  # any error must fail the request, also in a task
                self._fail_sample(adding[0], error)
            else:
                if adding and (self.closed or self.aborted):
                    self._abort(adding)  # the engine may have got the first abort too early
                for sequence in adding:
                    self.holds.hold_late(sequence)

    def _abort(self, sequences: Sequence[EngineSequence]) -> None:
        """Makes the engine abort samples.

        The tasks that start samples are cancelled first, so that none starts after its abort.
        """
        for task in self._starting:
            task.cancel()
        self._abort_running(sequences)

    def _abort_running(self, sequences: Sequence[EngineSequence]) -> None:
        """Makes the engine abort samples, while others may still start."""
        ids = [sequence.plan_id for sequence in sequences if sequence.started]
        if ids and self._backend is not None:
            keep(self._aborting, self._abort_in(self._backend, ids))

    async def _abort_in(self, backend: Backend, plan_ids: Sequence[str]) -> None:
        try:
            await backend.abort(plan_ids)
        except Exception as error:  # the request has ended for its client, so only the log remains
            _LOG.error("samples %s were not aborted", ", ".join(plan_ids), exc_info=error)
        self._close_outputs()

    def _receive(self, sequence: EngineSequence, delta: Delta) -> None:
        """Handles new tokens of a sample."""
        if sequence.ended:
            return
        sequence.has_output = True
        sequence.engine_ended = delta.ending is not None
        hold = sequence.token_hold
        if hold is None:
            self._accept(sequence, delta)
            return
        for released in hold.add(delta):
            self._accept(sequence, released)
        self._check_hold(hold)

    def _accept(self, sequence: EngineSequence, delta: Delta) -> None:
        """Hands new tokens of a sample on."""
        if sequence.kind is not SequenceKind.SCORE:
            # Also after a failure, because the feeds expect a row for each known token.
            sequence.tokens += delta.token_ids
            self.outputs.extend(sequence.key, delta.token_ids)
        if self.closed:
            return
        if delta.ending is not None:
            sequence.ended = True
            sequence.ending = delta.ending
            if sequence.token_hold is not None:
                sequence.fired_row = sequence.token_hold.fired_row
        self.queue.put_delta(sequence, delta)
        if sequence.ended:
            self._decide(sequence, delta.stop if isinstance(delta.stop, StoppedBy) else None)
            sequence.installed_or_ended.set()
            if sequence.ending in (Ending.RULE, Ending.WATCH):
                # The row at which the rule fired was computed, though no token after it is sent.
                self.outputs.reach(sequence.key, sequence.fired_row + 1)
                self._abort_running([sequence])
            self._close_outputs()

    def _check_hold(self, hold: TokenHold) -> None:
        """Fails the request if tokens would wait for ever, or take too much memory."""
        if hold.stuck and not self.closed:
            self.fail(Defect("the engine did not report what the request's probes have read"))
        self.share.check()

    def _stop_at(self, sequence: EngineSequence, hold: TokenHold, fired: Fired) -> None:
        """Stops a sample at the row at which a rule has fired."""
        stop = fired.rule.stop
        assert stop is not None
        by = StoppedBy(fired.rule.name, stop.label, fired.rule.watch, fired.rule.policy)
        for delta in hold.stop(fired.row, by, drop_sampled=stop.drop_sampled):
            self._accept(sequence, delta)
        if sequence.ended:
            self._decide(sequence)

    def _decide(self, sequence: EngineSequence, by: StoppedBy | None = None) -> None:
        """Notes whether the firing of a rule has ended a sample, and ends the others if it says so.

        `by` is the rule or watch that has ended it, if one has.
        """
        if self.signals is None or sequence.kind is not SequenceKind.OWN:
            return
        rule = self.signals.decide(sequence.sample, stopped=sequence.fired_row >= 0)
        if by is not None and rule is not None and rule.stop is not None and rule.stop.all_samples:
            self.stop(by, excluding=sequence)

    def stop(self, by: StoppedBy, excluding: EngineSequence | None = None) -> None:
        """Ends the samples that run with the tokens that they have sent, except `excluding`."""
        for sequence in self.own_samples:
            if sequence is excluding or sequence.ended:
                continue
            if sequence.token_hold is not None:
                sequence.token_hold.drop()
            self._accept(sequence, Delta(ending=by.ending, stop=by))

    def _fail_sample(self, sequence: EngineSequence, error: Exception) -> None:
        """Fails the request because the engine cannot run a sample."""
        if self.closed or sequence.ended:
            return
        if isinstance(error, RheostatError):
            self.fail(error)
        else:
            _LOG.error("sample %s failed", sequence.plan_id, exc_info=error)
            self.fail(Defect("the engine could not run the request"))
