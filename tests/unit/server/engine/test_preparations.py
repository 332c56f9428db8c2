"""Tables of large plans are built in the workers before their requests start."""

import asyncio

import grpc
import pytest

from rheostat_server.engine import preparations

from ..conftest import Refusal, rest
from ..fakes import ScriptedBackend, sites_with
from ..messages import add, capture, request, selector, window
from ..streams import settled, until

STEP = 2


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparations, "SMALL_PLAN_COST", 1)
    monkeypatch.setattr(preparations, "STEP_COST", STEP)


def large(request_id: str, scale: float = 1.0):
    steer = [add(scale=scale + i, where=selector(window(i, i + 1))) for i in range(4)]
    return request(request_id=request_id, steer=steer)


class Slow(ScriptedBackend):
    """An engine whose steps, and thus calls of its workers, take until they are let go."""

    def __init__(self, **settings: object) -> None:
        super().__init__(sites=sites_with(bank_rows=64, slots=64), **settings)
        self.step = asyncio.Event()
        self.at_once = 0

    async def prepare(self, name, plan, plan_cost):
        self.at_once += 1
        assert self.at_once == 1, "the workers got two calls at the same time"
        await self.step.wait()
        answer = await super().prepare(name, plan, plan_cost)
        self.at_once -= 1
        return answer


async def test_a_large_plan_is_built_in_bounded_parts_before_its_request_starts(starter) -> None:
    running = await starter(Slow())
    backend = running.backend
    call = asyncio.ensure_future(running.client.generate(large("a")))
    await until(lambda: backend.at_once)
    assert not backend.jobs
    backend.step.set()
    await call
    (job,) = backend.jobs
    assert sum(built for _, built in backend.calls) == job.plan.plan_cost
    assert len(backend.calls) > 1
    assert all(built <= STEP for _, built in backend.calls)


async def test_what_is_prepared_is_released_and_counts_until_then(starter) -> None:
    running = await starter(Slow())
    running.backend.step.set()
    await running.client.generate(large("a"))
    await settled(running)
    await until(lambda: not running.backend.prepared)
    await until(lambda: not running.manager.ledger.requests)
    assert running.manager.ledger.used("bank_rows") == 0


@pytest.mark.parametrize("one", [large, lambda name: request(request_id=name, steer=[add()])])
async def test_an_idle_engine_releases_all_that_no_request_uses(
    starter, monkeypatch: pytest.MonkeyPatch, one
) -> None:
    monkeypatch.setattr(preparations, "_IDLE", 0.01)
    running = await starter(Slow())
    running.backend.step.set()
    running.backend.unused = 50
    await running.client.generate(one("a"))
    await until(lambda: not running.backend.unused)
    calls = running.backend.prepared_releases
    await asyncio.sleep(0.1)
    assert running.backend.prepared_releases == calls


async def test_a_request_that_comes_while_an_idle_engine_releases_only_delays_that(
    starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of its own is to be released, because it only captures."""
    monkeypatch.setattr(preparations, "_IDLE", 0.01)
    running = await starter()
    running.backend.unused = 1 << 40
    await running.client.generate(request(steer=[add()]))
    await until(lambda: running.backend.prepared_releases > 9)
    await running.client.generate(request(captures=[capture()]))
    await settled(running)
    calls = running.backend.prepared_releases
    await until(lambda: running.backend.prepared_releases > calls + 10)


async def test_a_busy_engine_releases_in_its_steps(
    starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparations, "_IDLE", 0.01)
    running = await starter(Slow())
    running.backend.unused = 50
    call = asyncio.ensure_future(running.client.generate(large("a")))
    await until(lambda: running.backend.at_once)
    await asyncio.sleep(0.1)
    assert running.backend.unused == 50
    running.backend.step.set()
    await call
    await until(lambda: not running.backend.unused)


class Ending(Slow):
    """An engine that takes time to end. vLLM's is not asked for anything in that time."""

    asked_late = 0

    async def release_prepared(self, names):
        self.asked_late += self.closed
        left = await super().release_prepared(names)
        self.asked_late += self.closed
        return left

    async def close(self):
        await super().close()
        await asyncio.sleep(0.1)


async def test_an_engine_that_ends_is_asked_for_nothing(
    starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its silence would look like a lost engine, and the server would exit as if it had crashed."""
    monkeypatch.setattr(preparations, "_IDLE", 0.01)
    running = await starter(Ending())
    running.backend.step.set()
    running.backend.unused = 1 << 40
    await running.client.generate(request(steer=[add()]))
    await until(lambda: running.backend.prepared_releases > 9)
    await running.server.stop(0)
    assert running.backend.closed
    assert not running.backend.asked_late


async def test_an_engine_that_ends_before_it_was_idle_for_long_is_asked_for_nothing(
    starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparations, "_IDLE", 0.5)
    running = await starter()
    await running.client.generate(request(steer=[add()]))
    calls = running.backend.prepared_releases
    await running.manager.preparations.close()
    await asyncio.sleep(0.6)
    assert running.backend.prepared_releases == calls


async def test_each_call_releases_few_preparations(starter) -> None:
    running = await starter(Slow())
    running.backend.step.set()
    largest = 0
    release = running.backend.release_prepared

    async def counting(names):
        nonlocal largest
        largest = max(largest, len(names))
        return await release(names)

    running.backend.release_prepared = counting
    many = (large(f"{number}", scale=1.0 + 5 * number) for number in range(12))
    await asyncio.gather(*map(running.client.generate, many))
    await until(lambda: not running.backend.prepared)
    assert 1 <= largest <= 8


async def test_a_small_plan_asks_nothing_of_the_workers_before_its_request(starter) -> None:
    running = await starter(Slow())
    await running.client.generate(request())
    await running.client.generate(request(captures=[]))
    assert not running.backend.calls


async def test_equal_plans_share_a_preparation_and_others_take_turns(starter) -> None:
    running = await starter(Slow())
    backend = running.backend
    calls = [
        asyncio.ensure_future(running.client.generate(one))
        for one in (large("a"), large("b"), large("c", scale=9.0))
    ]
    await until(lambda: backend.at_once and running.manager.open_requests == 3)
    backend.step.set()
    await asyncio.gather(*calls)
    names = [name for name, _ in backend.calls]
    assert len(set(names)) == 2
    assert names[1:5] == [names[1], names[2]] * 2


async def test_a_request_that_goes_away_while_its_plan_is_built_leaves_nothing(starter) -> None:
    running = await starter(Slow())
    backend = running.backend
    call = running.client.generation.Generate(large("a"))
    await until(lambda: backend.at_once)
    call.cancel()
    await until(lambda: not running.manager.open_requests)
    backend.step.set()
    await until(lambda: not running.manager.ledger.requests)
    assert not backend.prepared
    assert not backend.jobs
    await running.client.generate(large("a"))


async def test_a_plan_that_no_worker_can_build_fails_its_request_alone(starter) -> None:
    running = await starter(Slow(prepare_error="no room"))
    backend = running.backend
    backend.step.set()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(running.client.generation.Generate(large("a")))
    assert Refusal.of(caught.value).code is grpc.StatusCode.INTERNAL
    await settled(running)
    backend.prepare_error = ""
    await running.client.generate(large("a"))
    await running.client.generate(request(captures=[capture()]))
