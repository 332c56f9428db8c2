"""Steering in force: which slot, rule and cell every token of every request has.

Invariant: what a plan's acts hold is taken all at once or not at all, and given back once. Slots
and rules are held once for equal acts, so that each further sample of a request costs little. A
plan that is amended keeps the cells of what was measured before, and goes on to fill them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.composition import Piece, compose
from rheostat_engine.core.bank import Bank
from rheostat_engine.core.doses import CellRun, Doses, Norms, cell_of
from rheostat_engine.core.rules import TokenRules
from rheostat_engine.core.segments import Int64, PositionTable
from rheostat_engine.core.vectors import BankError, Vectors
from rheostat_engine.plan import Act, Plan, TokenSet

_SLOT, _CELL, _RULE = range(3)


class Placed(NamedTuple):
    """What a plan's acts hold."""

    acts: tuple[Act, ...] = ()
    """Those for which slots and rules are held."""
    variants: tuple[int, ...] = ()
    """Where the variants of each piece that follows a rule begin."""
    cells: tuple[CellRun, ...] = ()
    """Cells, the amended plan's after those from before."""
    measured: bool = True
    """Whether there were cells for everything."""


@dataclass
class _Arranged:
    """What acts hold together, however many requests carry them out."""

    pieces: tuple[Piece, ...]
    slots: list[int]
    """Of every variant, piece by piece."""
    rules: list[int]
    """Of every piece; 0: none."""
    sets: list[tuple[TokenSet, ...]]
    """The rules in use."""
    users: int = 0


class Instruction(NamedTuple):
    """What a step's tokens are to do."""

    slot: npt.NDArray[np.int32]
    """[n]; this and the next two as in `Compact`."""
    cell: npt.NDArray[np.int32]
    """[n]."""
    rule: npt.NDArray[np.int32]
    """[n]."""
    sites: npt.NDArray[np.bool_]
    """[sites]: where something may happen."""


