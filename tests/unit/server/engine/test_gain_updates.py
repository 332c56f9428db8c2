"""Gains reach the engine in few messages, none of which waits for the answer to another."""

import asyncio
import time
from collections.abc import Sequence
from typing import cast

from rheostat_engine import GainsUpdate
from rheostat_server.engine.backend import Backend
from rheostat_server.engine.gain_updates import GainUpdates
from rheostat_server.errors import EngineLost, RheostatError

from ..streams import until


class Core:
    """An engine whose core answers a message between two steps."""

    def __init__(self) -> None:
        self.messages: list[Sequence[GainsUpdate]] = []
        self.between_steps = asyncio.Event()
        self.lost = False

    async def set_gains(self, updates: Sequence[GainsUpdate]) -> None:
        self.messages.append(updates)
        await self.between_steps.wait()
        if self.lost:
            raise EngineLost("gone")


def sending() -> tuple[Core, GainUpdates]:
    core = Core()
    return core, GainUpdates(cast(Backend, core))


def update(name: str, change: int) -> GainsUpdate:
    return GainsUpdate(name, change, 0, {0: change / 100})


def unexpected(error: RheostatError) -> None:
    raise AssertionError(error)


async def test_gains_of_an_iteration_share_a_message_in_which_the_last_one_counts() -> None:
    core, updates = sending()
    for name, change in (("a", 1), ("b", 1), ("a", 2)):
        updates.set(update(name, change), unexpected)
    await until(lambda: bool(core.messages))
    assert core.messages == [[update("a", 2), update("b", 1)]]
    core.between_steps.set()


async def test_gains_can_be_sent_before_the_iteration_ends() -> None:
    core, updates = sending()
    updates.send_now()
    assert not core.messages
    for name in "ab":
        updates.set(update(name, 1), unexpected)
    updates.send_now()
    await asyncio.sleep(0)  # the core's coroutine has begun
    assert core.messages == [[update("a", 1), update("b", 1)]]
    core.between_steps.set()
    await until(lambda: not updates._unanswered)
    assert len(core.messages) == 1


async def test_a_gain_does_not_wait_until_the_step_of_the_gains_before_it_has_ended() -> None:
    # It would act a position later.
    core, updates = sending()
    for change in range(1, 5):
        updates.set(update("a", change), unexpected)
        await until(lambda change=change: len(core.messages) == change)
    assert core.messages == [[update("a", change)] for change in range(1, 5)]
    core.between_steps.set()


async def test_messages_of_a_long_step_are_few() -> None:
    core, updates = sending()
    begun, change = time.monotonic(), 0
    while time.monotonic() < begun + 0.1:
        change += 1
        updates.set(update("a", change), unexpected)
        await asyncio.sleep(0)
    assert change > 50
    assert len(core.messages) <= 9  # after 0, 0.5, 1.5, 3.5 ... 63.5 ms, or later
    await until(lambda: core.messages[-1] == [update("a", change)])
    core.between_steps.set()
    await until(lambda: not updates._unanswered)
    updates.set(update("a", change + 1), unexpected)
    updates.set(update("b", 1), unexpected)
    await until(lambda: core.messages[-1] == [update("a", change + 1), update("b", 1)])


async def test_an_error_fails_the_requests_of_its_message() -> None:
    core, updates = sending()
    failed: list[str] = []
    for number, name in enumerate("ab", 1):
        updates.set(update(name, 1), lambda _, name=name: failed.append(name))
        await until(lambda number=number: len(core.messages) == number)
    core.lost = True
    core.between_steps.set()
    await until(lambda: len(failed) == 2)
    assert failed == ["a", "b"]
