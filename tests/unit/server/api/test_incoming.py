"""Requests as they arrive: how many, how large and how soon."""

import asyncio
import gc
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest

from rheostat._connection.aio_status import ServerStatus
from rheostat._watches.state import join_gains
from rheostat_server.api import incoming
from rheostat_server.api.incoming import Calls, Reader
from rheostat_server.errors import DeadlinePassed, QueueFull
from rheostat_server.front_ends.call import Call
from rheostat_server.limits import FIRST_READ_SECONDS, FIRST_READS, NUMBER_BYTES
from rheostat_server.subscriptions import event_stream
from rheostat_server.tasks import uploads
from rheostat_server.vectors import upload
from rheostat_wire.v1 import (
    engine_service_pb2,
    gain_pb2,
    generation_pb2,
    generation_service_pb2,
    steering_pb2,
    steering_service_pb2,
)
from rheostat_wire.v1.monitor_service_pb2 import WatchRequest, WatchSteer, WatchSteerBatch

from .. import talks, watchers
from ..conftest import Client, Refusal, rest
from ..fakes import ScriptedBackend
from ..messages import add, capture, request, selector
from ..streams import kinds, until
from ..subscribers import EVERY, Subscriber, ends_of, opening, wanted
from ..talks import SessionCall
from ..uploads import chunk, header, put, values
from ..watchers import Watcher

Code = grpc.StatusCode
pb = generation_service_pb2
LARGE = request(text="x" * (15 << 20))


async def refused(call: object) -> Refusal:
    """How a call fails."""
    streams = isinstance(call, grpc.aio.UnaryStreamCall | grpc.aio.StreamStreamCall)
    status = ServerStatus(call)  # gRPC may replace it if it writes after the end
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (rest(call) if streams else call)
    error = await status.behind(caught.value)
    assert error is not None
    return Refusal.of(error)


async def held(running, count: int, **fields: object) -> list[object]:
    """So many requests that run until the backend goes on."""
    calls = [running.client.generation.Generate(request(**fields)) for _ in range(count)]
    for call in calls:
        await call.read()
    return calls


@pytest.mark.parametrize(
    "begin",
    [
        lambda client: client.generation.Generate(LARGE),
        lambda client: client.generation.Explain(pb.ExplainRequest(request=LARGE)),
        lambda client: client.generation.Session(iter([pb.SessionRequest(start=request())])),
        lambda client: client.capture.Subscribe(iter(())),
        lambda client: client.steering.ListVectors(steering_service_pb2.ListVectorsRequest()),
    ],
    ids=["Generate", "Explain", "Session", "Subscribe", "ListVectors"],
)
async def test_one_call_too_many_is_refused_unread(starter, monkeypatch, begin) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()), maximum_concurrent_rpcs=2)
    calls = await held(running, 2)
    read: list[int] = []
    walked = Calls.walked

    async def counting(self: Calls, data: bytes, reader) -> object:
        read.append(len(data))
        return await walked(self, data, reader)

    monkeypatch.setattr(Calls, "walked", counting)
    refusal = await refused(begin(running.client))
    assert (refusal.code, refusal.reason, refusal.retry) == (
        Code.RESOURCE_EXHAUSTED,
        "REASON_QUEUE_FULL",
        True,
    )
    assert "2 calls run" in refusal.message
    assert "--maximum-concurrent-rpcs" in refusal.message
    assert read == []
    stats = await running.client.engine.GetStats(engine_service_pb2.GetStatsRequest())
    assert stats.requests.admitted_count == 2
    running.backend.hold.set()
    for call in calls:
        await rest(call)
    assert (await running.client.generate(request()))[-1].HasField("receipt")


async def test_calls_that_are_cancelled_or_fail_give_their_places_back(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()), maximum_concurrent_rpcs=2)
    for _ in range(3):
        for call in await held(running, 2):
            call.cancel()
        await until(lambda: not running.manager.open_requests)
        for _ in range(3):
            await running.client.refusal(request(request_id="no id"))
    await held(running, 2)


