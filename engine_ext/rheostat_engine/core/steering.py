"""Steering in force: which slot, rule and cell every token of every request has.

Invariant: what a plan's acts hold is taken all at once or not at all, and given back once. A plan
that is amended keeps the cells of what was measured before.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.composition import compose
from rheostat_engine.core.bank import Bank
from rheostat_engine.core.doses import CellRun, Doses, Norms, cell_of
from rheostat_engine.core.rules import TokenRules
from rheostat_engine.core.segments import Int64, PositionTable
from rheostat_engine.core.vectors import BankError, Vectors
from rheostat_engine.plan import Act, Plan, TokenSet

_SLOT, _CELL, _RULE = range(3)


class Placed(NamedTuple):
    """What a plan's acts hold."""

    slots: tuple[int, ...] = ()
    """Slots of the bank."""
    rules: tuple[tuple[TokenSet, ...], ...] = ()
    """Rules about token ids, one use each."""
    variants: tuple[int, ...] = ()
    """Where the variants of each piece that follows a rule begin."""
    cells: tuple[CellRun, ...] = ()
    """Cells, the amended plan's after those from before."""
    measured: bool = True
    """Whether there were cells for everything."""


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
        self._table = PositionTable(columns=3)

    def load(self, vectors: Vectors) -> None:
        """Keeps vectors, by digest, for plans to come."""
        for digest, vector in vectors.items():
            self._vectors[digest] = vector
            self._norms[digest] = np.linalg.norm(vector.astype(np.float64), axis=1).astype("<f4")

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
            before: what the request held so far; it is given back, apart from its cells.

        Raises:
            BankError, ValueError: the plan can't be put in force; nothing has changed then.
        """
        pieces = compose(plan.acts)
        variants = [variant for piece in pieces for variant in piece.variants]
        slots = self.bank.acquire([one.combination for one in variants], self._vectors)
        ruled: list[tuple[TokenSet, ...]] = []
        begins: list[int] = []
        if not any(slots):
            placed = Placed(tuple(slots))
            self._table.drop(number)
        else:
            cells = self._doses.acquire(pieces)
            slot_of = iter(slots)
            rows = []
            try:
                for piece in pieces:
                    held = [next(slot_of) for _ in piece.variants]
                    at = [cell_of(cells, variant) for variant in piece.variants]
                    if not piece.sets:
                        rows.append((held[0], at[0], 0))
                        continue
                    rule = self.rules.acquire(piece.sets)
                    ruled.append(piece.sets)
                    start = self.rules.place(held, at)
                    begins.append(start)
                    rows.append((start, 0, rule))
            except BankError:
                self.release(Placed(tuple(slots), tuple(ruled), tuple(begins)))
                if cells is not None:
                    self._doses.take_out([cells])
                raise
            placed = Placed(
                tuple(slots),
                tuple(ruled),
                tuple(begins),
                () if cells is None else (cells,),
                cells is not None,
            )
            self._table.put(number, [piece.start for piece in pieces], rows)
        if before is None:
            return placed
        self.release(before)
        return placed._replace(
            cells=before.cells + placed.cells, measured=before.measured and placed.measured
        )

    def remove(self, number: int, placed: Placed) -> None:
        """Takes a request's acts out of force; its cells stay until `take_out`."""
        self._table.drop(number)
        self.release(placed)

    def release(self, placed: Placed) -> None:
        """Gives back all but the cells."""
        for slot in placed.slots:
            self.bank.release(slot)
        for sets in placed.rules:
            self.rules.release(sets)
        for start in placed.variants:
            self.rules.displace(start)

    def take_out(self, placed: Sequence[Placed]) -> torch.Tensor | None:
        """What was measured of requests that are gone, [sites, cells, 4], in their order."""
        return self._doses.take_out([run for one in placed for run in one.cells])

    def lookup(self, numbers: Int64, positions: Int64) -> Instruction:
        """What each token of a step is to do, [n] each; see `PositionTable.lookup`."""
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