class Steering:
    """The acts of all requests."""

    def __init__(self, bank: Bank, rules: TokenRules, doses: Doses) -> None:
        """Nothing is in force."""
        self.bank = bank
        self.rules = rules
        self._doses = doses
        self._vectors: dict[bytes, npt.NDArray[np.float32]] = {}
        self._norms: dict[bytes, npt.NDArray[np.float32]] = {}
        self._arranged: dict[tuple[Act, ...], _Arranged] = {}
        self._table = PositionTable(columns=3)

    @property
    def vectors(self) -> Vectors:
        """Those that are kept, now and later."""
        return MappingProxyType(self._vectors)

    def load(self, vectors: Vectors, norms: Norms) -> None:
        """Keeps vectors and the norms of their rows, by digest, for plans to come."""
        self._vectors |= vectors
        self._norms |= norms

    def drop(self, digests: Sequence[bytes]) -> None:
        """Forgets vectors. What was made of them stays as long as its requests."""
        for digest in digests:
            self._vectors.pop(digest, None)
            self._norms.pop(digest, None)

    def norms_of(self, acts: Iterable[Act]) -> Norms:
        """The norms of the vectors that some acts use.

        Raises:
            BankError: a vector is missing.
        """
        digests = sorted({digest for act in acts if act.acts for digest in act.vectors})
        for digest in digests:
            if digest not in self._norms:
                raise BankError(f"vector {digest.hex()} is not in the worker")
        return {digest: self._norms[digest] for digest in digests}

    def place(self, number: int, plan: Plan, before: Placed | None = None) -> Placed:
        """Puts a plan's acts in force.

        Args:
            number: the request's number.
            plan: the plan.
            before: what the request held so far, for a plan that the new one amends; it is given
                back, apart from its cells.

        Raises:
            BankError, ValueError: the plan can't be put in force; nothing has changed then.
        """
        old = before or Placed()
        arranged = self._arrange(plan.acts)
        ruled = sum(map(bool, arranged.rules))
        if ruled > self.rules.room + len(old.variants):
            self._let_go(plan.acts)
            raise BankError("every piece that follows a rule about token ids is in use")
        self._displace(old)
        new = self._doses.acquire(arranged.pieces, old.cells) if old.measured else None
        cells = (*old.cells, new) if new is not None and new.count else old.cells
        begins = []
        if any(arranged.slots):
            slots = iter(arranged.slots)
            rows = []
            for piece, rule in zip(arranged.pieces, arranged.rules, strict=True):
                held = [next(slots) for _ in piece.variants]
                at = [0 if new is None else cell_of(cells, one) for one in piece.variants]
                if rule:
                    begins.append(self.rules.place(held, at))
                    rows.append((begins[-1], 0, rule))
                else:
                    rows.append((held[0], at[0], 0))
            self._table.put(number, [piece.start for piece in arranged.pieces], rows)
        else:
            self._table.drop(number)
        self._let_go(old.acts)
        return Placed(plan.acts, tuple(begins), cells, new is not None)

    def remove(self, number: int, placed: Placed) -> None:
        """Takes a request's acts out of force; its cells stay until `take_out`."""
        self._table.drop(number)
        self._displace(placed)
        self._let_go(placed.acts)

    def _arrange(self, acts: tuple[Act, ...]) -> _Arranged:
        """Slots and rules of acts, used once more; all or none."""
        arranged = self._arranged.get(acts)
        if arranged is None:
            pieces = compose(acts)
            slots = self.bank.acquire(
                [variant.combination for piece in pieces for variant in piece.variants],
                self._vectors,
            )
            arranged = _Arranged(pieces, slots, [0] * len(pieces), [])
            if not any(slots):
                return arranged
            try:
                self._find_rules(arranged)
            except BankError:
                self._free(arranged)
                raise
            self._arranged[acts] = arranged
        arranged.users += 1
        return arranged

    def _find_rules(self, arranged: _Arranged) -> None:
        """Takes each rule once."""
        numbers: dict[int, int] = {}
        for index, piece in enumerate(arranged.pieces):
            if piece.sets and id(piece.sets) not in numbers:
                numbers[id(piece.sets)] = self.rules.acquire(piece.sets)
                arranged.sets.append(piece.sets)
            arranged.rules[index] = numbers.get(id(piece.sets), 0)

    def _let_go(self, acts: tuple[Act, ...]) -> None:
        """Ends one use of what acts hold."""
        arranged = self._arranged.get(acts)
        if arranged is None:
            return
        arranged.users -= 1
        if not arranged.users:
            del self._arranged[acts]
            self._free(arranged)

    def _free(self, arranged: _Arranged) -> None:
        for slot in arranged.slots:
            self.bank.release(slot)
        for sets in arranged.sets:
            self.rules.release(sets)

    def _displace(self, placed: Placed) -> None:
        for start in placed.variants:
            self.rules.displace(start)

    def take_out(self, placed: Sequence[Placed]) -> torch.Tensor | None:
        """What was measured of requests that are gone, [sites, cells, 4], in their order."""
        return self._doses.take_out([run for one in placed for run in one.cells])

    def lookup(self, numbers: Int64, positions: Int64) -> Instruction:
        """What each token of a step is to do, [n] each; see `PositionTable.lookup`.

        All that it needs is brought to the device.
        """
        self.bank.flush()
        found = self._table.lookup(numbers, positions)
        slot, cell, rule = found[:, _SLOT], found[:, _CELL], found[:, _RULE]
        if not rule.any():
            return Instruction(slot, cell, rule, self.bank.sites_of(slot))
        plain = np.where(rule == 0, slot, 0)
        variants = [
            self.rules.slots[start : start + self.rules.count(int(number))]
            for start, number in {tuple(row) for row in found[rule > 0][:, [_SLOT, _RULE]].tolist()}
        ]
        return Instruction(slot, cell, rule, self.bank.sites_of(np.concatenate([plain, *variants])))
