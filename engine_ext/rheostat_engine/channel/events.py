"""The reports of a worker about its requests, and their serialization.

Invariants: the reports of a request are Installed, then Rows and SignalRows, and Released last. An
Attached or a Gained comes between Installed and Released, an Attached after all rows of earlier
steps. A frame is a msgpack head; its rows are in the staging area. Nothing in either is executed or
unpickled.
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt

from rheostat_engine.channel.staging import StagingRange
from rheostat_engine.plan.row_encodings import RAW_KEY

RowArray = npt.NDArray[np.generic]
"""Rows from a worker: float32, float16, or uint16 with the bits of bfloat16."""

_WIRE_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}

_LARGE = 1 << 16
"""Bytes of a block at one site from which on each site gets its own event. Otherwise a reader of a
site would keep the memory of all sites."""


@dataclass(frozen=True)
class Installed:
    """The workers have applied a request's plan, before the request's first step."""

    request_id: str
    error: str
    """Why the plan could not be applied, so that the request must fail; empty if it was applied."""


@dataclass(frozen=True)
class Attached:
    """The captures of a request were updated, from the step after this report on."""

    request_id: str
    change: int
    """The server's number of the update."""
    first: int
    """First updated position; `OPEN_END`: the request ended before."""
    error: str
    """Why the update failed without effect; empty if it did not fail."""


class Gained(NamedTuple):
    """Gains of a request were changed, from the step after this report on."""

    request_id: str
    change: int
    """The server's number of the change."""
    first: int
    """First changed position."""


@dataclass(frozen=True)
class ControllerDisabled:
    """The controller of a request was disabled, now or before the request began."""

    request_id: str
    controller: str
    reason: str
    first: int
    """The first position about which it did not decide. The gains stay as they were."""


@dataclass(slots=True, eq=False)
class Rows:
    """Captured rows of some sites at the same positions.

    Immutable by convention: `frozen` would triple the time to create it, once per request and step.
    """

    request_id: str
    sites: tuple[int, ...]
    """Site indices."""
    positions: npt.NDArray[np.int32]
    """Absolute positions, [n], ascending."""
    data: RowArray
    """[sites, n, width]: raw rows; or uint8 [sites, n, bytes of a row]: encoded rows."""
    encoding: bytes = RAW_KEY
    """`RowEncoding.key` of their encoding."""


class Dose(NamedTuple):
    """The effect of an act at one site, measured on the device. Norms are L2, in float32."""

    act: int
    """Index of the act in the plan."""
    site: int
    """Site index."""
    rows: int
    """Changed rows, including those of recomputed tokens."""
    change: float
    """Sum of |change| over the rows."""
    relative: float
    """Sum of |change| / |x| over the rows, with x the row before the act."""
    relative_max: float
    """Largest |change| / |x|."""


@dataclass(frozen=True)
class Released:
    """The workers have freed all resources of a request."""

    request_id: str
    doses: tuple[Dose, ...]
    """Ascending by act, then site; sites without changed rows are missing."""
    measured: bool
    """Whether all changed rows were measured."""
    captured: dict[int, int]
    """Rows sent, by site index."""
    lost_rows: int
    """Selected rows that could not be captured or sent."""
    preemptions: int
    """The number of preemptions."""
    computed: tuple[int, int]
    """[start, end) computed positions; earlier positions came from the prefix cache."""
    recomputed: int = 0
    """Tokens recomputed after a preemption, and cached tokens recomputed for captures."""
    gains: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(first position, gains) for the last positions of a request with a controller."""


@dataclass(slots=True, eq=False)
class SignalRows:
    """The signals of one step, of all requests that want some.

    There is one event for a step, and not one for each request, because a step of hundreds of
    requests has one row for each. The signals of a request come after `Installed`, before
    `Released`, and in the order of positions, each position once.
    """

    request_ids: tuple[str, ...]
    """The request of each block."""
    starts: tuple[int, ...]
    """The first position of each block; the others follow it."""
    counts: tuple[int, ...]
    """The number of positions of each block."""
    values: npt.NDArray[np.float32] | None
    """[sum of counts, readings + gates]: block by block, the numbers that were read, NaN where none
    was, then how far each gate is open, by its number in the plan. A request with fewer readings
    or gates than others has arbitrary numbers in the rest. None: the values are lost."""
    readings: int
    """The number of columns of readings."""

    @property
    def request_id(self) -> str:
        """The ids of all requests, for logs."""
        return ", ".join(self.request_ids)


Report = Installed | Attached | Gained | ControllerDisabled | Rows | SignalRows | Released
"""A report of a worker about a request, or about the requests of a step."""


@dataclass(frozen=True)
class Dropped:
    """A report that the server could not process.

    The request must fail at once, because its reader would wait forever for the report.
    """

    report: Report

    @property
    def request_id(self) -> str:
        """The id of the report's request."""
        return self.report.request_id


