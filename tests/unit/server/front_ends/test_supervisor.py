"""The server's side of a front end, without the process."""

import asyncio

from rheostat_server.front_ends import supervisor
from rheostat_server.front_ends.records import CallBegin, First, Kind, call_body
from rheostat_server.tasks.turns import Turns


class Answers:
    """Answers calls once `go_on` is set."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.go_on = asyncio.Event()

    async def __call__(self, path: str, call: object) -> None:
        self.begun.append(path)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.append(path)
            raise


def begin(front_end: supervisor._FrontEnd, number: int) -> None:
    front_end._receive(Kind.BEGIN, number, call_body(CallBegin(str(number), None, First.HERE)))


async def some_iterations() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calls_start_in_turns_and_in_order() -> None:
    answers = Answers()
    front_end = supervisor._FrontEnd("", 0, answers, Turns(2))
    for number in range(5):
        begin(front_end, number)
    await asyncio.sleep(0)
    assert answers.begun == ["0", "1"]
    await some_iterations()
    assert answers.begun == ["0", "1", "2", "3", "4"]
    answers.go_on.set()
    await some_iterations()
    assert not front_end._tasks


async def test_a_call_whose_client_leaves_before_its_turn_never_starts() -> None:
    answers = Answers()
    front_end = supervisor._FrontEnd("", 0, answers, Turns(1))
    for number in range(3):
        begin(front_end, number)
    front_end._receive(Kind.DONE, 1, b"")
    await some_iterations()
    assert answers.begun == ["0", "2"]
    front_end._receive(Kind.DONE, 0, b"")
    await some_iterations()
    assert answers.cancelled == ["0"]
    assert [*front_end._calls] == [2]
    front_end._lost()
    await some_iterations()
    assert answers.cancelled == ["0", "2"]


async def test_calls_of_a_front_end_that_dies_before_their_turn_never_start() -> None:
    answers = Answers()
    front_end = supervisor._FrontEnd("", 0, answers, Turns(1))
    for number in range(3):
        begin(front_end, number)
    front_end._lost()
    await some_iterations()
    assert answers.begun == []
    assert not front_end._tasks
