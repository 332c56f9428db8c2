"""The events of a subscription, and the check that none is missing or damaged.

Every tensor's checksum is verified. At the end of a request its rows are verified once more: by
count, and by a checksum over the checksums.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias, cast

import google_crc32c
import numpy as np
import numpy.typing as npt

from rheostat._activations import IntArray, Rows, positions_of, read_block
from rheostat._encodings import Encoding, Numbers
from rheostat._errors import DataLoss, ServerError
from rheostat._payloads import View
from rheostat._points import Site
from rheostat._receipts import read_word
from rheostat._results import DroppedRows, FinishReason
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, tensor_pb2, types_pb2


class Cursor(NamedTuple):
    """A place in a subscription from which `Engine.resume` continues."""

    subscription_id: str
    """Id of the subscription."""
    sequence: int
    """Number of the last event that shall not come again; 0 if all shall."""


class Heartbeat(NamedTuple):
    """The state of a subscription at the server, sent every 5 seconds without other events."""

    buffered_bytes: int
    """Bytes that wait for credit or the network."""
    credit_bytes: int
    """Bytes that may be sent without further credit."""
    last_sequence: int
    """Number of the last event."""


@dataclass(frozen=True, eq=False)
class CapturedRows:
    """Rows of a request, at sites that share their positions."""

    sequence: int
    """Number of the event, from 1 on without gaps."""
    request_id: str
    """The request."""
    capture: int
    """Index of the subscription's capture. Captures that requests send here count after those."""
    sample: int
    """Sample, from 0."""
    baseline: bool
    """Whether they are of the baseline."""
    sites: tuple[Site, ...]
    """Where, by layer, then point."""
    positions: IntArray
    """Absolute position of each row, int64 [positions], ascending."""
    token_ids: IntArray
    """Input token at each position, int64 [positions]."""
    shape: tuple[int, ...]
    """Of `values`: sites, positions, width."""
    _numbers: Numbers

    @property
    def values(self) -> FloatArray:
        """The rows, float32 [sites, positions, width].

        For encoding "rp8" they are projected to ``kept`` numbers. With ``projection=`` they are x·d
        for each direction d. With ``views=True`` the array is made at the first access, which
        raises Refused if the rows were acknowledged before.
        """
        return self._numbers.values

    @property
    def elements(self) -> npt.NDArray[np.generic] | None:
        """With ``views=True``: the elements as they travelled, of `shape`, read-only.

        float32, float16, or uint16 with bfloat16's bits. None without ``views=True``, and for
        encodings other than "raw". The array is no copy: its content changes once this client, or
        one that resumed the subscription, has acknowledged the rows. Access then raises Refused.
        """
        return self._numbers.elements if isinstance(self._numbers, View) else None

    @property
    def encoding(self) -> Encoding:
        """The encoding in which the rows travelled."""
        return self._numbers.encoding

    @property
    def max_error(self) -> FloatArray | None:
        """Largest error of each row's numbers, float32 [sites, positions]; None: exact.

        NaN for rows that were not finite.
        """
        return self._numbers.max_error

    @property
    def rows(self) -> tuple[Rows, ...]:
        """The same rows, site by site."""
        return tuple(
            Rows(
                self.sample,
                *site,
                self.positions,
                self.token_ids,
                self.values[number],
                self.baseline,
                self.encoding,
                None if self.max_error is None else self.max_error[number],
            )
            for number, site in enumerate(self.sites)
        )

    def __repr__(self) -> str:
        """Request, sample, sites and shape."""
        of = f"{'baseline ' if self.baseline else ''}sample={self.sample}"
        sites = ", ".join(map(str, self.sites))
        return (
            f"CapturedRows({self.sequence}, {self.request_id!r}, {of}, {sites}, "
            f"shape={list(self.shape)})"
        )


@dataclass(frozen=True)
class Attached:
    """A sample that began before the subscription, and from where on its rows come."""

    request_id: str
    """The request."""
    sample: int
    """Sample, from 0."""
    baseline: bool
    """Whether it is the sample's baseline."""
    first_position: int | None
    """First position whose rows come. None: not known yet or, in `EndOfRequest`, no row came."""


@dataclass(frozen=True)
class EndOfRequest:
    """The last event of a request: all its rows have come, as the server counted them."""

    sequence: int
    """Number of the event."""
    request_id: str
    """The request."""
    chunk_count: int
    """Number of its `CapturedRows` events."""
    row_count: int
    """Number of its rows, positions times sites."""
    dropped_row_count: int
    """Number of its rows that were lost."""
    finish_reasons: tuple[FinishReason, ...]
    """How each sample ended; empty if the subscription ended before the request."""
    attached: tuple[Attached, ...] = ()
    """From where on each sample came; empty if the request began after the subscription."""
    missed_reason: str = ""
    """Why the request was not captured for the subscription; empty if it was."""