Event = Report | Dropped


class ReportHead(msgspec.Struct, frozen=True):
    """Head of a frame with a report about one request."""

    rank: int
    number: int
    """The worker's number of the request in frames of rows, until `Released`; 0: the worker does
    not have the request."""


class InstalledHead(ReportHead, frozen=True, tag="installed"):
    """Head of an `Installed` frame."""

    report: Installed


class AttachedHead(ReportHead, frozen=True, tag="attached"):
    """Head of an `Attached` frame."""

    report: Attached


class ControllerDisabledHead(ReportHead, frozen=True, tag="controller"):
    """Head of a `ControllerDisabled` frame. Only one rank sends it."""

    report: ControllerDisabled


class ReleasedHead(ReportHead, frozen=True, tag="released"):
    """Head of a `Released` frame."""

    report: Released


class GainsHead(msgspec.Struct, frozen=True, tag="gains"):
    """Head of a frame of `Gained`s."""

    rank: int
    changes: list[Gained]


class _StepHead(msgspec.Struct, frozen=True):
    """Base of `RowsHead` and `SignalsHead`. Each has `lost`: whether its payload is lost."""

    rank: int

    @property
    def as_lost(self) -> Self:
        """The head of the same step when its payload is lost."""
        return msgspec.structs.replace(self, lost=True)


class RowsHead(_StepHead, frozen=True, tag="rows"):
    """Head of a step's rows.

    The rows are in blocks, ordered by encoding. A block has consecutive positions of one request,
    site by site. The arrays have one entry per block and are little-endian int64.
    """

    dtype: str
    width: int
    site_sets: list[list[int]]
    """The distinct sets of sites in this step, each with one encoding."""
    number: bytes
    """The worker's number of the request."""
    which: bytes
    """Index into `site_sets`."""
    start: bytes
    """First position."""
    count: bytes
    """Number of positions."""
    encodings: list[tuple[bytes, int]] = []
    """(Key, bytes of a row) of each encoding in this step; empty if all rows are raw."""
    encoding_of: list[int] = []
    """Index into `encodings` for each of `site_sets`."""
    lost: bool = False
    """Whether the rows are lost."""
    staging_range: StagingRange | None = None
    """The range of the rows; None if none was reserved."""

    @property
    def as_raw(self) -> "RowsHead":
        """The head for the same rows sent raw."""
        return msgspec.structs.replace(self, encodings=[], encoding_of=[])


class SignalsHead(_StepHead, frozen=True, tag="signals"):
    """Head of a step's signals; see `SignalRows`.

    The values are float32, row by row. The arrays have one entry per block and are little-endian
    int64.
    """

    readings: int
    gates: int
    number: bytes
    """The worker's number of the request."""
    start: bytes
    """First position."""
    count: bytes
    """Number of positions."""
    lost: bool = False
    """Whether the values are lost."""
    staging_range: StagingRange | None = None
    """The range of the values; None if none was reserved."""

    @property
    def as_raw(self) -> "SignalsHead":
        """Itself, because signals are always sent raw."""
        return self


def signal_rows(head: SignalsHead, values: bytes | None, names: Mapping[int, str]) -> SignalRows:
    """The event of a frame of signals.

    Args:
        head: the frame's head.
        values: its payload, which the event keeps; None: it is lost.
        names: request ids by the worker's numbers.

    Raises:
        LookupError, ValueError: the frame is malformed.
    """
    labels = head.number, head.start, head.count
    count, rest = divmod(len(head.number), 8)
    if rest or not len(head.number) == len(head.start) == len(head.count):
        raise ValueError("the labels of a frame of signals have different lengths")
    # With few requests, arrays of numpy would take several times as long.
    layout = f"<{count}q"
    numbers, starts, counts = (struct.unpack(layout, data) for data in labels)
    rows = None
    if values is not None:
        shape = sum(counts), head.readings + head.gates
        if len(values) != 4 * shape[0] * shape[1]:
            raise ValueError(f"a frame labels {shape} signals, but has {len(values)} bytes")
        rows = np.ndarray(shape, "<f4", values)
    return SignalRows(
        tuple([names[number] for number in numbers]), starts, counts, rows, head.readings
    )


