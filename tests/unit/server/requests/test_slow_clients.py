"""Clients that read tokens slowly or not at all: nothing is lost, and memory stays bounded."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import grpc
import pytest

from rheostat_server.admission.admit import admit
from rheostat_server.engine.backend import Delta, Job
from rheostat_server.errors import Defect
from rheostat_server.generation.responses import run
from rheostat_server.sinks import registry
from rheostat_wire.v1 import (
    capture_pb2,
    generation_pb2,
    generation_service_pb2,
)

from ..conftest import Refusal, narrow, rest
from ..fakes import INFO, VOCABULARY, Paced, ScriptedBackend, sites_with
from ..messages import add, capture, request, site_set
from ..sink_plugins import Plugin, Slow
from ..streams import captured, kinds, peak, received, settled, tokens, until
from ..subscribers import POST

KIB = 1 << 10
UNCOUNTED = 64 * KIB
"""Bytes of a request that its limit leaves out."""
PROMPT = 3


class Eager(ScriptedBackend):
    """An engine that makes a token of each sample whenever the reader has taken a message."""

    def __init__(self, **script: object) -> None:
        super().__init__(**script)
        self.step = asyncio.Event()

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        async with aclosing(super().generate(job)) as deltas:
            async for delta in deltas:
                yield delta
                self.step.clear()
                await self.step.wait()


@dataclass
class Waiting(ScriptedBackend):
    """Streams a token in every few iterations of the event loop, so that a reader waits for it.

    Requests of one token wait in it until `free` is set.
    """

    free: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        if job.sampling.max_tokens == 1:
            self.waiting += 1
            await self.free.wait()
        async with aclosing(super().generate(job)) as deltas:
            async for delta in deltas:
                yield delta
                for _ in range(4):
                    await asyncio.sleep(0)


def engine(kind: type[ScriptedBackend] = Paced, **script: object) -> ScriptedBackend:
    script.setdefault("info", replace(INFO, model_tokens=8192, running_samples=64))
    return kind(sites=sites_with(capture_rows=1 << 20), **script)


def request_message(tokens: int, n: int = 1, logprobs: int | None = None, **fields: object):
    sampling = generation_pb2.Sampling(
        max_tokens=tokens, n=n, temperature=1.0 if n > 1 else 0.0, logprobs=logprobs
    )
    sampling.MergeFrom(generation_pb2.Sampling(**fields.pop("sampling", {})))
    return request(sampling=sampling, **fields)


def expected(count: int) -> list[int]:
    return [(12 + 1 + index) % VOCABULARY for index in range(count)]


def check_exact(events, count: int, n: int, logprobs: int | None) -> None:
    """Every token of every sample, with its offset, text and log-probabilities, once, in order."""
    for sample in range(n):
        parts = [e.tokens for e in events if e.HasField("tokens") and e.tokens.sample == sample]
        assert [t for part in parts for t in part.token_ids] == expected(count)
        assert "".join(part.text for part in parts) == "".join(map(chr, expected(count)))
        offset = 0
        for part in parts:
            assert part.offset == offset
            offset += len(part.token_ids)
            if logprobs is not None:
                assert [one.token.token_id for one in part.logprobs] == list(part.token_ids)
                assert {len(one.alternatives) for one in part.logprobs} == {logprobs}
        kinds_of = [
            e.WhichOneof("event")
            for e in events
            if getattr(getattr(e, e.WhichOneof("event")), "sample", -1) == sample
            and e.WhichOneof("event") in ("tokens", "finished")
        ]
        assert kinds_of[-1] == "finished"
        assert kinds_of.count("finished") == 1


async def read(running, message, pace) -> list:
    """All that comes of a request whose reader waits as `pace` says between messages."""
    events = []
    admitted = await admit(message, running.manager.admission)
    async with aclosing(run(admitted, running.manager)) as responses:
        async for response in responses:
            events.append(received(response))
            await pace(len(events))
    return events


async def test_tokens_beside_requests_that_wait_in_the_engine_do_not_merge(starter) -> None:
    backend = engine(Waiting)
    running = await starter(backend)
    one, many = request_message(1), request_message(40)

    async def at_once(_: int) -> None:
        pass

    waiting = [asyncio.create_task(read(running, one, at_once)) for _ in range(400)]
    await until(lambda: backend.waiting == len(waiting))
    events = await read(running, many, at_once)
    assert sum(event.HasField("tokens") for event in events) == 40
    backend.free.set()
    await asyncio.gather(*waiting)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("logprobs", [None, 2])
async def test_tokens_that_are_not_read_merge_into_few_messages(starter, n, logprobs) -> None:
    running = await starter(engine())

    async def pace(number: int) -> None:
        if number == 1:
            active = running.manager._active_requests["a"]
            await until(lambda: all(sequence.ended for sequence in active.sequences))

    events = await read(running, request_message(500, n, logprobs, request_id="a"), pace)
    check_exact(events, 500, n, logprobs)
    assert kinds(events).count("tokens") == n
    assert kinds(events)[-1] == "receipt"


@pytest.mark.parametrize("seed", range(6))
async def test_however_a_reader_pauses_every_token_comes_once_in_order(starter, seed) -> None:
    rng = random.Random(seed)
    running = await starter(engine())

    async def pace(number: int) -> None:
        for _ in range(rng.choice([0, 0, 1, 5, 40])):
            await asyncio.sleep(0)

    n, logprobs = rng.randrange(1, 5), rng.choice([None, 1, 3])
    message = request_message(
        200, n, logprobs, with_baseline=seed % 2 == 0,
        sampling={"prompt_logprobs": 1} if seed % 3 == 0 else {},
    )  # fmt: skip
    events = await read(running, message, pace)
    own = [e for e in events if not getattr(getattr(e, e.WhichOneof("event")), "baseline", False)]
    check_exact(own, 200, n, logprobs)
    if seed % 3 == 0:
        first = next(e.WhichOneof("event") for e in own if not e.HasField("started"))
        assert first == "prompt_logprobs"
    stats = await settled(running)
    assert (stats.request_buffer_bytes, stats.leaked_count) == (0, 0)


async def test_a_reader_that_keeps_up_gets_each_token_by_itself(starter) -> None:
    running = await starter(engine(Eager))

    async def pace(number: int) -> None:
        running.backend.step.set()

    events = await read(running, request_message(50), pace)
    assert [[*e.tokens.token_ids] for e in events if e.HasField("tokens")] == [
        [one] for one in expected(50)
    ]


async def test_messages_that_merged_are_of_bounded_size(starter, monkeypatch) -> None:
    monkeypatch.setattr("rheostat_server.requests.response_queue._MESSAGE_BYTES", 8 * KIB)
    running = await starter(engine())

    async def pace(number: int) -> None:
        if number == 1:
            active = running.manager._active_requests["a"]
            await until(lambda: all(sequence.ended for sequence in active.sequences))

    events = await read(running, request_message(300, 2, 3, request_id="a"), pace)
    check_exact(events, 300, 2, 3)
    parts = [event.tokens for event in events if event.HasField("tokens")]
    assert 20 < len(parts) < 200
    assert max(part.ByteSize() for part in parts) < 8 * KIB


async def refusal_of(call) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return Refusal.of(caught.value)


async def test_a_client_that_reads_nothing_ends_when_its_tokens_fill_its_memory(starter) -> None:
    running = await starter(engine(), request_buffer_bytes=128 * KIB)
    budget = running.manager.budget
    async with narrow(running) as client, peak(lambda: budget.used) as most:
        calls = [
            client.generation.Generate(request_message(600, 4, 5, request_id=f"r{k}"))
            for k in range(2)
        ]
        for call in calls:
            assert (await call.read()).HasField("started")
        await until(lambda: not running.manager.open_requests)
        assert 64 * KIB < most.value <= 2 * (128 * KIB + UNCOUNTED)
        assert tokens(await running.client.generate(request_message(40))) == expected(40)
        for call in calls:
            refusal = await refusal_of(call)
            assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert refusal.reason == "REASON_RESPONSE_OVERFLOW"
            assert "--request-buffer-mib" in refusal.message
            assert int(dict(refusal.metadata)["bytes"]) > 64 * KIB
    stats = await settled(running)
    assert (stats.request_buffer_bytes, stats.leaked_count) == (0, 0)
    assert stats.requests.failed_count == 2


async def test_the_widest_request_that_nobody_reads_stays_within_its_memory(starter) -> None:
    """64 samples with 20 log-probabilities each, the most that a request may ask for."""
    limit = 4 << 20
    running = await starter(
        engine(
            info=replace(INFO, model_tokens=8192, running_samples=64, logprobs=20),
        ),
        request_buffer_bytes=limit,
    )
    budget = running.manager.budget
    async with narrow(running) as client, peak(lambda: budget.used) as most:
        call = client.generation.Generate(request_message(4000, 64, 20, request_id="a"))
        assert (await call.read()).HasField("started")
        refusal = await refusal_of(call)
    assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refusal.reason == "REASON_RESPONSE_OVERFLOW"
    assert limit // 2 < most.value <= limit + UNCOUNTED
    stats = await settled(running)
    assert (stats.request_buffer_bytes, stats.leaked_count) == (0, 0)


async def test_tokens_of_a_hog_give_way_for_all_together(starter) -> None:
    running = await starter(engine(), buffers_bytes=256 * KIB)
    async with narrow(running) as client:
        modest = client.generation.Generate(request_message(200, request_id="modest"))
        hog = client.generation.Generate(request_message(600, 8, 5, request_id="hog"))
        for call in (modest, hog):
            await call.read()
        await until(lambda: "hog" not in running.manager._active_requests)
        refusal = await refusal_of(hog)
        assert refusal.reason == "REASON_RESPONSE_OVERFLOW"
        assert "--buffers-mib" in refusal.message
        assert tokens(await rest(modest)) == expected(200)


async def test_readings_that_wait_to_be_compared_count_too(starter) -> None:
    running = await starter(engine(), request_buffer_bytes=64 * KIB)
    refusal = await running.client.refusal(request_message(2000, 2, 5, with_baseline=True))
    assert refusal.reason == "REASON_RESPONSE_OVERFLOW"
    stats = await settled(running)
    assert (stats.request_buffer_bytes, stats.leaked_count) == (0, 0)


async def test_rows_leave_while_tokens_wait(starter) -> None:
    """Many samples make tokens as quickly as they are read, so that one always waits."""
    running = await starter(engine(Eager), request_buffer_bytes=64 * KIB)
    backend = running.backend

    async def pace(number: int) -> None:
        backend.step.set()
        for _ in range(3):
            await asyncio.sleep(0)

    spec = capture(site_set(POST, layers=[0, 1]), overload=capture_pb2.OVERLOAD_FAIL)
    events = await read(running, request_message(300, 8, captures=[spec]), pace)
    check_exact(events, 300, 8, None)
    assert len(captured(events)) == 8 * 2 * (PROMPT + 300 - 1)
    found = kinds(events)
    first, last = found.index("captured"), len(found) - found[::-1].index("tokens")
    assert found[first:last].count("captured") > 100


async def test_captures_of_all_policies_leave_by_turns(starter) -> None:
    running = await starter(engine(Eager))

    async def pace(number: int) -> None:
        running.backend.step.set()
        for _ in range(3):
            await asyncio.sleep(0)

    policies = (capture_pb2.OVERLOAD_FAIL, capture_pb2.OVERLOAD_DROP_NEWEST)
    specs = [capture(site_set(POST, layers=[0]), overload=policy) for policy in policies]
    events = await read(running, request_message(200, 4, captures=specs), pace)
    turns = [e.captured.capture_index for e in events if e.HasField("captured")]
    half = turns[: len(turns) // 2]
    assert abs(half.count(0) - half.count(1)) <= len(half) // 5


async def test_what_the_engine_has_let_go_of_is_free_though_nobody_reads(starter) -> None:
    running = await starter(
        Paced(info=replace(INFO, model_tokens=8192), sites=sites_with(bank_rows=1))
    )
    async with narrow(running) as client:
        unread = client.generation.Generate(
            request_message(1000, logprobs=5, steer=[add()], request_id="a")
        )
        await unread.read()
        await until(
            lambda: all(
                sequence.ended for sequence in running.manager._active_requests["a"].sequences
            )
        )
        other = request(steer=[add(scale=2.0)], when_full=generation_service_pb2.WHEN_FULL_REFUSE)
        assert kinds(await running.client.generate(other))[-1] == "receipt"
        assert kinds(await rest(unread))[-1] == "receipt"
    assert (await settled(running)).leaked_count == 0


async def test_what_a_failed_request_held_is_free_though_nobody_reads(starter) -> None:
    running = await starter(
        Paced(info=replace(INFO, model_tokens=8192), sites=sites_with(bank_rows=1))
    )
    async with narrow(running) as client:
        unread = client.generation.Generate(
            request_message(4000, logprobs=5, steer=[add()], request_id="a")
        )
        await unread.read()
        active = running.manager._active_requests["a"]
        await until(lambda: active.queue.freeable > 4 * UNCOUNTED)
        active.fail(Defect("it fails"))
        await until(lambda: active.sequences[0].released.is_set())
        other = request(steer=[add(scale=2.0)], when_full=generation_service_pb2.WHEN_FULL_REFUSE)
        assert kinds(await running.client.generate(other))[-1] == "receipt"
        assert (await refusal_of(unread)).message == "it fails"
    assert (await settled(running)).leaked_count == 0


async def test_sinks_of_a_failed_request_end_though_nobody_reads(starter, monkeypatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda **_: [Plugin(Slow)])
    running = await starter(engine(), sinks=("slow=theirs",))
    to_sink = capture(site_set(POST, layers=[0]), sink=capture_pb2.SinkTarget(sink_name="slow"))
    async with narrow(running) as client:
        unread = client.generation.Generate(
            request_message(4000, logprobs=5, captures=[to_sink], request_id="a")
        )
        await unread.read()
        active = running.manager._active_requests["a"]
        await until(lambda: active.queue.freeable > UNCOUNTED and "write" in Slow.made.calls)
        active.fail(Defect("it fails"))
        await until(lambda: "finish" in Slow.made.calls)
        assert (await refusal_of(unread)).message == "it fails"
    assert (await settled(running)).leaked_count == 0


async def test_a_request_that_has_failed_ends_though_its_tokens_give_way(starter) -> None:
    running = await starter(engine())

    async def pace(number: int) -> None:
        active = running.manager._active_requests["a"]
        await until(lambda: active.queue.freeable > 0)
        active.fail(Defect("it fails"))
        active.share.give_up(active.share.freeable, "the memory of all is full")

    with pytest.raises(Defect, match="it fails"):
        async with asyncio.timeout(10):
            await read(running, request_message(200, request_id="a"), pace)
    stats = await settled(running)
    assert (stats.request_buffer_bytes, stats.leaked_count) == (0, 0)


async def test_a_client_that_does_not_read_holds_up_no_drain(starter, monkeypatch) -> None:
    monkeypatch.setattr("rheostat_server.requests.manager._LAST_READS", 0.2)
    running = await starter(engine())
    async with narrow(running) as client:
        unread = client.generation.Generate(request_message(4000, logprobs=5, request_id="a"))
        await unread.read()
        await until(lambda: running.manager._active_requests["a"].sequences[0].ended)
        async with asyncio.timeout(10):
            assert await running.manager.drain(0.1) == (0, 1)
        assert (await refusal_of(unread)).reason == "REASON_DRAINING"
