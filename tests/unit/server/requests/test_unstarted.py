"""A request that ends before it starts holds nothing any more once its caller has the status."""

import asyncio

import grpc
import pytest

from rheostat_server.sinks import SinkError
from rheostat_wire.v1 import capture_pb2, engine_service_pb2, generation_service_pb2

from ..conftest import rest
from ..fakes import ScriptedBackend, sites_with
from ..messages import add, capture, request, site_set
from ..sink_plugins import Plugin, Slow, failing, with_slow
from ..streams import settled, until
from ..subscribers import EVERY, POST, Subscriber, ends_of, generate, opening, wanted

Code = grpc.StatusCode
REFUSE = generation_service_pb2.WHEN_FULL_REFUSE


def to_sink(name: str = "disk", tag: str = "default") -> capture_pb2.CaptureSpec:
    target = capture_pb2.SinkTarget(sink_name=name, tag=tag)
    return capture_pb2.CaptureSpec(sites=site_set(POST, layers=[1]), sink=target)


def to_run(name: str) -> capture_pb2.CaptureSpec:
    return capture_pb2.CaptureSpec(
        sites=site_set(POST, layers=[1]), run=capture_pb2.RunTarget(run_id=name)
    )


def small(**script: object) -> ScriptedBackend:
    """An engine with room for one added row, and for the captures of one request."""
    return ScriptedBackend(sites=sites_with(bank_rows=1, capture_rows=48), **script)


async def takes_everything(running, request_id: str = "a") -> None:
    """A request of the same id gets all that the engine has, and waits for nothing."""
    one = request(
        request_id=request_id,
        steer=[add(scale=9.0)],
        captures=[capture(site_set(POST, layers=[0, 1, 2]))],
        when_full=REFUSE,
    )
    assert (await running.client.generate(one))[-1].HasField("receipt")


async def leaked(running) -> int:
    """What is held though no request is there; -1: a request is still there."""
    if running.manager.open_requests:
        return -1
    stats = await running.client.engine.GetStats(engine_service_pb2.GetStatsRequest())
    return stats.leaked_count


async def test_one_whose_second_sink_group_collides(starter, tmp_path) -> None:
    running = await starter(small(), sinks=(f"disk=filesystem:root={tmp_path}",))
    await generate(running, "a", captures=[to_sink(tag="taken")])
    both = [to_sink(tag="free"), to_sink(tag="taken")]
    refusal = await running.client.refusal(request(request_id="a", steer=[add()], captures=both))
    assert refusal.brief == (Code.ALREADY_EXISTS, "REASON_ARTIFACT_EXISTS", "captures[1].sink")
    assert await leaked(running) == 0
    await takes_everything(running)
    await generate(running, "a", captures=[to_sink(tag="free")])


async def test_one_whose_sink_does_not_open(starter, monkeypatch) -> None:
    plugin = Plugin(failing(open=SinkError("no")))
    monkeypatch.setattr("rheostat_server.sinks.registry.entry_points", lambda **_: [plugin])
    running = await starter(small(), sinks=("bad=theirs", "mem=memory"))
    specs = [to_sink("mem"), to_sink("bad")]
    refusal = await running.client.refusal(request(request_id="a", steer=[add()], captures=specs))
    assert refusal.reason == "REASON_ROWS_LOST"
    assert await leaked(running) == 0
    await takes_everything(running)


async def test_one_for_whose_run_there_is_no_room(starter) -> None:
    running = await starter(small(hold=asyncio.Event()), runs_bytes=6000)
    held = running.client.generation.Generate(request(request_id="h", captures=[to_run("first")]))
    await held.read()
    specs = [capture(), to_run("second")]
    refusal = await running.client.refusal(request(request_id="a", steer=[add()], captures=specs))
    assert refusal.reason == "REASON_STORE_FULL"
    held.cancel()
    running.backend.hold.set()
    await settled(running)
    await takes_everything(running)
    assert await leaked(running) == 0


async def test_one_that_sends_to_a_subscription_that_ended_meanwhile(starter) -> None:
    running = await starter(small(loading=asyncio.Event()))
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    spec = capture_pb2.CaptureSpec(sites=site_set(POST, layers=[1]), subscription_id=one.name)
    refused = asyncio.ensure_future(
        running.client.refusal(request(request_id="a", steer=[add()], captures=[spec]))
    )
    await until(lambda: running.manager.open_requests == 1)
    await one.rest()
    running.backend.loading.set()
    assert (await refused).reason == "REASON_SUBSCRIPTION_NOT_FOUND"
    assert await leaked(running) == 0
    await takes_everything(running)


