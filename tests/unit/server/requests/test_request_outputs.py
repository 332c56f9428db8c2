"""What a request's rows go to beside its response never holds it up, and never outlives it."""

import asyncio
import threading

import pytest

from rheostat_server.errors import Draining
from rheostat_server.sinks import Artifact, RequestAbout, registry
from rheostat_server.sinks.guarded import SinkFailed
from rheostat_server.subscriptions.call import subscribe
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, generation_service_pb2

from ..conftest import Refusal, rest
from ..fakes import ScriptedBackend, sites_with
from ..messages import capture, request, selector, site_set, window
from ..sink_plugins import Plugin, Slow, stored, with_slow
from ..streams import settled, until
from ..subscribers import (
    EVERY,
    POST,
    ROW,
    Message,
    Subscriber,
    by_id,
    ends_of,
    generate,
    opening,
    sampled,
    wanted,
)

LOSING = {"overload": capture_pb2.OVERLOAD_DROP_NEWEST}


@pytest.mark.parametrize("at", ["open", "write"])
async def test_a_recording_ends_though_its_client_went_away(starter, monkeypatch, at) -> None:
    running, sink = await with_slow(starter, monkeypatch, at)
    call = running.client.generation.Generate(
        request(request_id="a", sampling=sampled(3), captures=[stored(1)])
    )
    await until(lambda: at in sink.calls)
    call.cancel()
    await asyncio.sleep(0.1)
    sink.gate.set()
    await until(lambda: sink.calls[-1] in ("finish", "abandon"))
    await settled(running)


async def test_sinks_that_hang_hold_up_nothing_else(starter, monkeypatch) -> None:
    running, sink = await with_slow(starter, monkeypatch, "open")
    calls = [
        running.client.generation.Generate(request(request_id=f"{k}", captures=[stored(1)]))
        for k in range(8)
    ]
    reading = [asyncio.create_task(call.read()) for call in calls]
    await until(lambda: len(sink.calls) == 8)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 5) == 1
    sink.gate.set()
    for call, one in zip(calls, reading, strict=True):
        await one
        await rest(call)
    await settled(running)


async def test_a_sink_that_hangs_holds_up_no_other_sink_no_run_and_no_lookup(
    starter, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda **_: [Plugin(Slow)])
    running = await starter(sinks=("slow=theirs", f"disk=filesystem:root={tmp_path}"))
    Slow.made.at = "open"
    calls = [
        running.client.generation.Generate(
            request(request_id=f"slow{k}", captures=[stored(1, sink="slow")])
        )
        for k in range(48)
    ]
    reading = [asyncio.create_task(call.read()) for call in calls]
    await until(lambda: running.manager.open_requests == 48)
    run = capture_pb2.CaptureSpec(
        sites=site_set(POST, layers=[0]), run=capture_pb2.RunTarget(run_id="run")
    )
    async with asyncio.timeout(10):
        events = await generate(running, "a", captures=[stored(1, sink="disk"), run])
        assert events[-1].HasField("receipt")
        found = await running.client.capture.GetArtifacts(
            capture_service_pb2.GetArtifactsRequest(request_id="a", sink_name="disk")
        )
        assert len(found.artifacts) == 2
    Slow.made.gate.set()
    for call, one in zip(calls, reading, strict=True):
        await one
        await rest(call)
    await settled(running)


async def test_lookups_that_hang_hold_up_no_request_and_are_refused_beyond_a_number(
    starter, monkeypatch
) -> None:
    gate = threading.Event()

    class Hanging(Slow):
        def artifacts(self, request_id: str) -> list[Artifact]:
            gate.wait(20)
            return []

    monkeypatch.setattr(registry, "entry_points", lambda **_: [Plugin(Hanging)])
    running = await starter(sinks=("slow=theirs", "mem=memory"))
    request_message = capture_service_pb2.GetArtifactsRequest(request_id="a")
    asked = [
        asyncio.ensure_future(running.client.capture.GetArtifacts(request_message))
        for _ in range(100)
    ]
    async with asyncio.timeout(10):
        # One that is refused shows that as many hang as may.
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert (await generate(running, "b", captures=[stored(1)]))[-1].HasField("receipt")
        assert await asyncio.to_thread(lambda: 1) == 1
    refusal = Refusal.of(done.pop().exception())
    assert (refusal.reason, refusal.retry) == ("REASON_QUEUE_FULL", True)
    gate.set()
    reasons = [
        Refusal.of(error).reason for error in await asyncio.gather(*asked, return_exceptions=True)
    ]
    assert set(reasons) == {"REASON_QUEUE_FULL", "REASON_ARTIFACT_NOT_FOUND"}