async def test_large_requests_share_their_memory(starter, monkeypatch) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    tokens = selector(*({"token_ids": {"ids": [1] * 4096}} for _ in range(25)))
    large = {"captures": [capture(where=tokens)]}
    size = request(**large).ByteSize() + NUMBER_BYTES * 25 * 4096
    assert size > 64 << 10
    monkeypatch.setattr(incoming, "REQUESTS_BYTES", 2 * size + 20_000)  # with their fields
    calls = await held(running, 2, **large)
    refusal = await running.client.refusal(request(**large))
    assert (refusal.code, refusal.reason, refusal.retry) == (
        Code.RESOURCE_EXHAUSTED,
        "REASON_QUEUE_FULL",
        True,
    )
    assert f"of {2 * size + 20_000}" in refusal.message
    small = running.client.generation.Generate(request())
    await small.read()
    running.backend.hold.set()
    for call in (*calls, small):
        await rest(call)
    assert (await running.client.generate(request(**large)))[-1].HasField("receipt")


@pytest.fixture
def taken(monkeypatch) -> Counter[str]:
    """Counts the bytes that large requests have reserved."""
    sizes: Counter[str] = Counter()
    take, give_back = Calls.take, Calls.give_back

    def taking(self: Calls, size: int) -> None:
        take(self, size)
        sizes["bytes"] += size

    def giving(self: Calls, size: int) -> None:
        give_back(self, size)
        sizes["bytes"] -= size

    monkeypatch.setattr(Calls, "take", taking)
    monkeypatch.setattr(Calls, "give_back", giving)
    return sizes


MANY_TOKENS = selector(*({"token_ids": {"ids": [1] * 4096}} for _ in range(5)))


async def test_updates_of_a_session_reserve_memory_until_they_are_answered(starter, taken) -> None:
    running = await starter(ScriptedBackend(unscheduled=asyncio.Event()))
    talk = SessionCall(running)
    await talk.say(talks.start())
    await talk.hear("started")
    large = [talks.update(number, add(where=MANY_TOKENS)) for number in range(1, 5)]
    await talk.say(*large)
    size = NUMBER_BYTES * 5 * 4096
    await until(lambda: taken["bytes"] >= 4 * size)
    running.backend.unscheduled.set()
    assert kinds(await talk.end())[-1] == "receipt"
    await until(lambda: taken["bytes"] == 0)


@pytest.mark.parametrize("end", ["answered", "cancelled", "watch lost"])
async def test_changes_by_a_watch_reserve_memory_until_they_are_answered(
    starter, taken, end
) -> None:
    running = await starter(ScriptedBackend(unscheduled=asyncio.Event()))
    watcher = await Watcher.open(running, watchers.opening(steers=True))
    call = running.client.generation.Generate(request(request_id="r"))
    await call.read()
    for number in range(1, 5):
        layer = steering_pb2.Steering(interventions=[add(where=MANY_TOKENS)])
        await watcher.say(steer=WatchSteer(update_id=number, request_id="r", layer=layer))
    size = NUMBER_BYTES * 5 * 4096
    await until(lambda: taken["bytes"] >= 4 * size)
    if end == "watch lost":
        watcher.call.cancel()
        await until(lambda: len(running.manager.watches) == 0 or running.manager.watches.waiting)
        assert taken["bytes"] >= 4 * size
    if end == "cancelled":
        call.cancel()
    else:
        running.backend.unscheduled.set()
        await rest(call)
    await until(lambda: taken["bytes"] == 0)


@pytest.mark.parametrize("request_id", ["gone", "no id"])
async def test_a_change_that_is_refused_at_once_reserves_nothing(
    starter, taken, request_id
) -> None:
    running = await starter()
    watcher = await Watcher.open(running, watchers.opening(steers=True))
    layer = steering_pb2.Steering(interventions=[add(where=MANY_TOKENS)])
    await watcher.say(steer=WatchSteer(update_id=1, request_id=request_id, layer=layer))
    await watcher.hear()
    await watcher.say(steer=WatchSteer(update_id=2, request_id=request_id))
    await watcher.hear()
    assert taken["bytes"] == 0


async def test_changes_whose_answers_do_not_fit_reserve_nothing_once_the_call_has_ended(
    running, taken, monkeypatch
) -> None:
    monkeypatch.setattr(event_stream, "UNREAD_WATCH_ANSWERS", 2)
    watcher = await Watcher.open(running, watchers.opening(steers=True))
    gain = gain_pb2.Gain(factor=0.5)
    changes = [WatchSteer(update_id=n, request_id="gone", gain=gain) for n in range(1, 1025)]
    await watcher.say(steer_batch=WatchSteerBatch(steers=changes))
    assert (await refused(watcher.call)).reason == "REASON_QUEUE_FULL"
    assert await watchers.clean(running)
    assert taken["bytes"] == 0


