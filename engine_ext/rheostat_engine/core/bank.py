"""The bank: slots, each of which says for every site which program runs there.

Invariant: slot 0 does nothing, for ever. Equal content has one slot, however many use it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.capacity import Capacity
from rheostat_engine.composition import Combination
from rheostat_engine.core.programs import Programs
from rheostat_engine.core.segments import Int32
from rheostat_engine.core.shared import Full, Shared
from rheostat_engine.core.tables import Table
from rheostat_engine.core.vectors import BankError, Exhausted, Vectors


class Bank:
    """Slots and programs in device memory, with their host-side books."""

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
            capacity: how much there is to be of everything, number 0 not counted.
            width: W.
            dtype: the stream's dtype.
            device: where it all lies.
        """
        self.programs = Programs(capacity, width=width, dtype=dtype, device=device)
        slots = capacity.slots + 1
        self._codes = Table(torch.zeros(sites, slots, dtype=torch.int32, device=device), dim=1)
        self.slot_sites: npt.NDArray[np.bool_] = np.zeros((slots, sites), np.bool_)
        """[slots, sites], on the host: whether a slot does anything at a site."""
        self._slots: Shared[Combination] = Shared(capacity.slots)
        self._combinations: dict[int, Combination] = {}

    @property
    def code_of(self) -> torch.Tensor:
        """[sites, slots] int32: the code of a slot's program at a site; see `Programs`."""
        return self._codes.tensor

    @property
    def slots_used(self) -> int:
        """Slots in use, slot 0 not counted."""
        return len(self._slots)

    def acquire(self, combinations: Sequence[Combination], vectors: Vectors) -> list[int]:
        """Takes a slot for each combination, making what isn't there yet; all or none.

        What was made is on the device after `flush`.

        Args:
            combinations: what to do at which site; an empty one is slot 0.
            vectors: float32 [rows, W] by digest.

        Raises:
            BankError: a combination can't be made, or there is no room. Nothing is taken then.
        """
        taken: list[int] = []
        fresh: dict[int, Combination] = {}
        try:
            for combination in combinations:
                taken.append(self._take(combination, fresh))
            programs = [program for made in fresh.values() for _, program in made]
            codes = iter(self.programs.acquire(programs, vectors))
        except BankError:
            for combination, slot in zip(combinations, taken, strict=False):
                if slot:
                    self._slots.give(combination)
            raise
        columns = np.zeros((len(self.code_of), len(fresh)), np.int32)
        for index, combination in enumerate(fresh.values()):
            for site, _ in combination:
                columns[site, index] = next(codes)
        if fresh:
            self._codes.put_all(list(fresh), columns)
            self.slot_sites[list(fresh)] = columns.T != 0
            self._combinations |= fresh
        return taken

    def weight(self, slot: int) -> int:
        """How many programs a slot that is in use holds."""
        return len(self._combinations[slot])

    def flush(self) -> None:
        """Brings what was made to the device."""
        self.programs.flush()
        self._codes.flush()

    def release(self, slot: int) -> None:
        """Gives a slot back."""
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
        """[sites]: where at least one of the slots does something."""
        used = np.flatnonzero(np.bincount(slots, minlength=1))
        touched: npt.NDArray[np.bool_] = np.logical_or.reduce(self.slot_sites[used], axis=0)
        return touched

    def _take(self, combination: Combination, fresh: dict[int, Combination]) -> int:
        """A combination's slot; noted if it is a new one."""
        if not combination:
            return 0
        try:
            taken = self._slots.take(combination)
        except Full as error:
            raise Exhausted("every slot is in use") from error
        if taken.fresh:
            fresh[taken.number] = combination
        return taken.number
