"""Measurements: how far each act moved the rows that it touched, summed up on the device.

A dose slot has one measurement at one site, for one variant of one request: the number of rows, the
sum of |change|, and sum and maximum of |change| / |x|. An addition changes a row by its vector,
multiplied by a factor f: how far a gate is open, a gain, or 1. The kernel then sums f in place of
|change|. The sums are multiplied by the norm of the vector when they are read here.

Invariants: dose slots are zero when a request gets them. The first `MAX_STEPS` slots belong to no
request. If too few slots are free for a request, the kernel writes its measurements there.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.cached_property import cached_property
from rheostat_engine.plan.acts import Act, Kind
from rheostat_engine.plan.composition import MAX_STEPS, attribution
from rheostat_engine.worker.state.device_table import to_device
from rheostat_engine.worker.state.id_allocators import RangeAllocator
from rheostat_engine.worker.state.position_functions import Int64

_DOSE_SLOTS = 8192
_MOST = 512
"""The most dose slots of one request, with all updates of its acts."""

Norms = Mapping[bytes, npt.NDArray[np.float32]]
"""L2 norm of each row, by digest."""

DoseFields = tuple[int, int, int, float, float, float]
"""The fields of a `Dose`."""


class SlotRange(NamedTuple):
    """Consecutive dose slots of a request."""

    start: int
    count: int  # type: ignore[assignment]  # a range is no sequence to count in


class Doses:
    """Dose slots in device memory."""

    def __init__(self, sites: int, device: torch.device) -> None:
        """Allocates the dose slots of every site."""
        self.dose_slots = torch.zeros(sites, _DOSE_SLOTS + MAX_STEPS, 4, device=device)
        """[sites, slots, 4] float32: rows, sum of |change|, sum and maximum of |change| / |x|."""
        self._ranges = RangeAllocator(MAX_STEPS, _DOSE_SLOTS + MAX_STEPS)

    def acquire(self, count: int, current: Sequence[SlotRange] = ()) -> SlotRange | None:
        """Takes dose slots for a request that has `current`; None if they don't fit."""
        if count == 0:
            return SlotRange(0, 0)
        fits = count + sum(slots.count for slots in current) <= _MOST
        start = self._ranges.take(count) if fits else None
        return None if start is None else SlotRange(start, count)

    def take_out(self, ranges: Sequence[SlotRange]) -> torch.Tensor | None:
        """Takes the values of slots, [sites, slots, 4], in their order, and frees the slots."""
        numbers = [n for slots in ranges for n in range(slots.start, slots.start + slots.count)]
        if not numbers:
            return None
        where = to_device(torch.tensor(numbers), self.dose_slots.device)
        measured = self.dose_slots.index_select(1, where)
        self.dose_slots.index_fill_(1, where, 0.0)
        for slots in ranges:
            if slots.count:
                self._ranges.give(slots.start, slots.count)
        return measured


class _Entries(NamedTuple):
    """Measured acts as columns, [n] each, by act, then site."""

    acts: Int64
    sites: Int64
    dose_slots: Int64
    norms: npt.NDArray[np.float64]
    """The factor of the sums: |v| if the act adds a vector v, 1 for any other act."""
    firsts: Int64
    """[m]: the first entry of each act at a site. The others follow it."""


