"""What a worker says of a request, and the bytes in which it says it.

Invariant: per request the order is Installed, Rows..., Released, and nothing follows Released. An
Attached comes between the two, after all rows of the steps before the one that it speaks of. A
frame is a msgpack head; rows lie beside it, in the staging area. Nothing in either is executed or
unpickled.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rheostat_engine.row_forms import RAW_KEY
from rheostat_engine.staging import Place

RowArray = npt.NDArray[np.generic]
"""Rows as they leave the worker: float32, float16, or uint16 that holds bfloat16's bits."""

_WIRE_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}

_LARGE = 1 << 16
"""Bytes of a block at one site from which on each of its sites is an event of its own, since
whoever keeps rows of one site keeps the event's memory."""


@dataclass(frozen=True)
class Installed:
    """The worker has taken up a request's plan, before the request's first step runs."""

    request_id: str
    error: str
    """Empty if all is well; otherwise the plan is not in force and the request must be failed."""


@dataclass(frozen=True)
class Attached:
    """What is captured of a request has changed, in the step before which this is said."""

    request_id: str
    change: int
    """Which change, as the server numbered it."""
    first: int
    """First position that is captured as it says; `OPEN_END`: the request ended before."""
    error: str
    """Why it is not in force, and nothing has changed; empty if it is."""


@dataclass(frozen=True)
class Rows:
    """Captured rows of some sites at the same positions."""

    request_id: str
    sites: tuple[int, ...]
    """Site indices."""
    positions: npt.NDArray[np.int32]
    """Absolute positions, [n], ascending."""
    data: RowArray
    """The rows, [sites, n, width]; in a form their bytes, uint8 [sites, n, bytes of a row]."""
    form: bytes = RAW_KEY
    """Key of the form in which they left the device."""


class Dose(NamedTuple):
    """What an act did at one site, measured on the device. Norms are L2, of float32 rows."""

    act: int
    """Index of the act in the plan."""
    site: int
    """Site index."""
    rows: int
    """Rows on which it acted, each computation of a token counted."""
    change: float
    """Sum over the rows of |change|."""
    relative: float
    """Sum over the rows of |change| / |x|, x the row before the act."""
    relative_max: float
    """Largest |change| / |x|."""


@dataclass(frozen=True)
class Released:
    """The worker holds nothing of the request any more."""

    request_id: str
    doses: tuple[Dose, ...]
    """What its acts did, by act, then site; sites without rows are missing."""
    measured: bool
    """Whether every row that was touched was measured."""
    captured: dict[int, int]
    """Rows sent, by site index."""
    lost_rows: int
    """Rows that were selected but could not be captured."""
    preemptions: int
    """How often the request was preempted and resumed."""
    computed: tuple[int, int]
    """[start, end) positions that were computed for it; those below start came from the cache."""
    recomputed: int = 0
    """Tokens computed again after a preemption, and cached ones computed for a capture."""


Report = Installed | Attached | Rows | Released
"""What a worker says of a request."""


@dataclass(frozen=True)
class Dropped:
    """A report that the server could not take in.

    The request must fail at once: nothing else tells whoever waits for this report.
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
    """What the worker calls the request in the frames of rows that follow, until `Released`."""
    request_id: str
    error: str


class AttachedHead(msgspec.Struct, frozen=True, tag="attached"):
    """Head of an `Attached` frame."""

    rank: int
    number: int
    """As in `InstalledHead`; 0: the worker does not hold the request."""
    request_id: str
    change: int
    first: int
    error: str


class RowsHead(msgspec.Struct, frozen=True, tag="rows"):
    """Head of a step's rows.

    The rows lie in blocks one after the other, those of one form together; a block is consecutive
    positions of one request, site by site. The arrays have one entry per block and are
    little-endian int64.
    """

    rank: int
    dtype: str
    width: int
    classes: list[list[int]]
    """The different sets of sites in this step, each in one form."""
    number: bytes
    """Whose rows."""
    which: bytes
    """Index into `classes`."""
    start: bytes
    """First position."""
    count: bytes
    """Positions."""
    forms: list[tuple[bytes, int]] = []
    """Key and bytes of a row of each form in this step; none: all rows are as they are."""
    form_of: list[int] = []
    """The form of each of `classes`."""
    lost: bool = False
    """Whether the rows could not be brought here."""
    place: Place | None = None
    """Where the rows lie, or would; None: they never had a place."""

    @property
    def as_they_are(self) -> "RowsHead":
        """The same of rows that have no form."""
        return msgspec.structs.replace(self, forms=[], form_of=[])

    @property
    def without_rows(self) -> "RowsHead":
        """What is said where the rows are lost."""
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


class _Block(NamedTuple):
    """A block's labels."""

    number: int
    sites: tuple[int, ...]
    start: int
    positions: int
    key: bytes
    row_bytes: int