async def test_gains_that_a_client_joins_need_no_memory_and_wait_for_no_large_message(
    running, monkeypatch
) -> None:
    monkeypatch.setattr(incoming, "REQUESTS_BYTES", 0)
    watcher = await Watcher.open(running, watchers.opening(steers=True))
    gain = gain_pb2.Gain(factor=0.5, interventions=[0])
    gains = [
        WatchRequest(steer=WatchSteer(update_id=n, request_id="gone", gain=gain))
        for n in range(1, 1001)
    ]
    for message in join_gains(gains):
        reader = Reader(WatchRequest.FromString)
        walk = reader.walk(message.SerializeToString())
        assert walk is None or reader.advance(walk, incoming._FEW_FIELDS)
        await watcher.call.write(message)
    assert (await watcher.until("refused", 1000)).refused.update_id == 1000
    await watcher.rest()


async def test_many_large_requests_at_once_are_decoded_one_by_one(running, monkeypatch) -> None:
    at_once: list[int] = []
    sizes: list[int] = []
    monkeypatch.setattr(incoming, "REQUESTS_BYTES", 33 << 20)
    take, give_back = Calls.take, Calls.give_back

    def taking(self: Calls, size: int) -> None:
        take(self, size)
        sizes.append(size)
        at_once.append(sum(sizes))

    def giving(self: Calls, size: int) -> None:
        give_back(self, size)
        sizes.append(-size)

    monkeypatch.setattr(Calls, "take", taking)
    monkeypatch.setattr(Calls, "give_back", giving)
    explain = pb.ExplainRequest(request=LARGE)
    calls = [running.client.generation.Explain(explain, timeout=60) for _ in range(24)]
    found = {(await refused(call)).reason for call in calls}
    assert found <= {"REASON_QUEUE_FULL", "REASON_PROMPT_TOO_LONG"}
    assert "REASON_PROMPT_TOO_LONG" in found
    assert max(at_once) <= 33 << 20
    assert sum(sizes) == 0


@pytest.mark.parametrize("rpc", ["Explain", "Generate"])
async def test_a_request_that_was_refused_is_not_kept(running, rpc) -> None:
    kind = pb.ExplainRequest if rpc == "Explain" else pb.GenerateRequest
    data = (pb.ExplainRequest(request=LARGE) if rpc == "Explain" else LARGE).SerializeToString()
    channel = running.client.channel
    gc.collect()
    gc.disable()
    try:
        before = sum(type(one) is kind for one in gc.get_objects())
        for _ in range(3):
            if rpc == "Explain":
                call = channel.unary_unary("/rheostat.v1.GenerationService/Explain")(data)
            else:
                call = channel.unary_stream("/rheostat.v1.GenerationService/Generate")(data)
            assert (await refused(call)).reason == "REASON_PROMPT_TOO_LONG"
        assert sum(type(one) is kind for one in gc.get_objects()) <= before
    finally:
        gc.enable()


CALLER = """
import sys, grpc
explain = grpc.insecure_channel(sys.argv[1]).unary_unary("/rheostat.v1.GenerationService/Explain")
data = sys.stdin.buffer.read()
calls = [explain.future(data) for _ in range(int(sys.argv[2]))]
print("made", flush=True)
for call in calls:
    call.exception()
"""
"""Makes so many calls at once, in a process of its own: what a client keeps does not count."""


async def test_calls_that_wait_to_be_read_take_little_memory(starter, monkeypatch) -> None:
    monkeypatch.setattr(incoming, "FIRST_READS", 0)
    running = await starter(maximum_concurrent_rpcs=40, front_ends=0)
    before = resident_bytes()
    command = [sys.executable, "-c", CALLER, f"127.0.0.1:{running.server.port}", "48"]
    pipe = asyncio.subprocess.PIPE
    caller = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        caller.stdin.write(LARGE.SerializeToString())
        caller.stdin.close()
        async with asyncio.timeout(60):
            await caller.stdout.readline()
            while not await is_full(running):  # which takes a place itself for a moment
                await asyncio.sleep(1)
        await asyncio.sleep(1)  # for what may still come of them
        assert resident_bytes() - before < 100 << 20  # all of them have 600 MiB
    finally:
        caller.kill()
        await caller.wait()


