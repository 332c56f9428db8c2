"""Large parts pass through shared memory as they are, and none is overwritten before it is read."""

import asyncio
import os
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from rheostat_server.front_ends.process import FrontEnd
from rheostat_server.front_ends.record_connection import RecordConnection
from rheostat_server.front_ends.records import Kind
from rheostat_server.front_ends.shared_parts import LARGE_PART, Place, SharedParts, create_memory

SIZE = 1 << 12


def both_ends(size: int = SIZE) -> tuple[SharedParts, SharedParts]:
    """The server's end and the front end's."""
    descriptor = create_memory(size)
    try:
        return SharedParts(descriptor, size), SharedParts(descriptor, size)
    finally:
        os.close(descriptor)


@given(st.lists(st.one_of(st.none(), st.binary(min_size=1, max_size=SIZE)), max_size=40))
def test_parts_are_read_as_they_were_written_in_any_order_of_writes_and_reads(
    steps: list[bytes | None],
) -> None:
    server, front_end = both_ends()
    waiting: deque[tuple[Place, bytes]] = deque()
    for part in steps:
        place = None if part is None else server.put(part)
        if part is not None and place is not None:
            waiting.append((place, part))
        elif waiting:  # a read, or there is no space
            place, written = waiting.popleft()
            assert front_end.take(b"head", place) == b"head" + written
        else:
            assert part is None, "an empty ring has space for every part"
    for place, written in waiting:
        assert front_end.take(b"", place) == written


def test_a_ring_has_space_again_once_its_parts_were_read() -> None:
    server, front_end = both_ends()
    first = server.put(b"a" * (SIZE // 2))
    assert first is not None
    assert server.put(b"b" * (SIZE // 2)) is not None
    assert server.put(b"c") is None
    front_end.take(b"", first)
    assert server.put(b"c" * (SIZE // 2)) is not None


def test_a_place_survives_the_wire() -> None:
    place = Place((1 << 40) + 64, 200_000)
    assert Place.read(memoryview(place.to_bytes())) == place


class Pipe(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)


async def test_parts_for_which_there_is_no_space_go_through_the_socket() -> None:
    parts = [bytes([number]) * (2 * LARGE_PART) for number in range(3)]
    received: list[tuple[Kind, int, bytes]] = []
    server = RecordConnection(lambda *record: None, lambda: None)
    front_end = RecordConnection(lambda *record: received.append(record), lambda: None)
    server.sent_parts, front_end.received_parts = both_ends(4 * LARGE_PART)
    pipe = Pipe()
    server.connection_made(pipe)
    for number, part in enumerate(parts):
        server.send(Kind.MESSAGE, number, b"head", memoryview(part))
    server.send(Kind.MESSAGE, 3, parts[0], b"small")
    await asyncio.sleep(0)
    assert len(pipe.written) < 5 * LARGE_PART
    front_end.data_received(pipe.written[:9])
    front_end.data_received(pipe.written[9:])
    assert received == [
        *((Kind.MESSAGE, number, b"head" + part) for number, part in enumerate(parts)),
        (Kind.MESSAGE, 3, parts[0] + b"small"),
    ]


async def test_a_front_end_does_not_write_into_the_memory() -> None:
    """Its large requests would overwrite rows that other clients have not been sent yet."""
    server, shared = both_ends(4 * LARGE_PART)
    front_end = FrontEnd(shared)
    connection = front_end._connection
    pipe = Pipe()
    connection.connection_made(pipe)
    rows, request = b"r" * LARGE_PART, b"x" * LARGE_PART
    place = server.put(rows)
    assert place is not None
    front_end.send(Kind.MESSAGE, 1, request)
    await asyncio.sleep(0)
    assert pipe.written.endswith(request)
    assert shared.take(b"", place) == rows
