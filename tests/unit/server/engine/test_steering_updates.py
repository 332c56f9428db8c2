"""Updates of running samples reach the workers in few calls, each of bounded cost."""

import asyncio
from collections.abc import Sequence

import pytest

from rheostat_engine import OPEN_END, REQUEST_COST, STEP_COST, Act, Kind, Plan
from rheostat_server.engine.backend import SteeringUpdate
from rheostat_server.engine.steering_updates import SteeringUpdates
from rheostat_server.errors import Defect, EngineLost
from rheostat_wire.v1 import generation_pb2

from ..fakes import ScriptedBackend
from ..messages import add
from ..streams import until
from ..talks import P, SessionCall, start, update

Positions = list[int | None]


def plan(scale: float = 1.0) -> Plan:
    """A small plan."""
    act = Act(Kind.NORM_ADD, (bytes(32),), ((4, (0,)),), ((0, OPEN_END),), scale=scale)
    return Plan("", (act,)).pack()


class Workers:
    """Workers that answer a call once they are told to. Sample "7" is at position 7."""

    def __init__(self) -> None:
        self.calls: list[Sequence[SteeringUpdate]] = []
        self.errors: dict[str, Defect] = {}
        """By the id of a sample."""
        self.lost = False
        self._step = asyncio.Semaphore(0)

    def step(self) -> None:
        """Answers the call that waits, or else the next one."""
        self._step.release()

    async def update_steering(self, updates: Sequence[SteeringUpdate]) -> list[Positions | Defect]:
        self.calls.append(updates)
        await self._step.acquire()
        if self.lost:
            raise EngineLost("gone")
        return [self._positions(one) for one in updates]

    def _positions(self, one: SteeringUpdate) -> Positions | Defect:
        failed = [self.errors[name] for name in one.plan_ids if name in self.errors]
        return failed[0] if failed else [max(one.not_before, int(name)) for name in one.plan_ids]


def sizes(calls: Sequence[Sequence[SteeringUpdate]]) -> list[list[int]]:
    """How many samples each update of each call has."""
    return [[len(one.plan_ids) for one in call] for call in calls]


async def test_updates_that_wait_share_the_next_call() -> None:
    workers = Workers()
    updates = SteeringUpdates(workers)
    one = asyncio.create_task(updates.apply(plan(), ("1", "2", "3"), 0))
    await until(lambda: len(workers.calls) == 1)
    others = [asyncio.create_task(updates.apply(plan(n), (str(n),), 5)) for n in (4, 6)]
    await asyncio.sleep(0.01)
    assert sizes(workers.calls) == [[3]]
    workers.step()
    assert await one == [1, 2, 3]
    workers.step()
    assert await asyncio.gather(*others) == [[5], [6]]
    assert sizes(workers.calls) == [[3], [1, 1]]
    assert [list(call[0].plan_ids) for call in workers.calls] == [["1", "2", "3"], ["4"]]


async def test_a_call_costs_the_workers_at_most_what_a_step_may() -> None:
    workers = Workers()
    updates = SteeringUpdates(workers)
    many = [str(number) for number in range(3 * STEP_COST // REQUEST_COST)]
    applying = [asyncio.create_task(updates.apply(plan(n), many, 0)) for n in (1, 2)]
    for number in range(1, 100):
        await until(lambda n=number: len(workers.calls) == n or all(a.done() for a in applying))
        if all(a.done() for a in applying):
            break
        workers.step()
    assert [one.result() for one in applying] == [[*range(len(many))]] * 2
    assert sum(map(sum, sizes(workers.calls))) == 2 * len(many)
    for call in workers.calls:
        cost = sum(one.plan.plan_cost + REQUEST_COST * len(one.plan_ids) for one in call)
        assert cost <= STEP_COST


async def test_an_update_that_fails_takes_no_other_with_it() -> None:
    workers = Workers()
    updates = SteeringUpdates(workers)
    workers.errors["1"] = Defect("no row")
    applying = [asyncio.create_task(updates.apply(plan(n), (str(n),), 0)) for n in (1, 2)]
    workers.step()
    workers.step()
    done = await asyncio.gather(*applying, return_exceptions=True)
    assert (str(done[0]), done[1]) == ("no row", [2])


async def test_updates_for_which_the_engine_has_no_answer_fail() -> None:
    class Forgetful(Workers):
        async def update_steering(self, updates: Sequence[SteeringUpdate]) -> list[Positions]:
            return [[1]]

    updates = SteeringUpdates(Forgetful())
    applying = [asyncio.create_task(updates.apply(plan(n), (str(n),), 0)) for n in (1, 2)]
    done = await asyncio.wait_for(asyncio.gather(*applying, return_exceptions=True), 5)
    assert done[0] == [1]
    assert isinstance(done[1], Defect)
    assert await updates.apply(plan(), ("1",), 0) == [1]


async def test_all_updates_that_wait_learn_of_an_engine_that_is_lost() -> None:
    workers = Workers()
    updates = SteeringUpdates(workers)
    applying = [asyncio.create_task(updates.apply(plan(), ("1",), 0)) for _ in range(3)]
    await until(lambda: bool(workers.calls))
    workers.lost = True
    workers.step()
    workers.step()
    for one in applying:
        with pytest.raises(EngineLost):
            await one


async def test_updates_of_sessions_that_have_ended_are_not_sent() -> None:
    workers = Workers()
    updates = SteeringUpdates(workers)
    running = asyncio.create_task(updates.apply(plan(), ("1",), 0))
    await until(lambda: bool(workers.calls))
    ended = asyncio.create_task(updates.apply(plan(), ("2",), 0))
    after = asyncio.create_task(updates.apply(plan(), ("3",), 0))
    await asyncio.sleep(0)
    ended.cancel()
    running.cancel()
    await asyncio.sleep(0.01)
    assert len(workers.calls) == 1  # the engine still works on it
    workers.step()
    workers.step()
    assert await after == [3]
    assert [one.plan_ids for call in workers.calls for one in call] == [("1",), ("3",)]


async def test_an_update_of_a_session_is_one_call_however_many_samples_it_has(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    talk = SessionCall(running)
    samples = 32
    await talk.say(start(sampling=generation_pb2.Sampling(max_tokens=4, n=samples)))
    await until(lambda: len(running.backend.positions) == samples)
    for number in (1, 2):
        await talk.say(update(number, add(scale=number)))
        applied = await talk.hear("applied")
        assert [one.position for one in applied.first_positions] == [P] * samples
    assert sizes(running.backend.update_calls) == [[samples]] * 2
    running.backend.hold.set()
    await talk.end()