async def is_full(running) -> bool:
    """Whether one more call is refused because too many run."""
    call = running.client.generation.Generate(request(), timeout=0.1)
    return "calls run, which is the most" in (await refused(call)).message


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_large_messages_are_decoded_in_iterations_of_their_own() -> None:
    calls, order = Calls(9), []

    def decode(data: bytes) -> bytes:
        order.append(data[:1])
        return data

    large = [bytes([number]) * (3 << 20) for number in range(3)]
    decoded = asyncio.gather(*(calls.decoded(data, Reader(decode)) for data in large))
    while not decoded.done():
        order.append(b"t")
        await asyncio.sleep(0)
    first, second, third = (order.index(data[:1]) for data in large)
    assert b"t" in order[first:second]
    assert b"t" in order[second:third]


def test_calls_of_operators_have_places_of_their_own() -> None:
    calls = Calls(1)
    first = calls.begin(control=False)
    with pytest.raises(QueueFull):
        calls.begin(control=False)
    calls.begin(control=True)
    first.end()
    calls.begin(control=False)


@pytest.mark.parametrize(
    "rpc",
    ["GenerationService/Session", "GenerationService/Generate", "CaptureService/Subscribe"],
)
async def test_a_call_that_says_nothing_ends(running, monkeypatch, rpc) -> None:
    monkeypatch.setattr(incoming, "FIRST_MESSAGE_SECONDS", 0.1)
    call = running.client.channel.stream_stream(f"/rheostat.v1.{rpc}")(timeout=20)
    refusal = await refused(call)
    assert (refusal.code, refusal.reason) == (Code.DEADLINE_EXCEEDED, "REASON_DEADLINE")
    assert "within 0.1 s" in refusal.message


async def test_calls_that_say_nothing_give_way_to_others(starter, monkeypatch) -> None:
    monkeypatch.setattr(incoming, "FIRST_READS", 3)
    monkeypatch.setattr(incoming, "FIRST_READ_SECONDS", 0.5)
    running = await starter()
    session = running.client.channel.stream_stream("/rheostat.v1.GenerationService/Session")
    silent = [session(timeout=60) for _ in range(9)]
    for call in silent:
        await call.wait_for_connection()
    for _ in range(5):
        assert (await running.client.generate(request(), timeout=20))[-1].HasField("receipt")
    ended = [call for call in silent if call.done()]
    assert ended
    refusal = await refused(ended[0])
    assert (refusal.code, refusal.reason, refusal.retry) == (
        Code.RESOURCE_EXHAUSTED,
        "REASON_QUEUE_FULL",
        True,
    )
    assert "within 0.5 s" in refusal.message
    for call in silent:
        call.cancel()


async def test_many_calls_of_one_connection_keep_no_other_from_being_read(starter) -> None:
    running = await starter()
    session = running.client.channel.stream_stream("/rheostat.v1.GenerationService/Session")
    silent = [session(timeout=60) for _ in range(3 * FIRST_READS)]
    for call in silent:
        await call.wait_for_connection()
    options = [("grpc.use_local_subchannel_pool", 1)]
    target = f"127.0.0.1:{running.server.port}"
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        for _ in range(3):
            call = Client(channel).generation.Generate(request(), timeout=FIRST_READ_SECONDS / 2)
            assert (await rest(call))[-1].HasField("receipt")
    assert not any(call.done() for call in silent)
    for call in silent:
        call.cancel()


async def test_few_large_messages_of_a_connection_are_copied_in_one_iteration(
    starter, monkeypatch
) -> None:
    """gRPC copies a message on the event loop, where no limit of ours can interrupt it."""
    running = await starter(front_ends=0)
    iterations, copies = [0], Counter[int]()
    read = Call.read

    async def counted(call: Call) -> bytes | None:
        data = await read(call)
        copies[iterations[0]] += 1
        return data

    async def tick() -> None:
        while True:
            iterations[0] += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(Call, "read", counted)
    ticking = asyncio.create_task(tick())
    sampling = generation_pb2.Sampling(max_tokens=2, stop=["x" * (2 << 20)])
    large = request(sampling=sampling)
    await asyncio.gather(*(running.client.refusal(large) for _ in range(48)))
    ticking.cancel()
    assert copies.total() == 48
    assert max(copies.values()) <= 2


async def test_a_call_comes_while_another_runs_out_of_time(monkeypatch) -> None:
    """The event loop may be busy, and then see both at once."""
    monkeypatch.setattr(incoming, "FIRST_READS", 1)
    monkeypatch.setattr(incoming, "FIRST_MESSAGE_SECONDS", 0.05)
    reads, loop = Calls(2).reads, asyncio.get_running_loop()

    async def silent() -> None:
        async with reads.turn("one client"):
            await asyncio.Event().wait()

    async def quick() -> None:
        async with reads.turn("one client"):
            pass

    first = asyncio.create_task(silent())
    await asyncio.sleep(0)
    made: asyncio.Future[asyncio.Task[None]] = loop.create_future()
    loop.call_later(0.04, lambda: made.set_result(asyncio.create_task(quick())))
    time.sleep(0.1)
    await (await made)
    with pytest.raises(DeadlinePassed):
        await first


