"""When the samples of a request reach the engine."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from rheostat_server.admission.admit import admit
from rheostat_server.generation.responses import run
from rheostat_server.requests import sequence
from rheostat_wire.v1 import generation_pb2

from ..fakes import ScriptedBackend
from ..messages import add, request
from ..streams import kinds, settled, until


@dataclass
class Watched(ScriptedBackend):
    """Notes a number whenever it gets a sample."""

    number: Callable[[], int] = int
    numbers: list[int] = field(default_factory=list)

    async def add_request(self, job, receive, fail) -> None:
        self.numbers.append(self.number())
        await super().add_request(job, receive, fail)


@dataclass
class Slow(ScriptedBackend):
    """Takes samples when `free` is set."""

    free: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0

    async def add_request(self, job, receive, fail) -> None:
        self.waiting += 1
        await self.free.wait()
        await super().add_request(job, receive, fail)


async def test_requests_of_a_burst_reach_the_engine_as_they_are_admitted(starter) -> None:
    running = await starter(Watched())
    manager = running.manager
    running.backend.number = lambda: manager.open_requests

    async def kinds_of(name: str) -> list[str]:
        admitted = await admit(request(request_id=name, steer=[add()]), manager.admission)
        return kinds([response async for response in run(admitted, manager)])

    await kinds_of("first")  # loads the vector
    burst = await asyncio.gather(*map(kinds_of, "abcdefgh"))
    assert {answer[-1] for answer in burst} == {"receipt"}
    assert running.backend.numbers == [1, *range(1, 9)]


async def test_the_engine_has_few_samples_of_a_large_request_at_once(starter) -> None:
    running = await starter(Watched())
    running.backend.number = lambda: len(running.backend.jobs)
    many = generation_pb2.Sampling(max_tokens=2, n=64)
    answer = await running.client.generate(request(sampling=many))
    assert kinds(answer)[-1] == "receipt"
    assert len(running.backend.numbers) == 64
    assert running.backend.numbers[-1] > 32  # the first had begun to run


async def test_a_sample_that_is_aborted_on_its_way_into_the_engine_does_not_stay(starter) -> None:
    running = await starter(Slow(hold=asyncio.Event()))
    call = running.client.generation.Generate(request(request_id="r", steer=[add()]))
    await until(lambda: running.backend.waiting == 1)
    draining = asyncio.create_task(running.manager.drain(0))
    await until(lambda: running.manager.draining)
    for _ in range(10):
        await asyncio.sleep(0)
    running.backend.free.set()
    async with asyncio.timeout(10):
        await draining
    await settled(running)
    assert not running.backend.tasks
    assert running.manager.ledger.requests == 0
    call.cancel()


async def test_a_client_that_leaves_on_the_way_into_the_engine_frees_everything(
    starter, monkeypatch
) -> None:
    monkeypatch.setattr(sequence, "UNSCHEDULED_GRACE", 0.01)
    running = await starter(Slow(hold=asyncio.Event()))
    call = running.client.generation.Generate(request(request_id="r", steer=[add()]))
    await until(lambda: running.backend.waiting == 1)
    call.cancel()
    stats = await settled(running)
    running.backend.free.set()
    await asyncio.sleep(0)
    assert not running.backend.tasks
    assert (stats.leaked_count, running.manager.ledger.requests) == (0, 0)
