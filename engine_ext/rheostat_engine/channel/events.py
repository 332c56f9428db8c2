"""The reports of a worker about its requests, and their bytes.

Invariants: the order of a request's reports is Installed, Rows..., Released, and nothing follows
Released. An Attached comes between Installed and Released, after all rows of earlier steps. A frame
is a msgpack head, and its rows are in the staging area. Nothing in either is executed or unpickled.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rheostat_engine.channel.staging import StagingRange
from rheostat_engine.plan.row_encodings import RAW_KEY

RowArray = npt.NDArray[np.generic]
"""Rows as they leave the worker: float32, float16, or uint16 that holds bfloat16's bits."""

_WIRE_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}

_LARGE = 1 << 16
"""If a block has at least so many bytes at one site, each of its sites becomes an event of its own,
because a reader of one site would otherwise keep the memory of all."""


@dataclass(frozen=True)
class Installed:
    """A worker has put a request's plan in force, before the request's first step."""

    request_id: str
    error: str
    """Why the plan is not in force, so that the request must fail; empty if it is in force."""


@dataclass(frozen=True)
class Attached:
    """The captures of a request were updated, for the step that follows the report."""

    request_id: str
    change: int
    """The server's number of the update."""
    first: int
    """First position to which the update applies; `OPEN_END`: the request ended before."""
    error: str
    """Why the update failed and changed nothing; empty if it did not fail."""


@dataclass(slots=True, eq=False)
class Rows:
    """Captured rows of some sites at the same positions.

    Nothing changes it. It is not frozen, because that would triple the time to make one, and a step
    makes one for each request.
    """

    request_id: str
    sites: tuple[int, ...]
    """Site indices."""
    positions: npt.NDArray[np.int32]
    """Absolute positions, [n], ascending."""
    data: RowArray
    """[sites, n, width]: raw rows; or uint8 [sites, n, bytes of a row]: encoded rows."""
    encoding: bytes = RAW_KEY
    """Key of their encoding."""


class Dose(NamedTuple):
    """The effect of an act at one site, measured on the device. Norms are L2, of float32 rows."""

    act: int
    """Index of the act in the plan."""
    site: int
    """Site index."""
    rows: int
    """Rows that it changed. A token that is computed again counts again."""
    change: float
    """Sum over the rows of |change|."""
    relative: float
    """Sum over the rows of |change| / |x|, x the row before the act."""
    relative_max: float
    """Largest |change| / |x|."""


@dataclass(frozen=True)
class Released:
    """The worker has freed everything of the request."""

    request_id: str
    doses: tuple[Dose, ...]
    """The effects of its acts, by act, then site; sites without rows are missing."""
    measured: bool
    """Whether all changed rows were measured."""
    captured: dict[int, int]
    """Rows sent, by site index."""
    lost_rows: int
    """Rows that were selected but could not be captured."""
    preemptions: int
    """How often the request was preempted and resumed."""
    computed: tuple[int, int]
    """[start, end) positions that were computed for it; earlier ones came from the cache."""
    recomputed: int = 0
    """Tokens computed again after a preemption, and cached tokens computed for a capture."""


Report = Installed | Attached | Rows | Released
"""A report of a worker about a request."""


@dataclass(frozen=True)
class Dropped:
    """A report that the server could not process.

    The request must fail at once, because its reader would wait for the report for ever.
    """

    report: Report

    @property
    def request_id(self) -> str:
        """The request that the report was about."""
        return self.report.request_id


Event = Report | Dropped


class InstalledHead(msgspec.Struct, frozen=True, tag="installed"):
    """Head of an `Installed` frame."""

    rank: int
    number: int
    """The worker's number of the request in its frames of rows, until `Released`."""
    request_id: str
    error: str


class AttachedHead(msgspec.Struct, frozen=True, tag="attached"):
    """Head of an `Attached` frame."""

    rank: int
    number: int
    """As in `InstalledHead`; 0: the worker does not have the request."""
    request_id: str
    change: int
    first: int
    error: str


class RowsHead(msgspec.Struct, frozen=True, tag="rows"):
    """Head of a step's rows.

    The rows are in blocks, ordered by encoding. A block has consecutive positions of one request,
    site by site. The arrays have one entry per block and are little-endian int64.
    """

    rank: int
    dtype: str
    width: int
    site_sets: list[list[int]]
    """The different sets of sites in this step, each in one encoding."""
    number: bytes
    """The worker's number of the request."""
    which: bytes
    """Index into `site_sets`."""
    start: bytes
    """First position."""
    count: bytes
    """Number of positions."""
    encodings: list[tuple[bytes, int]] = []
    """Key and bytes of a row of each encoding in this step; empty if all rows are raw."""
    encoding_of: list[int] = []
    """The encoding of each of `site_sets`."""
    lost: bool = False
    """Whether the rows are lost."""
    staging_range: StagingRange | None = None
    """The range of the rows; None if they never got one."""

    @property
    def as_raw(self) -> "RowsHead":
        """The head of the same rows, sent raw."""
        return msgspec.structs.replace(self, encodings=[], encoding_of=[])

    @property
    def without_rows(self) -> "RowsHead":
        """The head that reports the rows as lost."""
        return msgspec.structs.replace(self, lost=True)


