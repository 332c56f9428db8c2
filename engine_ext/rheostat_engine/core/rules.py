"""Rules about token ids: which variant of a piece applies to a token known only on the device.

A rule is up to four sets of token ids. The table says for every token id in which of the sets it
is; the variants of a piece that follows a rule stand one after the other in another table.

Invariant: rule 0 puts every token into variant 0; equal sets are one rule. Every piece has room for
as many variants as there can be, so that what the ledger counts always finds its place.
"""

import numpy as np
import torch

from rheostat_engine.composition import MAX_TOKEN_SETS
from rheostat_engine.core.segments import Int32
from rheostat_engine.core.shared import Full, Shared
from rheostat_engine.core.tables import Table
from rheostat_engine.core.vectors import BankError, Exhausted

VARIANTS = 1 << MAX_TOKEN_SETS
"""Variants for which there is room wherever a rule decides."""


class TokenRules:
    """The rules and variants in use."""

    def __init__(self, rules: int, pieces: int, vocabulary: int, device: torch.device) -> None:
        """Allocates both tables.

        Args:
            rules: how many, rule 0 not counted.
            pieces: how many may follow a rule.
            vocabulary: number of token ids.
            device: where the tables lie.
        """
        self._bits = Table(torch.zeros(rules + 1, vocabulary, dtype=torch.uint8, device=device))
        self._numbers: Shared[tuple[bytes, ...]] = Shared(rules)
        self._free = list(range(pieces - 1, -1, -1))
        self._variants = Table(torch.zeros(pieces, VARIANTS, 2, dtype=torch.int32, device=device))
        self.slots: Int32 = np.zeros(pieces * VARIANTS, np.int32)
        """[variants], on the host: slot."""
        self._sizes: Int32 = np.ones(rules + 1, np.int32)

    def __len__(self) -> int:
        """Rules in use."""
        return len(self._numbers)

    @property
    def room(self) -> int:
        """For how many more pieces there is room."""
        return len(self._free)

    @property
    def bits(self) -> torch.Tensor:
        """[rules, vocabulary] uint8: bit i says whether a token id is in set i of a rule."""
        return self._bits.tensor

    @property
    def variants(self) -> torch.Tensor:
        """[variants, 2] int32: slot and cell."""
        return self._variants.tensor.view(-1, 2)

    def count(self, rule: int) -> int:
        """How many variants a piece under a rule has."""
        return int(self._sizes[rule])

    def acquire(self, sets: tuple[bytes, ...]) -> int:
        """Uses a rule; its number.

        Args:
            sets: token ids, each set as ascending little-endian int32.

        Raises:
            BankError: a token id isn't one of the model's, or there is no room.
        """
        vocabulary = self.bits.shape[1]
        ids = [np.frombuffer(tokens, "<i4") for tokens in sets]
        if any(len(one) and not 0 <= one[0] <= one[-1] < vocabulary for one in ids):
            raise BankError(f"a token id is not below the vocabulary's size, {vocabulary}")
        try:
            taken = self._numbers.take(sets)
        except Full as error:
            raise Exhausted("every rule about token ids is in use") from error
        if taken.fresh:
            bits = np.zeros(vocabulary, np.uint8)
            for bit, one in enumerate(ids):
                bits[one] |= np.uint8(1 << bit)
            self._sizes[taken.number] = 1 << len(sets)
            self._bits.put(taken.number, bits)
            self._bits.flush()
        return taken.number

    def release(self, sets: tuple[bytes, ...]) -> None:
        """Ends one use of a rule."""
        self._numbers.give(sets)

    def place(self, slots: Int32, cells: Int32) -> Int32:
        """Puts the variants of several combinations down; where each begins, [k].

        Args:
            slots: [k, variants]: as many variants as there can be; those that aren't there are 0.
            cells: [k, variants].

        Raises:
            BankError: there is no room for all of them.
        """
        count = len(slots)
        if count > len(self._free):
            raise Exhausted("every piece that follows a rule about token ids is in use")
        pieces = [self._free.pop() for _ in range(count)]
        self._variants.put_all(pieces, np.stack([slots, cells], axis=2))
        starts = np.array(pieces, np.int32) * VARIANTS
        self.slots.reshape(-1, VARIANTS)[pieces] = slots
        return starts

    def displace(self, starts: Int32) -> None:
        """Takes variants away that begin there."""
        self._free += (starts // VARIANTS).tolist()

    def flush(self) -> None:
        """Brings the variants to the device."""
        self._variants.flush()