SubscriptionEvent: TypeAlias = CapturedRows | DroppedRows | EndOfRequest
"""The events of a subscription."""


@dataclass
class _Tally:
    """What came of one request."""

    chunks: int = 0
    rows: int = 0
    dropped: int = 0
    crc32c: int = 0


class Ledger:
    """Reads events in the order of their numbers, and counts what came of each request."""

    def __init__(self, after: int, read: Callable[[int, tensor_pb2.Tensor], Numbers]) -> None:
        """An empty one; what was numbered up to ``after`` came to somebody else.

        ``read`` gives the numbers of an event's tensor.
        """
        self._inherited = after > 0
        self._read = read
        self._tallies: dict[str, _Tally] = {}

    def read(self, message: capture_service_pb2.SubscribeResponse) -> SubscriptionEvent | None:
        """The event; None for kinds that this client does not know.

        Raises DataLoss if rows are damaged or missing, ServerError for what cannot be read.
        """
        match message.WhichOneof("event"):
            case "captured":
                return self._captured(message.sequence, message.captured)
            case "dropped":
                return self._dropped(message.sequence, message.dropped)
            case "end_of_request":
                return self._end(message.sequence, message.end_of_request)
        return None

    def _captured(self, sequence: int, message: capture_pb2.Captured) -> CapturedRows:
        if not message.tensor.HasField("crc32c"):
            raise ServerError("a tensor of a subscription came without its CRC-32C")
        block = read_block(message, partial(self._read, sequence))
        tally = self._tally(message.request_id)
        tally.chunks += 1
        tally.rows += len(block.sites) * len(block.positions)
        tally.crc32c = google_crc32c.extend(tally.crc32c, struct.pack("<I", message.tensor.crc32c))
        return CapturedRows(
            sequence,
            message.request_id,
            message.capture_index,
            message.sample,
            message.baseline,
            block.sites,
            block.positions,
            block.token_ids,
            tuple(message.tensor.shape),
            block.tensor,
        )

    def _dropped(self, sequence: int, message: capture_pb2.Dropped) -> DroppedRows:
        self._tally(message.request_id).dropped += message.row_count
        return DroppedRows(
            sequence,
            message.request_id,
            message.capture_index,
            message.sample,
            message.baseline,
            positions_of(message.positions),
            message.row_count,
        )

    def _end(self, sequence: int, message: capture_service_pb2.EndOfRequest) -> EndOfRequest:
        came = self._tallies.pop(message.request_id, _Tally())
        told = _Tally(
            message.chunk_count, message.row_count, message.dropped_row_count, message.crc32c
        )
        if came != told and not (self._inherited and _may_continue(came, told)):
            raise DataLoss(
                f"of {message.request_id} came {_shown(came)}, of {_shown(told)} that were sent",
                reason="REASON_ROWS_LOST",
                metadata={"rows": str(max(0, told.rows - came.rows))},
            )
        return EndOfRequest(
            sequence,
            message.request_id,
            message.chunk_count,
            message.row_count,
            message.dropped_row_count,
            tuple(_finish_reason(one) for one in message.finish_reasons),
            to_attached(message.attached),
            message.missed_reason,
        )

    def _tally(self, request_id: str) -> _Tally:
        return self._tallies.setdefault(request_id, _Tally())


def to_attached(messages: Iterable[capture_service_pb2.Attached]) -> tuple[Attached, ...]:
    """What the server says of samples that began before."""
    return tuple(
        Attached(
            one.request_id,
            one.sample,
            one.baseline,
            one.first_position if one.HasField("first_position") else None,
        )
        for one in messages
    )


def _may_continue(came: _Tally, told: _Tally) -> bool:
    """Whether the first part of a request may have come before."""
    before = (told.chunks, told.dropped) != (came.chunks, came.dropped)
    return before and all(
        part <= whole
        for part, whole in (
            (came.chunks, told.chunks),
            (came.rows, told.rows),
            (came.dropped, told.dropped),
        )
    )


def _shown(tally: _Tally) -> str:
    return (
        f"{tally.rows} rows in {tally.chunks} chunks with {tally.dropped} dropped and CRC-32C "
        f"{tally.crc32c:08x}"
    )


def _finish_reason(number: types_pb2.FinishReason.ValueType) -> FinishReason:
    return cast(
        FinishReason, read_word(types_pb2.FinishReason.DESCRIPTOR, number, "FINISH_REASON_")
    )
