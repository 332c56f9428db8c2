"""The room that a reader gives: the credit of its calls, and its buffer on the server.

Invariants: no payload leaves that the credit does not cover. Neither is so small that nothing could
ever come.
"""

from collections.abc import Sequence

from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.errors import InvalidValue
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import capture_service_pb2


class Credit:
    """Bytes of payload that a subscription's call may send."""

    def __init__(self) -> None:
        """None."""
        self.window = 0
        """The most that has stood at a time, in any call: one that goes on for a reader who has
        much in hand begins with little."""
        self.endless = False
        """Whether everything may be sent."""
        self._left = 0

    def begin(self, size: int) -> None:
        """A call begins, with so much."""
        self._left = 0
        if size:
            self.grant(size)

    @property
    def left(self) -> int:
        """What may be sent now; 0 where it is endless."""
        return 0 if self.endless else self._left

    def grant(self, size: int) -> None:
        """More may be sent.

        Raises:
            InvalidValue: it allows nothing.
        """
        if size < 1:
            raise InvalidValue("allows at least 1 byte", field="credit.bytes")
        self._left += size
        self.window = max(self.window, self._left)

    def pay(self, payload: int) -> bool:
        """Whether it covers a payload, which is then spent."""
        if self.endless:
            return True
        if payload > self._left:
            return False
        self._left -= payload
        return True


def check_room(
    observer_capture: capture_service_pb2.SubscribeOpen,
    captures: Sequence[ResolvedCapture],
    held: FloatType,
) -> None:
    """Refuses room in which nothing of a subscription's own captures has a place.

    Args:
        observer_capture: what opens it.
        captures: what it captures.
        held: element type of rows in the engine.

    Raises:
        InvalidValue: there is too little.
    """
    rows = [one.form.row_bytes(one.numbers, one.kind) for one in captures]
    least = max(rows, default=0)
    if 0 < observer_capture.credit_bytes < least:
        raise InvalidValue(
            f"a row takes {least} bytes and is sent only if the credit covers all of it: grant at "
            "least as much, or 0 now and more later",
            field="open.credit_bytes",
        )
    least = position_bytes(captures, held)
    if observer_capture.HasField("buffer_bytes") and observer_capture.buffer_bytes < least:
        raise InvalidValue(
            f"one position of these captures takes {least} bytes; the buffer must hold one",
            field="open.buffer_bytes",
        )


def position_bytes(captures: Sequence[ResolvedCapture], held: FloatType) -> int:
    """Bytes of all rows of one position.

    Rows are counted in the engine's element type whatever their encoding, because rows that several
    readers want in different forms leave the engine as they are.
    """
    return sum(len(one.indices) * one.width * held.itemsize for one in captures)
