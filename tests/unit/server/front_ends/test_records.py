"""What the server and a front end tell each other over their socket."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_server.front_ends.records import (
    CallBegin,
    First,
    Kind,
    RecordConnection,
    call_body,
    count_body,
    read_call_body,
    read_count_body,
    read_seconds_body,
    seconds_body,
)

Record = tuple[Kind, int, bytes]
RECORDS = st.lists(
    st.tuples(st.sampled_from(Kind), st.integers(0, (1 << 32) - 1), st.binary(max_size=40))
)


def connection(received: list[Record]) -> RecordConnection:
    return RecordConnection(lambda *record: received.append(record), lambda: None)


class Pipe(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)


def written(records: list[Record]) -> list[bytes]:
    """The writes that sending all records in one iteration of the event loop makes."""
    pipe = Pipe()

    async def send() -> None:
        sender = connection([])
        sender.connection_made(pipe)
        for record in records:
            sender.send(*record)
        await asyncio.sleep(0)

    asyncio.run(send())
    return pipe.writes


@given(RECORDS, st.data())
def test_records_arrive_however_their_bytes_are_cut(records: list[Record], data) -> None:
    sent = b"".join(written(records))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=10)))
    received: list[Record] = []
    receiver = connection(received)
    for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        receiver.data_received(sent[begin:end])
    assert received == records


def test_large_parts_of_a_record_are_written_without_a_copy() -> None:
    large = memoryview(bytes(range(256)) * 256)
    pipe, received = Pipe(), []

    async def send() -> None:
        sender = connection([])
        sender.connection_made(pipe)
        sender.send(Kind.MESSAGE, 1, b"before")
        sender.send(Kind.MESSAGE, 2, b"head", large)
        sender.send(Kind.MESSAGE, 3, b"after")
        await asyncio.sleep(0)

    asyncio.run(send())
    connection(received).data_received(b"".join(pipe.writes))
    assert received == [
        (Kind.MESSAGE, 1, b"before"),
        (Kind.MESSAGE, 2, b"head" + bytes(large)),
        (Kind.MESSAGE, 3, b"after"),
    ]
    assert [part is large for part in pipe.writes] == [False, True, False]


def test_a_record_that_cannot_be_written_to_its_end_ends_the_connection() -> None:
    """Otherwise the other end would take the next record for the rest of this one."""

    class FullPipe(Pipe):
        aborted = False

        def write(self, data: bytes) -> None:
            if len(data) > 1 << 16:
                raise MemoryError
            super().write(data)

        def abort(self) -> None:
            self.aborted = True

    pipe = FullPipe()

    async def send() -> None:
        sender = connection([])
        sender.connection_made(pipe)
        sender.send(Kind.MESSAGE, 1, b"head", memoryview(bytes(1 << 17)))
        await asyncio.sleep(0)

    asyncio.run(send())
    assert pipe.writes  # the head
    assert pipe.aborted


def test_records_of_one_iteration_leave_in_one_write() -> None:
    records = [(Kind.MESSAGE, number, b"x" * number) for number in range(100)]
    assert len(written(records)) == 1


@pytest.fixture
async def pair() -> AsyncIterator[tuple[RecordConnection, RecordConnection, list[Record]]]:
    received: list[Record] = []
    ends = []
    for end in socket.socketpair():
        one = connection(received if ends else [])
        await asyncio.get_running_loop().create_connection(lambda one=one: one, sock=end)
        ends.append(one)
    yield ends[0], ends[1], received
    for one in ends:
        one.close()


async def test_a_large_record_arrives_between_small_ones(pair) -> None:
    sender, _, received = pair
    large = bytes(range(256)) * (64 << 10)
    records = [(Kind.READ, 1, b""), (Kind.MESSAGE, 2, large), (Kind.WRITTEN, 3, b"")]
    for record in records:
        sender.send(*record)
    async with asyncio.timeout(30):
        while len(received) < 3:
            await asyncio.sleep(0.001)
    assert received == records


async def test_what_is_sent_before_a_close_arrives(pair) -> None:
    sender, _, received = pair
    sender.send(Kind.NOT_LISTENING, 0, b"why")
    sender.close()
    async with asyncio.timeout(30):
        while not received:
            await asyncio.sleep(0.001)
    assert received == [(Kind.NOT_LISTENING, 0, b"why")]


METHODS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(
    METHODS,
    st.none() | st.floats(0, 1e9),
    st.sampled_from([First.UNREAD, First.READING]),
    st.sampled_from(["", "ipv4:127.0.0.1:50000"]),
)
def test_a_call_begins_with_its_method_deadline_and_connection(
    method, remaining, first, connection
) -> None:
    begin = CallBegin(method, remaining, first, connection=connection)
    assert read_call_body(call_body(begin)) == begin


@given(METHODS, st.binary())
def test_a_call_may_begin_with_its_first_message(method: str, message: bytes) -> None:
    begin = CallBegin(method, 1.5, First.HERE, message)
    assert read_call_body(call_body(begin)) == begin


def test_a_deadline_that_has_passed_is_zero() -> None:
    assert read_call_body(call_body(CallBegin("/a/b", -0.5))).remaining == 0.0


@given(st.integers(0, (1 << 32) - 1))
def test_the_number_of_written_messages_is_kept(count: int) -> None:
    assert read_count_body(count_body(count)) == count


@given(st.floats(0, 1e9))
def test_the_seconds_of_a_stop_are_kept(seconds: float) -> None:
    assert read_seconds_body(seconds_body(seconds)) == seconds
