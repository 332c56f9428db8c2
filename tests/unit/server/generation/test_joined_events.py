"""Events that are ready together are sent in one message, without the task of their call."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import numpy as np
import pytest

from rheostat_engine import Installed, Released
from rheostat_server.engine.backend import Delta, Ending
from rheostat_server.front_ends.call import Call
from rheostat_server.generation.sample import Sample
from rheostat_server.requests.response_queue import ResponseQueue
from rheostat_wire.v1 import generation_pb2, generation_service_pb2

from ..conftest import Events, Running, narrow, rest
from ..messages import probe, request
from ..streams import kinds, settled, tokens, until
from ..talks import P, SessionCall, start
from .by_hand import ByHand, turns
from .lagging import Lagging
from .test_signals import all_positions, all_signals


def reading(*, batches: bool = True, **fields: object) -> generation_service_pb2.GenerateRequest:
    """A request whose client gets what a probe reads."""
    reads = probe()
    reads.signals = True
    return request(probes=[reads], batches=batches, **fields)


def flat(events: Events) -> Events:
    """The events, those of batches one by one."""
    return [one for event in events for one in (event.batch.events or [event])]


async def installed(running: Running) -> None:
    """Returns when the request runs, and has sent its first messages."""
    await until(lambda: running.backend.job is not None)
    running.backend.deliver(Installed(running.backend.job.plan.request_id, ""))
    await turns()


def step(running: Running, number: int, text: str = "") -> None:
    """A step of the engine: the signals of a row, and the token that was sampled from it."""
    backend = running.backend
    first = 0 if number == 0 else P + number - 1
    backend.deliver(backend.signals(backend.job.plan, first, P + number))
    backend.receive(Delta(token_ids=(number,), text=text))


def released(running: Running, steps: int) -> None:
    """The end of the request in the engine."""
    backend = running.backend
    backend.receive(Delta(ending=Ending.LENGTH))
    plan_id = backend.job.plan.request_id
    backend.deliver(Released(plan_id, (), True, {}, 0, 0, (0, P + steps - 1)))


@pytest.fixture
def woken(monkeypatch) -> list[object]:
    """The entries for which the task of a call was woken."""
    entries: list[object] = []
    get = ResponseQueue.get

    async def counted(self) -> object:
        entries.append(entry := await get(self))
        return entry

    monkeypatch.setattr(ResponseQueue, "get", counted)
    return entries


@pytest.fixture
def taken(monkeypatch) -> Callable[[], Awaitable[None]]:
    """Returns when gRPC has taken all messages. A client may get a message before that."""
    calls: set[Call] = set()
    write_now = Call.write_now

    def write(self, message) -> None:
        calls.add(self)
        write_now(self, message)

    monkeypatch.setattr(Call, "write_now", write)
    return lambda: until(lambda: not any(call._unwritten for call in calls))


async def begun(running: Running) -> tuple[grpc.aio.UnaryStreamCall, list]:
    """A call that has its first token, and the messages until then."""
    call = running.client.generation.Generate(reading(), timeout=10)
    await installed(running)
    step(running, 0)
    events: list = []
    while not tokens(flat(events)):
        events.append(await call.read())
    await turns()
    return call, events


async def test_a_token_and_its_signals_come_in_one_message(starter, woken, taken) -> None:
    running = await starter(ByHand())
    call, events = await begun(running)
    woken.clear()
    for number in range(1, 20):
        step(running, number)
        message = await call.read()
        assert kinds(message.batch.events) == ["tokens", "signals"]
        events.append(message)
        await taken()
    assert woken == []
    released(running, 20)
    await rest(call, events)
    assert tokens(flat(events)) == [*range(20)]
    assert all_positions(flat(events)) == [*range(P + 19)]
    assert kinds(events)[-1] == "receipt"


async def test_signals_and_the_answer_to_an_update_come_in_one_message(
    starter, woken, taken
) -> None:
    running = await starter(ByHand())
    talk = SessionCall(running)
    asked = start(batches=True)
    asked.start.probes.extend(reading().probes)
    await talk.say(asked)
    await installed(running)
    step(running, 0)
    while not tokens(flat(talk.events)):
        await talk.next()
    ((active, _),) = running.manager._routes.values()
    backend = running.backend
    await turns()
    woken.clear()
    for number in range(1, 20):
        first = P + number - 1
        backend.deliver(backend.signals(backend.job.plan, first, first + 1))
        active.pending_notices += 1
        active.notify(generation_pb2.UpdateApplied(update_id=number))
        assert kinds((await talk.next()).batch.events) == ["signals", "applied"]
        await taken()
        backend.receive(Delta(token_ids=(number,)))
        assert kinds([await talk.next()]) == ["tokens"]
        await taken()
    assert woken == []
    assert active.pending_notices == 0
    released(running, 20)
    await talk.call.done_writing()
    assert kinds(flat(await talk.end()))[-1] == "receipt"


@pytest.mark.parametrize("batches", [False, True])
async def test_signals_that_come_after_their_token_leave_at_once(starter, batches: bool) -> None:
    running = await starter(ByHand())
    call = running.client.generation.Generate(reading(batches=batches), timeout=10)
    await installed(running)
    backend, events = running.backend, []
    for number in range(10):
        backend.receive(Delta(token_ids=(number,)))
        while len(tokens(flat(events))) <= number:
            events.append(await call.read())
        await turns()
        first = 0 if number == 0 else P + number - 1
        backend.deliver(backend.signals(backend.job.plan, first, P + number))
        while len(all_positions(flat(events))) < P + number:
            events.append(await call.read())
    released(running, 10)
    await rest(call, events)
    assert all_positions(flat(events)) == [*range(P + 9)]


async def test_an_answer_behind_the_last_token_ends_the_wait_for_it(starter) -> None:
    """Once all samples have ended, the task waits for the answers alone."""
    running = await starter(ByHand())
    talk = SessionCall(running)
    asked = start(batches=True)
    asked.start.probes.extend(reading().probes)
    await talk.say(asked)
    await installed(running)
    ((active, _),) = running.manager._routes.values()
    active.pending_notices += 1
    step(running, 0)
    released(running, 1)
    await asyncio.sleep(0.05)
    assert "receipt" not in kinds(flat(talk.events))
    active.notify(generation_pb2.UpdateApplied(update_id=1))
    await talk.call.done_writing()
    events = flat(await talk.end())
    assert kinds(events)[-2:] == ["applied", "receipt"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("lag", [0, 2])
async def test_a_client_that_reads_batches_gets_the_same_events(starter, n: int, lag: int) -> None:
    running = await starter(Lagging(lag=lag))
    sampling = generation_pb2.Sampling(max_tokens=6, n=n, temperature=1)
    found = {
        batches: await running.client.generate(reading(batches=batches, sampling=sampling))
        for batches in (False, True)
    }
    assert "batch" not in kinds(found[False])
    assert len(found[True]) < len(found[False])
    assert all(len(event.batch.events) > 1 for event in found[True] if event.HasField("batch"))
    for sample in range(n):
        plain, joined = (tokens(flat(events), sample) for events in found.values())
        assert plain == joined
        plain, joined = (all_signals(flat(events), sample) for events in found.values())
        assert (plain[0], plain[1].tolist(), plain[2]) == (joined[0], joined[1].tolist(), joined[2])
    assert [kinds(flat(found[True]))[i] for i in (0, 1, -1)] == [
        "started",
        "signal_table",
        "receipt",
    ]


async def test_tokens_wake_no_task_if_this_process_speaks_grpc(starter, woken, taken) -> None:
    running = await starter(ByHand())
    call = running.client.generation.Generate(request(), timeout=10)
    await until(lambda: running.backend.job is not None)
    events = []
    for number in range(20):
        running.backend.receive(Delta(token_ids=(number,)))
        while len(tokens(events)) <= number:
            events.append(await call.read())
        await taken()
        if number == 2:
            woken.clear()
    assert woken == []
    call.cancel()


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("seed", range(8))
async def test_a_slow_client_gets_every_event_in_order(starter, seed: int, batches: bool) -> None:
    rng = np.random.default_rng(seed)
    running = await starter(ByHand())
    events: Events = []
    async with narrow(running) as client:
        call = client.generation.Generate(reading(batches=batches), timeout=20)
        await installed(running)
        for number in range(150):
            step(running, number, "x" * int(rng.integers(0, 3000)))
            await turns(int(rng.integers(0, 6)))
            if rng.random() < 0.3:
                for _ in range(int(rng.integers(0, 4))):
                    if len(tokens(flat(events))) < number:
                        events.append(await call.read())
        released(running, 150)
        await rest(call, events)
    assert tokens(flat(events)) == [*range(150)]
    assert all_positions(flat(events)) == [*range(P + 149)]
    assert kinds(events)[-1] == "receipt"
    known = P
    for event in flat(events):
        if event.HasField("tokens"):
            known += len(event.tokens.token_ids)
        elif event.HasField("signals"):
            assert max(run.start + run.count for run in event.signals.positions) < known


async def test_a_client_that_leaves_while_a_message_waits_ends_its_request(starter, caplog) -> None:
    running = await starter(ByHand())
    async with narrow(running) as client:
        call = client.generation.Generate(request(), timeout=20)
        await until(lambda: running.backend.job is not None)
        for number in range(50):
            running.backend.receive(Delta(token_ids=(number,), text="x" * 10_000))
            await turns(5)
        call.cancel()
        await settled(running)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_an_event_that_cannot_be_sent_fails_its_request_alone(starter, monkeypatch) -> None:
    running = await starter(ByHand())
    call, _ = await begun(running)

    def broken(self, delta: Delta) -> None:
        raise ValueError("no message")

    monkeypatch.setattr(Sample, "message", broken)
    step(running, 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    released(running, 2)
