"""The response stream of a request: Started, then the output of its samples, then the receipt.

Invariant: the receipt is sent exactly if nothing failed. If the stream ends early, for whatever
reason, the request is aborted in the engine.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator

from rheostat_engine import Plan, Released
from rheostat_server.admission import AdmittedRequest
from rheostat_server.capture.inline import LOSSLESS, rows_lost
from rheostat_server.capture.leaving import Chunk, Loss, Sealed
from rheostat_server.capture.leaving import Item as RowItem
from rheostat_server.capture.row_messages import captured, dropped
from rheostat_server.engine import EngineHost
from rheostat_server.errors import Defect
from rheostat_server.flight import Flight
from rheostat_server.host import Delta
from rheostat_server.interruption import interrupter
from rheostat_server.offload import offload
from rheostat_server.receipts import receipt_work, write_receipt
from rheostat_server.release import RELEASE_GRACE, UNSCHEDULED_GRACE
from rheostat_server.response_queue import Item, Notice, Sign, WaitingDeltas
from rheostat_server.sample import Response, Sample
from rheostat_server.scoring import Score, scoring_life
from rheostat_server.sequence import Life, Role
from rheostat_wire.v1 import generation_pb2, types_pb2

_LOG = logging.getLogger(__name__)

Companion = Callable[[Flight], Coroutine[None, None, None]]
"""A coroutine that runs beside a stream until the stream ends."""


async def run(
    admitted: AdmittedRequest, host: EngineHost, companion: Companion | None = None
) -> AsyncGenerator[Response | Notice, None]:
    """Runs a request, and yields its responses.

    Args:
        admitted: the request.
        host: the engine that runs it.
        companion: updates the running request. Without a companion, no `Notice` is yielded.

    Raises:
        RheostatError: the request could not start, or failed.
    """
    async with host.fly(admitted) as flight:
        flight.interrupt = interrupter()
        yield _started(admitted, host)
        stream = _Stream(admitted, flight, host)
        beside = asyncio.create_task(companion(flight)) if companion is not None else None
        try:
            async for response in stream.responses():
                yield response
        finally:
            if beside is not None:
                beside.cancel()
                await asyncio.wait({beside})
        flight.finish()
        host.leave_engine(flight)
        await flight.outlets.written()
        work = receipt_work(admitted, stream.own)
        handed_over = flight.outlets.handed_over()
        runs = flight.outlets.keep_runs()
        receipt = await offload(work, write_receipt, admitted, stream.own, handed_over, runs)
        yield Response(receipt=receipt)
        flight.completed = True
    _LOG.info(
        "request %s: %d prompt tokens, %d generated, %d interventions, %d captures",
        admitted.request_id,
        admitted.prompt_len,
        sum(len(sample.tokens) for sample in stream.own),
        len(admitted.interventions),
        len(admitted.captures),
    )


def _started(admitted: AdmittedRequest, host: EngineHost) -> Response:
    started = generation_pb2.Started(
        request_id=admitted.request_id,
        model_name=host.info.name,
        prompt_token_count=admitted.prompt_len,
    )
    if admitted.return_prompt_token_ids:
        ids = types_pb2.TokenIds(ids=admitted.prompt.token_ids)
        started.prompt_token_ids.CopyFrom(ids)
    return Response(started=started)


class _Stream:
    """Turns the items of a flight's queue into responses."""

    def __init__(self, admitted: AdmittedRequest, flight: Flight, host: EngineHost) -> None:
        self._samples = {
            life: Sample(admitted, life, flight.admitted_at, flight.queue.meter)
            for life in flight.lives
        }
        self._scores: dict[Life, Score] = {}
        self._unscored: deque[tuple[Life, Score]] = deque()
        """Scores that wait until others have ended."""
        self._scored_tokens = 0
        """Prompt tokens of the scores that run."""
        self._open: dict[Life, Sample | Score] = dict(self._samples)
        """The sequences that may still produce something."""
        self._admitted = admitted
        self._flight = flight
        self._host = host
        self._held_back: dict[Life, WaitingDeltas] = {}
        """Tokens that may not be sent yet: the sample's plan is not installed, or the prompt's
        log-probabilities have to be sent first."""
        wanted = admitted.sampling.prompt_logprobs is not None
        self._prompt_logprobs_due = {life.role for life in flight.lives if wanted}
        self._silence = UNSCHEDULED_GRACE
        self._lost = 0
        """Rows that were lost although their policy allows no loss."""

    @property
    def own(self) -> list[Sample]:
        """The request's own samples, in order."""
        return [self._samples[life] for life in self._flight.own]

    async def responses(self) -> AsyncIterator[Response | Notice]:
        """Every message between Started and Receipt."""
        flight = self._flight
        while flight.unanswered or self._open:
            item = await self._next()
            if isinstance(item, Item):
                for response in self._take(item):
                    yield response
                if item.life in self._scores and self._scores[item.life].done:
                    found = await self._scores[item.life].divergence(self._admitted.prompt_len)
                    if found is not None:
                        yield Response(divergence=found)
            elif not isinstance(item, Sign):
                yield item
            # Rows take turns with tokens. If they waited until the queue is empty, rows of many
            # samples would never leave, and the request would fail as if its reader were slow.
            while (rows := flight.inline.take()) is not None:
                yield await self._rows(rows)
                if len(flight.queue):
                    break
        async for remaining in self._rest():
            yield remaining
        if self._lost:
            raise rows_lost(self._lost)

    async def _rest(self) -> AsyncIterator[Response | Notice]:
        """Yields the remaining rows after all samples have ended."""
        self._flight.finish()
        while True:
            while (rows := self._flight.inline.take()) is not None:
                yield await self._rows(rows)
            if self._flight.inline.ended:
                return
            item = await self._flight.next()
            if not isinstance(item, Item | Sign):
                yield item

    async def _next(self) -> Item | Notice | Sign:
        """Waits for the next item. Once all samples have ended, the wait has a limit.

        Samples that were aborted before they were scheduled get no report. All of them share one
        wait, because their reports would come within the same time.
        """
        flight = self._flight
        if flight.unanswered:
            return await flight.next()
        for life in self._open:
            if not life.ended:
                return await flight.next()
        silent = [life for life in self._open if flight.never_scheduled(life)]
        try:
            async with asyncio.timeout(self._silence if silent else RELEASE_GRACE):
                return await flight.next()
        except TimeoutError as error:
            if not silent:
                raise Defect("the engine did not report the request's end") from error
            self._silence = 0.0
            return Item(silent[0], _never_ran(silent[0].job.plan))

    def _take(self, item: Item) -> Iterable[Response]:
        """The responses of an item.

        Responses of tokens that were held back are made one at a time, because these tokens count
        in the request's memory until they are sent.
        """
        life, what = item
        if life in self._scores:
            self._scores[life].take(what)
            self._remove_done(life)
            return ()
        sample = self._samples[life]
        if isinstance(what, Delta):
            if not self._held_back and self._may_go(life):
                return self._said(life, what)
            life.held_back = True
            held = self._held_back.get(life)
            if held is None:
                held = self._held_back[life] = WaitingDeltas(self._flight.queue.meter)
            held.add(what)
        elif isinstance(what, Released):
            sample.released = what
            self._remove_done(life)
            return ()
        return self._release_held() if self._held_back else ()

    def _remove_done(self, life: Life) -> None:
        """Removes a sequence that can produce nothing more."""
        if life in self._open and self._open[life].done:
            del self._open[life]
            if life in self._scores:
                self._scored_tokens -= len(life.job.prompt)
                self._start_scores()

    def _may_go(self, life: Life) -> bool:
        """Whether a sample's tokens may be sent now; see `_held_back`."""
        if self._prompt_logprobs_due and life.sample > 0 and life.role in self._prompt_logprobs_due:
            return False
        return life.in_force or self._flight.never_scheduled(life)

    def _release_held(self) -> Iterator[Response]:
        """Yields the responses of tokens that were held back and may be sent now."""
        for life in sorted(self._held_back, key=lambda one: one.sample):
            if self._may_go(life):
                for delta in self._held_back.pop(life).take_all():
                    yield from self._said(life, delta)

    def _said(self, life: Life, delta: Delta) -> list[Response]:
        """The responses of a delta, then the responses that follow a sample's end."""
        if self._prompt_logprobs_due:
            self._prompt_logprobs_due.discard(life.role)
        sample = self._samples[life]
        responses = sample.take(delta)
        if sample.ended:
            responses += self._compare(life, sample)
            self._remove_done(life)
        return responses

    def _compare(self, life: Life, sample: Sample) -> list[Response]:
        """Lets the baseline score an ended sample, if the request asks for it."""
        baseline = self._admitted.baseline
        if baseline is None or life.role is not Role.OWN or self._flight.aborted:
            return []
        reader = scoring_life(self._flight, baseline, sample)
        if reader is None:
            return [Response(divergence=generation_pb2.Divergence(sample=sample.index))]
        self._unscored.append((reader, Score(sample, reader)))
        self._start_scores()
        return []

    def _start_scores(self) -> None:
        """Starts scores until their prompts fill a step of the engine.

        The samples of a request often end in the same step. If all their scores started then, the
        prompts of other clients would wait for all of them.
        """
        if self._flight.aborted:
            self._unscored.clear()
        while self._unscored:
            life, score = self._unscored[0]
            tokens = len(life.job.prompt)
            if self._scored_tokens and self._scored_tokens + tokens > self._host.info.step_tokens:
                return
            self._unscored.popleft()
            self._scored_tokens += tokens
            self._scores[life] = self._open[life] = score
            self._host.launch(self._flight, life)

    async def _rows(self, item: RowItem) -> Response:
        """The response for captured rows, or for lost rows."""
        if isinstance(item, Chunk | Sealed):
            return await captured(item)
        assert isinstance(item, Loss)
        if item.tap.policy in LOSSLESS:
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
