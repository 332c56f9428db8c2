"""Messages that may be delayed, so that short records of other calls go first.

Why
    The other end receives 256 KiB in an iteration of its event loop. If a message of 16 MiB were
    one record, the records of all other calls would wait for 64 iterations.
How
    A message above `PIECE_BYTES` is sent in pieces, and a piece is written only while the socket
    takes more. The other end joins the pieces of a call (`ReceivedPieces`). A message whose last
    part goes through shared memory, such as captured rows, is sent whole, once the other end has
    read most of the earlier parts. The calls whose messages wait take turns, a piece or a whole
    message each.

Invariant: the messages of a call, and the records that come after them, keep their order. If a call
ends, its unsent pieces are dropped, and the other end drops those that it has received.
"""

from collections import deque

from rheostat_server.front_ends.records import Kind, Record
from rheostat_server.front_ends.shared_parts import LARGE_PART
from rheostat_wire.message_parts import Payload

PIECE_BYTES = 64 << 10
"""Bytes of a piece."""

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

    @property
    def first(self) -> Record:
        """The record whose turn it is; if pieces of it were sent, only the rest."""
        return next(iter(self._waiting.values()))[0]

    def remove_first(self) -> list[Record]:
        """Removes the record whose turn it is, because it was sent whole.

        Returns:
            The short records of its call behind it, which are removed too and must be sent now.
            Otherwise a token that came after rows would wait for the rows of all other calls.
        """
        call, records = self._take_turn()
        records.popleft()
        short: list[Record] = []
        while records and sum(map(len, records[0].body)) < LARGE_PART:
            short.append(records.popleft())
        self._end_turn(call, records)
        return short

    def next(self) -> Record:
        """The next record to send; a message is not large. To be called if records wait."""
        call, records = self._take_turn()
        record = records.popleft()
        piece, rest = _cut(record.body)
        if rest and record.kind is Kind.MESSAGE:
            records.appendleft(record._replace(body=rest))
            record = Record(Kind.PIECE, call, piece)
        self._end_turn(call, records)
        return record

    def _take_turn(self) -> tuple[int, deque[Record]]:
        """Removes the call whose turn it is, and its records."""
        call = next(iter(self._waiting))
        return call, self._waiting.pop(call)

    def _end_turn(self, call: int, records: deque[Record]) -> None:
        if records:
            self._waiting[call] = records  # behind the other calls

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
