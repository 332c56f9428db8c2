"""Tables of captures in the worker, each built once for all requests that share it.

Invariant: a table's classes and function are held as long as a request uses the table. At the end
of a request its tables and its last position give the number of rows that it selected, whatever
changed meanwhile.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rheostat_engine.acts import OPEN_END
from rheostat_engine.core.classes import CaptureClasses
from rheostat_engine.core.forms import Forms
from rheostat_engine.core.places import Places
from rheostat_engine.core.segments import Functions, Int64, Segment
from rheostat_engine.plan import Sealed, captures_of
from rheostat_engine.tables import MAX_CAPTURE_EFFORT, CaptureTable, count


@dataclass(eq=False)
class CaptureSet:
    """The classes and the function of a table, however many requests share it."""

    digest: bytes
    table: CaptureTable
    classes: list[int]
    """The class of each set of captures in the table."""
    function: int
    """The class of each piece."""
    captured: npt.NDArray[np.bool_]
    """[sets, sites]: whether a set captures at a site of this worker."""
    users: int = 0

    def rows(self, start: int, end: int) -> Int64:
        """Rows that it selects of positions [start, end), [sites]."""
        positions = count(self.table.pieces, start, max(start, end))
        some = np.flatnonzero(positions)
        rows: Int64 = positions[some] @ self.captured[some]
        return rows


@dataclass
class Selected:
    """The captures of one request."""

    parts: list[tuple[int, CaptureSet | None]] = field(default_factory=list)
    """(First position, captures), ascending by position; None captures nothing."""
    _counted: Int64 | None = None
    """[sites]: rows that earlier parts selected."""

    @property
    def sets(self) -> Iterator[CaptureSet]:
        """The tables that it uses."""
        return (one for _, one in self.parts if one is not None)

    @property
    def segments(self) -> list[Segment]:
        """The function from each position on; empty if nothing is captured."""
        if not any(self.sets):
            return []
        begun = [] if not self.parts[0][0] else [Segment(0, 0)]
        return begun + [Segment(first, one.function if one else 0) for first, one in self.parts]

    def change(
        self, first: int, new: CaptureSet | None, computed: tuple[int, int]
    ) -> list[CaptureSet]:
        """Captures `new` from a position on, in place of earlier captures.

        A computed position is never captured again. Parts that end before the last computed
        position are therefore only counted, so that a request holds little, however often its
        captures change.

        Args:
            first: the position.
            new: the captures from there on; None captures nothing.
            computed: [start, end) positions that have been computed.
        """
        start, end = computed
        kept: list[tuple[int, CaptureSet | None]] = []
        gone: list[CaptureSet] = []
        for (begin, one), (stop, _) in pairwise([*self.parts, (first, None)]):
            stop = min(stop, first)
            if begin < stop and end < stop:
                kept.append((begin, one))
            elif one is not None:
                self._count(one.rows(max(begin, start), stop))
                gone.append(one)
        self.parts = [*kept, (first, new)]
        return gone

    def rows(self, start: int, end: int) -> Int64 | None:
        """Rows that are selected of positions [start, end), [sites]; None: nothing ever was."""
        for (begin, one), (stop, _) in pairwise([*self.parts, (OPEN_END, None)]):
            if one is not None:
                self._count(one.rows(max(begin, start), min(stop, end)))
        self.parts = []
        return self._counted

    def _count(self, rows: Int64) -> None:
        self._counted = rows if self._counted is None else self._counted + rows


class CaptureSets:
    """The tables of captures that are in use."""

    def __init__(
        self, classes: CaptureClasses, forms: Forms, places: Places, present: frozenset[int]
    ) -> None:
        """There is none.

        Args:
            classes: numbers for sets of sites.
            forms: in which rows leave.
            places: where the model's sites are kept.
            present: the places of the sites in this rank's part of the model.
        """
        self.functions = Functions()
        self.built = 0
        """Effort that was built since the start."""
        self._classes = classes
        self._forms = forms
        self._places = places
        self._present = np.isin(np.arange(places.count), list(present))
        self._used: dict[bytes, CaptureSet] = {}

    def cost(self, captures: Sealed | None) -> int:
        """The effort that `use` takes for a table; 0 if the table is in use.

        Raises:
            ValueError: it is no table.
        """
        if captures is None or captures.digest in self._used:
            return 0
        return captures_of(captures).effort

    def use(self, captures: Sealed) -> CaptureSet:
        """Adds a use of a table.

        Raises:
            ValueError: it is no table, or names sites that the model cannot have.
        """
        one = self._used.get(captures.digest)
        if one is None:
            one = self._put_together(captures.digest, captures_of(captures))
            self._used[captures.digest] = one
        one.users += 1
        return one

    def release(self, one: CaptureSet) -> None:
        """Ends one use."""
        one.users -= 1
        if not one.users:
            del self._used[one.digest]
            self.functions.drop(one.function)
            self._classes.release(one.classes)

    def _put_together(self, digest: bytes, table: CaptureTable) -> CaptureSet:
        if table.effort > MAX_CAPTURE_EFFORT:
            raise ValueError(
                f"captures are too fragmented: their effort is over {MAX_CAPTURE_EFFORT}"
            )
        places = [self._places.captured(capture.sites) for capture in table.captures]
        forms = [self._forms.acquire(capture.form) for capture in table.captures]
        sets = np.zeros((len(table.pieces.members), self._places.count), np.int16)
        holders: list[list[int]] = [[] for _ in places]
        for number, members in enumerate(table.pieces.members):
            for member in members:
                holders[member].append(number)
        for held, at, form in zip(holders, places, forms, strict=True):
            where = np.ix_(np.array(held, np.int64), at[self._present[at]])
            found = sets[where]
            # Where captures want a site in different forms, its rows leave as they are.
            sets[where] = np.where((found == 0) | (found == form + 1), form + 1, 1)
        classes = self._classes.acquire(sets)
        for form in forms:  # their classes hold them now
            self._forms.release(form)
        function = 0
        if any(classes):
            values = np.array(classes, np.int32)[table.pieces.sets]
            function = self.functions.add(table.pieces.starts, values)
        self.built += table.effort
        return CaptureSet(digest, table, classes, function, sets > 0)
