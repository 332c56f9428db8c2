"""The parts of a plan: acts, which change the stream, and captures, which copy it.

Invariant: both refer only to absolute token positions and token ids. The server resolves phases,
windows and texts, so chunking, preemption and batching can't change the selected tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, cast, overload

import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.gates import COORDINATE, Gate, Reading, Readout
from rheostat_engine.plan.row_encodings import RowEncoding

OPEN_END = 2**31 - 1
"""End of an open span."""

Spans = tuple[tuple[int, int], ...]
"""Half-open [start, end) token positions, ascending, disjoint, not touching."""

TokenSet = tuple[int, ...]
"""Distinct token ids, ascending."""


_LARGEST = 1e15
"""The sum of squares of a million elements of this size is still finite in float32."""


def largest_replaced(finite_max: float) -> float:
    """The largest magnitude of a row that may replace a row of the stream.

    Half of the range stays free, because the model's next branch must still fit.

    Args:
        finite_max: the largest finite number of the stream's dtype.
    """
    return min(_LARGEST, finite_max / 2)


class Kind(IntEnum):
    """How an act changes a row x of the stream. |x| is the L2 norm; u is v / |v|.

    Programs and kernels compare the numbers: kinds below `REPLACE` change x in the order of the
    list of acts, and kinds from `GATE` on are steps of programs, but no acts.
    """

    ADD = 1
    """x + scale * v."""
    NORM_ADD = 2
    """x + scale * |x| * u."""
    PULL = 3
    """For each band in turn: x + strength * (clip(r, low, high) - r) * w, with r read of x; see
    `Band`.

    Ablation has low = high = 0. Scaling by f is the same with strength 1 - f. Clamping has a band.
    """
    REPLACE = 4
    """x + scale * m * (v - x), where the mask m is all ones if there is no second vector. Elements
    with scale * m = 1 become those of v, bit for bit. Acts last."""
    ADD_LAST = 5
    """x + scale * m * v, with m as for REPLACE. Acts last."""
    READ = 6
    """Changes nothing. Reads a number of x, after all other acts; see `Reading`."""
    GATE = 7
    """No act, but a step of programs, before the first step whose strength a gate multiplies."""
    SUM = 8
    """Not an act, but a step of programs: adds x to a sum of rows, for a reading of their mean."""
    READ_ALONE = 9
    """Not an act, but a step of programs: a reading that needs several reductions over the row."""
    READ_MEAN = 10
    """Not an act, but a step of programs: reads the number of a mean row, before the gates that
    need it."""

    @property
    def is_act(self) -> bool:
        """Whether a plan may have an act of this kind."""
        return self < Kind.GATE

    @property
    def reads(self) -> bool:
        """Whether it reads x without changing it. Such steps come after all others."""
        return self in (Kind.READ, Kind.SUM, Kind.READ_ALONE)

    @property
    def acts_last(self) -> bool:
        """Whether it acts after all acts that do not act last, in the order of the list."""
        return self in (Kind.REPLACE, Kind.ADD_LAST)


class Band(NamedTuple):
    """The interval for a number r that a pull reads of x, and how it moves x.

    It reads with a vector v, and moves x along w: u = v / |v|, if r is in units of the stream, and
    v / |v|^2, if r is in units of v. So r reaches the interval, unless an activation bends it.
    """

    low: float
    """Lower bound, or -inf."""
    high: float
    """Upper bound, or inf; at least `low`."""
    strength: float
    """Fraction of the way; finite."""
    readout: Readout = COORDINATE
    """How r is made of x and v."""
    writes: bool = False
    """Whether w is the vector that follows v in the act, as it is."""
    only_on: bool = False
    """Whether rows with r = 0 stay as they are."""

    @property
    def vectors(self) -> int:
        """How many vectors of the act belong to it."""
        return 2 if self.writes else 1

    @property
    def plain(self) -> bool:
        """Whether it pulls the coordinate along a direction."""
        return self.readout == COORDINATE and not self.writes and not self.only_on


class TokenCondition(NamedTuple):
    """Positions at which an act selects tokens by token id."""

    spans: Spans
    tokens: TokenSet
    """Token ids, at least one."""
    among: bool
    """True: tokens with one of these ids are selected. False: all other tokens."""


SiteRow = tuple[int, tuple[int, ...]]
"""Index of a site, and the row of each vector that the act uses there."""

Int32 = npt.NDArray[np.int32]


class SiteRows(Sequence[SiteRow]):
    """The sites of an act, with the rows of its vectors, as arrays.

    Why arrays: waiting requests hold their acts, and 256 acts at 180 sites took 5 MB as tuples.
    """

    __slots__ = ("rows", "sites")

    def __init__(self, sites: Int32, rows: Int32) -> None:
        """`sites`, [n], are site indices, ascending; `rows` is [n, vectors]."""
        self.sites = sites
        self.rows = rows

    @classmethod
    def of(cls, pairs: Iterable[SiteRow]) -> "SiteRows":
        """Packs pairs into arrays."""
        listed = list(pairs)
        sites = np.array([site for site, _ in listed], np.int32)
        rows = np.array([rows for _, rows in listed], np.int32)
        return cls(sites, rows.reshape(len(listed), rows.size // max(1, len(listed))))

    def within(self, sites: range) -> Iterator[SiteRow]:
        """The pairs whose sites are in a range, ascending by site."""
        first, end = np.searchsorted(self.sites, (sites.start, sites.stop)).tolist()
        return self._pairs(first, end)

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[SiteRow]:
        return self._pairs(0, len(self))

    @overload
    def __getitem__(self, index: int) -> SiteRow: ...

    @overload
    def __getitem__(self, index: slice) -> "SiteRows": ...

    def __getitem__(self, index: int | slice) -> "SiteRow | SiteRows":
        if isinstance(index, slice):
            return SiteRows(self.sites[index], self.rows[index])
        return int(self.sites[index]), tuple(self.rows[index].tolist())

    def __eq__(self, other: object) -> bool:
        """Whether both have equal sites and rows; `other` may be a tuple of pairs."""
        if isinstance(other, tuple):
            return tuple(self) == other
        if not isinstance(other, SiteRows):
            return NotImplemented
        return self._content == other._content

    def __hash__(self) -> int:
        # Equal to the hash of the tuple, because the two compare equal.
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"SiteRows({tuple(self)!r})"

    @property
    def _content(self) -> tuple[bytes, bytes]:
        return self.sites.tobytes(), self.rows.tobytes()

    def _pairs(self, first: int, end: int) -> Iterator[SiteRow]:
        rows = map(tuple, self.rows[first:end].tolist())
        return zip(self.sites[first:end].tolist(), rows, strict=True)


@dataclass(frozen=True, slots=True)
class Act:
    """A change of the stream at some sites, for some tokens.

    The server makes acts of a client's interventions: of each none, one, or one for each position
    that it replaces.
    """

    kind: Kind
    vectors: tuple[bytes, ...]
    """SHA-256 of the content of each vector: one, those of a pull's bands in order, or the rows of
    an act that acts last and its mask, if it has one."""
    rows: Sequence[SiteRow]
    """Ascending by site."""
    spans: Spans
    """Positions selected whatever their token."""
    scale: float = 1.0
    """ADD, NORM_ADD: factor; finite. REPLACE: part of the way to v, 0 to 1. ADD_LAST: factor, 0
    to 1."""
    bands: tuple[Band, ...] = ()
    """PULL: in order; each has one vector, or two if it writes."""
    orthogonal: bool = False
    """PULL: whether each direction is first made orthogonal to the earlier ones, so that the act
    covers their span. All bands are plain then."""
    conditions: tuple[TokenCondition, ...] = ()
    """Further positions, selected by token id; disjoint from `spans` and from each other."""
    reading: Reading | None = None
    """READ: what is read."""
    gate: Gate | None = None
    """Multiplies the strength at each token. None: 1. Not for READ."""
    gain: int | None = None
    """The index of the gain that multiplies the strength too; see `plan.gains`. None: 1. Not for
    READ."""

    def __post_init__(self) -> None:
        if not isinstance(self.rows, SiteRows):
            object.__setattr__(self, "rows", SiteRows.of(self.rows))

    def with_gate(self, gate: Gate | None, *, positions: bool = True) -> "Act":
        """A copy under another gate, with its positions or without spans and conditions.

        `dataclasses.replace` would take three times as long.
        """
        return Act(
            self.kind,
            self.vectors,
            self.rows,
            self.spans if positions else (),
            self.scale,
            self.bands,
            self.orthogonal,
            self.conditions if positions else (),
            self.reading,
            gate,
            self.gain,
        )

    @property
    def site_rows(self) -> SiteRows:
        """`rows` with their stored type."""
        return cast(SiteRows, self.rows)

    @property
    def strong(self) -> bool:
        """Whether it changes a token that it selects, if its gate is open."""
        if self.kind is Kind.READ:
            return False
        if self.kind is Kind.PULL:
            return bool(self.rows) and any(band.strength != 0 for band in self.bands)
        return bool(self.rows) and self.scale != 0

    @property
    def constant(self) -> bool:
        """Whether neither a gate nor a gain multiplies its strength."""
        return self.gate is None and self.gain is None

    @property
    def in_force(self) -> bool:
        """Whether it changes or reads a token that it selects."""
        return self.strong or (self.kind is Kind.READ and bool(self.rows))

    @property
    def acts(self) -> bool:
        """Whether it changes any token."""
        return self.strong and bool(self.spans or self.conditions)


@dataclass(frozen=True, slots=True)
class Capture:
    """Rows of the stream to copy out."""

    sites: tuple[int, ...]
    """Site indices, ascending."""
    spans: Spans
    encoding: RowEncoding | None = None
    """Encoding of the rows on the device, if all readers accept it; None: raw."""