async def test_one_that_is_drained_while_its_sink_opens(starter, monkeypatch) -> None:
    running, sink = await with_slow(starter, monkeypatch, "open")
    refused = asyncio.ensure_future(
        running.client.refusal(request(request_id="a", steer=[add()], captures=[to_sink("mem")]))
    )
    await until(lambda: "open" in sink.calls)
    draining = asyncio.create_task(running.manager.drain(10))
    await asyncio.sleep(0)
    sink.gate.set()
    assert (await refused).reason == "REASON_DRAINING"
    assert await leaked(running) == 0
    assert sink.calls == ["open", "abandon"]
    assert await draining == (1, 0)


async def test_one_that_waits_when_the_server_drains(starter) -> None:
    running = await starter(small(hold=asyncio.Event()))
    held = running.client.generation.Generate(request(request_id="h", steer=[add(scale=2.0)]))
    await held.read()
    refused = asyncio.ensure_future(running.client.refusal(request(steer=[add(scale=3.0)])))
    await until(lambda: running.manager.admission_queue.waiting == 1)
    draining = asyncio.create_task(running.manager.drain(10))
    assert (await refused).reason == "REASON_DRAINING"
    assert (running.manager.open_requests, running.manager.store.pins) == (1, 1)
    running.backend.hold.set()
    await rest(held)
    await draining
    assert await leaked(running) == 0


async def test_one_with_the_id_of_another(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    held = running.client.generation.Generate(request(request_id="a", steer=[add(scale=2.0)]))
    await held.read()
    refusal = await running.client.refusal(request(request_id="a", steer=[add(scale=3.0)]))
    assert refusal.reason == "REASON_DUPLICATE_REQUEST"
    assert (running.manager.store.pins, running.manager.ledger.used("bank_rows")) == (1, 1)
    running.backend.hold.set()
    await rest(held)
    await settled(running)
    assert await leaked(running) == 0


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("at", ["the line", "its vectors", "its sink"])
async def test_one_whose_client_goes_away_while_it_waits_for(
    starter, monkeypatch, at: str, how: str
) -> None:
    monkeypatch.setattr("rheostat_server.sinks.registry.entry_points", lambda **_: [Plugin(Slow)])
    backend = small(loading=asyncio.Event() if at == "its vectors" else None)
    running = await starter(backend, sinks=("mem=theirs",))
    Slow.made.at = "open" if at == "its sink" else ""
    held = None
    if at == "the line":
        backend.hold = asyncio.Event()
        held = running.client.generation.Generate(request(request_id="h", steer=[add(scale=2.0)]))
        await held.read()
    call = running.client.generation.Generate(
        request(request_id="a", steer=[add()], captures=[to_sink("mem")]),
        timeout=1.0 if how == "deadline" else None,
    )
    reading = asyncio.ensure_future(call.read())
    await until(
        lambda: {
            "the line": lambda: running.manager.admission_queue.waiting == 1,
            "its vectors": lambda: running.manager.store.pins == 1,
            "its sink": lambda: "open" in Slow.made.calls,
        }[at]()
    )
    if how == "cancel":
        call.cancel()
    await asyncio.wait({reading})
    async with asyncio.timeout(5):  # the server gets the cancellation a moment after the client
        await until(
            lambda: running.manager.ledger.requests == running.manager.store.pins == bool(held)
        )
    Slow.made.gate.set()
    if held is not None:
        held.cancel()
        backend.hold.set()
    if backend.loading is not None:
        backend.loading.set()
    async with asyncio.timeout(5):
        await until(lambda: not running.manager.open_requests)
    assert await leaked(running) == 0
    await until(lambda: Slow.made.calls in ([], ["open", "abandon"]))
    await takes_everything(running)


async def test_a_subscription_that_had_joined_it_hears_nothing_and_holds_nothing(
    starter, tmp_path
) -> None:
    running = await starter(
        small(loading=asyncio.Event()), sinks=(f"disk=filesystem:root={tmp_path}",)
    )
    taken = asyncio.ensure_future(generate(running, "a", captures=[to_sink()]))
    running.backend.loading.set()
    await taken
    running.backend.loading.clear()
    refused = asyncio.ensure_future(
        running.client.refusal(
            request(request_id="a", steer=[add()], captures=[to_sink(tag="x"), to_sink()])
        )
    )
    await until(lambda: running.manager.open_requests == 1)
    one = await Subscriber.open(running, opening(EVERY, [wanted(0, 2)]))
    running.backend.loading.set()
    assert (await refused).reason == "REASON_ARTIFACT_EXISTS"
    assert await leaked(running) == 0
    await takes_everything(running, "b")
    await one.rest()
    assert [name for name, end in ends_of(one.events).items() if end.row_count] == ["b"]
