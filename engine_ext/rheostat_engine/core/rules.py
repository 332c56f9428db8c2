"""Rules about token ids: which variant of a piece applies to a token known only on the device.

A rule is up to four sets of token ids. The table says for every token id in which of the sets it
is; the variants of a piece that follows a rule stand one after the other in another table.

Invariant: rule 0 puts every token into variant 0; equal sets are one rule. Every piece has room for
as many variants as there can be, so that what the ledger counts always finds its place.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rheostat_engine.composition import MAX_TOKEN_SETS
from rheostat_engine.core.segments import Int32
from rheostat_engine.core.shared import Full, Shared
from rheostat_engine.core.tables import Table
from rheostat_engine.core.vectors import BankError
from rheostat_engine.plan import TokenSet

_ROOM = 1 << MAX_TOKEN_SETS
"""Variants of a piece."""


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
        self._numbers: Shared[tuple[TokenSet, ...]] = Shared(rules)
        self._free = list(range(pieces - 1, -1, -1))
        self._variants = Table(torch.zeros(pieces, _ROOM, 2, dtype=torch.int32, device=device))
        self.slots: Int32 = np.zeros(pieces * _ROOM, np.int32)
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

    def place(self, slots: Sequence[int], cells: Sequence[int]) -> int:
        """Puts a piece's variants down; where they begin.

        Raises:
            BankError: there is no room.
        """
        if not self._free:
            raise BankError("every piece that follows a rule about token ids is in use")
        piece = self._free.pop()
        content = np.zeros((_ROOM, 2), np.int32)
        content[: len(slots)] = np.stack([slots, cells], axis=1)
        self._variants.put(piece, content)
        self.slots[piece * _ROOM : (piece + 1) * _ROOM] = content[:, 0]
        return piece * _ROOM

    def displace(self, start: int) -> None:
        """Takes a piece's variants away."""
        self._free.append(start // _ROOM)

    def flush(self) -> None:
        """Brings the variants to the device."""
        self._variants.flush()