class Measures:
    """The measurements of a table of acts, shared by all requests with the table.

    A dose slot belongs to a measurement of a variant. Neighbouring additions are measured together.
    """

    def __init__(self, acts: Sequence[Act], norms: Norms) -> None:
        """Nothing is measured yet.

        Args:
            acts: the acts of the table.
            norms: norms of the vectors that are added.
        """
        self.dose_slots = 0
        """Dose slots that a request needs."""
        self._acts = acts
        self._norms = norms
        self._first_slots: dict[tuple[int, ...], int] = {}
        self._entries: list[tuple[int, int, int, float]] = []
        """Act, site, dose slot and norm of each measured act, as in `_Entries`."""
        self._later: list[tuple[tuple[int, ...], int]] = []
        """Variants whose measurements are noted when the first is read, and their first slots."""

    def first_slot(self, members: tuple[int, ...]) -> int | None:
        """The first dose slot of a variant, counted from 0; None if it was not added."""
        return self._first_slots.get(members)

    def measure(self, members: tuple[int, ...], sites: range | None = None) -> None:
        """Notes the measurements of a variant at some sites, before the variant is added.

        Args:
            members: the acts that apply, by index.
            sites: the sites; None for all.
        """
        self._note(members, sites, self.dose_slots)

    def _note(self, members: tuple[int, ...], sites: range | None, first_slot: int) -> None:
        acts = self._acts
        rows = {
            index: dict(acts[index].rows if sites is None else acts[index].site_rows.within(sites))
            for index in members
            if acts[index].strong
        }
        for site, groups in attribution(acts, members, sites).items():
            for dose_slot, group in enumerate(groups, first_slot):
                for index in group:
                    norm = self._norm(acts[index], rows[index][site][0])
                    self._entries.append((index, site, dose_slot, norm))

    def add(self, members: tuple[int, ...], dose_slots: int) -> int:
        """Adds a variant whose measurements were noted; returns its first dose slot, from 0.

        Args:
            members: the acts that apply, by index.
            dose_slots: measurements that the variant's longest program makes.
        """
        first = self._first_slots[members] = self.dose_slots
        self.dose_slots += dose_slots
        return first

    def add_small(self, members: tuple[int, ...], dose_slots: int) -> int:
        """Adds a variant of a small table, whose measurements are noted once they are read.

        Many requests are never measured. Arguments and result as in `add`.
        """
        first = self.add(members, dose_slots)
        self._later.append((members, first))
        return first

    def read(
        self, measured: npt.NDArray[np.float32], begins: Sequence[int], first_act: int
    ) -> list[list[DoseFields]]:
        """Reads the dose slots of requests with this table; of each by act, then site.

        Args:
            measured: [sites, slots, 4]: dose slots.
            begins: [r]: the first slot of each request.
            first_act: index of the table's first act in the plan of each request.
        """
        entries = self._columns
        if not len(entries.firsts):
            return [[] for _ in begins]
        at = np.array(begins)[:, None] + entries.dose_slots
        # A table that replaces a row at each position has thousands of entries, and the prefix
        # cache often leaves few of these positions to compute. Doses are therefore made only for
        # acts that touched a row, because making Python objects holds the GIL.
        rows = measured[entries.sites, at, 0]
        sizes = np.diff(entries.firsts, append=len(entries.acts))
        touched = np.logical_or.reduceat(rows != 0, entries.firsts, axis=1)
        request, entry = np.repeat(touched, sizes, axis=1).nonzero()
        values = measured[entries.sites[entry], at[request, entry]].astype(np.float64)
        values[values[:, 0] == 0] = 0.0
        rows, change, share, largest = values.T
        norms = entries.norms[entry]
        change, share, largest = change * norms, share * norms, largest * norms
        request, act = touched.nonzero()
        if len(act) < len(entry):
            sizes = sizes[act]
            firsts = sizes.cumsum() - sizes
            rows, change, share = (np.add.reduceat(sums, firsts) for sums in (rows, change, share))
            largest = np.maximum.reduceat(largest, firsts)
        heads = entries.firsts[act]
        columns = (
            first_act + entries.acts[heads],
            entries.sites[heads],
            np.rint(rows).astype(np.int64),
            change,
            share,
            largest,
        )
        doses = list(zip(*(column.tolist() for column in columns), strict=True))
        ends = request.searchsorted(range(len(begins) + 1)).tolist()
        return [doses[begin:end] for begin, end in pairwise(ends)]

    @cached_property
    def _columns(self) -> _Entries:
        """The entries as columns, once all of them were noted."""
        for members, first_slot in self._later:
            self._note(members, None, first_slot)
        self._later.clear()
        listed = np.array(self._entries, np.float64).reshape(-1, 4)
        listed = listed[np.lexsort((listed[:, 1], listed[:, 0]))]
        acts, sites, dose_slots = listed[:, :3].astype(np.int64).T
        norms = listed[:, 3]
        self._entries.clear()
        another = (np.diff(acts, prepend=-1) != 0) | (np.diff(sites, prepend=-1) != 0)
        firsts = np.flatnonzero(another)
        return _Entries(acts, sites, dose_slots, norms, firsts)

    def _norm(self, act: Act, row: int) -> float:
        """The norm of a row that an act adds; 1 for an act of another kind."""
        if act.kind is not Kind.ADD:
            return 1.0
        return abs(act.scale) * float(self._norms[act.vectors[0]][row])