class ReleasedHead(msgspec.Struct, frozen=True, tag="released"):
    """Head of a `Released` frame."""

    rank: int
    number: int
    request_id: str
    doses: list[tuple[int, int, int, float, float, float]]
    measured: bool
    captured: dict[int, int]
    lost_rows: int
    preemptions: int
    computed: tuple[int, int]
    recomputed: int


Head = InstalledHead | AttachedHead | RowsHead | ReleasedHead

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(
    InstalledHead | AttachedHead | RowsHead | ReleasedHead
)


def encode_head(head: Head) -> bytes:
    """The bytes of a frame's head."""
    return _ENCODER.encode(head)


def decode_head(data: bytes) -> Head:
    """The head that `encode_head` wrote."""
    return _DECODER.decode(data)


class _RowBlock(NamedTuple):
    """A block's labels."""

    number: int
    sites: tuple[int, ...]
    start: int
    positions: int
    key: bytes
    row_bytes: int


def _blocks(head: RowsHead) -> list[_RowBlock]:
    """The blocks of a frame, in their order."""
    arrays = (head.number, head.which, head.start, head.count)
    columns = [np.frombuffer(data, "<i8").tolist() for data in arrays]
    raw = (RAW_KEY, head.width * np.dtype(_WIRE_DTYPES[head.dtype]).itemsize)
    kinds = (
        [head.encodings[encoding] for encoding in head.encoding_of]
        if head.encodings
        else [raw] * len(head.site_sets)
    )
    site_sets = [tuple(sites) for sites in head.site_sets]
    return [
        _RowBlock(number, site_sets[which], start, count, *kinds[which])
        for number, which, start, count in zip(*columns, strict=True)
    ]


def lost_rows(head: RowsHead) -> dict[int, Counter[int]]:
    """The rows of a frame that is lost: rows by site index, by the worker's number of the request.

    Raises:
        LookupError, ValueError: the frame is malformed.
    """
    lost: dict[int, Counter[int]] = {}
    for block in _blocks(head):
        lost.setdefault(block.number, Counter()).update(dict.fromkeys(block.sites, block.positions))
    return lost


def copy_arrays(arrays: Sequence[RowArray]) -> list[RowArray]:
    """Copies arrays one after the other."""
    return [array.copy() for array in arrays]


def same_arrays(arrays: Sequence[RowArray]) -> list[RowArray]:
    """The arrays themselves, which are copies already."""
    return [*arrays]


def split_rows(
    head: RowsHead,
    payload: bytes | memoryview | npt.NDArray[np.uint8],
    names: Mapping[int, str],
    copies: Callable[[Sequence[RowArray]], list[RowArray]] = copy_arrays,
) -> list[Rows]:
    """The rows of a frame, an event per block, or per site of a large one.

    Each event has memory of its own, so that a slow reader does not keep other requests' rows.
    Unless `copies` copies nothing: then all events of the frame keep the payload.

    Args:
        head: the frame's head.
        payload: the rows.
        names: request ids by the worker's numbers.
        copies: copies arrays.

    Raises:
        LookupError, OverflowError, ValueError: head and payload don't fit.
    """
    blocks = _blocks(head)
    labelled = sum(block.positions * len(block.sites) * block.row_bytes for block in blocks)
    if labelled != len(payload) or any(block.row_bytes < 1 for block in blocks):
        raise ValueError(f"a frame of {len(payload)} bytes labels {labelled}")
    plain = np.dtype(_WIRE_DTYPES[head.dtype])
    every_byte = np.frombuffer(payload, np.uint8)
    events: list[Rows] = []
    views: list[RowArray] = []
    offset = 0
    for number, sites, start, count, key, row_bytes in blocks:
        end = offset + len(sites) * count * row_bytes
        rows = every_byte[offset:end]
        offset = end
        rows = (rows if key else rows.view(plain)).reshape(len(sites), count, -1)
        positions = np.arange(start, start + count, dtype=np.int32)
        if count * row_bytes < _LARGE:
            events.append(Rows(names[number], sites, positions, rows, key))
            views.append(rows)
        else:
            for index, site in enumerate(sites):
                alone = rows[index : index + 1]
                events.append(Rows(names[number], (site,), positions, alone, key))
                views.append(alone)
    for event, data in zip(events, copies(views), strict=True):
        event.data = data
    return events
