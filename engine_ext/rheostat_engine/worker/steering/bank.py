"""The bank: slots, each of which has a program for every site.

Invariants: slot 0 always does nothing. Equal content has one slot, however many requests use it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.plan.capacity import Capacity
from rheostat_engine.plan.composition import Combination
from rheostat_engine.worker.state.device_table import Table
from rheostat_engine.worker.state.id_allocators import BankError, RefCountedIds
from rheostat_engine.worker.state.position_functions import Int32
from rheostat_engine.worker.steering.programs import Programs
from rheostat_engine.worker.steering.vectors import Vectors


class Bank:
    """Slots and programs in device memory, and their contents on the host."""

    def __init__(
        self,
        *,
        sites: int,
        capacity: Capacity,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates everything; nothing is allocated later.

        Args:
            sites: number of sites.
            capacity: the number of slots, rows, directions and steps, without number 0.
            width: W.
            dtype: the stream's dtype.
            device: of all tables.
        """
        self.programs = Programs(capacity, width=width, dtype=dtype, device=device)
        slots = capacity.slots + 1
        self._codes = Table(torch.zeros(sites, slots, dtype=torch.int32, device=device), dim=1)
        self.code_of = self._codes.tensor
        """[sites, slots] int32: the code of a slot's program at a site; see `Programs`."""
        self.slot_sites: npt.NDArray[np.bool_] = np.zeros((slots, sites), np.bool_)
        """[slots, sites], on the host: whether a slot has a program at a site."""
        self._slots: RefCountedIds[Combination] = RefCountedIds(capacity.slots, "slot")
        self._combinations: dict[int, Combination] = {}

    @property
    def slots_used(self) -> int:
        """Slots in use, slot 0 not counted."""
        return len(self._slots)

    @property
    def more_than_half_used(self) -> bool:
        """Whether more than half of the slots, or of a resource of programs, are used."""
        return self._slots.more_than_half_used or self.programs.more_than_half_used

    def acquire(self, combinations: Sequence[Combination], vectors: Vectors) -> list[int]:
        """Takes a slot for each combination, or none; makes combinations that do not exist yet.

        New slots are on the device after `flush`.

        Args:
            combinations: programs by site; an empty combination is slot 0.
            vectors: float32 [rows, W] by digest.

        Raises:
            BankError: a combination can't be made, or a resource is exhausted. Nothing is taken
                then.
        """
        wanted = [combination for combination in combinations if combination]
        taken = self._slots.take_all(wanted)
        new = {slot: own for own, (slot, fresh) in zip(wanted, taken, strict=True) if fresh}
        programs = [program for combination in new.values() for _, program in combination]
        try:
            codes = iter(self.programs.acquire(programs, vectors))
        except BankError:
            for combination in wanted:
                self._slots.give(combination)
            raise
        columns = np.zeros((len(self.code_of), len(new)), np.int32)
        for index, combination in enumerate(new.values()):
            for site, _ in combination:
                columns[site, index] = next(codes)
        if new:
            self._codes.put_all(list(new), columns)
            self.slot_sites[list(new)] = columns.T != 0
            self._combinations |= new
        slots = (slot for slot, _ in taken)
        return [next(slots) if combination else 0 for combination in combinations]

    def weight(self, slot: int) -> int:
        """The number of programs of a slot in use."""
        return len(self._combinations[slot])

    def flush(self) -> None:
        """Copies new slots and programs to the device."""
        self.programs.flush()
        self._codes.flush()

    def release(self, slot: int) -> None:
        """Ends one use of a slot."""
        if slot == 0:
            return
        combination = self._combinations[slot]
        if not self._slots.give(combination):
            return
        del self._combinations[slot]
        self.slot_sites[slot] = False
        for _, program in combination:
            self.programs.release(program)

    def sites_of(self, slots: Int32) -> npt.NDArray[np.bool_]:
        """[sites]: whether at least one of the slots has a program at a site."""
        used = np.flatnonzero(np.bincount(slots, minlength=1))
        touched: npt.NDArray[np.bool_] = np.logical_or.reduce(self.slot_sites[used], axis=0)
        return touched