Head = (
    InstalledHead
    | AttachedHead
    | GainsHead
    | ControllerDisabledHead
    | RowsHead
    | SignalsHead
    | ReleasedHead
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(Head)


def encode_head(head: Head) -> bytes:
    """Serializes a frame's head."""
    return _ENCODER.encode(head)


def decode_head(data: bytes) -> Head:
    """Parses the bytes of `encode_head`."""
    return _DECODER.decode(data)


class RowBlocks:
    """The labels of a frame of rows, as arrays with one entry per block."""

    def __init__(self, head: RowsHead) -> None:
        """Parses a frame's head.

        Raises:
            LookupError, OverflowError, ValueError: the head is malformed.
        """
        arrays = (head.number, head.which, head.start, head.count)
        self.number, self.which, self.start, self.count = (
            np.frombuffer(data, "<i8") for data in arrays
        )
        if len({len(data) for data in arrays}) > 1:
            raise ValueError("the labels of a frame have different lengths")
        self.dtype = _WIRE_DTYPES[head.dtype]
        """NumPy dtype of raw rows."""
        self.site_sets = [tuple(sites) for sites in head.site_sets]
        raw = (RAW_KEY, head.width * np.dtype(self.dtype).itemsize)
        self.kinds = (
            [head.encodings[encoding] for encoding in head.encoding_of]
            if head.encodings
            else [raw] * len(head.site_sets)
        )
        """(Key, bytes of a row) of each set of sites."""
        if len(self.kinds) != len(self.site_sets) or any(size < 1 for _, size in self.kinds):
            raise ValueError("the encodings of a frame do not fit its sites")
        sets = zip(self.site_sets, self.kinds, strict=True)
        position_bytes = np.array([len(sites) * size for sites, (_, size) in sets], np.int64)
        self.offset = np.zeros(len(self.number) + 1, np.int64)
        """Offset of each block in the payload, and the end of the last block."""
        if len(self.number):
            if self.which.min() < 0 or self.count.min() < 0:
                raise ValueError("a label of a frame is negative")
            if (self.start + self.count).max() > np.iinfo(np.int32).max:
                raise OverflowError("a position of a frame exceeds 32 bits")
            np.cumsum(position_bytes[self.which] * self.count, out=self.offset[1:])

    @property
    def bytes(self) -> int:
        """Bytes of the payload."""
        return int(self.offset[-1])


def copy_arrays(arrays: Sequence[RowArray]) -> list[RowArray]:
    """Copies arrays one after the other."""
    return [array.copy() for array in arrays]


def split_rows(
    blocks: RowBlocks,
    payload: bytes | memoryview | npt.NDArray[np.uint8],
    names: Mapping[int, str],
    copies: Callable[[Sequence[RowArray]], list[RowArray]] = copy_arrays,
    chosen: Iterable[int] | None = None,
) -> list[Rows]:
    """The events of a frame: one for each block, or for each site of a large block.

    With `copy_arrays` each event has its own memory, so a slow reader does not keep the rows of
    other requests. With `list` all events of the frame keep the payload.

    Args:
        blocks: the frame's labels.
        payload: the rows, `blocks.bytes` bytes.
        names: request ids by the worker's numbers.
        copies: `copy_arrays`, or `list` if the payload is a copy already.
        chosen: indices of the blocks; None: all blocks.

    Raises:
        LookupError: a request has no name.
    """
    every_byte = np.frombuffer(payload, np.uint8)
    events: list[Rows] = []
    views: list[RowArray] = []
    numbers, kinds = blocks.number.tolist(), blocks.which.tolist()
    starts, counts, offsets = blocks.start.tolist(), blocks.count.tolist(), blocks.offset.tolist()
    for block in range(len(numbers)) if chosen is None else chosen:
        name, which = names[numbers[block]], kinds[block]
        start, count = starts[block], counts[block]
        sites, (key, row_bytes) = blocks.site_sets[which], blocks.kinds[which]
        rows: RowArray = every_byte[offsets[block] : offsets[block + 1]]
        rows = (rows if key else rows.view(blocks.dtype)).reshape(len(sites), count, -1)
        positions = np.arange(start, start + count, dtype=np.int32)
        if count * row_bytes < _LARGE:
            events.append(Rows(name, sites, positions, rows, key))
            views.append(rows)
        else:
            for index, site in enumerate(sites):
                alone = rows[index : index + 1]
                events.append(Rows(name, (site,), positions, alone, key))
                views.append(alone)
    for event, data in zip(events, copies(views), strict=True):
        event.data = data
    return events
