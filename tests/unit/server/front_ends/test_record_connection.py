"""Records over the socket between the server and a front end: their order, cuts and ends."""

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rheostat_server.front_ends import record_connection
from rheostat_server.front_ends.large_messages import PIECE_BYTES, ReceivedPieces
from rheostat_server.front_ends.record_connection import RecordConnection
from rheostat_server.front_ends.records import Kind
from rheostat_server.front_ends.shared_parts import LARGE_PART, SharedParts, create_memory

from ....effort import FACTOR

Record = tuple[Kind, int, bytes]
RECORDS = st.lists(
    st.tuples(st.sampled_from(Kind), st.integers(0, (1 << 32) - 1), st.binary(max_size=40))
)


def connection(received: list[Record]) -> RecordConnection:
    return RecordConnection(lambda *record: received.append(record), lambda: None)


def messages(records: list[Record]) -> dict[int, list[bytes]]:
    """The complete messages among records, by call."""
    found: dict[int, list[bytes]] = {}
    pieces: defaultdict[int, ReceivedPieces] = defaultdict(ReceivedPieces)
    for kind, call, body in records:
        if kind is Kind.PIECE:
            pieces[call].add(body)
        elif kind is Kind.MESSAGE:
            found.setdefault(call, []).append(pieces[call].complete(body))
    return found


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
    large = memoryview(bytes(range(256)) * 128)
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
            if len(data) >= 1 << 15:
                raise MemoryError
            super().write(data)

        def abort(self) -> None:
            self.aborted = True

    pipe = FullPipe()

    async def send() -> None:
        sender = connection([])
        sender.connection_made(pipe)
        sender.send(Kind.MESSAGE, 1, b"head", memoryview(bytes(1 << 15)))
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


async def test_a_large_message_arrives_over_a_socket(pair) -> None:
    sender, _, received = pair
    large = bytes(range(256)) * (64 << 10)
    records = [(Kind.READ, 1, b""), (Kind.MESSAGE, 2, large), (Kind.WRITTEN, 3, b"")]
    for record in records:
        sender.send(*record)
    async with asyncio.timeout(30):
        while not received or received[-1][0] is not Kind.MESSAGE:
            await asyncio.sleep(0.001)
    assert messages(received) == {2: [large]}
    assert {kind for kind, call, _ in received if call != 2} == {Kind.READ, Kind.WRITTEN}


async def test_what_is_sent_before_a_close_arrives(pair) -> None:
    sender, _, received = pair
    sender.send(Kind.NOT_LISTENING, 0, b"why")
    sender.close()
    async with asyncio.timeout(30):
        while not received:
            await asyncio.sleep(0.001)
    assert received == [(Kind.NOT_LISTENING, 0, b"why")]


class SlowPipe(Pipe):
    """Is full after each large write, until `drain`."""

    connected: RecordConnection
    full = False

    def write(self, data: bytes) -> None:
        super().write(data)
        if len(data) >= PIECE_BYTES // 2 and not self.full:
            self.full = True
            self.connected.pause_writing()

    def drain(self) -> None:
        self.full = False
        self.connected.resume_writing()

    def close(self) -> None:
        pass


class Ends:
    """Two connections. What one sends arrives at the other when `pass_on` is called."""

    def __init__(self) -> None:
        self.received: list[Record] = []
        self.pipe = SlowPipe()
        self.sender = self.pipe.connected = connection([])
        self.sender.connection_made(self.pipe)
        self.receiver = connection(self.received)

    async def pass_on(self, writes: int = 1) -> None:
        """Lets the socket take more, `writes` times."""
        for _ in range(writes):
            await asyncio.sleep(0)
            written, self.pipe.writes = self.pipe.writes, []
            self.receiver.data_received(b"".join(written))
            if self.pipe.full:
                self.pipe.drain()

    async def pass_on_all(self) -> None:
        """Passes on until nothing is left."""
        before = -1
        while before < len(self.received):
            before = len(self.received)
            await self.pass_on(2)

    def order(self) -> list[tuple[Kind, int]]:
        """Kinds and calls of the received records, without pieces."""
        return [(kind, call) for kind, call, _ in self.received if kind is not Kind.PIECE]