async def test_a_request_that_never_ran_ends_with_its_sink(starter) -> None:
    running = await starter(ScriptedBackend(silent=True), sinks=("mem=memory",))
    call = running.client.generation.Generate(
        request(request_id="a", sampling=sampled(3), captures=[stored(1)])
    )
    await until(lambda: bool(running.backend.jobs))
    draining = asyncio.create_task(running.manager.drain(0.1))
    events = await asyncio.wait_for(rest(call), 15)
    assert events[-1].HasField("receipt")
    await draining


async def test_a_sink_that_gets_nothing_ends_beside_an_observer_without_room(starter) -> None:
    running = await starter(
        ScriptedBackend(sites=sites_with(capture_rows=2)), sinks=("mem=memory",)
    )
    await Subscriber.open(running, opening(EVERY, [wanted(0, 1)], **LOSING))
    nothing = selector(window(0, 1), exclude=[window(0, 1)])
    events = await generate(running, "a", tokens=1, captures=[stored(1, where=nothing)])
    assert events[-1].HasField("receipt")


async def test_a_request_that_finds_one_sink_broken_leaves_nothing_in_the_other(
    starter, tmp_path, monkeypatch
) -> None:
    running = await starter(sinks=(f"mem=filesystem:root={tmp_path}", "bad=memory"))
    sinks, broken = running.manager.sinks, [True]
    real = sinks.open

    def opened(about: RequestAbout):
        if about.target.sink == "bad" and broken[0]:
            raise SinkFailed("no")
        return real(about)

    monkeypatch.setattr(sinks, "open", opened)
    specs = [stored(1), stored(0, sink="bad")]
    await running.client.refusal(request(request_id="a", captures=specs))
    await settled(running)
    broken[0] = False
    assert (await generate(running, "a", captures=specs))[-1].HasField("receipt")


async def test_observers_take_no_room_of_the_response(starter) -> None:
    running = await starter(request_buffer_bytes=5 * ROW)
    await Subscriber.open(running, opening(EVERY, [wanted(0, 1, 2)]))
    own = capture(site_set(POST, layers=[0]))
    assert (await generate(running, "a", captures=[own]))[-1].HasField("receipt")


async def test_observers_are_no_part_of_an_explanation(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(capture_rows=2)))
    await Subscriber.open(running, opening(EVERY, [wanted(0, 1)], **LOSING))
    request_message = generation_service_pb2.ExplainRequest(request=request(request_id="b"))
    assert (await running.client.generation.Explain(request_message)).prompt_token_ids


async def test_an_observer_without_room_does_not_end_a_request_that_also_sends(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(capture_rows=4)))
    one = await Subscriber.open(running, opening(EVERY, [wanted(0, 1, 2)]))
    spec = capture_pb2.CaptureSpec(sites=site_set(POST, layers=[0]), subscription_id=one.name)
    assert (await generate(running, "a", captures=[spec]))[-1].HasField("receipt")


async def test_rows_of_steps_that_ran_on_do_not_fill_a_subscription(starter) -> None:
    running = await starter(ScriptedBackend(overrun=1))
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    for number in range(5):
        await generate(running, f"{number}")
    await one.until("end_of_request", 5)
    assert running.manager.subscriptions.named(one.name, "").buffer.byte_counter.bytes == 0
    assert len(ends_of(one.events)) == 5


async def test_a_receipt_counts_rows_that_a_subscriber_did_not_wait_for(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    one = await Subscriber.open(running, opening(by_id("nobody")))
    spec = capture_pb2.CaptureSpec(sites=site_set(POST, layers=[0]), subscription_id=one.name)
    call = running.client.generation.Generate(
        request(request_id="a", sampling=sampled(6), captures=[spec])
    )
    await one.until("captured")
    await one.rest()
    running.backend.hold.set()
    (site,) = (await rest(call))[-1].receipt.captures[0].sites
    assert (site.row_count + site.dropped_row_count, site.row_count > 0) == (8, True)


async def test_a_call_that_is_cancelled_while_it_ends_is_left(running) -> None:
    subscriptions, gate = running.manager.subscriptions, asyncio.Event()

    async def messages():
        yield Message(open=opening(EVERY, [wanted(0)]))
        try:
            await asyncio.Event().wait()
        finally:
            await gate.wait()

    async def read() -> None:
        async for _ in subscribe(messages(), subscriptions, running.manager.late_attachment.attach):
            pass

    reading = asyncio.create_task(read())
    await until(lambda: len(subscriptions) == 1)
    await asyncio.sleep(0.05)
    subscriptions.end(Draining("the server is ending"))
    await asyncio.sleep(0.05)
    reading.cancel()
    gate.set()
    await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: not len(subscriptions) or bool(subscriptions.waiting))
