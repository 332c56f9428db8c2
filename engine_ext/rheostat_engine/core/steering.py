"""Acts in force: the steering of each token of each request.

Requests with equal acts share an arrangement. Each request itself holds only its cells, and its
places under rules about token ids.

Invariant: a request gets everything that its acts need, or nothing, and gives it back once. If its
acts change, it keeps the old acts for earlier positions, and the cells of earlier measurements.
"""

from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.core.arrangements import Arrangement, Arrangements
from rheostat_engine.core.bank import Bank
from rheostat_engine.core.doses import CellRun, Doses, HeadDose, Norms
from rheostat_engine.core.places import Places
from rheostat_engine.core.rules import TokenRules
from rheostat_engine.core.segments import Functions, Int32, Int64, Requests, Segment
from rheostat_engine.core.vectors import BankError, Exhausted, Vectors
from rheostat_engine.plan import Sealed, steering_of
from rheostat_engine.tables import MAX_EFFORT, SteeringTable

_SLOT, _CELL, _RULE = range(3)
_CELLS, _VARIANTS = range(2)


class Part(NamedTuple):
    """The acts of a request from a position on."""

    first: int
    """The position."""
    arrangement: Arrangement | None
    """None: no acts."""
    cells: CellRun | None
    """None: no cells were free, so that nothing is measured."""
    variants: Int32
    """[k]: the first variant of each combination under a rule."""


class Placed(NamedTuple):
    """The parts of a request."""

    parts: tuple[Part, ...] = ()
    """In the order in which they came. A later part replaces the others from its position on."""

    @property
    def measured(self) -> bool:
        """Whether every part has cells."""
        return all(part.cells is not None for part in self.parts)

    @property
    def cells(self) -> list[CellRun]:
        """All its cells."""
        return [part.cells for part in self.parts if part.cells is not None]

    @property
    def effort(self) -> int:
        """The effort of its tables; see `tables`."""
        return sum(one.arrangement.table.effort for one in self.parts if one.arrangement)

    def read(self, measured: npt.NDArray[np.float32]) -> list[HeadDose]:
        """Reads its cells, [sites, cells, 4], as fields of `Dose`s, by act, then site."""
        doses: list[HeadDose] = []
        first_act = begin = 0
        for _, arrangement, cells, _ in self.parts:
            if arrangement is None:
                continue
            if cells is not None and cells.count:
                values = measured[:, begin : begin + cells.count]
                doses += arrangement.measures.read(values, first_act)
                begin += cells.count
            first_act += len(arrangement.table.acts)
        return doses


class Instruction(NamedTuple):
    """The instructions for a step's tokens."""

    slot: npt.NDArray[np.int32]
    """[n]; this and the next two as in `Compact`."""
    cell: npt.NDArray[np.int32]
    """[n]."""
    rule: npt.NDArray[np.int32]
    """[n]."""
    sites: npt.NDArray[np.bool_]
    """[sites]: whether a token may change at the site."""


