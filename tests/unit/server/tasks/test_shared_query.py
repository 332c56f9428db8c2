"""A question goes to the engine once, however many ask it."""

import asyncio

from rheostat_server.errors import EngineLost
from rheostat_server.tasks.shared_query import SharedQuery


class Engine:
    """Answers with the number of the call, once it may."""

    def __init__(self) -> None:
        self.calls = 0
        self.answers = asyncio.Event()
        self.lost = False

    async def ask(self) -> int:
        self.calls += 1
        number = self.calls
        await self.answers.wait()
        if self.lost:
            raise EngineLost("gone")
        return number


async def begun(*asking) -> list[asyncio.Task]:
    tasks = [asyncio.ensure_future(one) for one in asking]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def test_all_who_ask_at_once_share_one_call_and_its_answer_is_kept() -> None:
    engine = Engine()
    query = SharedQuery(engine.ask, keep=60)
    tasks = await begun(*(query.recent() for _ in range(20)))
    engine.answers.set()
    assert await asyncio.gather(*tasks) == [1] * 20
    assert [await query.recent() for _ in range(20)] == [1] * 20
    assert engine.calls == 1


async def test_an_answer_is_not_kept_for_longer_than_told() -> None:
    engine = Engine()
    engine.answers.set()
    query = SharedQuery(engine.ask, keep=0.0)
    assert [await query.recent(), await query.recent()] == [1, 2]


async def test_a_fresh_answer_is_of_a_call_that_began_later_and_is_shared_too() -> None:
    engine = Engine()
    query = SharedQuery(engine.ask, keep=60)
    (first,) = await begun(query.recent())
    later = await begun(*(query.fresh() for _ in range(5)))
    assert engine.calls == 1
    engine.answers.set()
    assert await first == 1
    assert await asyncio.gather(*later) == [2] * 5
    assert await query.recent() == 2
    assert engine.calls == 2


async def test_once_answers_expire_a_call_that_began_before_is_not_joined() -> None:
    engine = Engine()
    query = SharedQuery(engine.ask, keep=60)
    (before,) = await begun(query.recent())
    query.expire()
    (after,) = await begun(query.recent())
    engine.answers.set()
    assert (await before, await after) == (1, 2)
    assert await query.recent() == 2
    query.expire()
    assert await query.recent() == 3


async def test_a_caller_that_goes_away_takes_the_answer_from_nobody() -> None:
    engine = Engine()
    query = SharedQuery(engine.ask, keep=60)
    first, second = await begun(query.recent(), query.recent())
    first.cancel()
    engine.answers.set()
    assert await second == 1


async def test_a_lost_engine_is_told_to_all_and_asked_again_later() -> None:
    engine = Engine()
    query = SharedQuery(engine.ask, keep=60)
    tasks = await begun(query.recent(), query.recent(), query.fresh())
    engine.lost = True
    engine.answers.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in found] == [EngineLost] * 3
    engine.lost = False
    assert await query.recent() == 3
