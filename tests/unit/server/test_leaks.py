"""Whatever clients do with their requests, nothing of them stays in the server."""

import asyncio
import gc
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

import grpc
import pytest

from rheostat_engine import Capacity
from rheostat_server.admission import compiled_requests
from rheostat_server.engine import sampling
from rheostat_server.front_ends.supervisor import FrontEnds
from rheostat_wire.v1 import capture_pb2, generation_pb2, generation_service_pb2, run_service_pb2

from ...effort import FACTOR, at_length, some
from .conftest import Client, Running, narrow, rest
from .fakes import INFO, Paced, sites_with
from .messages import FIRST, add, capture, norm_add, request, site_set, tensor
from .streams import settled, until
from .subscribers import EVERY, POST, Subscriber, opening, wanted
from .talks import start, stop, update
from .tracing_calls import JitteryBackend, calls
from .tracing_fuzz import play

KIB = 1 << 10
FAIL, OLDEST, NEWEST, SPILL = (
    capture_pb2.OVERLOAD_FAIL,
    capture_pb2.OVERLOAD_DROP_OLDEST,
    capture_pb2.OVERLOAD_DROP_NEWEST,
    capture_pb2.OVERLOAD_SPILL,
)
RESOURCES = [one.name for one in fields(Capacity)]
ENDS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""How a request may end that the client leaves, or for which there is no room."""


def engine() -> Paced:
    return Paced(
        info=replace(INFO, model_tokens=2048, running_samples=64),
        sites=sites_with(capture_rows=1 << 16, bank_rows=6),
    )


def captures(rng: random.Random, name: str, n: int = 1) -> list[capture_pb2.CaptureSpec]:
    """Up to four captures, to readers of every kind."""
    made = []
    for number in range(rng.choice([0, 1, 1, 2, 4])):
        targets = [
            {},
            {"sink": capture_pb2.SinkTarget(sink_name="disk", tag=f"t{number}")},
            {"run": capture_pb2.RunTarget(run_id=f"{name}-{number}")},
        ]
        target = rng.choice(targets[: 3 if n == 1 else 2])  # a run is of one sample
        policy = FAIL if "run" in target else rng.choice([FAIL, OLDEST, NEWEST, SPILL])
        layers = rng.sample(range(3), rng.randrange(1, 4))
        spec = capture(site_set(POST, layers=sorted(layers)), overload=policy)
        if target:
            spec = capture_pb2.CaptureSpec(sites=spec.sites, overload=policy, **target)
        made.append(spec)
    return made


def request_message(rng: random.Random, name: str) -> generation_service_pb2.GenerateRequest:
    n = rng.choice([1, 1, 2, 5])
    sampling = generation_pb2.Sampling(
        max_tokens=rng.choice([1, 5, 60, 400]), n=n, temperature=1.0 if n > 1 else 0.0
    )
    if rng.random() < 0.4:
        sampling.logprobs = rng.randrange(6)
    if rng.random() < 0.2:
        sampling.prompt_logprobs = 1
    steer = [add(scale=rng.random()), norm_add(tensor(FIRST), 0.5)][: rng.randrange(3)]
    return request(
        request_id=name,
        sampling=sampling,
        steer=steer or None,
        captures=captures(rng, name, n),
        with_baseline=bool(steer) and rng.random() < 0.5,
    )


async def generate(client: Client, rng: random.Random, name: str) -> grpc.StatusCode:
    """A request whose client reads, reads late, leaves, or has no patience."""
    message = request_message(rng, name)
    deadline = rng.choice([None, None, None, 0.02, 0.2])
    call = client.generation.Generate(message, timeout=deadline)
    try:
        for _ in range(rng.choice([0, 1, 3, 20])):
            if await call.read() is grpc.aio.EOF:
                break
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
        await asyncio.sleep(rng.choice([0, 0.01, 0.3]))
        if rng.random() < 0.4:
            call.cancel()
        events = await rest(call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.CancelledError:
        return grpc.StatusCode.CANCELLED
    assert not events or events[-1].HasField("receipt")
    return await call.code()


async def talk(client: Client, rng: random.Random, name: str) -> grpc.StatusCode:
    """A session whose client changes its steering, and ends it, leaves, or goes on."""
    call = client.generation.Session()
    sampling = generation_pb2.Sampling(max_tokens=rng.choice([3, 60, 400]), n=1)
    try:
        await call.write(
            start(request_id=name, sampling=sampling, steer=[add()], captures=captures(rng, name))
        )
        for number in range(1, rng.randrange(2, 6)):
            await call.write(update(number, add(scale=rng.random())))
            if rng.random() < 0.5:
                await call.read()
        way = rng.randrange(3)
        if way == 0:
            call.cancel()
        elif way == 1:
            await call.write(stop(9))
        await call.done_writing()
        await rest(call)
    except grpc.aio.AioRpcError:
        return await _end(call)
    except (asyncio.CancelledError, asyncio.InvalidStateError):
        return grpc.StatusCode.CANCELLED
    return await call.code()


async def _end(call: grpc.aio.StreamStreamCall) -> grpc.StatusCode:
    """The status of a session that one of its client's writes found ended.

    The status is lost where gRPC in this process learns of the end by the failed write. It reports
    INTERNAL instead, with a text of its own. The server's texts are never this one.
    """
    if await call.details() == "Internal error from Core":
        return grpc.StatusCode.CANCELLED
    return await call.code()


async def watch(running: Running, rng: random.Random) -> None:
    """An observer of every request, which stays for a while."""
    one = await Subscriber.open(
        running, opening(EVERY, [wanted(rng.randrange(3))], overload=NEWEST)
    )
    await asyncio.sleep(rng.choice([0.05, 0.5]))
    await one.rest()


async def storm(running: Running, rng: random.Random, name: str, count: int) -> Counter:
    """Many clients at once, each on a connection of its own."""

    async def one(number: int) -> grpc.StatusCode | None:
        await asyncio.sleep(rng.random() * 0.5)
        if number % 10 == 9:
            return await watch(running, rng)
        async with narrow(running) as client:
            make = talk if number % 4 == 3 else generate
            return await make(client, random.Random(rng.random()), f"{name}-{number}")

    return Counter(await asyncio.gather(*(one(number) for number in range(count))))


def objects() -> Counter:
    """How many objects of each class of the server there are."""
    gc.collect()
    return counted()


def counted() -> Counter:
    """The same without a collection of garbage."""
    names = (f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    return Counter(name for name in names if name.startswith("rheostat_server."))


async def ended_by_grpc() -> None:
    """Returns once the thread of gRPC's events holds no call that has ended.

    It sleeps between two looks, because a loop that looks all the time delays that thread.
    """
    async with asyncio.timeout(10):
        while counted()["rheostat_server.front_ends.core_server.CoreCall"]:
            await asyncio.sleep(0.02)


async def idle(running: Running) -> None:
    """Returns once nothing runs; checks that nothing is held."""
    await until(lambda: len(running.manager.subscriptions) == 0)
    stats = await settled(running)
    assert stats.request_buffer_bytes == stats.subscription_buffer_bytes == 0
    assert (
        stats.used_bank_row_count
        == stats.leaked_count
        == running.manager.admission_queue.waiting
        == 0
    )
    manager = running.manager
    assert manager.ledger.requests == manager.store.pins == 0
    assert manager.budget.used == manager.budget.spilling == 0
    assert {resource: manager.ledger.used(resource) for resource in RESOURCES} == dict.fromkeys(
        RESOURCES, 0
    )
    listed = await running.client.runs.ListRuns(run_service_pb2.ListRunsRequest())
    for run in listed.runs:
        await running.client.runs.DeleteRun(run_service_pb2.DeleteRunRequest(run_id=run.run_id))
    assert (len(manager.runs), manager.runs.unfinished, manager.runs.used_bytes) == (0, 0, 0)
    backend = running.backend
    assert not backend.plans
    for log in (
        backend.jobs,
        backend.aborted,
        backend.updates,
        backend.update_calls,
        backend.capture_updates,
    ):
        log.clear()


@asynccontextmanager
async def no_cycles() -> AsyncIterator[None]:
    """Fails if objects of the server stay after the block that only a collection would free."""
    gc.collect()
    gc.disable()
    try:
        yield
        await ended_by_grpc()
        left, reachable = counted(), objects()
        assert left - reachable == {}
    finally:
        gc.enable()


async def fill_caches(running: Running) -> None:
    """Makes every kind of capture once, because the server keeps some that it has resolved."""
    sets = [
        site_set(POST, layers=layers)
        for count in (1, 2, 3)
        for layers in itertools.combinations(range(3), count)
    ]
    for sites in sets:
        specs = [capture(sites, overload=policy) for policy in (FAIL, OLDEST, NEWEST, SPILL)]
        await running.client.generate(request(captures=specs))
    observer = await Subscriber.open(
        running, opening(EVERY, [wanted(layer) for layer in range(3)], overload=NEWEST)
    )
    await observer.rest()


async def warmed_up(starter, scratch: Path, rng: random.Random, count: int) -> Running:
    """A server with little memory, a sink and a spool, which has served `count` clients."""
    running: Running = await starter(
        engine(),
        request_buffer_bytes=48 * KIB,
        buffers_bytes=1024 * KIB,
        capacity_wait=0.2,
        resume_window=0.05,
        spool=str(scratch / "spool"),
        sinks=(f"disk=filesystem:root={scratch}",),
    )
    await fill_caches(running)
    await storm(running, rng, "first", count)
    await idle(running)
    return running


@at_length
@pytest.mark.parametrize("seed", some(range(2), 0))
async def test_nothing_of_a_request_stays_whatever_its_client_does(
    starter, tmp_path, seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Caches keep compiled requests and sampling settings. They are small here, to expose leaks.
    monkeypatch.setattr(compiled_requests, "COMPILED_REQUESTS", 2)
    monkeypatch.setattr(sampling, "_cached", lru_cache(2)(sampling._cached.__wrapped__))
    rng = random.Random(seed)
    running = await warmed_up(starter, tmp_path, rng, 30)
    before = objects()
    codes: Counter = Counter()
    for turn in range(3):
        codes += await storm(running, rng, f"{turn}", 30)
        await idle(running)
    assert codes.keys() - {None} <= ENDS, codes
    assert {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED} <= codes.keys(), codes
    more = objects() - before
    more -= Counter({name: count for name, count in more.items() if ".sinks." in name})
    # Sinks remember what they wrote, within a limit of their own.
    assert {name: count for name, count in more.items() if count > 20} == {}


async def test_calls_of_many_kinds_leave_no_cycles(starter, tmp_path) -> None:
    # They are refused, cancelled, too slow, observed and changed; they spill and write to sinks.
    rng = random.Random(0)
    running = await warmed_up(starter, tmp_path, rng, 10)
    async with no_cycles():
        await storm(running, rng, "second", 40)
        await idle(running)


async def test_calls_of_causal_tracing_leave_no_cycles(starter) -> None:
    running = await starter(JitteryBackend())
    async with no_cycles():
        assert not (await play(running, calls(0, 40 * FACTOR))).problems


def running_calls(running: Running) -> int:
    """The calls that front ends have not reported as over."""
    grpc_side = running.server.grpc
    if not isinstance(grpc_side, FrontEnds):
        return 0
    return sum(len(front_end.calls) for front_end in grpc_side._front_ends)


@pytest.mark.parametrize("what", ["plain", "steered", "captured", "two samples"])
async def test_an_ended_request_leaves_no_cycles(running, what: str) -> None:
    async def generate(number: int) -> None:
        message = request(request_id=f"r{number}")
        if what == "steered":
            message.steering.interventions.append(add())
        elif what == "captured":
            message.captures.append(capture())
        elif what == "two samples":
            message.sampling.MergeFrom(generation_pb2.Sampling(n=2, temperature=1.0))
        await running.client.generate(message)
        await settled(running)

    for number in (8, 9):  # steering and captures stay compiled, and are kept if they come again
        await generate(number)
    running.backend.jobs.clear()
    before = objects()
    gc.disable()
    try:
        for number in range(1, 6):
            await generate(number)
        running.backend.jobs.clear()  # it remembers all samples
        # A front end reports a little later that it has sent the status of a call.
        await until(lambda: not running_calls(running))
        await ended_by_grpc()
        left, reachable = counted(), objects()
        assert left - reachable == {}
        more = reachable - before
        # A timer, as of statistics that are asked for again later, refers to the call that set it.
        del more["rheostat_server.tasks.interruption.Interruption"]
        assert more == {}
    finally:
        gc.enable()
