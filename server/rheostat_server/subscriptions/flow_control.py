"""The memory that a reader grants: the credit of its calls, and its buffer on the server.

Invariants: no payload is sent without credit. Credit and buffer are never so small that no row
could ever be sent.
"""

from collections.abc import Sequence

from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.errors import InvalidValue
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import capture_service_pb2


class Credit:
    """Bytes of payload that a subscription's call may send."""

    def __init__(self) -> None:
        """There is no credit."""
        self.window = 0
        """The largest credit so far, in any call. A call that resumes may begin with little."""
        self.endless = False
        """Whether payloads are sent without credit."""
        self._left = 0

    def begin(self, size: int) -> None:
        """Begins a call with `size` bytes."""
        self._left = 0
        if size:
            self.grant(size)

    @property
    def left(self) -> int:
        """Bytes that may be sent now; 0 if `endless`."""
        return 0 if self.endless else self._left

    def grant(self, size: int) -> None:
        """Adds credit.

        Raises:
            InvalidValue: it is 0.
        """
        if size < 1:
            raise InvalidValue("allows at least 1 byte", field="credit.bytes")
        self._left += size
        self.window = max(self.window, self._left)

    def try_spend(self, payload: int) -> bool:
        """Spends the bytes of a payload; False if the credit does not cover it."""
        if self.endless:
            return True
        if payload > self._left:
            return False
        self._left -= payload
        return True


def check_credit(
    opened: capture_service_pb2.SubscribeOpen,
    captures: Sequence[ResolvedCapture],
    row_type: FloatType,
) -> None:
    """Refuses credit or a buffer too small for a row of the subscription's own captures.

    Args:
        opened: the message that opens the subscription.
        captures: its captures.
        row_type: element type of rows in the engine.

    Raises:
        InvalidValue: one of them is too small.
    """
    rows = [capture.form.row_bytes(capture.numbers, capture.kind) for capture in captures]
    least = max(rows, default=0)
    if 0 < opened.credit_bytes < least:
        raise InvalidValue(
            f"a row takes {least} bytes and is sent only if the credit covers all of it: grant at "
            "least as much, or 0 now and more later",
            field="open.credit_bytes",
        )
    least = position_bytes(captures, row_type)
    if opened.HasField("buffer_bytes") and opened.buffer_bytes < least:
        raise InvalidValue(
            f"one position of these captures takes {least} bytes; the buffer must hold one",
            field="open.buffer_bytes",
        )


def position_bytes(captures: Sequence[ResolvedCapture], row_type: FloatType) -> int:
    """Bytes of all rows of one position.

    Rows are counted in the engine's element type whatever their encoding, because rows that several
    readers want in different forms leave the engine as they are.
    """
    return sum(len(capture.indices) * capture.width * row_type.itemsize for capture in captures)
