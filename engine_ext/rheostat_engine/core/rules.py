"""Rules about token ids: which variant of a piece applies to a token known only on the device.

A rule is up to four sets of token ids. The table says for every token id in which of the sets it
is; the variants of a piece that follows a rule stand one after the other in another table.

Invariant: rule 0 puts every token into variant 0; equal sets are one rule.
"""

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.core.devices import to_device
from rheostat_engine.core.segments import Int32
from rheostat_engine.core.shared import Full, Runs, Shared
from rheostat_engine.core.tables import Table
from rheostat_engine.core.vectors import BankError
from rheostat_engine.plan import TokenSet

_VARIANTS = 16384


class TokenRules:
    """The rules and variants in use."""

    def __init__(self, rules: int, vocabulary: int, device: torch.device) -> None:
        """Allocates both tables.

        Args:
            rules: how many, rule 0 not counted.
            vocabulary: number of token ids.
            device: where the tables lie.
        """
        self._bits = Table(torch.zeros(rules + 1, vocabulary, dtype=torch.uint8, device=device))
        self._numbers: Shared[tuple[TokenSet, ...]] = Shared(rules)
        self._runs = Runs(0, _VARIANTS)
        self.variants = torch.zeros(_VARIANTS, 2, dtype=torch.int32, device=device)
        """[variants, 2] int32: slot and cell."""
        self.slots: Int32 = np.zeros(_VARIANTS, np.int32)
        """[variants], on the host: slot."""
        self._cells: Int32 = np.zeros(_VARIANTS, np.int32)
        self._sizes: Int32 = np.ones(rules + 1, np.int32)
        self._stale = False

    def __len__(self) -> int:
        """Rules in use."""
        return len(self._numbers)

    @property
    def bits(self) -> torch.Tensor:
        """[rules, vocabulary] uint8: bit i says whether a token id is in set i of a rule."""
        return self._bits.tensor

    def count(self, rule: int) -> int:
        """How many variants a piece under a rule has."""
        return int(self._sizes[rule])

    def acquire(self, sets: tuple[TokenSet, ...]) -> int:
        """Uses a rule; its number.

        Raises:
            BankError: a token id isn't one of the model's, or there is no room.
        """
        vocabulary = self.bits.shape[1]
        if any(tokens and not 0 <= tokens[0] <= tokens[-1] < vocabulary for tokens in sets):
            raise BankError(f"a token id is not below the vocabulary's size, {vocabulary}")
        try:
            taken = self._numbers.take(sets)
        except Full as error:
            raise BankError("every rule about token ids is in use") from error
        if taken.fresh:
            bits = np.zeros(vocabulary, np.uint8)
            for bit, tokens in enumerate(sets):
                bits[list(tokens)] |= np.uint8(1 << bit)
            self._sizes[taken.number] = 1 << len(sets)
            self._bits.put(taken.number, bits)
            self._bits.flush()
        return taken.number

    def release(self, sets: tuple[TokenSet, ...]) -> None:
        """Ends one use of a rule."""
        self._numbers.give(sets)

    def place(self, slots: npt.ArrayLike, cells: npt.ArrayLike) -> int:
        """Puts a piece's variants down; where they begin.

        Raises:
            BankError: there is no room.
        """
        slots, cells = np.asarray(slots, np.int32), np.asarray(cells, np.int32)
        start = self._runs.take(len(slots))
        if start is None:
            raise BankError("every variant of pieces with token ids is in use")
        self.slots[start : start + len(slots)] = slots
        self._cells[start : start + len(slots)] = cells
        self._stale = True
        return start

    def displace(self, start: int, count: int) -> None:
        """Takes a piece's variants away."""
        self._runs.give(start, count)

    def flush(self) -> None:
        """Brings the variants to the device."""
        if self._stale:
            self._stale = False
            table = torch.from_numpy(np.stack([self.slots, self._cells], axis=1))
            self.variants.copy_(to_device(table, self.variants.device), non_blocking=True)
