"""The records that the server and a front end exchange over a socket.

A record is a kind, the number of a call, and bytes. The front end numbers the calls. Records that
are sent in one iteration of the event loop are written together. The last part of a body may be in
shared memory; see `shared_parts`.
"""

import asyncio
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from rheostat_server.front_ends.shared_parts import LARGE_PART, PLACE_BYTES, Place, SharedParts
from rheostat_wire.message_parts import Payload

_HEAD = struct.Struct("<IBI")
"""Bytes of the body, kind, number of the call."""

_SECONDS = struct.Struct("<d")

_CALL = struct.Struct("<dB")
"""Remaining seconds of a call, and a `First`. The method follows, then a zero byte and the message
if there is one."""

_COUNT = struct.Struct("<I")

_SHARED = 0x80
"""Is added to the kind of a record whose body ends with the place of its last part."""


class Kind(IntEnum):
    """The meaning of a record, and the side that sends it. Most kinds have no body."""

    LISTENING = 1
    """Front end: it listens."""
    NOT_LISTENING = 2
    """Front end: it cannot listen. Body: the error."""
    BEGIN = 3
    """Front end: a call begins. Body: see `call_body`."""
    READ = 4
    """Server: requests the next message. The first may be sent without a request; see `First`."""
    MESSAGE = 5
    """Both: a message. A front end sends one for each READ."""
    HALF_CLOSED = 6
    """Front end, instead of MESSAGE: the client has closed its side of the stream."""
    WRITTEN = 7
    """Front end: gRPC has taken messages. Body: their number since the last WRITTEN; see
    `count_body`."""
    END = 8
    """Server: the call ends after its messages, or without them if the client does not read them
    for `STATUS_SECONDS`. Body: a `google.rpc.Status`, which is empty for OK."""
    DONE = 9
    """Front end: the call is over, because its status is sent or its client has disconnected."""
    HEALTH = 10
    """Server: the new answer of health checks. Body: one byte, the status."""
    STOP = 11
    """Server: the front end must end. Body: one double, the grace period of calls in seconds."""
    PING = 12
    """Server: the front end must answer with PONG, which shows that its event loop runs."""
    PONG = 13
    """Front end: the answer to PING."""


_KINDS = {kind.value: kind for kind in Kind}
"""The kinds by number. A look-up takes a fifth of the time of `Kind(number)`."""


class First(IntEnum):
    """The state of the first message of a call when the call begins."""

    UNREAD = 0
    """The front end reads it when the server sends READ."""
    READING = 1
    """The front end is reading it, and sends MESSAGE or HALF_CLOSED without READ."""
    HERE = 2
    """It is in the body of BEGIN."""


class CallBegin(NamedTuple):
    """The body of BEGIN."""

    method: str
    """The full name of the method."""
    remaining: float | None
    """Seconds until the client's deadline; None if there is none."""
    first: First = First.UNREAD
    message: bytes = b""
    """The first message, if `first` is HERE."""
    connection: str = ""
    """The address of the client's connection, unless `first` is HERE."""


def call_body(begin: CallBegin) -> bytes:
    """The body of BEGIN."""
    remaining = -1.0 if begin.remaining is None else max(0.0, begin.remaining)
    head = _CALL.pack(remaining, begin.first) + begin.method.encode()
    here = begin.first is First.HERE
    return b"\0".join((head, begin.message if here else begin.connection.encode()))


def read_call_body(body: bytes) -> CallBegin:
    """Reads the body of BEGIN."""
    remaining, first = _CALL.unpack_from(body)
    end = body.index(0, _CALL.size)
    begin = CallBegin(
        body[_CALL.size : end].decode(), None if remaining < 0 else remaining, First(first)
    )
    rest = body[end + 1 :]
    if begin.first is First.HERE:
        return begin._replace(message=rest)
    return begin._replace(connection=rest.decode())


def count_body(count: int) -> bytes:
    """The body of WRITTEN."""
    return _COUNT.pack(count)


def read_count_body(body: bytes) -> int:
    """The number of messages in the body of WRITTEN."""
    (count,) = _COUNT.unpack(body)
    return int(count)


def seconds_body(seconds: float) -> bytes:
    """The body of STOP."""
    return _SECONDS.pack(seconds)


def read_seconds_body(body: bytes) -> float:
    """The seconds in the body of STOP."""
    (seconds,) = _SECONDS.unpack(body)
    return float(seconds)


class RecordConnection(asyncio.Protocol):
    """One end of the socket between the server and a front end.

    `receive` is called with each record, `on_lost` once the other end has closed the socket. The
    bytes that wait to be sent are not limited here, because each call limits its unread messages.
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
        self._received = bytearray()
        self._wanted = _HEAD.size
        """Bytes that must have been received before the next record is complete."""

    def send(self, kind: Kind, call: int = 0, *body: Payload) -> None:
        """Queues a record. It is dropped if the connection is lost.

        The parts of the body must not change until they are sent.
        """
        if not self._outgoing:
            self._schedule()
        marked: int = kind
        if self.sent_parts is not None and body and len(body[-1]) >= LARGE_PART:
            place = self.sent_parts.put(body[-1])
            if place is not None:
                marked, body = kind | _SHARED, (*body[:-1], place.to_bytes())
        self._outgoing += (_HEAD.pack(sum(map(len, body)), marked, call), *body)

    def close(self) -> None:
        """Sends all queued records, then closes the connection."""
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
        self._on_lost()

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
                self._receive(_KINDS[kind], call, data)
        del received[:begin]

    def _schedule(self) -> None:
        """Lets `_flush` be called soon."""
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is None:
            return
        try:
            _write(self._transport, outgoing)
        except BaseException:
            # The other end would read the next record as the rest of this incomplete record.
            self._transport.abort()
            raise


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
