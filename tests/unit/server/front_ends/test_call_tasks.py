"""The tasks that answer forwarded calls, without gRPC."""

import asyncio

from google.rpc import code_pb2, status_pb2

from rheostat_server.front_ends.call_starts import CallStarts
from rheostat_server.front_ends.call_tasks import CallTasks
from rheostat_server.front_ends.records import CallBegin, First, Kind, call_body


class Answers:
    """Answers calls once `go_on` is set. One call fails then."""

    def __init__(self, fails: str = "") -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.go_on = asyncio.Event()
        self.fails = fails
        self.ends: dict[int, status_pb2.Status] = {}

    async def __call__(self, path: str, call: object) -> None:
        self.begun.append(path)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.append(path)
            raise
        if path == self.fails:
            raise ValueError("a defect")

    def send(self, kind: Kind, call: int = 0, *body: bytes) -> None:
        """Takes the records of calls."""
        if kind is Kind.END:
            self.ends[call] = status_pb2.Status.FromString(b"".join(body))


def tasks(answers: Answers, starts: int) -> CallTasks:
    return CallTasks(answers.send, answers, CallStarts(starts))


def begin(calls: CallTasks, number: int) -> None:
    calls.receive(Kind.BEGIN, number, call_body(CallBegin(str(number), None, First.HERE)))


async def some_iterations() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calls_start_in_turns_and_in_order() -> None:
    answers = Answers()
    calls = tasks(answers, 2)
    for number in range(5):
        begin(calls, number)
    await asyncio.sleep(0)
    assert answers.begun == ["0", "1"]
    await some_iterations()
    assert answers.begun == ["0", "1", "2", "3", "4"]
    answers.go_on.set()
    await some_iterations()
    assert not calls._tasks


async def test_a_call_whose_client_leaves_before_its_turn_never_starts() -> None:
    answers = Answers()
    calls = tasks(answers, 1)
    for number in range(3):
        begin(calls, number)
    calls.receive(Kind.DONE, 1, b"")
    await some_iterations()
    assert answers.begun == ["0", "2"]
    calls.receive(Kind.DONE, 0, b"")
    await some_iterations()
    assert answers.cancelled == ["0"]
    assert [*calls._calls] == [2]
    calls.cancel()
    await some_iterations()
    assert answers.cancelled == ["0", "2"]


async def test_calls_of_a_front_end_that_dies_before_their_turn_never_start() -> None:
    answers = Answers()
    calls = tasks(answers, 1)
    for number in range(3):
        begin(calls, number)
    calls.cancel()
    await some_iterations()
    assert answers.begun == []
    assert not calls._tasks


async def test_a_call_whose_answer_raises_ends_with_internal() -> None:
    answers = Answers(fails="1")
    calls = tasks(answers, 2)
    for number in range(2):
        begin(calls, number)
    answers.go_on.set()
    await some_iterations()
    assert answers.ends[0].code == code_pb2.OK
    assert answers.ends[1].code == code_pb2.INTERNAL
    assert "stopped answering" in answers.ends[1].message
