"""The records that the server and a front end exchange.

A record is a kind, the number of a call, and bytes. The front end numbers the calls.
`record_connection` sends records over a socket.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

from rheostat_wire.message_parts import Payload

_SECONDS = struct.Struct("<d")

_CALL = struct.Struct("<dB")
"""Remaining seconds of a call, and a `First`. The method follows, then a zero byte and the message
if there is one."""

_COUNT = struct.Struct("<I")


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
    PIECE = 14
    """Both: a part of the call's next message, which ends with MESSAGE; see `large_messages`."""


class Record(NamedTuple):
    """A record that is to be sent."""

    kind: Kind
    call: int
    body: tuple[Payload, ...]
    """The parts of the body."""


class First(IntEnum):
    """The state of the first message of a call when the call begins."""

    UNREAD = 0
    """The front end reads it when the server sends READ."""
    READING = 1
    """The front end is reading it, and sends MESSAGE or HALF_CLOSED without READ."""
    HERE = 2
    """It is in the body of BEGIN."""
    COMING = 3
    """The front end has read it, and sends it in pieces without READ, because it is large."""


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
    """The address of the client's connection, unless `first` is HERE or COMING."""


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
