"""The response stream of a request: Started, then the output of its samples, then the receipt.

Invariant: the receipt is sent if and only if nothing failed. If the stream ends early, the request
is aborted in the engine.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from itertools import chain

from google.protobuf.message import Message

from rheostat_engine import Plan, Released
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.delivery.items import Loss, RowItem
from rheostat_server.delivery.response_rows import LOSSLESS
from rheostat_server.delivery.row_messages import CapturedRows, captured_rows, dropped, few_rows
from rheostat_server.engine.backend import Delta
from rheostat_server.engine.pace import Pace
from rheostat_server.errors import Defect, RowsLost
from rheostat_server.generation.joined_events import JOINED_BYTES, JOINED_EVENTS, JoinEvents
from rheostat_server.generation.receipts import (
    add_controller,
    add_rules,
    add_watches,
    estimate_receipt,
    write_receipt,
)
from rheostat_server.generation.sample import Response, Sample
from rheostat_server.generation.scoring import Score, scoring_sequence
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.manager import RequestManager
from rheostat_server.requests.response_queue import Notice, ResponseItem, Sign, WaitingDeltas
from rheostat_server.requests.sequence import (
    RELEASE_GRACE,
    UNSCHEDULED_GRACE,
    EngineSequence,
    SequenceKind,
)
from rheostat_server.tasks.direct_messages import DirectMessages
from rheostat_server.tasks.interruption import interrupter
from rheostat_server.tasks.offload import offload
from rheostat_wire.v1 import generation_pb2

LOG = logging.getLogger(__name__)
"""Its debug messages are those of `--enable-log-requests`."""

_SPARSE = 4
"""While many streams run, signals of a sample are sent with every fourth message of tokens, because
a message costs more than the numbers in it."""

_STALLED = 2 * _SPARSE
"""Intervals without signals of a sample after which they are sent without a message of tokens."""

Companion = Callable[[ActiveRequest], Coroutine[None, None, None]]
"""A coroutine that runs beside a stream until the stream ends."""


async def run(
    admitted: AdmittedRequest,
    manager: RequestManager,
    companion: Companion | None = None,
    direct: DirectMessages | None = None,
    join: JoinEvents[Message] | None = None,
) -> AsyncGenerator[Response | CapturedRows | Notice | None, None]:
    """Runs a request, and yields its responses.

    Args:
        admitted: the request.
        manager: runs it.
        companion: updates the running request. Without one, no `Notice` is yielded.
        direct: sends events for which the generator need not be resumed. None: all are yielded.
        join: makes one message of several events. With it, `None` is yielded before the stream
            waits, so that the reader can join what was yielded. None: each event is a message.

    Raises:
        RheostatError: the request could not start, or failed.
    """
    async with manager.run_request(admitted) as active:
        active.interrupt = interrupter()
        yield _started(admitted, manager)
        if admitted.signals is not None and admitted.signals.reported:
            yield Response(signal_table=admitted.signals.table)
        stream = _Stream(admitted, active, manager, direct, join)
        beside = asyncio.create_task(companion(active)) if companion is not None else None
        try:
            async for response in stream.responses():
                yield response
        finally:
            if beside is not None:
                beside.cancel()
                await asyncio.wait({beside})
        if join is not None:
            yield None  # sinks may take long
        active.finish()
        manager.release_engine(active)
        await active.outputs.written()
        work = estimate_receipt(admitted, stream.own_samples)
        handed_over = active.outputs.handed_over()
        runs = active.outputs.keep_runs()
        receipt = await offload(
            work, write_receipt, admitted, stream.own_samples, handed_over, runs
        )
        add_rules(receipt, admitted, active.signals, stream.own_samples)
        add_controller(receipt, admitted, stream.own_samples)
        add_watches(receipt, active.control, active.holds, stream.own_samples)
        yield Response(receipt=receipt)
        active.completed = True
    LOG.debug(
        "request %s: %d prompt tokens, %d generated, %d interventions, %d captures",
        admitted.request_id,
        admitted.prompt_len,
        sum(len(sample.tokens) for sample in stream.own_samples),
        len(admitted.interventions),
        len(admitted.captures),
    )


def _started(admitted: AdmittedRequest, manager: RequestManager) -> Response:
    response = Response()
    started = response.started
    started.request_id = admitted.request_id
    started.model_name = manager.info.name
    started.prompt_token_count = admitted.prompt_len
    if admitted.return_prompt_token_ids:
        started.prompt_token_ids.ids.extend(admitted.prompt.token_ids)
    return response


class _Stream:
    """Turns the entries of a request's queue into responses."""

    def __init__(
        self,
        admitted: AdmittedRequest,
        active: ActiveRequest,
        manager: RequestManager,
        direct: DirectMessages | None,
        join: JoinEvents[Message] | None,
    ) -> None:
        self._marks_waits = join is not None
        """Whether None is yielded before a wait for the queue."""
        self._samples = {
            sequence: Sample(admitted, sequence, active.admitted_at, active.queue.byte_counter)
            for sequence in active.sequences
        }
        self._scores: dict[EngineSequence, Score] = {}
        self._unscored: deque[tuple[EngineSequence, Score]] = deque()
        """Scores that start after others have ended."""
        self._scored_tokens = 0
        """Prompt tokens of the running scores."""
        self._open: dict[EngineSequence, Sample | Score] = dict(self._samples)
        """The sequences that may still produce output or events."""
        self._admitted = admitted
        self._active = active
        self._manager = manager
        self._held_back: dict[EngineSequence, WaitingDeltas] = {}
        """Tokens that must not be sent yet, because the sample's plan is not installed, or because
        the log-probabilities of the prompt come first."""
        wanted = admitted.sampling.prompt_logprobs is not None
        self._prompt_logprobs_due = {sequence.kind for sequence in active.sequences if wanted}
        reported = admitted.signals is not None and admitted.signals.reported
        self._reported_signals = active.signals if reported else None
        """Its signals if its client gets any."""
        self._signals_sent_at: dict[EngineSequence, float] = {}
        """When signals of each sample were sent last, while many streams run."""
        self._looks_for_signals = False
        """Whether `_look_for_late_signals` will look."""
        self._silence = UNSCHEDULED_GRACE
        self._lost = 0
        """Number of lost rows whose policy allows no loss."""
        self._direct = direct
        self._join = join
        if direct is not None:
            active.queue.joined = join is not None
            active.queue.direct_in_turn = not direct.cheap
            active.queue.direct_entries = self._send_entries_directly
            active.queue.direct = self._send_directly
            if not admitted.in_session:
                active.queue.direct_rows = self._send_rows_directly
        self._next_rows: RowItem | None = None
        """Rows that were taken, and that `_send_rows_directly` could not send."""
        self._rows_error: Exception | None = None
        """The error of `_send_rows_directly`, for `responses` to raise."""

    @property
    def own_samples(self) -> list[Sample]:
        """The request's own samples, in order."""
        return [self._samples[sequence] for sequence in self._active.own_samples]

    async def responses(self) -> AsyncIterator[Response | CapturedRows | Notice | None]:
        """Every message between Started and Receipt; None before a wait, if waits are marked."""
        active, rows_ready = self._active, False
        while active.unanswered or self._open:
            if self._marks_waits and await self._runs_dry():
                yield None
            item = await self._next()
            rows_ready = rows_ready or item is Sign.ROWS
            if isinstance(item, ResponseItem):
                for response in self._take(item):
                    yield response
                for signals in self._signals(item.sequence):
                    yield signals
                if item.sequence in self._scores and self._scores[item.sequence].done:
                    if self._marks_waits:
                        yield None  # long samples are compared on a thread
                    divergence = await self._scores[item.sequence].divergence(
                        self._admitted.prompt_len
                    )
                    if divergence is not None:
                        yield Response(divergence=divergence)
            elif item is Sign.SIGNALS:
                for signals in self._all_signals():
                    yield signals
            elif not isinstance(item, Sign):
                yield item
            # Rows take turns with tokens. If they waited until the queue is empty, rows of many
            # samples would never leave, and the request would fail as if its reader were slow.
            while rows_ready and (rows := self._take_rows()) is not None:
                if self._marks_waits:
                    yield None  # many rows are encoded on a thread
                yield await self._rows(rows)
                if len(active.queue):
                    break
            else:
                rows_ready = False
        active.finish()  # the rows that remain come with their ends
        while not active.response_rows.ended:
            if rows_ready:
                while (rows := self._take_rows()) is not None:
                    if self._marks_waits:
                        yield None
                    yield await self._rows(rows)
                rows_ready = False
                continue
            if self._marks_waits and await self._runs_dry():
                yield None
            item = await active.next()
            rows_ready = item is Sign.ROWS
            if not isinstance(item, (ResponseItem, Sign)):
                yield item
        if self._lost:
            raise RowsLost.no_room(self._lost)
        for signals in self._all_signals():
            yield signals

    def _all_signals(self) -> Iterator[Response]:
        """The waiting signals of all samples that may leave."""
        return chain.from_iterable(map(self._signals, self._active.own_samples))

    async def _runs_dry(self) -> bool:
        """Whether the queue is empty, also after the callbacks that the event loop runs now."""
        if not len(self._active.queue):
            await asyncio.sleep(0)
        return not len(self._active.queue)

    async def _next(self) -> ResponseItem | Notice | Sign:
        """Waits for the next item. Once all samples have ended, the wait has a time limit.

        The engine sends no event of a sample that was aborted before it was scheduled. All such
        samples share one wait, because their events would come within the same time.
        """
        active = self._active
        if len(active.queue) or active.unanswered:
            return await active.next()
        for sequence in self._open:
            if not sequence.ended:
                return await active.next()
        silent = [sequence for sequence in self._open if active.never_scheduled(sequence)]
        try:
            async with asyncio.timeout(self._silence if silent else RELEASE_GRACE):
                return await active.next()
        except TimeoutError as error:
            if not silent:
                raise Defect("the engine did not report the request's end") from error
            self._silence = 0.0
            return ResponseItem(silent[0], _never_ran(silent[0].job.plan))

    def _take(self, item: ResponseItem) -> Iterable[Response]:
        """The responses of an item.

        If tokens were held back, their responses are made one at a time, because the tokens count
        in the request's memory until they are sent.
        """
        sequence, what = item
        if sequence in self._scores:
            self._scores[sequence].take(what)
            self._remove_done(sequence)
            return ()
        sample = self._samples[sequence]
        if isinstance(what, Delta):
            if not self._held_back and self._may_send(sequence):
                return self._responses_of(sequence, what)
            sequence.held_back = True
            held = self._held_back.get(sequence)
            if held is None:
                held = self._held_back[sequence] = WaitingDeltas(self._active.queue.byte_counter)
            held.add(what)
        elif isinstance(what, Released):
            sample.released = what
            self._remove_done(sequence)
            return ()
        return self._release_held() if self._held_back else ()

    def _send_directly(self, sequence: EngineSequence, delta: Delta) -> bool:
        """Sends the message of new tokens, and signals, while `responses` waits in `_next`.

        Others share the callback that calls it, so it raises nothing.

        Returns:
            Whether it did, or has failed the request. Otherwise `responses` has to take the delta.
        """
        direct = self._direct
        if (
            direct is None
            or delta.ending is not None
            or delta.prompt_logprobs is not None
            or self._held_back
            or sequence in self._scores
            or not (delta.token_ids or delta.text)
            or not direct.has_room()
            or not self._may_send(sequence)
        ):
            return False
        if self._prompt_logprobs_due:
            self._prompt_logprobs_due.discard(sequence.kind)
        try:
            direct.send(self._samples[sequence].message(delta))
            self._send_signals_directly(direct, sequence)
        except Exception as error:  # any error must fail this request alone
            self._fail_directly(error)
        return True

    def _send_signals_directly(self, direct: DirectMessages, sequence: EngineSequence) -> None:
        """Sends the signals of a sample that may leave; `responses` sends what has no room."""
        waiting = self._signals(sequence)
        while direct.has_room():
            signals = next(waiting, None)
            if signals is None:
                return
            direct.send(signals)
        if self._reported_signals is not None:
            self._active.queue.put(Sign.SIGNALS)

    def _fail_directly(self, error: Exception) -> None:
        """Fails the request because of an error while something was sent directly."""
        LOG.error("request %s failed", self._admitted.request_id, exc_info=error)
        self._direct = None
        self._active.fail(Defect("the server could not send an event of the request"))

    def _send_entries_directly(self) -> None:
        """Sends tokens, signals and notices of the queue while `responses` waits in `_next`.

        Other requests share the callback that calls it, so it raises nothing.
        """
        direct = self._direct
        # Once all samples have ended, the last notice ends the stream, so `responses` must get it.
        runs = any(not sequence.ended for sequence in self._open)
        if direct is None or not runs or self._held_back:
            return
        try:
            while direct.has_room():
                events = self._direct_events()
                if not events:
                    return
                direct.send(events[0] if self._join is None else self._join(events))
        except Exception as error:  # any error must fail this request alone
            self._fail_directly(error)

    def _direct_events(self) -> list[Response | Notice]:
        """Takes the events of the next message from the queue. None are left to send: empty."""
        active, size = self._active, 0
        events: list[Response | Notice] = []
        most = 1 if self._join is None else JOINED_EVENTS
        while len(events) < most and size < JOINED_BYTES:
            item = active.take_plain(self._may_send_directly)
            if item is None:
                return events
            sequences: Sequence[EngineSequence] = active.own_samples
            if isinstance(item, ResponseItem):
                assert isinstance(item.what, Delta), "other items are not plain"
                self._prompt_logprobs_due.discard(item.sequence.kind)
                for response in self._samples[item.sequence].take(item.what):
                    events.append(response)
                    size += response.ByteSize()
                sequences = [item.sequence]
            elif not isinstance(item, Sign):
                events.append(item)
                size += item.ByteSize()
                continue
            waiting = chain.from_iterable(map(self._signals, sequences))
            while len(events) < most and size < JOINED_BYTES:
                signals = next(waiting, None)
                if signals is None:
                    break
                events.append(signals)
                size += signals.ByteSize()
        if self._reported_signals is not None:
            active.queue.put_back(Sign.SIGNALS)  # others may wait
        return events

    def _may_send_directly(self, sequence: EngineSequence) -> bool:
        """Whether tokens of a sequence may be sent without `responses`."""
        return sequence not in self._scores and self._may_send(sequence)

    def _send_rows_directly(self) -> bool:
        """Sends the rows that are ready, while `responses` waits.

        Other requests share the callback that calls it, so it raises nothing.

        Returns:
            Whether it sent all, and more will come. Otherwise `responses` has to go on.
        """
        direct = self._direct
        try:
            while direct is not None:
                item = self._take_rows()
                if item is None:
                    return not self._active.response_rows.ended
                if not direct.has_room():
                    self._next_rows = item
                    return False
                if isinstance(item, Loss):
                    direct.send(self._dropped(item))
                    continue
                rows = few_rows(item)
                if rows is None:
                    self._next_rows = item
                    return False
                direct.send(rows.as_field(Response.CAPTURED_FIELD_NUMBER))
        except Exception as error:  # any error must fail this request alone
            self._rows_error = error
        return False

    def _take_rows(self) -> RowItem | None:
        """Removes and returns the next rows, or the report of lost rows; None: there are none.

        Raises the error of `_send_rows_directly`, if it had one.
        """
        if self._rows_error is not None:
            raise self._rows_error
        item, self._next_rows = self._next_rows, None
        return self._active.response_rows.take() if item is None else item

    def _signals(self, sequence: EngineSequence) -> Iterator[Response]:
        """The waiting signals of a sample that may leave.

        The token that was sampled from their row was sent. In a session it is enough that their own
        token was sent: the client may answer them while this token is being sampled.
        """
        signals = self._reported_signals
        if signals is None or sequence.kind is not SequenceKind.OWN:
            return
        sample, prompt = self._samples[sequence], self._admitted.prompt.token_ids
        pace = self._active.pace
        if pace is not None and (pause := pace.interval):
            now = time.monotonic()
            sent_at = self._signals_sent_at.get(sequence, 0.0)
            if not sample.ended and now < sent_at + _SPARSE * pause:
                self._look_for_late_signals(pace)
                return
            self._signals_sent_at[sequence] = now
        ahead = self._admitted.in_session and not sample.ended
        end = sample.token_end if ahead else sample.row_end
        while True:
            message = signals.take(sample.index, end, prompt, sample.tokens)
            if message is None:
                return
            if message.positions:
                last = message.positions[-1]
                sample.signals_end = last.start + last.count
            yield Response(signals=message)

    def _look_for_late_signals(self, pace: Pace) -> None:
        """Has waiting signals sent later, even if no token follows."""
        if self._looks_for_signals:
            return
        self._looks_for_signals = True

        def look() -> None:
            self._looks_for_signals = False
            if self._active.closed or not self._open:
                return
            latest = time.monotonic() - _STALLED * pace.interval
            sent_at = self._signals_sent_at
            if any(sent_at.get(sequence, latest) < latest for sequence in self._open):
                self._active.queue.put(Sign.SIGNALS)
            else:
                self._look_for_late_signals(pace)

        pace.call_later(look)

    def _remove_done(self, sequence: EngineSequence) -> None:
        """Removes a sequence if it can produce no more output or events."""
        if sequence in self._open and self._open[sequence].done:
            del self._open[sequence]
            if sequence in self._scores:
                self._scored_tokens -= len(sequence.job.prompt)
                self._start_scores()

    def _may_send(self, sequence: EngineSequence) -> bool:
        """Whether a sample's tokens may be sent now; see `_held_back`."""
        if (
            self._prompt_logprobs_due
            and sequence.sample > 0
            and sequence.kind in self._prompt_logprobs_due
        ):
            return False
        return sequence.in_force or self._active.never_scheduled(sequence)

    def _release_held(self) -> Iterator[Response]:
        """Yields the responses of tokens that were held back and may be sent now."""
        for sequence in sorted(self._held_back, key=lambda sequence: sequence.sample):
            if self._may_send(sequence):
                for delta in self._held_back.pop(sequence).take_all():
                    yield from self._responses_of(sequence, delta)

    def _responses_of(self, sequence: EngineSequence, delta: Delta) -> list[Response]:
        """The responses of a delta, and of the comparison that the end of a sample starts."""
        if self._prompt_logprobs_due:
            self._prompt_logprobs_due.discard(sequence.kind)
        sample = self._samples[sequence]
        responses = sample.take(delta)
        if sample.ended:
            responses += self._compare(sequence, sample)
            self._remove_done(sequence)
        return responses

    def _compare(self, sequence: EngineSequence, sample: Sample) -> list[Response]:
        """Starts the comparison of an ended sample with its baseline, if the request has one."""
        baseline = self._admitted.baseline
        if baseline is None or sequence.kind is not SequenceKind.OWN or self._active.aborted:
            return []
        reader = scoring_sequence(self._active, baseline, sample)
        if reader is None:
            return [Response(divergence=generation_pb2.Divergence(sample=sample.index))]
        self._unscored.append((reader, Score(sample, reader)))
        self._start_scores()
        return []

    def _start_scores(self) -> None:
        """Starts scores until their prompts fill a step of the engine.

        The samples of a request often end in the same step. If all scores started then, the
        prompts of other clients would have to wait for them.
        """
        if self._active.aborted:
            self._unscored.clear()
        while self._unscored:
            sequence, score = self._unscored[0]
            tokens = len(sequence.job.prompt)
            if (
                self._scored_tokens
                and self._scored_tokens + tokens > self._manager.info.step_tokens
            ):
                return
            self._unscored.popleft()
            self._scored_tokens += tokens
            self._scores[sequence] = self._open[sequence] = score
            self._manager.add_sequence(self._active, sequence)

    async def _rows(self, item: RowItem) -> Response | CapturedRows:
        """Captured rows, or the response for lost rows."""
        return self._dropped(item) if isinstance(item, Loss) else await captured_rows(item)

    def _dropped(self, item: Loss) -> Response:
        """The response for lost rows."""
        if item.feed.policy in LOSSLESS:
            self._lost += item.rows
        return Response(dropped=dropped(item))


def _never_ran(plan: Plan) -> Released:
    """The report of a sample that was aborted before the engine scheduled it."""
    return Released(
        request_id=plan.request_id,
        doses=(),
        measured=True,
        captured={},
        lost_rows=0,
        preemptions=0,
        computed=(0, 0),
    )