class Steering:
    """The acts of all requests."""

    def __init__(self, bank: Bank, rules: TokenRules, doses: Doses, places: Places) -> None:
        """No acts are in force."""
        self.bank = bank
        self.rules = rules
        self._doses = doses
        self._places = places
        self._vectors: dict[bytes, npt.NDArray[np.float32]] = {}
        self._norms: dict[bytes, npt.NDArray[np.float32]] = {}
        functions = Functions(columns=3)
        self.arrangements = Arrangements(bank, rules, functions, self._vectors, self._norms)
        self._requests = Requests(functions, bases=2)
        self._variants: dict[int, Int32] = {}
        """By request number: the first variants of all its parts, one after the other."""

    @property
    def vectors(self) -> Vectors:
        """The loaded vectors; a live view."""
        return MappingProxyType(self._vectors)

    def load(self, vectors: Vectors, norms: Norms) -> None:
        """Stores vectors and the norms of their rows, by digest."""
        self._vectors |= vectors
        self._norms |= norms

    def drop(self, digests: Sequence[bytes]) -> None:
        """Drops vectors. Rows that were made of them stay as long as their requests."""
        for digest in digests:
            self._vectors.pop(digest, None)
            self._norms.pop(digest, None)

    def use(self, acts: Sealed) -> Arrangement:
        """Adds a use of a table's arrangement; see `Arrangements.use`."""
        return self.arrangements.use(acts.digest, partial(self._read, acts))

    def place(
        self, number: int, acts: Sealed | None, before: Placed | None = None, first: int = 0
    ) -> Placed:
        """Puts acts in force.

        Args:
            number: the request's number.
            acts: its acts; None: it has none.
            before: the request's present acts, which these acts replace; None if it has none.
            first: the position from which on these acts replace them.

        Raises:
            BankError, ValueError: they can't be put in force; nothing has changed then.
        """
        old = before or Placed()
        if acts is None:
            part = Part(first, None, CellRun(0, 0), np.zeros(0, np.int32))
        else:
            part = self._part(acts, first, old)
        placed = Placed((*old.parts, part))
        self._put(number, placed)
        return placed

    def remove(self, number: int, placed: Placed) -> None:
        """Takes a request's acts out of force; its cells stay until `take_out`."""
        self._requests.drop(number)
        self._variants.pop(number, None)
        for part in placed.parts:
            self.rules.displace(part.variants)
            if part.arrangement is not None:
                self.arrangements.release(part.arrangement)

    def take_out(self, placed: Sequence[Placed]) -> torch.Tensor | None:
        """Takes the cells of requests that have ended, [sites, cells, 4], in their order."""
        return self._doses.take_out([run for one in placed for run in one.cells])

    def lookup(self, numbers: Int64, positions: Int64) -> Instruction:
        """Looks up the instructions for each token of a step; see `Requests.lookup`.

        Rows and programs that they need are copied to the device.
        """
        self.bank.flush()
        found, bases = self._requests.lookup(numbers, positions)
        slot, rule = found[:, _SLOT], found[:, _RULE]
        cells = bases[:, _CELLS]
        measured = (found[:, _CELL] > 0) & (cells > 0)
        cell = np.where(measured, cells + found[:, _CELL] - 1, 0).astype(np.int32)
        ruled = np.flatnonzero(rule)
        if not len(ruled):
            return Instruction(slot, cell, rule, self.bank.sites_of(slot))
        # Under a rule the slot is the number of a combination, whose variants are the request's.
        wanted = bases[ruled, _VARIANTS] + slot[ruled]
        names, at, which = np.unique(
            (numbers[ruled] << 32) + wanted, return_index=True, return_inverse=True
        )
        starts = [int(self._variants[n >> 32][n & 0xFFFFFFFF]) for n in names.tolist()]
        slot[ruled] = np.array(starts)[which]
        variants = [
            self.rules.slots[start : start + self.rules.count(number)]
            for start, number in zip(starts, rule[ruled[at]].tolist(), strict=True)
        ]
        plain = np.where(rule == 0, slot, 0)
        return Instruction(slot, cell, rule, self.bank.sites_of(np.concatenate([plain, *variants])))

    def _read(self, acts: Sealed) -> SteeringTable:
        table = steering_of(acts)
        if table.effort > MAX_EFFORT:
            raise ValueError(f"the plan is too fragmented: its effort is over {MAX_EFFORT}")
        self._places.check(table)
        return table

    def _part(self, acts: Sealed, first: int, old: Placed) -> Part:
        """Takes everything that acts need."""
        arrangement = self.use(acts)
        try:
            if old.effort + arrangement.table.effort > MAX_EFFORT:
                raise ValueError("the request has been changed too often")
            self.arrangements.build(arrangement)
            ruled = arrangement.ruled
            if len(ruled.slots) > self.rules.room:
                raise Exhausted("every piece that follows a rule about token ids is in use")
        except (BankError, ValueError):
            self.arrangements.release(arrangement)
            raise
        count = arrangement.measures.cells
        cells = self._doses.acquire(count, old.cells) if old.measured else None
        start = cells.start if cells is not None else 0
        at = np.where((ruled.cells > 0) & (start > 0), start + ruled.cells - 1, 0)
        return Part(first, arrangement, cells, self.rules.place(ruled.slots, at.astype(np.int32)))

    def _put(self, number: int, placed: Placed) -> None:
        segments = [Segment(0, 0, (0, 0))]
        variants = 0
        for first, arrangement, cells, own in placed.parts:
            while segments and segments[-1].first >= first:
                segments.pop()
            function = 0 if arrangement is None else arrangement.function
            start = cells.start if cells is not None else 0
            segments.append(Segment(first, function, (start, variants)))
            variants += len(own)
        if variants:
            self._variants[number] = np.concatenate([part.variants for part in placed.parts])
        if any(segment.function for segment in segments):
            self._requests.put(number, segments)
        else:
            self._requests.drop(number)