async def test_a_wait_to_be_read_that_is_cancelled_leaves_no_trace(starter, monkeypatch) -> None:
    monkeypatch.setattr(incoming, "FIRST_READS", 1)
    running = await starter()
    session = running.client.channel.stream_stream("/rheostat.v1.GenerationService/Session")
    silent = [session(timeout=60) for _ in range(4)]
    for call in silent:
        await call.wait_for_connection()
    for call in reversed(silent):
        call.cancel()
    for _ in range(3):
        assert (await running.client.generate(request(), timeout=20))[-1].HasField("receipt")


async def test_a_call_that_is_never_read_may_come_again(starter, monkeypatch) -> None:
    monkeypatch.setattr(incoming, "FIRST_READS", 0)
    running = await starter(front_ends=0)  # a front end sends a small message with its call
    monkeypatch.setattr(incoming, "FIRST_MESSAGE_SECONDS", 0.1)
    refusal = await running.client.refusal(request())
    assert (refusal.reason, refusal.retry) == ("REASON_QUEUE_FULL", True)
    assert "waited 0.1 s to be read" in refusal.message


async def test_a_stream_may_be_silent_once_it_has_begun(starter, monkeypatch) -> None:
    monkeypatch.setattr(incoming, "FIRST_MESSAGE_SECONDS", 0.5)
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    call = running.client.generation.Session()
    await call.write(pb.SessionRequest(start=request()))
    await asyncio.sleep(0.6)
    running.backend.hold.set()
    assert (await rest(call))[-1].HasField("receipt")


async def test_a_call_without_its_request_is_refused(running) -> None:
    call = running.client.channel.stream_unary("/rheostat.v1.EngineService/GetStats")
    refusal = await refused(call(iter(()), timeout=20))
    assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "REASON_MISSING_FIELD")


async def test_uploads_that_stop_give_their_room_to_others(running, monkeypatch) -> None:
    size = header(4).header.total_bytes
    monkeypatch.setattr(upload, "UPLOADED_BYTES", 8 * size)
    stub = running.client.channel.stream_unary("/rheostat.v1.SteeringService/PutVector")

    async def stopping():
        yield header(4).SerializeToString()
        await asyncio.Event().wait()

    waiting = 0

    async def counted(*arguments):
        nonlocal waiting
        waiting += 1
        try:
            return await uploads.next_message(*arguments)
        finally:
            waiting -= 1

    monkeypatch.setattr(upload, "next_message", counted)
    calls = [stub(stopping(), timeout=60) for _ in range(8)]
    # Another upload could take the room of one that has not begun.
    await until(lambda: waiting == 8)
    whole = [header(4, name="x"), chunk(values(rows=4))]
    refusal = await refused(running.client.steering.PutVector(iter(whole)))
    assert refusal.reason == "REASON_QUEUE_FULL"
    for call in calls:
        call.cancel()
    await until(lambda: waiting == 0)
    assert await put(running.client, *whole)


async def test_an_upload_that_stops_ends_by_itself(running, monkeypatch) -> None:
    monkeypatch.setattr(uploads, "UPLOAD_GRACE_SECONDS", 0.2)
    stub = running.client.channel.stream_unary("/rheostat.v1.SteeringService/PutVector")

    async def stopping():
        yield header(4).SerializeToString()
        await asyncio.Event().wait()

    refusal = await refused(stub(stopping(), timeout=60))
    assert refusal.brief == (
        Code.INVALID_ARGUMENT,
        "REASON_TRUNCATED_UPLOAD",
        "header.total_bytes",
    )
    assert "0 of 64 bytes came in 0 s" in refusal.message
    assert "262144 bytes for each further second" in refusal.message


async def test_a_subscription_lasts_though_its_reader_says_nothing_more(
    running, monkeypatch
) -> None:
    monkeypatch.setattr(incoming, "FIRST_MESSAGE_SECONDS", 0.5)
    one = await Subscriber.open(running, opening(EVERY, [wanted()]))
    await asyncio.sleep(0.6)
    await running.client.generate(request())
    await one.rest()
    assert len(ends_of(one.events)) == 1
