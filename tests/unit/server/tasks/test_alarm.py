"""An event that is set at a moment, with one timer at a time."""

import asyncio

from rheostat_server.tasks.alarm import Alarm


async def test_many_waits_have_one_timer() -> None:
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    alarm = Alarm(event)
    begun = loop.time()
    timers = [timer for _ in range(100) if (timer := _timer_of(alarm)) is not None]
    assert len(set(timers)) == 1
    await event.wait()
    assert loop.time() - begun >= 0.01
    event.clear()
    alarm.set_in(0.0)
    async with asyncio.timeout(10):
        await event.wait()


def _timer_of(alarm: Alarm) -> asyncio.TimerHandle | None:
    alarm.set_in(0.02)
    return alarm._timer


async def test_an_alarm_that_is_cancelled_sets_nothing() -> None:
    event = asyncio.Event()
    alarm = Alarm(event)
    alarm.set_in(0.0)
    alarm.cancel()
    alarm.cancel()
    await asyncio.sleep(0.02)
    assert not event.is_set()
