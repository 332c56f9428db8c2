"""The bank: rows that steering adds, shared by content, counted by users, recycled.

Invariant: row 0 and slot 0 are nothing, for ever. A row is the float32 sum of what one combination
of vectors adds at a site, rounded once to the model's dtype; a sum of zeros is row 0. A slot is
what one combination does at all sites. Equal content has one row and one slot, however many use it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.core.devices import to_device
from rheostat_engine.core.segments import Int32
from rheostat_engine.plan import RowKey

Combination = tuple[tuple[int, RowKey], ...]
Vectors = Mapping[bytes, npt.NDArray[np.float32]]


class BankError(Exception):
    """A combination can't be put into the bank; the request that wants it must fail."""


@dataclass
class _Entry:
    number: int
    users: int


class Bank:
    """Rows and slots in device memory, with their host-side books."""

    def __init__(
        self,
        *,
        sites: int,
        rows: int,
        slots: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates everything; nothing is allocated later.

        Args:
            sites: number of sites.
            rows: rows, row 0 included.
            slots: slots, slot 0 included.
            width: W.
            dtype: the stream's dtype.
            device: where the rows lie.
        """
        self.rows = torch.zeros(rows, width, dtype=dtype, device=device)
        """[rows, W]."""
        self.row_of = torch.zeros(sites, slots, dtype=torch.int32, device=device)
        """[sites, slots]: the row that a slot adds at a site."""
        self.slot_sites: npt.NDArray[np.bool_] = np.zeros((slots, sites), np.bool_)
        """[slots, sites], on the host: whether a slot adds anything at a site."""
        self._free_rows = list(range(rows - 1, 0, -1))
        self._free_slots = list(range(slots - 1, 0, -1))
        self._row_entries: dict[RowKey, _Entry] = {}
        self._slot_entries: dict[Combination, _Entry] = {}
        self._combination_of: dict[int, Combination] = {}

    @property
    def rows_used(self) -> int:
        """Rows in use, row 0 not counted."""
        return self.rows.shape[0] - 1 - len(self._free_rows)

    @property
    def slots_used(self) -> int:
        """Slots in use, slot 0 not counted."""
        return len(self._slot_entries)

    def acquire(self, combinations: Sequence[Combination], vectors: Vectors) -> list[int]:
        """Takes a slot for each combination, making what isn't there yet; all or none.

        Args:
            combinations: what to do at which site; an empty one is slot 0.
            vectors: float32 [rows, W] by digest.

        Raises:
            BankError: a vector is missing or of the wrong shape, a sum isn't finite in the
                stream's dtype, or the bank is full. Nothing is taken then.
        """
        taken: list[int] = []
        try:
            for combination in combinations:
                taken.append(self._acquire_one(combination, vectors))
        except BankError:
            for slot in taken:
                self.release(slot)
            raise
        return taken

    def release(self, slot: int) -> None:
        """Gives a slot back."""
        if slot == 0:
            return
        combination = self._combination_of[slot]
        entry = self._slot_entries[combination]
        entry.users -= 1
        if entry.users:
            return
        del self._slot_entries[combination], self._combination_of[slot]
        self.slot_sites[slot] = False
        self._free_slots.append(slot)
        for _, key in combination:
            self._release_row(key)

    def sites_of(self, slots: Int32) -> npt.NDArray[np.bool_]:
        """[sites]: where at least one of the slots adds something."""
        used = np.flatnonzero(np.bincount(slots, minlength=1))
        touched: npt.NDArray[np.bool_] = np.logical_or.reduce(self.slot_sites[used], axis=0)
        return touched

    def _acquire_one(self, combination: Combination, vectors: Vectors) -> int:
        if not combination:
            return 0
        known = self._slot_entries.get(combination)
        if known is not None:
            known.users += 1
            return known.number
        if not self._free_slots:
            raise BankError("every slot is in use")
        numbers = self._acquire_rows([key for _, key in combination], vectors)
        slot = self._free_slots.pop()
        column = np.zeros(self.row_of.shape[0], np.int32)
        for (site, _), number in zip(combination, numbers, strict=True):
            column[site] = number
        self.row_of[:, slot] = to_device(torch.from_numpy(column), self.row_of.device)
        self.slot_sites[slot] = column != 0
        self._slot_entries[combination] = _Entry(slot, 1)
        self._combination_of[slot] = combination
        return slot

    def _acquire_rows(self, keys: Sequence[RowKey], vectors: Vectors) -> list[int]:
        fresh: dict[RowKey, torch.Tensor] = {}
        for key in keys:
            if key not in self._row_entries and key not in fresh:
                fresh[key] = self._compose(key, vectors)
        nonzero = [key for key, row in fresh.items() if bool(row.any())]
        if len(nonzero) > len(self._free_rows):
            raise BankError("every row of the bank is in use")
        for key in fresh:
            self._row_entries[key] = _Entry(self._free_rows.pop() if key in nonzero else 0, 0)
        if nonzero:
            where = torch.tensor([self._row_entries[key].number for key in nonzero])
            content = torch.stack([fresh[key] for key in nonzero])
            device = self.rows.device
            self.rows.index_copy_(0, to_device(where, device), to_device(content, device))
        for key in keys:
            self._row_entries[key].users += 1
        return [self._row_entries[key].number for key in keys]

    def _release_row(self, key: RowKey) -> None:
        entry = self._row_entries[key]
        entry.users -= 1
        if entry.users == 0:
            del self._row_entries[key]
            if entry.number:
                self._free_rows.append(entry.number)

    def _compose(self, key: RowKey, vectors: Vectors) -> torch.Tensor:
        width = self.rows.shape[1]
        total = np.zeros(width, np.float32)
        for digest, row, scale in key:
            vector = vectors.get(digest)
            if vector is None:
                raise BankError(f"vector {digest.hex()} is not in the worker")
            if not 0 <= row < vector.shape[0] or vector.shape[1] != width:
                raise BankError(f"vector {digest.hex()} has no row {row} of width {width}")
            with np.errstate(over="ignore", invalid="ignore"):
                total += np.float32(scale) * vector[row]
        composed = torch.from_numpy(total).to(self.rows.dtype)
        if not bool(composed.isfinite().all()):
            raise BankError(f"the sum of the vectors is not finite in {self.rows.dtype}")
        return composed
