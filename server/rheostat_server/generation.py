"""A request's stream: Started, then what its samples produce, the receipt last.

Invariant: the receipt is sent exactly if nothing failed. Leaving the stream early, for whatever
reason, aborts the request in the engine.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from rheostat._proto.v1 import capture_pb2, generation_pb2, types_pb2
from rheostat_engine import Installed, Plan, Released, Rows
from rheostat_server.admission import Admitted
from rheostat_server.capture_stream import to_captured, wire_runs
from rheostat_server.engine import RELEASE_GRACE, UNSCHEDULED_GRACE, EngineHost
from rheostat_server.errors import Defect, RowsLost
from rheostat_server.flight import Flight, Item
from rheostat_server.host import Delta
from rheostat_server.offload import offload
from rheostat_server.receipts import write_receipt
from rheostat_server.sample import Response, Sample
from rheostat_server.selection import clipped
from rheostat_server.tensors import FloatType

_LOG = logging.getLogger(__name__)


async def run(admitted: Admitted, host: EngineHost) -> AsyncGenerator[Response, None]:
    """Runs a request and says what happens.

    Raises:
        RheostatError: it could not begin, or failed.
    """
    async with host.fly(admitted) as flight:
        yield _started(admitted, host)
        stream = _Stream(admitted, flight, FloatType(host.sites.dtype))
        async for response in stream.responses():
            yield response
        yield Response(receipt=write_receipt(admitted, stream.samples))
        flight.completed = True
    _LOG.info(
        "request %s: %d prompt tokens, %d generated, %d interventions, %d captures",
        admitted.request_id,
        admitted.prompt_len,
        sum(len(sample.tokens) for sample in stream.samples),
        len(admitted.additions),
        len(admitted.captures),
    )


def _started(admitted: Admitted, host: EngineHost) -> Response:
    started = generation_pb2.Started(
        request_id=admitted.request_id,
        model=host.info.name,
        prompt_tokens=admitted.prompt_len,
    )
    if admitted.return_prompt_token_ids:
        ids = types_pb2.TokenIds(ids=admitted.prompt.token_ids)
        started.prompt_token_ids.CopyFrom(ids)
    return Response(started=started)


class _Stream:
    """Turns what happens in a flight into messages."""

    def __init__(self, admitted: Admitted, flight: Flight, held: FloatType) -> None:
        self.samples = [
            Sample(admitted, life.job, held, flight.admitted_at) for life in flight.lives
        ]
        self._admitted = admitted
        self._flight = flight
        self._held_back: list[Item] = []
        self._prompt_logprobs_due = admitted.sampling.prompt_logprobs is not None
        self._silence = UNSCHEDULED_GRACE

    async def responses(self) -> AsyncIterator[Response]:
        """Every message between Started and Receipt."""
        while not all(sample.done for sample in self.samples):
            item = await self._next()
            for response in self._take(item):
                yield response
            if self._flight.idle:
                async for response in self._captured():
                    yield response
        async for response in self._captured():
            yield response
        for response in self._dropped():
            yield response
        lost = sum(s.released.lost_rows for s in self.samples if s.released is not None)
        if lost:
            raise RowsLost(
                f"{lost} captured rows are lost: the ring was full. Capture fewer sites or "
                "tokens, or raise the server's --capture-mib",
                metadata={"rows": str(lost)},
            )

    async def _next(self) -> Item:
        """What happens next; once all samples have ended the engine has limited time for it.

        Samples of which it says nothing fall silent together: what is waited for one is for all.
        """
        waiting = [sample.index for sample in self.samples if not sample.done]
        if not all(self._flight.lives[index].ended for index in waiting):
            return await self._flight.next()
        silent = [index for index in waiting if self._flight.never_scheduled(index)]
        try:
            async with asyncio.timeout(self._silence if silent else RELEASE_GRACE):
                return await self._flight.next()
        except TimeoutError as error:
            if not silent:
                raise Defect("the engine did not report the request's end") from error
            self._silence = 0.0
            return Item(silent[0], _never_ran(self._flight.lives[silent[0]].job.plan))

    def _take(self, item: Item) -> list[Response]:
        sample, what = self.samples[item.sample], item.what
        if isinstance(what, Rows):
            sample.captures.feed(what)
            return []
        if isinstance(what, Released):
            sample.released = what
            return []
        if isinstance(what, Installed):
            sample.installed = True
        else:
            self._held_back.append(item)
        return self._release_held()

    def _release_held(self) -> list[Response]:
        """Lets out the deltas whose sample is in force and that nothing else must precede."""
        responses: list[Response] = []
        kept: list[Item] = []
        if self._prompt_logprobs_due:
            self._held_back.sort(key=lambda item: item.sample)
        for item in self._held_back:
            sample, delta = self.samples[item.sample], item.what
            assert isinstance(delta, Delta)
            in_force = sample.installed or self._flight.never_scheduled(item.sample)
            if not in_force or (self._prompt_logprobs_due and item.sample > 0):
                kept.append(item)
                continue
            self._prompt_logprobs_due = False
            responses += sample.take(delta)
        self._held_back = kept
        return responses

    async def _captured(self) -> AsyncIterator[Response]:
        for sample in self.samples:
            for block in sample.captures.ready(sample.row_end):
                tokens = sample.token_ids(block.positions.tolist())
                message = await offload(block.size, to_captured, block, sample.index, tokens)
                yield Response(captured=message)

    def _dropped(self) -> list[Response]:
        """For samples that lost rows: which."""
        responses = []
        for sample in self.samples:
            if sample.released is None or not sample.released.lost_rows:
                continue
            start, end = sample.released.computed
            for spec, capture in enumerate(self._admitted.captures):
                selected = clipped(capture.spans, start, min(end, sample.row_end))
                missing = sample.captures.missing(spec, selected)
                count = sum(stop - begin for begin, stop in missing)
                if count:
                    dropped = capture_pb2.Dropped(
                        spec=spec,
                        sample=sample.index,
                        rows=count * len(capture.sites),
                        positions=wire_runs(missing),
                    )
                    responses.append(Response(dropped=dropped))
        return responses


def _never_ran(plan: Plan) -> Released:
    """What the engine would say of a sample that was aborted before it was scheduled."""
    return Released(
        request_id=plan.request_id,
        tokens_added=(0,) * len(plan.additions),
        captured={},
        lost_rows=0,
        preemptions=0,
        computed=(0, 0),
    )
