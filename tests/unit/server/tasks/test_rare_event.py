"""`RareEvent` does what `asyncio.Event` does."""

import asyncio

from rheostat_server.tasks.rare_event import RareEvent


async def test_it_is_set_until_it_is_cleared() -> None:
    event = RareEvent()
    assert not event.is_set()
    event.set()
    assert event.is_set()
    event.clear()
    assert not event.is_set()


async def test_all_that_wait_go_on_when_it_is_set() -> None:
    event = RareEvent()
    waiting = [asyncio.create_task(event.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    event.set()
    await asyncio.wait_for(asyncio.gather(*waiting), 1)


async def test_a_wait_for_a_set_event_returns_at_once() -> None:
    event = RareEvent()
    event.set()
    await asyncio.wait_for(event.wait(), 1)


async def test_it_can_be_awaited_again_after_clear() -> None:
    event = RareEvent()
    first = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    event.set()
    await first
    event.clear()
    second = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    assert not second.done()
    event.set()
    await asyncio.wait_for(second, 1)