LARGE = bytes(range(256)) * (10 * PIECE_BYTES // 256) + b"end"


async def test_records_of_other_calls_arrive_before_a_large_message_is_complete() -> None:
    ends = Ends()
    ends.sender.send(Kind.MESSAGE, 1, LARGE)
    await ends.pass_on()
    ends.sender.send(Kind.MESSAGE, 2, b"small")
    await ends.pass_on_all()
    assert ends.order() == [(Kind.MESSAGE, 2), (Kind.MESSAGE, 1)]


async def test_records_about_the_other_direction_do_not_wait_for_the_call_s_message() -> None:
    ends = Ends()
    ends.sender.send(Kind.MESSAGE, 1, LARGE)
    await ends.pass_on()
    ends.sender.send(Kind.WRITTEN, 1)
    await ends.pass_on_all()
    assert ends.order() == [(Kind.WRITTEN, 1), (Kind.MESSAGE, 1)]


async def test_the_messages_of_a_call_and_its_end_keep_their_order() -> None:
    ends = Ends()
    sent = [LARGE, b"small", LARGE[1:], LARGE[:PIECE_BYTES], b""]
    for body in sent:
        ends.sender.send(Kind.MESSAGE, 1, body)
    ends.sender.send(Kind.END, 1, b"status")
    await ends.pass_on_all()
    assert messages(ends.received) == {1: sent}
    assert ends.received[-1] == (Kind.END, 1, b"status")
    assert not ends.sender._large


async def test_large_messages_take_turns() -> None:
    ends = Ends()
    ends.sender.send(Kind.MESSAGE, 1, LARGE)
    ends.sender.send(Kind.MESSAGE, 2, LARGE[: 3 * PIECE_BYTES])
    ends.sender.send(Kind.MESSAGE, 3, LARGE[: 2 * PIECE_BYTES])
    await ends.pass_on_all()
    assert ends.order() == [(Kind.MESSAGE, call) for call in (3, 2, 1)]
    before = ends.received.index((Kind.MESSAGE, 2, LARGE[2 * PIECE_BYTES : 3 * PIECE_BYTES]))
    assert [call for _, call, _ in ends.received[:before]] == [1, 2, 3, 1, 2, 3, 1]


async def test_a_call_that_is_done_leaves_no_pieces() -> None:
    ends = Ends()
    for call in (1, 2):
        ends.sender.send(Kind.MESSAGE, call, LARGE)
        ends.sender.send(Kind.HALF_CLOSED, call)
    await ends.pass_on(3)
    ends.sender.send(Kind.DONE, 1)
    await ends.pass_on_all()
    done = ends.received.index((Kind.DONE, 1, b""))
    assert 1 not in {call for _, call, _ in ends.received[done + 1 :]}
    assert ends.order() == [(Kind.DONE, 1), (Kind.MESSAGE, 2), (Kind.HALF_CLOSED, 2)]
    assert not ends.sender._large


@pytest.mark.parametrize("kind", [Kind.END, Kind.DONE])
async def test_pieces_of_a_call_that_the_other_end_has_ended_are_not_sent(kind: Kind) -> None:
    ends = Ends()
    for call in (1, 2):
        ends.sender.send(Kind.MESSAGE, call, LARGE)
    await ends.pass_on(3)
    ends.receiver.connection_made(back := Pipe())
    ends.receiver.send(kind, 1)
    await ends.pass_on()
    ends.sender.data_received(b"".join(back.writes))
    before = len(ends.received)
    await ends.pass_on_all()
    assert ends.order() == [(Kind.MESSAGE, 2)]
    assert {call for _, call, _ in ends.received[before + 4 :]} == {2}


async def test_a_connection_that_is_lost_leaves_no_pieces() -> None:
    ends = Ends()
    ends.sender.send(Kind.MESSAGE, 1, LARGE)
    await ends.pass_on()
    ends.sender.connection_lost(None)
    ends.sender.send(Kind.MESSAGE, 2, LARGE)
    await asyncio.sleep(0)
    assert not ends.sender._large


SIZES = st.sampled_from(
    [0, 5, LARGE_PART, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 150_000]
)


@pytest.fixture
def shared() -> Ends:
    """Ends with shared memory."""
    ends = Ends()
    memory = create_memory()
    ends.sender.sent_parts = SharedParts(memory)
    ends.receiver.received_parts = SharedParts(memory)
    os.close(memory)
    return ends


ROWS = bytes(range(256)) * 1024


async def test_a_token_overtakes_rows_that_the_other_end_has_not_read(shared: Ends) -> None:
    for call in range(32):
        shared.sender.send(Kind.MESSAGE, call, b"head", ROWS)
    await asyncio.sleep(0)
    shared.sender.send(Kind.MESSAGE, 32, b"token")
    await asyncio.sleep(0)
    await shared.pass_on()
    read = [call for _, call in shared.order()]
    assert read == [0, 1, 2, 3, 32]
    async with asyncio.timeout(10):
        while len(shared.received) < 33:
            await asyncio.sleep(0.001)  # the other end sends nothing
            await shared.pass_on()
    assert shared.order() == [(Kind.MESSAGE, call) for call in (0, 1, 2, 3, 32, *range(4, 32))]
    assert messages(shared.received) == {call: [b"head" + ROWS] for call in range(32)} | {
        32: [b"token"]
    }


async def test_rows_leave_when_the_other_end_reports_that_it_has_read(
    shared: Ends, monkeypatch
) -> None:
    monkeypatch.setattr(record_connection, "_RETRY_SECONDS", 3600)
    for call in range(8):
        shared.sender.send(Kind.MESSAGE, call, ROWS)
    await shared.pass_on(3)
    assert len(shared.received) == 4
    shared.receiver.connection_made(back := Pipe())
    shared.receiver.send(Kind.WRITTEN, 0)
    await asyncio.sleep(0)
    shared.sender.data_received(b"".join(back.writes))
    await shared.pass_on(3)
    assert len(shared.received) == 8


async def test_messages_of_several_large_parts_wait_for_the_reader_too(shared: Ends) -> None:
    for call in range(8):
        shared.sender.send(Kind.MESSAGE, call, *(4 * [b"head", 4 * ROWS]))
    await asyncio.sleep(0.05)
    assert shared.sender.sent_parts is not None
    assert shared.sender.sent_parts.unread <= record_connection._MOST_UNREAD + PIECE_BYTES
    async with asyncio.timeout(20):
        while sum(kind is Kind.MESSAGE for kind, _, _ in shared.received) < 8:
            await asyncio.sleep(0)
            await shared.pass_on()
    assert messages(shared.received) == {call: [4 * (b"head" + 4 * ROWS)] for call in range(8)}


async def test_one_timer_waits_for_the_reader(shared: Ends, monkeypatch) -> None:
    later = asyncio.get_running_loop().call_later
    timers: list[asyncio.TimerHandle] = []

    def call_later(*arguments):
        timers.append(later(*arguments))
        return timers[-1]

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
    for call in range(8):
        shared.sender.send(Kind.MESSAGE, call, ROWS)
    shared.receiver.connection_made(back := Pipe())
    shared.receiver.send(Kind.WRITTEN, 0)
    await asyncio.sleep(0)
    for _ in range(20):
        shared.sender.data_received(b"".join(back.writes))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(timers) > 1
    assert sum(not timer.cancelled() for timer in timers) <= 1


async def test_a_call_that_is_done_leaves_no_rows_that_wait(shared: Ends) -> None:
    for call in range(8):
        shared.sender.send(Kind.MESSAGE, call, ROWS)
    for call in range(8):
        shared.sender.send(Kind.END, call)
        shared.sender.send(Kind.DONE, call)
    assert not shared.sender._large


async def test_rows_and_what_follows_them_keep_their_order(shared: Ends, monkeypatch) -> None:
    monkeypatch.setattr(record_connection, "_MOST_UNREAD", 1)
    sent = [ROWS, b"small", ROWS[1:], b"small", ROWS[:PIECE_BYTES]]
    for call in (1, 2):
        for body in sent:
            shared.sender.send(Kind.MESSAGE, call, body)
        shared.sender.send(Kind.END, call, b"status")
    async with asyncio.timeout(10):
        while sum(kind is Kind.END for kind, _, _ in shared.received) < 2:
            await asyncio.sleep(0.001)
            await shared.pass_on()
    assert messages(shared.received) == {1: sent, 2: sent}
    for call in (1, 2):
        kinds = [kind for kind, of, _ in shared.received if of == call]
        assert kinds == [Kind.MESSAGE] * len(sent) + [Kind.END]


async def test_a_token_behind_waiting_rows_does_not_wait_for_rows_of_others(shared: Ends) -> None:
    for call in range(8):
        shared.sender.send(Kind.MESSAGE, call, ROWS)
    shared.sender.send(Kind.MESSAGE, 4, b"token")
    async with asyncio.timeout(10):
        while len(shared.received) < 9:
            await asyncio.sleep(0.001)
            await shared.pass_on()
    assert [call for _, call in shared.order()] == [0, 1, 2, 3, 4, 4, 5, 6, 7]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.lists(SIZES, max_size=3), st.integers(0, 2))),
    st.integers(1, 8),
    st.sampled_from([1, 2 * LARGE_PART, 1 << 20]),
)
@settings(max_examples=100 * FACTOR, deadline=None)
def test_messages_arrive_unchanged_whether_shared_memory_is_full_or_not(
    sends, ring, unread
) -> None:
    """A call's messages keep their order, and no shared part is overwritten before it is read."""

    async def send() -> None:
        ends = Ends()
        memory = create_memory(ring * LARGE_PART)
        ends.sender.sent_parts = SharedParts(memory, ring * LARGE_PART)
        ends.receiver.received_parts = SharedParts(memory, ring * LARGE_PART)
        os.close(memory)
        sent: dict[int, list[bytes]] = {}
        for number, (call, sizes, writes) in enumerate(sends):
            parts = [bytes([number % 256]) * size for size in sizes]
            sent.setdefault(call, []).append(b"".join(parts))
            ends.sender.send(Kind.MESSAGE, call, *parts)
            await ends.pass_on(writes)
        async with asyncio.timeout(20):
            while messages(ends.received) != sent:
                await ends.pass_on()
        assert not ends.sender._large

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_connection, "_MOST_UNREAD", unread)
        patch.setattr(record_connection, "_RETRY_SECONDS", 0)
        asyncio.run(send())
