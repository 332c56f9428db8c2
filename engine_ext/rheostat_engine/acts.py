"""What a plan is made of: acts, which change the stream, and captures, which copy it.

Invariant: both speak of absolute token positions and token ids only. Phases, windows and texts are
resolved before, so that chunking, preemption and batching can't change which tokens are touched.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from rheostat_engine.row_forms import RowForm

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


@dataclass(frozen=True, slots=True)
class Act:
    """One intervention: a change of the stream at some sites, for some tokens."""

    kind: Kind
    vectors: tuple[bytes, ...]
    """SHA-256 of its vectors' content: one, or a pull's directions in order."""
    rows: tuple[tuple[int, tuple[int, ...]], ...]
    """(site index, row of each vector that is used there), ascending by site."""
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
    form: RowForm | None = None
    """In which the rows may leave the device, where all who read them want no more; None: as they
    are."""
