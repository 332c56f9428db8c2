"""Rules about token ids: the variant of an interval for a token whose id only the device has.

A rule is up to four sets of token ids. One table has, for every token id, the sets that contain it.
Another table has the variants of each interval that follows a rule, one after the other.

Invariants: rule 0 gives every token variant 0. Equal sets are one rule. Every interval has space
for all variants that a rule can have, so that all intervals that the ledger admits fit.
"""

import numpy as np
import torch

from rheostat_engine.plan.composition import MAX_TOKEN_SETS
from rheostat_engine.worker.state.device_table import Table
from rheostat_engine.worker.state.id_allocators import BankError, Exhausted, RefCountedIds
from rheostat_engine.worker.state.position_functions import Int32

VARIANTS = 1 << MAX_TOKEN_SETS
"""Variants of an interval for which there is space."""


class TokenRules:
    """The rules and variants in use."""

    def __init__(self, rules: int, intervals: int, vocabulary: int, device: torch.device) -> None:
        """Allocates both tables.

        Args:
            rules: number of rules without rule 0.
            intervals: number of intervals that may follow a rule.
            vocabulary: number of token ids.
            device: of the tables.
        """
        self._bits = Table(torch.zeros(rules + 1, vocabulary, dtype=torch.uint8, device=device))
        self.bits = self._bits.tensor
        """[rules, vocabulary] uint8: bit i says whether a token id is in set i of a rule."""
        self._numbers: RefCountedIds[tuple[bytes, ...]] = RefCountedIds(
            rules, "rule about token ids"
        )
        self._free = list(range(intervals - 1, -1, -1))
        self._variants = Table(
            torch.zeros(intervals, VARIANTS, 2, dtype=torch.int32, device=device)
        )
        self.variants = self._variants.tensor.view(-1, 2)
        """[variants, 2] int32: slot and dose slot."""
        self.slots: Int32 = np.zeros(intervals * VARIANTS, np.int32)
        """[variants], on the host: slot."""
        self._sizes: Int32 = np.ones(rules + 1, np.int32)

    def __len__(self) -> int:
        """Rules in use."""
        return len(self._numbers)

    @property
    def free_intervals(self) -> int:
        """Intervals that may still follow a rule."""
        return len(self._free)

    def count(self, rule: int) -> int:
        """The number of variants of an interval under a rule."""
        return int(self._sizes[rule])

    def acquire(self, sets: tuple[bytes, ...]) -> int:
        """Adds a use of a rule; returns its number.

        Args:
            sets: token ids, each set as ascending little-endian int32.

        Raises:
            BankError: a token id isn't one of the model's, or every rule is in use.
        """
        vocabulary = self.bits.shape[1]
        ids = [np.frombuffer(packed, "<i4") for packed in sets]
        if any(len(tokens) and not 0 <= tokens[0] <= tokens[-1] < vocabulary for tokens in ids):
            raise BankError(f"a token id is not below the vocabulary's size, {vocabulary}")
        taken = self._numbers.take(sets)
        if taken.fresh:
            bits = np.zeros(vocabulary, np.uint8)
            for bit, tokens in enumerate(ids):
                bits[tokens] |= np.uint8(1 << bit)
            self._sizes[taken.number] = 1 << len(sets)
            self._bits.put(taken.number, bits)
            self._bits.flush()
        return taken.number

    def release(self, sets: tuple[bytes, ...]) -> None:
        """Ends one use of a rule."""
        self._numbers.give(sets)

    def add_variants(self, slots: Int32, dose_slots: Int32) -> Int32:
        """Adds the variants of several combinations; returns the first variant of each, [k].

        Args:
            slots: [k, variants]; 0 for variants that a rule does not have.
            dose_slots: [k, variants].

        Raises:
            BankError: too few intervals are free.
        """
        count = len(slots)
        if count > len(self._free):
            raise Exhausted("every interval that follows a rule about token ids is in use")
        taken = [self._free.pop() for _ in range(count)]
        self._variants.put_all(taken, np.stack([slots, dose_slots], axis=2))
        starts = np.array(taken, np.int32) * VARIANTS
        self.slots.reshape(-1, VARIANTS)[taken] = slots
        return starts

    def remove_variants(self, starts: Int32) -> None:
        """Removes the variants that begin at `starts`."""
        if len(starts):
            self._free += (starts // VARIANTS).tolist()

    def flush(self) -> None:
        """Copies new variants to the device."""
        self._variants.flush()
