"""One end of the socket between the server and a front end.

Records that are sent in one iteration of the event loop are written together. The last part of a
body may be in shared memory; see `shared_parts`. Large messages are written after other records, in
pieces or when shared memory has room; see `large_messages`.
"""

import asyncio
import struct
from collections.abc import Callable, Sequence

from rheostat_server.front_ends.large_messages import PIECE_BYTES, LargeMessages
from rheostat_server.front_ends.records import Kind, Record
from rheostat_server.front_ends.shared_parts import LARGE_PART, PLACE_BYTES, Place, SharedParts
from rheostat_wire.message_parts import Payload

_HEAD = struct.Struct("<IBI")
"""Bytes of the body, kind, number of the call."""

_SHARED = 0x80
"""Is added to the kind of a record whose body ends with the place of its last part."""

_KINDS = {kind.value: kind for kind in Kind}
"""The kinds by number. A look-up takes a fifth of the time of `Kind(number)`."""

_PIECES = 4
"""Pieces that are written in one iteration of the event loop. The other end receives as many bytes
in one of its iterations."""

_MOST_UNREAD = 1 << 20
"""Limit of the bytes in shared memory that the other end has not read. Above it, messages with
shared parts wait. Otherwise a token that follows the rows of 32 prompts would wait until the front
end has passed on all of them."""

_RETRY_SECONDS = 0.001
"""Seconds after which messages that wait for the other end to read are tried again."""


