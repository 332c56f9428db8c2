"""The interface of sinks: the protocol that plugins implement, and the values that they receive.

The life of a sink. A factory makes it once, when the server starts, from the settings of its
configuration. The server calls `check` for every target at admission, `open` once per admitted
request and target, `artifacts` for every lookup, and `close` once at the end, when no recording is
open.

The life of a recording. `write` is called any number of times, then `finish` or `abandon` exactly
once. All calls may block and run on worker threads: one call at a time per recording, concurrent
calls for different recordings. So state that recordings share needs a lock.

Errors. `check` raises only SinkRefusal; the request is refused. The factory raises
SinkSettingsError; the server does not start. `open`, `write` and `finish` may raise any exception.
The client gets the text of SinkError and OSError, and only the type of others. If `write` or
`finish` raises, `abandon` follows. The rows of the request then count as lost in its receipt.

Nothing is published, not even in part, before `finish` returns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rheostat_engine import Site
from rheostat_engine.cached_property import cached_property
from rheostat_server.tensors import FloatType
from rheostat_wire.dtypes import StoredArray

Labels = npt.NDArray[np.int32]
"""Positions or token ids."""


class Layout(StrEnum):
    """The layout of a sink's files."""

    PER_FILE = "per_file"
    """One file per request and site."""
    PACKED = "packed"
    """One file per request."""
    SHARDED = "sharded"
    """Append-only files that many requests share."""


class Encoding(StrEnum):
    """The encoding in which the rows of a capture are stored."""

    RAW = "raw"
    """Not encoded."""
    FULL8 = "full8"
    """A code per element; value = offset + scale * code."""
    RP8 = "rp8"
    """A random projection, encoded as FULL8."""
    TOPK8 = "topk8"
    """The largest elements: their indices, and their codes as in FULL8."""


class State(StrEnum):
    """The state of an artefact."""

    PENDING = "pending"
    COMPLETE = "complete"
    PARTIAL = "partial"
    FAILED = "failed"


class Ending(StrEnum):
    """Whether the rows of a request are complete."""

    COMPLETE = "complete"
    """Every selected row has been written."""
    PARTIAL = "partial"
    """Rows were lost under an overload policy; the others have been written."""
    ABORTED = "aborted"
    """The request ended early; the rows until then have been written."""


class SinkRefusal(Exception):
    """A target is refused. The client gets the message."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field
        """The target's field, e.g. "options.format"."""


class SinkSettingsError(Exception):
    """The settings of a sink are wrong. The operator gets the message."""


class SinkError(Exception):
    """Rows cannot be stored. The client gets the message."""


class Collision(SinkError):
    """The sink has rows under this request id and tag, and never overwrites them.

    If `open` raises it, the request is refused before it runs.
    """


@dataclass(frozen=True, slots=True)
class Column:
    """One array of a table."""

    name: str
    dtype: str
    """"float32", "float16", "bfloat16" (stored as bits in uint16), "int32", "uint32", "uint8"."""
    shape: tuple[int, ...]
    """Shape of the value of one row."""


LABELS = (
    Column("positions", "int32", ()),
    Column("token_ids", "int32", ()),
    Column("samples", "int32", ()),
    Column("baseline", "uint8", ()),
)
"""Columns of every table: position, input token, sample, and 1 for rows of the baseline."""


class ReadoutAbout(NamedTuple):
    """A number that is made of a row x and a vector d: activation(normalise(x, d) + bias)."""

    normalise: str
    """"none": x.d; "unit": x.d / |d|; "cosine": x.d / (|x| |d|)."""
    activation: str
    """"identity", "relu", "jump_relu" or "tanh"."""
    bias: float
    theta: float
    """The threshold of "jump_relu"."""