def _blocks(head: RowsHead) -> list[_Block]:
    """The blocks of a frame, in their order."""
    arrays = (head.number, head.which, head.start, head.count)
    columns = [np.frombuffer(data, "<i8").tolist() for data in arrays]
    raw = (RAW_KEY, head.width * np.dtype(_WIRE_DTYPES[head.dtype]).itemsize)
    kinds = [head.forms[form] for form in head.form_of] if head.forms else [raw] * len(head.classes)
    classes = [tuple(sites) for sites in head.classes]
    return [
        _Block(number, classes[which], start, count, *kinds[which])
        for number, which, start, count in zip(*columns, strict=True)
    ]


def lost_rows(head: RowsHead) -> dict[int, Counter[int]]:
    """What a frame says is lost: rows by site index, by the worker's number.

    Raises:
        LookupError, ValueError: it is malformed.
    """
    lost: dict[int, Counter[int]] = {}
    for block in _blocks(head):
        lost.setdefault(block.number, Counter()).update(dict.fromkeys(block.sites, block.positions))
    return lost


def copied(arrays: Sequence[RowArray]) -> list[RowArray]:
    """Copies, one after the other."""
    return [array.copy() for array in arrays]


def split_rows(
    head: RowsHead,
    payload: bytes | memoryview,
    names: Mapping[int, str],
    copies: Callable[[Sequence[RowArray]], list[RowArray]] = copied,
) -> list[Rows]:
    """The rows of a frame, an event per block, or per site of a large one.

    Each has memory of its own, so that a slow reader keeps no other request's rows alive.

    Args:
        head: the frame's head.
        payload: the rows, of which nothing is kept.
        names: request ids by the worker's numbers.
        copies: makes copies of arrays.

    Raises:
        LookupError, OverflowError, ValueError: head and payload don't fit.
    """
    blocks = _blocks(head)
    labelled = sum(block.positions * len(block.sites) * block.row_bytes for block in blocks)
    if labelled != len(payload) or any(block.row_bytes < 1 for block in blocks):
        raise ValueError(f"a frame of {len(payload)} bytes labels {labelled}")
    labels: list[tuple[str, tuple[int, ...], npt.NDArray[np.int32], bytes]] = []
    views: list[RowArray] = []
    at = 0
    coded, plain = np.dtype(np.uint8), np.dtype(_WIRE_DTYPES[head.dtype])
    for number, sites, start, count, key, row_bytes in blocks:
        kind = coded if key else plain
        rows = np.frombuffer(payload, kind, len(sites) * count * row_bytes // kind.itemsize, at)
        rows = rows.reshape(len(sites), count, -1)
        at += rows.nbytes
        positions = np.arange(start, start + count, dtype=np.int32)
        if count * row_bytes < _LARGE:
            labels.append((names[number], sites, positions, key))
            views.append(rows)
        else:
            labels += [(names[number], (site,), positions, key) for site in sites]
            views += np.split(rows, len(sites))
    return [
        Rows(name, sites, positions, data, key)
        for (name, sites, positions, key), data in zip(labels, copies(views), strict=True)
    ]
