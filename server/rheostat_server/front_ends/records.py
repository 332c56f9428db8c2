"""What the server and a front end tell each other, over a socket between them.

Both sides send records: a kind, the number of a call, and bytes. The front end numbers the calls.
Records that are sent in one iteration of the event loop leave in one write.
"""

import asyncio
import struct
from collections.abc import Callable
from enum import IntEnum

_HEAD = struct.Struct("<IBI")
"""Bytes of the body, kind, number of the call."""

_REMAINING = struct.Struct("<d")


class Kind(IntEnum):
    """What a record says. The body is empty unless the kind describes it."""

    LISTENING = 1
    """Front end: it listens."""
    NOT_LISTENING = 2
    """Front end: it cannot listen. Body: why."""
    BEGIN = 3
    """Front end: a call begins. Body: see `call_body`."""
    READ = 4
    """Server: it wants the call's next message."""
    MESSAGE = 5
    """Both: a message. A front end sends one for each READ; the server waits for WRITTEN first."""
    HALF_CLOSED = 6
    """Front end, instead of MESSAGE: the client has closed its side of the stream."""
    WRITTEN = 7
    """Front end: gRPC has taken the last message."""
    END = 8
    """Server: the call ends. Body: a `google.rpc.Status`, which is empty for OK."""
    DONE = 9
    """Front end: the call is over, because its status is sent or its client has disconnected."""
    HEALTH = 10
    """Server: what health checks answer from now on. Body: one byte, the status."""
    STOP = 11
    """Server: the front end must end. Body: one double, the seconds that calls may still take."""


def call_body(method: str, remaining: float | None) -> bytes:
    """The body of BEGIN.

    Args:
        method: the full name of the method.
        remaining: seconds until the client's deadline; None if it has set none.
    """
    return _REMAINING.pack(-1.0 if remaining is None else max(0.0, remaining)) + method.encode()


def read_call_body(body: bytes) -> tuple[str, float | None]:
    """The method and the remaining seconds in the body of BEGIN."""
    (remaining,) = _REMAINING.unpack_from(body)
    return body[_REMAINING.size :].decode(), None if remaining < 0 else remaining


def seconds_body(seconds: float) -> bytes:
    """The body of STOP."""
    return _REMAINING.pack(seconds)


def read_seconds_body(body: bytes) -> float:
    """The seconds in the body of STOP."""
    (seconds,) = _REMAINING.unpack(body)
    return float(seconds)


class RecordConnection(asyncio.Protocol):
    """One end of the socket between the server and a front end.

    Nothing here limits what waits to be sent. Each call sends one message at a time, and waits for
    the answer.
    """

    def __init__(
        self, receive: Callable[[Kind, int, bytes], None], on_lost: Callable[[], None]
    ) -> None:
        """An end that is not connected yet.

        Args:
            receive: is called with each record.
            on_lost: is called once the other end is gone.
        """
        self._receive = receive
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._received = bytearray()
        self._wanted = _HEAD.size
        """Bytes that must have been received before the next record is complete."""

    def send(self, kind: Kind, call: int = 0, body: bytes = b"") -> None:
        """Sends a record soon. After the connection is lost it is dropped."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing += (_HEAD.pack(len(body), kind, call), body)

    def close(self) -> None:
        """Sends what is left, then closes the connection."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes over the socket."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone."""
        self._transport = None
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """Passes on every complete record."""
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
                self._receive(Kind(kind), call, bytes(view[body:begin]))
        del received[:begin]

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None and outgoing:
            self._transport.write(b"".join(outgoing))
