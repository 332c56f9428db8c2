"""Large messages, which are sent in pieces so that records of other calls go in between.

Why
    The other end receives 256 KiB in an iteration of its event loop. If a message of 16 MiB were
    one record, the records of all other calls would wait for 64 iterations.
How
    A piece is written only while the socket takes more. The calls whose large messages wait take
    turns, a piece each. The other end joins the pieces of a call (`ReceivedPieces`).

Invariant: the messages of a call, and the records that come after them, keep their order. If a call
ends, its unsent pieces are dropped, and the other end drops those that it has received.
"""

from collections import deque

from rheostat_server.front_ends.records import Kind, Record
from rheostat_wire.message_parts import Payload

PIECE_BYTES = 64 << 10
"""Bytes of a piece. A longer message is large."""

_ORDERED = (Kind.MESSAGE, Kind.HALF_CLOSED, Kind.END)
"""Records that wait for earlier messages of their call. The others are about messages in the other
direction."""


class LargeMessages:
    """The large messages that are being sent, and the records that wait for them."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Record]] = {}
        """Records by call. Of the first record of each call pieces may have been sent, if it is a
        message. The call whose turn it is comes first."""

    def __bool__(self) -> bool:
        """Whether records wait."""
        return bool(self._waiting)

    def holds_back(self, kind: Kind, call: int) -> bool:
        """Whether a record must wait for an earlier large message of its call."""
        return call in self._waiting and kind in _ORDERED

    def add(self, record: Record) -> None:
        """Adds a large message, or a record that is held back."""
        self._waiting.setdefault(record.call, deque()).append(record)

    def next(self) -> Record:
        """The next record to send; a message is not large. To be called if records wait."""
        call = next(iter(self._waiting))
        records = self._waiting.pop(call)
        record = records.popleft()
        piece, rest = _cut(record.body)
        if rest and record.kind is Kind.MESSAGE:
            records.appendleft(record._replace(body=rest))
            record = Record(Kind.PIECE, call, piece)
        if records:
            self._waiting[call] = records  # behind the other calls
        return record

    def drop(self, call: int) -> None:
        """Drops what waits of a call, because the call has ended."""
        self._waiting.pop(call, None)

    def clear(self) -> None:
        """Drops everything, because the connection is lost."""
        self._waiting.clear()


class ReceivedPieces:
    """The pieces that were received of a call's next message."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        """Adds the body of a record PIECE."""
        self._pieces.append(piece)

    def complete(self, last: bytes) -> bytes:
        """The message whose record MESSAGE has the body `last`."""
        if not self._pieces:
            return last
        message = b"".join((*self._pieces, last))
        self._pieces.clear()
        return message

    def clear(self) -> None:
        """Drops the pieces, because the call has ended."""
        self._pieces.clear()


def _cut(body: tuple[Payload, ...]) -> tuple[tuple[Payload, ...], tuple[Payload, ...]]:
    """The first `PIECE_BYTES` of a body and the rest, which is empty if the body is not longer."""
    room = PIECE_BYTES
    for index, part in enumerate(body):
        if len(part) > room:
            view = memoryview(part)
            return (*body[:index], view[:room]), (view[room:], *body[index + 1 :])
        room -= len(part)
    return body, ()
