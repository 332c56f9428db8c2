"""What a sink is: the protocol that plugins implement, and the values that they are given.

The life of a sink. A factory makes it once, when the server starts, from the settings of its
configuration. `check` is asked about every target at admission, `open` once per request and target
that was admitted, `artifacts` whenever somebody asks what was written, `close` once at the end,
with no recording open.

The life of a recording. `write` comes any number of times, then `finish` or `abandon` exactly once,
and nothing after that. All calls block and come from worker threads: one after the other for a
recording, at the same time for different recordings, so what these share needs a lock of its own.

What may fail. `check` raises SinkRefusal and nothing else; the request is refused. The factory
raises SinkSettingsError; the server does not start. `open`, `write` and `finish` may raise
anything; SinkError and OSError are told to the client in their own words, others by their type
alone. After `write` or `finish` raised, `abandon` follows. The request's rows count as lost then,
and its receipt says so.

Invariant: what `finish` has not returned from was never published, in whole or in part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rheostat_engine import Site
from rheostat_server.tensors import FloatType
from rheostat_wire.dtypes import StoredArray

Labels = npt.NDArray[np.int32]
"""Positions or token ids."""


class Layout(StrEnum):
    """How a sink lays out its files."""

    PER_FILE = "per_file"
    """One file per request and site."""
    PACKED = "packed"
    """One file per request."""
    SHARDED = "sharded"
    """Append-only files that many requests share."""


class Encoding(StrEnum):
    """What the rows of a capture are kept as."""

    RAW = "raw"
    """Themselves."""
    FULL8 = "full8"
    """A code per element; value = offset + scale * code."""
    RP8 = "rp8"
    """A random projection, kept as FULL8."""
    TOPK8 = "topk8"
    """The largest elements: their indices, and their codes as in FULL8."""


class State(StrEnum):
    """Where an artefact stands."""

    PENDING = "pending"
    COMPLETE = "complete"
    PARTIAL = "partial"
    FAILED = "failed"


class Ending(StrEnum):
    """How the rows of a request ended."""

    COMPLETE = "complete"
    """Every selected row has been written."""
    PARTIAL = "partial"
    """Rows were lost under an overload policy; the others have been written."""
    ABORTED = "aborted"
    """The request ended early; the rows until then have been written."""


class SinkRefusal(Exception):
    """A target cannot be served; the client reads why."""

    def __init__(self, message: str, field: str = "") -> None:
        """A refusal; `field` is the target's field concerned, e.g. "options.format"."""
        super().__init__(message)
        self.field = field


class SinkSettingsError(Exception):
    """A sink cannot be made from its settings; the operator reads why."""


class SinkError(Exception):
    """Rows cannot be kept; the client reads why."""


class Collision(SinkError):
    """The sink holds rows under this request id and tag, and never overwrites them.

    If `open` raises it, the request is refused before it runs.
    """


@dataclass(frozen=True, slots=True)
class Column:
    """One array of a table: what it holds per row."""

    name: str
    dtype: str
    """"float32", "float16", "bfloat16" (held as its bits in uint16), "int32", "uint32", "uint8"."""
    shape: tuple[int, ...]
    """Extents after that of the rows."""


LABELS = (
    Column("positions", "int32", ()),
    Column("token_ids", "int32", ()),
    Column("samples", "int32", ()),
    Column("baseline", "uint8", ()),
)
"""What stands beside every row: position, input token, sample, and 1 for rows of the baseline."""


