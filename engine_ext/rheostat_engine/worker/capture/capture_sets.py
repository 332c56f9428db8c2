"""Tables of captures in the worker, each built once for all requests that share it.

Invariants: a table keeps its site sets and function while a request uses it. The number of rows
that a request selected follows from its tables and its last position, even after updates.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.plan import EncodedTable, captures_of
from rheostat_engine.plan.tables import MAX_CAPTURE_COST, CaptureTable, count
from rheostat_engine.worker.capture.site_sets import SiteSets
from rheostat_engine.worker.state.position_functions import Functions, Int64, Segment
from rheostat_engine.worker.state.site_slots import SiteSlots
from rheostat_engine.worker.transport.row_encodings import RowEncodings


@dataclass(eq=False)
class CaptureSet:
    """The site sets and function of a table, shared by its requests."""

    digest: bytes
    table: CaptureTable
    site_sets: list[int]
    """The site set of each set of captures in the table."""
    function: int
    """The site set of each interval."""
    captured: npt.NDArray[np.bool_]
    """[sets, sites]: whether a set captures at this worker's site."""
    users: int = 0

    def rows(self, start: int, end: int) -> Int64:
        """[sites]: rows selected at positions [start, end)."""
        positions = count(self.table.intervals, start, max(start, end))
        used = np.flatnonzero(positions)
        rows: Int64 = positions[used] @ self.captured[used]
        return rows


@dataclass
class RequestCaptures:
    """The captures of one request."""

    parts: list[tuple[int, CaptureSet | None]] = field(default_factory=list)
    """(First position, captures), ascending by position; None captures nothing."""
    counted: Int64 | None = None
    """[sites]: rows selected by removed parts; None if none was removed."""

    @property
    def unused(self) -> bool:
        """Whether the request never had captures."""
        return not self.parts and self.counted is None

    @property
    def segments(self) -> list[Segment]:
        """The function from each position on; empty if nothing is captured."""
        if all(table is None for _, table in self.parts):
            return []
        begun = [] if not self.parts[0][0] else [Segment(0, 0)]
        return begun + [
            Segment(first, table.function if table else 0) for first, table in self.parts
        ]

    def change(
        self, first: int, new: CaptureSet | None, computed: tuple[int, int]
    ) -> list[CaptureSet]:
        """Replaces the captures from position `first` on; returns the tables no longer used.

        A computed position is never captured again. So parts that end before the last computed
        position are only counted, which keeps a request small after any number of updates.

        Args:
            first: the first updated position.
            new: the new captures; None captures nothing.
            computed: [start, end) computed positions.
        """
        start, end = computed
        kept: list[tuple[int, CaptureSet | None]] = []
        dropped: list[CaptureSet] = []
        for (begin, table), (stop, _) in pairwise([*self.parts, (first, None)]):
            stop = min(stop, first)
            if begin < stop and end < stop:
                kept.append((begin, table))
            elif table is not None:
                rows = table.rows(max(begin, start), stop)
                self.counted = rows if self.counted is None else self.counted + rows
                dropped.append(table)
        self.parts = [*kept, (first, new)]
        return dropped


class CaptureSets:
    """The tables of captures in use."""

    def __init__(
        self,
        site_sets: SiteSets,
        encodings: RowEncodings,
        site_slots: SiteSlots,
        present: frozenset[int],
    ) -> None:
        """`present` are the slots of the sites in this rank's part of the model."""
        self.functions = Functions()
        self.built = 0
        """The cost of all tables that were parsed since the start."""
        self._site_sets = site_sets
        self._encodings = encodings
        self._site_slots = site_slots
        self._present = np.isin(np.arange(site_slots.count), list(present))
        self._used: dict[bytes, CaptureSet] = {}

    def use(self, captures: EncodedTable) -> CaptureSet:
        """Adds a use of a table. `built` grows by the cost if no request uses the table.

        Raises:
            ValueError: the bytes are no table, or name sites that the model cannot have.
        """
        built = self._used.get(captures.digest)
        if built is None:
            built = self._build(captures.digest, captures_of(captures))
            self._used[captures.digest] = built
        built.users += 1
        return built

    def release(self, built: CaptureSet) -> None:
        """Ends one use."""
        built.users -= 1
        if not built.users:
            del self._used[built.digest]
            self.functions.drop(built.function)
            self._site_sets.release(built.site_sets)

    def _build(self, digest: bytes, table: CaptureTable) -> CaptureSet:
        self.built += table.plan_cost  # also if it is refused, because it was parsed
        if table.plan_cost > MAX_CAPTURE_COST:
            raise ValueError(f"captures are too fragmented: their cost is over {MAX_CAPTURE_COST}")
        slots = [self._site_slots.to_slots(capture.sites) for capture in table.captures]
        encodings = [self._encodings.acquire(capture.encoding) for capture in table.captures]
        sets = np.zeros((len(table.intervals.members), self._site_slots.count), np.int16)
        holders: list[list[int]] = [[] for _ in slots]
        for number, members in enumerate(table.intervals.members):
            for member in members:
                holders[member].append(number)
        for numbers, at, encoding in zip(holders, slots, encodings, strict=True):
            where = np.ix_(np.array(numbers, np.int64), at[self._present[at]])
            earlier = sets[where]
            # If captures request different encodings at a site, its rows are sent raw.
            sets[where] = np.where((earlier == 0) | (earlier == encoding + 1), encoding + 1, 1)
        site_sets = self._site_sets.acquire(sets)
        for encoding in encodings:  # the site sets use them now
            self._encodings.release(encoding)
        function = 0
        if any(site_sets):
            values = np.array(site_sets, np.int32)[table.intervals.sets]
            function = self.functions.add(table.intervals.starts, values)
        return CaptureSet(digest, table, site_sets, function, sets > 0)
