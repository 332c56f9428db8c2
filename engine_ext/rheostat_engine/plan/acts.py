"""The parts of a plan: acts, which change the stream, and captures, which copy it.

Invariant: both refer only to absolute token positions and token ids. Phases, windows and texts are
resolved before, so that chunking, preemption and batching can't change which tokens are touched.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, cast, overload

import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.row_encodings import RowEncoding

OPEN_END = 2**31 - 1
"""End of a span that has none."""

Spans = tuple[tuple[int, int], ...]
"""Half-open [start, end) token positions, ascending, disjoint, not touching."""

TokenSet = tuple[int, ...]
"""Token ids, ascending, each once."""


class Kind(IntEnum):
    """How an act changes a row x of the stream. Norms are L2; u is a row v made a unit vector."""

    ADD = 1
    """x + scale * v."""
    NORM_ADD = 2
    """x + scale * |x| * u."""
    PULL = 3
    """For each direction in turn x + strength * (clip(x.u, low, high) - x.u) * u.

    This is ablation (low = high = 0), clamping (a band) and, with low = high = 0 and strength
    1 - f, scaling by f along u."""


class Band(NamedTuple):
    """Where a pull wants a coordinate, and how much of the way it goes."""

    low: float
    """Lower bound, or -inf."""
    high: float
    """Upper bound, or inf; at least `low`."""
    strength: float
    """Part of the way; finite."""


class Condition(NamedTuple):
    """Positions of which only some tokens are selected."""

    spans: Spans
    """The positions."""
    tokens: TokenSet
    """Token ids, at least one."""
    among: bool
    """Whether the selected tokens are those with such an id, or all others."""


SiteRow = tuple[int, tuple[int, ...]]
"""A site's index, and the index of the row of each vector that is used there."""

Int32 = npt.NDArray[np.int32]


class SiteRows(Sequence[SiteRow]):
    """The sites of an act, with the rows of its vectors, as arrays.

    Why arrays: waiting requests hold their acts, and 256 acts at 180 sites took 5 MB as tuples.
    """

    __slots__ = ("rows", "sites")

    def __init__(self, sites: Int32, rows: Int32) -> None:
        """Keeps both arrays.

        Args:
            sites: [n]: site indices, ascending.
            rows: [n, vectors].
        """
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
        """The number of sites."""
        return len(self.sites)

    def __iter__(self) -> Iterator[SiteRow]:
        """The pairs, ascending by site."""
        return self._pairs(0, len(self))

    @overload
    def __getitem__(self, index: int) -> SiteRow: ...

    @overload
    def __getitem__(self, index: slice) -> "SiteRows": ...

    def __getitem__(self, index: int | slice) -> "SiteRow | SiteRows":
        """The pair at an index, or the pairs of a slice."""
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
        """The hash of the equal tuple."""
        return hash(tuple(self))

    def __repr__(self) -> str:
        """Shows the pairs as tuples."""
        return f"SiteRows({tuple(self)!r})"

    @property
    def _content(self) -> tuple[bytes, bytes]:
        return self.sites.tobytes(), self.rows.tobytes()

    def _pairs(self, first: int, end: int) -> Iterator[SiteRow]:
        rows = map(tuple, self.rows[first:end].tolist())
        return zip(self.sites[first:end].tolist(), rows, strict=True)


@dataclass(frozen=True, slots=True)
class Act:
    """One intervention: a change of the stream at some sites, for some tokens."""

    kind: Kind
    vectors: tuple[bytes, ...]
    """SHA-256 of its vectors' content: one, or a pull's directions in order."""
    rows: Sequence[SiteRow]
    """(site index, row of each vector that is used there), ascending by site; see `site_rows`."""
    spans: Spans
    """Positions that are touched, whatever their token."""
    scale: float = 1.0
    """ADD, NORM_ADD: factor; finite."""
    bands: tuple[Band, ...] = ()
    """PULL: one per vector."""
    orthogonal: bool = False
    """PULL: whether each direction is first made orthogonal to those before it, so that together
    they act on the directions' span."""
    conditions: tuple[Condition, ...] = ()
    """Further positions, which are touched only under some tokens; apart from `spans` and from each
    other."""

    def __post_init__(self) -> None:
        """Converts the rows to arrays."""
        if not isinstance(self.rows, SiteRows):
            object.__setattr__(self, "rows", SiteRows.of(self.rows))

    @property
    def site_rows(self) -> SiteRows:
        """`rows` with their stored type."""
        return cast(SiteRows, self.rows)

    @property
    def strong(self) -> bool:
        """Whether it changes the tokens that it touches."""
        if self.kind is Kind.PULL:
            return bool(self.rows) and any(band.strength != 0 for band in self.bands)
        return bool(self.rows) and self.scale != 0

    @property
    def acts(self) -> bool:
        """Whether it can change anything."""
        return self.strong and bool(self.spans or self.conditions)


@dataclass(frozen=True, slots=True)
class Capture:
    """Rows of the stream to copy out."""

    sites: tuple[int, ...]
    """Site indices, ascending."""
    spans: Spans
    """Positions that are captured."""
    encoding: RowEncoding | None = None
    """The encoding in which the rows leave the device, if all their readers want it; None: raw."""
