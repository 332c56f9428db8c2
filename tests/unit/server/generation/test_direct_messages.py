"""Tokens that are sent without waking the task of their call."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
import pytest
from google.rpc import code_pb2, status_pb2

from rheostat_engine import Installed, Released
from rheostat_server.delivery import row_messages
from rheostat_server.engine.backend import Delta, Ending
from rheostat_server.front_ends.call import Call
from rheostat_server.front_ends.records import CallBegin, First, Kind, count_body
from rheostat_server.generation import responses
from rheostat_server.requests import signals
from rheostat_server.requests.response_queue import ResponseQueue
from rheostat_server.tasks.turns import Turns
from rheostat_wire.v1 import generation_pb2, generation_service_pb2

from ..conftest import Running
from ..fakes import ScriptedBackend
from ..messages import add, capture, probe, request
from .by_hand import ByHand, InOneStep, turns

GENERATE = "/rheostat.v1.GenerationService/Generate"
WINDOW = 4
"""Messages that are sent ahead of the front end."""


@dataclass
class FrontEnd:
    """The other end of a call, which takes messages when the test says so."""

    messages: list[generation_service_pb2.GenerateResponse] = field(default_factory=list)
    taken: int = 0
    status: bytes | None = None
    call: Call | None = None

    def send(self, kind: Kind, *body: bytes) -> None:
        if kind is Kind.MESSAGE:
            message = generation_service_pb2.GenerateResponse()
            message.ParseFromString(b"".join(body))
            self.messages.append(message)
        elif kind is Kind.END:
            self.status = b"".join(body)
            assert self.call is not None
            self.call.receive(Kind.DONE, b"")

    def take(self, count: int | None = None) -> None:
        """Takes messages; all that were sent if `count` is None."""
        count = len(self.messages) - self.taken if count is None else count
        if count:
            self.taken += count
            assert self.call is not None
            self.call.receive(Kind.WRITTEN, count_body(count))

    @property
    def token_ids(self) -> list[int]:
        return [token for message in self.messages for token in message.tokens.token_ids]

    def tokens(self) -> Iterator[tuple[int, list[int]]]:
        """Offset and ids of each message with tokens."""
        for message in self.messages:
            if message.WhichOneof("event") == "tokens":
                yield message.tokens.offset, list(message.tokens.token_ids)


async def called(running: Running, asked: object) -> "tuple[FrontEnd, asyncio.Task[None]]":
    """A call that has begun."""
    front_end = FrontEnd()
    body = asked.SerializeToString()
    call = front_end.call = Call(front_end.send, CallBegin(GENERATE, None, First.HERE, body))
    task = asyncio.create_task(running.server._rpcs.answer(GENERATE, call))
    return front_end, task


async def begun(running: Running, asked: object) -> "tuple[FrontEnd, asyncio.Task[None]]":
    """A call whose task waits for tokens."""
    front_end, task = await called(running, asked)
    async with asyncio.timeout(10):
        while running.backend.job is None or not front_end.messages:
            await asyncio.sleep(0.001)
    await turns()
    front_end.take()
    return front_end, task


@pytest.fixture
async def running(starter) -> Running:
    return await starter(ByHand())


async def ended(running: Running, task: "asyncio.Task[None]", front_end: FrontEnd) -> None:
    running.backend.receive(Delta(ending=Ending.LENGTH))
    async with asyncio.timeout(10):
        while not task.done():
            front_end.take()
            await asyncio.sleep(0.001)
    await task


async def test_tokens_are_sent_before_anything_else_runs(running) -> None:
    front_end, task = await begun(running, request())
    for token in range(3):
        running.backend.receive(Delta(token_ids=(token,), text=str(token)))
        assert front_end.token_ids == list(range(token + 1))
    await ended(running, task, front_end)
    assert list(front_end.tokens()) == [(0, [0]), (1, [1]), (2, [2])]
    assert front_end.messages[-1].WhichOneof("event") == "receipt"


async def test_a_request_whose_last_tokens_cannot_be_sent_fails_at_once(
    running, monkeypatch
) -> None:
    front_end, task = await begun(running, request())

    def message(sample: responses.Sample, delta: Delta) -> responses.Response:
        raise MemoryError

    monkeypatch.setattr(responses.Sample, "message", message)
    running.backend.receive(Delta(token_ids=(7,), ending=Ending.LENGTH))
    async with asyncio.timeout(5):
        await task
    assert status_pb2.Status.FromString(front_end.status or b"").code == code_pb2.INTERNAL


async def test_a_front_end_that_takes_nothing_gets_a_few_messages_and_later_the_rest(
    running,
) -> None:
    front_end, task = await begun(running, request())
    for token in range(100):
        running.backend.receive(Delta(token_ids=(token,)))
        await turns(3)
    sent = len(list(front_end.tokens()))
    assert sent <= WINDOW + 1
    front_end.take(1)
    await turns()
    front_end.take()
    await ended(running, task, front_end)
    assert front_end.token_ids == list(range(100))
    assert len(list(front_end.tokens())) < 20, "tokens that waited are sent together"


async def test_tokens_that_follow_tokens_in_the_queue_wait_for_them(running) -> None:
    front_end, task = await begun(running, request())
    for token in range(20):  # beyond the window, no task runs in between
        running.backend.receive(Delta(token_ids=(token,)))
    front_end.take()
    running.backend.receive(Delta(token_ids=(20,)))
    await turns()
    front_end.take()
    await ended(running, task, front_end)
    assert front_end.token_ids == list(range(21))


async def test_the_first_token_waits_until_the_plan_is_in_force(running) -> None:
    front_end, task = await begun(running, request(steer=[add(scale=2.0)]))
    running.backend.receive(Delta(token_ids=(7,)))
    await turns()
    assert front_end.token_ids == []
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("seed", range(20))
async def test_any_order_of_tokens_and_readers_gives_the_same_stream(starter, seed) -> None:
    rng = np.random.default_rng(seed)
    running = await starter(ByHand())
    front_end, task = await begun(running, request())
    said: list[int] = []
    for _ in range(200):
        what = rng.random()
        if what < 0.6:
            count = int(rng.integers(1, 4))
            new = tuple(range(len(said), len(said) + count))
            said += new
            running.backend.receive(Delta(token_ids=new, text="".join(f"{one} " for one in new)))
        elif what < 0.8:
            front_end.take(int(rng.integers(0, len(front_end.messages) - front_end.taken + 1)))
        else:
            await turns(int(rng.integers(1, 5)))
    await ended(running, task, front_end)
    assert front_end.token_ids == said
    offsets = [offset for offset, _ in front_end.tokens()]
    lengths = [len(ids) for _, ids in front_end.tokens()]
    assert offsets == [sum(lengths[:number]) for number in range(len(lengths))]
    text = "".join(message.tokens.text for message in front_end.messages)
    assert text == "".join(f"{one} " for one in said)
    assert front_end.messages[-1].WhichOneof("event") == "receipt"


async def read_to_the_end(front_end: FrontEnd, task: "asyncio.Task[None]") -> None:
    async with asyncio.timeout(20):
        while not task.done():
            front_end.take()
            await asyncio.sleep(0)
    await task


def row_positions(messages) -> list[int]:
    return [
        position
        for message in messages
        if message.HasField("captured")
        for run in message.captured.positions
        for position in range(run.start, run.start + run.count)
    ]


async def test_the_tokens_of_a_step_are_sent_before_its_rows(starter) -> None:
    """Otherwise first tokens wait for the rows of all prompts that the step has computed."""
    running, count = await starter(InOneStep()), 6
    calls = [await called(running, capturing()) for _ in range(count)]
    async with asyncio.timeout(10):
        while len(running.backend.added) < count or not all(one.messages for one, _ in calls):
            await asyncio.sleep(0.001)
    running.backend.step()
    sent = [message for one, _ in calls for message in one.messages]
    assert [message.WhichOneof("event") for message in sent] == ["started", "tokens"] * count
    for front_end, task in calls:
        await read_to_the_end(front_end, task)
        assert row_positions(front_end.messages) == list(range(3))


def capturing():
    return request(captures=[capture()], sampling=generation_pb2.Sampling(max_tokens=30))


@dataclass
class Slow(ScriptedBackend):
    """Makes a token in every few iterations of the event loop, so that the reader waits."""

    async def generate(self, job):
        async with aclosing(super().generate(job)) as deltas:
            async for delta in deltas:
                yield delta
                await turns(6)


@pytest.mark.parametrize("seed", range(6))
async def test_rows_are_sent_whole_and_in_order(starter, seed) -> None:
    rng = np.random.default_rng(seed)
    running = await starter(Slow())
    expected = row_positions(await running.client.generate(capturing()))
    front_end, task = await called(running, capturing())
    async with asyncio.timeout(20):
        while not task.done():
            left = len(front_end.messages) - front_end.taken
            front_end.take(int(rng.integers(0, left + 1)) if rng.random() < 0.9 else left)
            await turns(int(rng.integers(1, 12)))
    await task
    assert row_positions(front_end.messages) == expected
    assert front_end.messages[-1].WhichOneof("event") == "receipt"


async def test_rows_wake_no_task_while_the_front_end_has_room(starter, monkeypatch) -> None:
    running = await starter(Slow())
    woken: list[object] = []
    get = ResponseQueue.get

    async def counted(self) -> object:
        woken.append(entry := await get(self))
        return entry

    monkeypatch.setattr(ResponseQueue, "get", counted)
    front_end, task = await called(running, capturing())
    await read_to_the_end(front_end, task)
    assert len(row_positions(front_end.messages)) == 32
    assert len(woken) < 8


async def test_many_rows_are_left_to_the_task(starter, monkeypatch) -> None:
    monkeypatch.setattr(row_messages, "OFFLOAD_BYTES", -1)
    running = await starter(Slow())
    front_end, task = await called(running, capturing())
    await read_to_the_end(front_end, task)
    assert row_positions(front_end.messages) == list(range(32))


async def test_rows_that_cannot_be_encoded_fail_their_request_alone(starter, monkeypatch) -> None:
    """They are encoded in a callback of the event loop that all requests share."""
    running = await starter(Slow())
    monkeypatch.setattr(running.manager, "_row_turns", Turns(1))  # the others wait for their turn
    calls = [await called(running, capturing()) for _ in range(3)]
    encode = responses.few_rows
    encoded = 0

    def once_broken(item):
        nonlocal encoded
        encoded += 1
        if encoded == 2:
            raise ValueError("no rows")
        return encode(item)

    monkeypatch.setattr(responses, "few_rows", once_broken)
    for front_end, task in calls:
        await read_to_the_end(front_end, task)
    statuses = [status_pb2.Status.FromString(one.status or b"").code for one, _ in calls]
    assert sorted(statuses) == [0, 0, code_pb2.INTERNAL]
    for (front_end, _), status in zip(calls, statuses, strict=True):
        if not status:
            assert row_positions(front_end.messages) == list(range(32))


async def test_signals_beyond_the_room_need_no_further_token(running, monkeypatch) -> None:
    monkeypatch.setattr(signals, "CHUNK_BYTES", 1)  # a message for the signals of each step
    reads = probe()
    reads.signals = True
    front_end, task = await begun(running, request(probes=[reads]))
    backend = running.backend
    plan = backend.job.plan
    backend.deliver(Installed(plan.request_id, ""))
    for position in range(12):
        backend.deliver(backend.signals(plan, position, position + 1))
    backend.receive(Delta(token_ids=tuple(range(10))))
    async with asyncio.timeout(10):
        while sum(one.HasField("signals") for one in front_end.messages) < 12:
            front_end.take()
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    backend.deliver(Released(plan.request_id, (), True, {}, 0, 0, (0, 12)))