@dataclass(frozen=True)
class CaptureAbout:
    """One capture of a request."""

    capture_index: int
    """Index in the request's captures."""
    sites: tuple[Site, ...]
    """Every name under which rows come, by layer, then point."""
    dtype: FloatType
    """Element type of the rows; those of an encoding other than RAW once decoded."""
    width: int
    """Elements of a row: of the stream, or as many as there are directions to project on."""
    encoding: Encoding = Encoding.RAW
    kept: int | None = None
    """K of RP8 and TOPK8."""
    seed: int | None = None
    """Seed of RP8."""
    directions: tuple[str, ...] = ()
    """Digests of the vectors that rows are projected on, in hexadecimal; none: rows are whole."""
    direction_rows: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By layer, which row of each."""

    @cached_property
    def parts(self) -> tuple[Column, ...]:
        """The arrays that a row consists of."""
        if self.encoding is Encoding.RAW:
            return (Column("rows", self.dtype.value, (self.width,)),)
        codes = self.width if self.encoding is Encoding.FULL8 else self.kept or 0
        found = [Column("scales", "float32", ()), Column("offsets", "float32", ())]
        if self.encoding is Encoding.TOPK8:
            found.append(Column("indices", "uint32", (codes,)))
        return (*found, Column("codes", "uint8", (codes,)))


@dataclass(frozen=True, slots=True)
class Target:
    """Where rows of a request go, as its client wrote it and its sink accepted it."""

    sink: str
    tag: str
    layout: Layout | None
    """None for sinks that write no files."""
    options: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class RequestAbout:
    """A request whose rows a recording takes."""

    request_id: str
    """[A-Za-z0-9._:-]{1,128}: not the name of a file before it has been made one."""
    target: Target
    captures: tuple[CaptureAbout, ...]
    """Those that go to this target."""
    model: str
    prompt_token_ids: Sequence[int] = ()
    labels: Mapping[str, str]
    started_at: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class RowBlock:
    """Rows of one capture and sample. Nobody changes its arrays once it has been written.

    Per capture, site and sample positions ascend over all blocks, and none comes twice; rows of the
    baseline are a sequence of their own.
    """

    capture_index: int
    """Index of the capture."""
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
        """How many: positions times sites."""
        return len(self.positions) * len(self.sites)

    @property
    def size(self) -> int:
        """Bytes of the rows."""
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, as its sink is told."""

    ending: Ending
    dropped_rows: int = 0
    """Rows selected and lost before they came here."""
    finish_reasons: tuple[str, ...] = ()
    """Of each sample: "stop", "length", "aborted", "rule" or "error"."""


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
    """Of these bytes; empty while PENDING and where FAILED."""
    write_time: float = 0.0
    """Seconds since the epoch."""
    whole: bool = True
    """Whether it is all of its file."""


class Recording(Protocol):
    """The rows of one request on their way into a sink."""

    @property
    def pending(self) -> Sequence[str]:
        """Paths of the artefacts that `finish` will publish, those that are known by now."""

    def write(self, block: RowBlock) -> None:
        """Takes rows."""

    def finish(self, outcome: Outcome) -> list[Artifact]:
        """Publishes everything; on return it outlasts a crash, where the sink's files do at all."""

    def abandon(self, error: BaseException) -> None:
        """Forgets everything and frees what it held. Raises nothing."""


@runtime_checkable
class Buffering(Protocol):
    """What a recording may say besides, if it keeps rows in memory that it can move to a disk.

    The server counts them as the request's, and asks for them to be moved when memory is short.
    """

    @property
    def memory(self) -> int:
        """Bytes of rows in memory, about."""

    def flush(self) -> None:
        """Moves them to the disk. It may fail as `Recording.write` may."""


class Sink(Protocol):
    """A place that captured rows can go to."""

    @property
    def layouts(self) -> Sequence[Layout]:
        """What it can write, its default first; empty where it writes no files."""

    @property
    def options(self) -> Mapping[str, str]:
        """What a target may say besides: name to one line of explanation."""

    def check(self, target: Target) -> None:
        """Refuses values of options. Names and layout have been checked; it has no side effects.

        Raises:
            SinkRefusal: it will not take this.
        """

    def open(self, about: RequestAbout) -> Recording:
        """Begins a recording. Nothing of it can be seen by readers yet.

        Raises:
            Collision: the sink holds rows under this request id and tag.
        """

    def artifacts(self, request_id: str) -> list[Artifact]:
        """What it published for a request and still has; from before a restart too, if it can."""

    def close(self) -> None:
        """Gives everything up. May come twice."""


class SinkFactory(Protocol):
    """What the entry point of a plugin names."""

    def __call__(self, name: str, settings: Mapping[str, str]) -> Sink:
        """Makes the sink that is called `name`.

        Raises:
            SinkSettingsError: the settings are wrong, or what they name cannot be used.
        """