class RecordConnection(asyncio.Protocol):
    """One end of the socket between the server and a front end.

    `receive` is called with each record, `on_lost` once the other end has closed the socket. The
    bytes that wait to be sent are not limited here, because each call limits its unread messages.

    DONE ends a call. When it is sent or received, the call's large messages that wait to be sent
    are dropped, with the records behind them. They are also dropped when END is received, because
    the server reads no more.
    """

    sent_parts: SharedParts | None = None
    """Passes large parts to the other end. None: they go through the socket."""
    received_parts: SharedParts | None = None
    """Has the large parts that the other end passes. Only one end may write into the memory, so a
    connection does not have both."""

    def __init__(
        self, receive: Callable[[Kind, int, bytes], None], on_lost: Callable[[], None]
    ) -> None:
        self._receive = receive
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[Payload] = []
        self._large = LargeMessages()
        self._scheduled = False
        """Whether `_flush` will be called."""
        self._full = False
        """Whether bytes that were written wait for the socket."""
        self._retry_timer: asyncio.TimerHandle | None = None
        """Set while large messages wait until the other end has read shared parts."""
        self._received = bytearray()
        self._wanted = _HEAD.size
        """Bytes that must have been received before the next record is complete."""

    def send(self, kind: Kind, call: int = 0, *body: Payload) -> None:
        """Queues a record. It is dropped if the connection is lost.

        The parts of the body must not change until they are sent.
        """
        size = sum(map(len, body))
        if size < LARGE_PART and not self._large:  # mostly so; the rest takes twice the time
            self._outgoing += (_HEAD.pack(size, kind, call), *body)
            if not self._scheduled:
                self._schedule_once()
            return
        if self._large:
            if kind is Kind.DONE:
                self._large.drop(call)
            elif self._large.holds_back(kind, call):
                self._large.add(Record(kind, call, body))
                return
        waits = self._large or self._reader_is_behind
        if kind is Kind.MESSAGE and waits and self._may_share(body):
            self._large.add(Record(kind, call, body))
        else:
            self._queue(Record(kind, call, body))
        self._schedule_once()

    def close(self) -> None:
        """Sends all queued records, except large messages, then closes the connection."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._transport = None
        self._large.clear()
        self._on_lost()

    def pause_writing(self) -> None:
        """Called by asyncio while bytes are written, if the socket is full."""
        self._full = True

    def resume_writing(self) -> None:
        """Called by asyncio once the socket has taken most of the bytes."""
        self._full = False
        if self._large:
            self._schedule_once()

    def data_received(self, data: bytes) -> None:
        """Calls `receive` with every complete record."""
        received = self._received
        received += data
        if len(received) < self._wanted:
            return
        begin = 0
        with memoryview(received) as view:
            while True:
                body = begin + _HEAD.size
                if len(received) < body:
                    self._wanted = _HEAD.size
                    break
                size, kind, call = _HEAD.unpack_from(received, begin)
                if len(received) < body + size:
                    self._wanted = _HEAD.size + size
                    break
                begin = body + size
                if kind & _SHARED and self.received_parts is not None:
                    place = Place.read(view[begin - PLACE_BYTES : begin])
                    data = self.received_parts.take(view[body : begin - PLACE_BYTES], place)
                    kind ^= _SHARED
                else:
                    data = bytes(view[body:begin])
                received_kind = _KINDS[kind]
                if self._large and received_kind in (Kind.END, Kind.DONE):
                    self._large.drop(call)
                self._receive(received_kind, call, data)
        del received[:begin]
        if self._retry_timer is not None:
            self._retry()  # a record that comes usually means that the other end has read parts

    @property
    def _reader_is_behind(self) -> bool:
        """Whether the other end has many bytes of shared parts to read."""
        return self.sent_parts is not None and self.sent_parts.unread >= _MOST_UNREAD

    def _may_share(self, body: tuple[Payload, ...]) -> bool:
        """Whether the last part of a body goes through shared memory if that has space."""
        return (
            self.sent_parts is not None
            and bool(body)
            and len(body[-1]) >= LARGE_PART
            and sum(map(len, body[:-1])) <= PIECE_BYTES
        )

    def _queue(self, record: Record) -> None:
        """Queues a record, as a large message if it is too long and has no shared part."""
        if self._share(record):
            return
        kind, call, body = record
        size = sum(map(len, body))
        if size > PIECE_BYTES and kind is Kind.MESSAGE:
            self._large.add(record)
        else:
            self._outgoing += (_HEAD.pack(size, kind, call), *body)

    def _share(self, record: Record) -> bool:
        """Queues a record with its last part in shared memory; returns whether it could."""
        kind, call, body = record
        if self.sent_parts is None or not self._may_share(body):
            return False
        place = self.sent_parts.put(body[-1])
        if place is None:
            return False
        body = (*body[:-1], place.to_bytes())
        self._outgoing += (_HEAD.pack(sum(map(len, body)), kind | _SHARED, call), *body)
        return True

    def _queue_large(self) -> bool:
        """Queues a large message or a piece of it; returns False if it waits for the other end."""
        first = self._large.first
        if self._reader_is_behind and any(len(part) >= LARGE_PART for part in first.body):
            return False
        if self._share(first):
            for record in self._large.remove_first():
                self._queue(record)
            return True
        self._queue(self._large.next())
        return True

    def _schedule_once(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._schedule()

    def _schedule(self) -> None:
        """Lets `_flush` be called soon."""
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Writes the queued records, then pieces of large messages while the socket has room."""
        self._scheduled = False
        if self._transport is None:
            self._outgoing.clear()
            self._large.clear()
            return
        try:
            self._write_queued(self._transport)
            for _ in range(_PIECES):
                if self._full or not self._large:
                    break
                if not self._queue_large():
                    self._wait_for_reader()
                    return
                self._write_queued(self._transport)
        except BaseException:
            # The other end would read the next record as the rest of this incomplete record.
            self._transport.abort()
            raise
        if self._large and not self._full:
            self._schedule_once()

    def _wait_for_reader(self) -> None:
        """Tries large messages again when the other end sends a record, or soon."""
        if self._retry_timer is None:
            loop = asyncio.get_running_loop()
            self._retry_timer = loop.call_later(_RETRY_SECONDS, self._retry)

    def _retry(self) -> None:
        """Lets `_flush` be called soon, if messages wait for the other end to read."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
            self._schedule_once()

    def _write_queued(self, transport: asyncio.Transport) -> None:
        outgoing, self._outgoing = self._outgoing, []
        _write(transport, outgoing)


def _write(transport: asyncio.Transport, parts: Sequence[Payload]) -> None:
    """Writes parts, the large ones by themselves, because copying them takes longer than a call."""
    small: list[Payload] = []
    for part in parts:
        if len(part) < LARGE_PART:
            small.append(part)
            continue
        transport.write(b"".join(small))
        small = []
        transport.write(part)
    if small:
        transport.write(b"".join(small))