@dataclass(frozen=True)
class CaptureAbout:
    """One capture of a request."""

    capture_index: int
    """Index in the request's captures."""
    sites: tuple[Site, ...]
    """Every name of its sites, by layer, then point."""
    dtype: FloatType
    """Element type of the rows, after decoding."""
    width: int
    """Elements of a row: of the stream, or the number of directions of a projection."""
    encoding: Encoding = Encoding.RAW
    kept: int | None = None
    """K of RP8 and TOPK8."""
    seed: int | None = None
    """Seed of RP8."""
    directions: tuple[str, ...] = ()
    """Digests of the vectors of a projection, hexadecimal; empty without a projection."""
    direction_rows: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The row of each of these vectors, by layer."""
    readouts: tuple[ReadoutAbout, ...] = ()
    """What the numbers are, one per vector; empty: the scalar products x.d."""

    @cached_property
    def parts(self) -> tuple[Column, ...]:
        """The columns of an encoded row."""
        if self.encoding is Encoding.RAW:
            return (Column("rows", self.dtype.value, (self.width,)),)
        codes = self.width if self.encoding is Encoding.FULL8 else self.kept or 0
        columns = [Column("scales", "float32", ()), Column("offsets", "float32", ())]
        if self.encoding is Encoding.TOPK8:
            columns.append(Column("indices", "uint32", (codes,)))
        return (*columns, Column("codes", "uint8", (codes,)))


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of rows, which `Sink.check` has accepted."""

    sink: str
    tag: str
    layout: Layout | None
    """None for sinks that write no files."""
    options: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class RequestAbout:
    """A request that is recorded."""

    request_id: str
    """[A-Za-z0-9._:-]{1,128}. It may be "." or ".."; escape it in file names."""
    target: Target
    captures: tuple[CaptureAbout, ...]
    """The captures with this target."""
    model: str
    prompt_token_ids: Sequence[int] = ()
    labels: Mapping[str, str]
    started_at: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class RowBlock:
    """Rows of one capture and sample. Its arrays do not change after `Recording.write`.

    Per capture, site and sample, positions ascend over all blocks, and each is unique. Rows of the
    baseline are a separate sequence.
    """

    capture_index: int
    sample: int
    sites: tuple[Site, ...]
    positions: Labels
    """[positions]."""
    token_ids: Labels
    """[positions]."""
    parts: Mapping[str, StoredArray]
    """By name, as `CaptureAbout.parts` lists them, each [sites, positions, ...]."""
    baseline: bool = False

    @property
    def rows(self) -> int:
        """Number of rows: positions times sites."""
        return len(self.positions) * len(self.sites)

    @property
    def size(self) -> int:
        """Bytes of the rows."""
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a request."""

    ending: Ending
    dropped_rows: int = 0
    """Selected rows that were lost before the sink."""
    finish_reasons: tuple[str, ...] = ()
    """One per sample: "stop", "length", "aborted", "rule" or "error"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file, or a part of one, that a sink wrote."""

    path: str
    """Relative to the sink's root, "/"-separated."""
    media_type: str
    state: State
    offset: int = 0
    """First byte in the file."""
    length: int = 0
    """In bytes."""
    rows: int = 0
    """Positions times sites."""
    sites: tuple[Site, ...] = ()
    sha256: bytes = b""
    """SHA-256 of these bytes; empty if PENDING or FAILED."""
    write_time: float = 0.0
    """Seconds since the epoch."""
    whole: bool = True
    """Whether it is a complete file."""


class Recording(Protocol):
    """Records the rows of one request."""

    @property
    def pending(self) -> Sequence[str]:
        """Known paths of the artefacts that `finish` will publish."""

    def write(self, block: RowBlock) -> None:
        """Adds rows."""

    def finish(self, outcome: Outcome) -> list[Artifact]:
        """Publishes the request. If the sink has files, they are on the disk when it returns."""

    def abandon(self, error: BaseException) -> None:
        """Discards all rows and frees resources. Raises nothing."""


@runtime_checkable
class Buffering(Protocol):
    """Further methods of a recording that has rows in memory and can move them to a disk.

    The server counts this memory as that of the request, and calls `flush` when memory is short.
    """

    @property
    def memory(self) -> int:
        """Approximate bytes of rows in memory."""

    def flush(self) -> None:
        """Moves the rows to the disk. It may raise as `Recording.write`."""


class Sink(Protocol):
    """A destination that stores captured rows."""

    @property
    def layouts(self) -> Sequence[Layout]:
        """Supported layouts, its default first; empty if it writes no files."""

    @property
    def options(self) -> Mapping[str, str]:
        """Names of the options of a target, each with one line of explanation."""

    def check(self, target: Target) -> None:
        """Checks the values of options; names and layout are checked already. No side effects.

        Raises:
            SinkRefusal: a value is wrong.
        """

    def open(self, about: RequestAbout) -> Recording:
        """Begins a recording, which readers cannot see yet.

        Raises:
            Collision: the sink has rows under this request id and tag.
        """

    def artifacts(self, request_id: str) -> list[Artifact]:
        """The published artefacts of a request, if possible also those before a restart."""

    def close(self) -> None:
        """Frees all resources. May be called twice."""


class SinkFactory(Protocol):
    """The object that the entry point of a plugin names."""

    def __call__(self, name: str, settings: Mapping[str, str]) -> Sink:
        """Makes the sink `name`.

        Raises:
            SinkSettingsError: the settings are wrong, or a resource that they name is unusable.
        """
