"""What tables of acts hold in the worker: put together once for all requests that have a table.

Why in slices
    A table may name thousands of rows. Put together at once it would hold up every request of the
    step. So it is put together in slices of bounded cost. A request whose table is not complete
    completes it; the server sees to it that there is little left by then.
Why what ended stays
    What the last request of a table leaves is let go of in slices too, with each step, or at once
    where somebody needs the room. An equal table that comes before takes it up again.

Invariant: a table holds its slots, programs and rules once, or nothing. What nobody uses never
keeps anybody from room that there is.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from rheostat_engine.acts import Act
from rheostat_engine.composition import Combination, Direction, Program, Variant, combine, meeting
from rheostat_engine.core.bank import Bank
from rheostat_engine.core.doses import Measures, Norms
from rheostat_engine.core.rules import VARIANTS, TokenRules
from rheostat_engine.core.segments import Functions, Int32
from rheostat_engine.core.vectors import BankError, Exhausted, Vectors
from rheostat_engine.tables import STEP_EFFORT, SteeringTable, direction_effort, site_effort

_T = TypeVar("_T")
_Work = Generator[int, None, _T]
"""Work in parts, each of which says what it has cost."""

_ROW_BYTES = 8 << 20
"""Bytes of float32 rows that a slice makes at most, about, because wide rows take longer."""

_COLLECTED = 1000
"""What is let go of at a time where room is needed at once, in units of `effort`."""


class Ruled(NamedTuple):
    """Combinations that depend on the token, one for each that a table has."""

    slots: Int32
    """[k, variants]."""
    cells: Int32
    """[k, variants]: as `Arrangement.cells_at` has them."""


@dataclass
class Arrangement:
    """What a table of acts holds, however many requests have it."""

    digest: bytes
    table: SteeringTable
    measures: Measures
    users: int = 0
    function: int = 0
    """What happens where: slot, cell and rule of each piece. Under a rule, the slot is the number
    of the combination among `ruled`. Cells count from 1; 0 is not measured."""
    ruled: Ruled = field(default_factory=lambda: Ruled(_no_variants(), _no_variants()))
    slots: list[int] = field(default_factory=list)
    rules: list[tuple[bytes, ...]] = field(default_factory=list)
    parts: list[Program] = field(default_factory=list)
    """Programs of a combination that takes several slices, held until it is complete."""
    directions: list[Direction] = field(default_factory=list)
    """Directions that were made before the programs that need them, held as long."""
    work: Generator[int, None, None] | None = None
    """What is left to be done; None: nothing."""
    problem: str = ""
    """Why it can't be put together; empty if it can."""


class Arrangements:
    """The tables of acts that are in use, and those that nobody uses any more but that are kept."""

    def __init__(
        self, bank: Bank, rules: TokenRules, functions: Functions, vectors: Vectors, norms: Norms
    ) -> None:
        """There is none.

        Args:
            bank: holds slots and programs.
            rules: holds rules about token ids.
            functions: three columns; see `Arrangement.function`.
            vectors: those that the worker has, now and later.
            norms: of their rows.
        """
        self._bank = bank
        self._rules = rules
        self.functions = functions
        self._vectors = vectors
        self._norms = norms
        self._used: dict[bytes, Arrangement] = {}
        self._unused: OrderedDict[bytes, Arrangement] = OrderedDict()
        self._ending: Arrangement | None = None
        """One that has given back some of what it holds, so that nobody can take it up again."""
        rows = _ROW_BYTES // (4 * bank.programs.rows.shape[1])
        self._slice_effort = max(1, min(rows, STEP_EFFORT))
        self.built = 0
        """What was put together so far, in units of `effort`."""

    def use(self, digest: bytes, read: Callable[[], SteeringTable]) -> Arrangement:
        """A table's arrangement, used once more; it may be incomplete, see `build`.

        Args:
            digest: the table's.
            read: reads it where it isn't known.

        Raises:
            BankError: a vector is missing.
            ValueError: it is no table.
        """
        one = self._used.get(digest) or self._unused.pop(digest, None)
        if one is None:
            table = read()
            one = Arrangement(digest, table, Measures(table.acts, self._norms_of(table)))
            one.work = self._put_together(one)
        self._used[digest] = one
        one.users += 1
        return one

    def build(self, one: Arrangement, budget: int | None = None) -> int:
        """Goes on putting a table together; what that cost. It is complete once `work` is None.

        Args:
            one: its arrangement.
            budget: after which it stops, or after a slice if that is less; None: it goes on to the
                end.

        Raises:
            BankError, ValueError: it can't be. It holds nothing then; its users must release it.
        """
        if one.problem:
            raise BankError(one.problem)
        spent = 0
        most = None if budget is None else min(budget, self._slice_effort)
        try:
            while one.work is not None and (most is None or spent < most):
                cost = next(one.work, None)
                if cost is None:
                    one.work = None
                else:
                    spent += cost
        except (BankError, ValueError) as error:
            one.problem = str(error)
            self._used.pop(one.digest, None)
            self._strip(one)
            raise
        self.built += spent
        return spent

    def release(self, one: Arrangement) -> None:
        """Ends one use. What nobody uses is let go of by `collect`."""
        one.users -= 1
        if not one.users and self._used.get(one.digest) is one:
            del self._used[one.digest]
            self._unused[one.digest] = one

    def collect(self, budget: int) -> bool:
        """Lets go of what nobody uses, the oldest first, until that has cost so much.

        Returns:
            Whether there is more of it.
        """
        while budget > 0 and (self._ending is not None or self._unused):
            if self._ending is None:
                _, self._ending = self._unused.popitem(last=False)
            budget -= 1 + self._give_slots(self._ending, budget)
            if not self._ending.slots:
                self._strip(self._ending)
                self._ending = None
        return self._ending is not None or bool(self._unused)

    def _norms_of(self, table: SteeringTable) -> Norms:
        """The norms of the vectors that a table uses.

        Raises:
            BankError: a vector is missing, or one of the rows that are used.
        """
        last: dict[bytes, int] = {}
        for index in table.used:
            act = table.acts[index]
            largest = act.site_rows.rows.max(axis=0).tolist()
            for digest, row in zip(act.vectors, largest, strict=True):
                last[digest] = max(row, last.get(digest, 0))
        for digest, row in last.items():
            if digest not in self._norms:
                raise BankError(f"vector {digest.hex()} is not in the worker")
            if row >= len(self._norms[digest]):
                raise BankError(f"vector {digest.hex()} has no row {row}")
        return {digest: self._norms[digest] for digest in last}

    def _put_together(self, one: Arrangement) -> _Work[None]:
        """Takes all that a table needs."""
        table = one.table
        ruled: list[tuple[list[int], list[int]]] = []
        columns = np.zeros((len(table.pieces.members), 3), np.int32)
        for number, clauses in enumerate(table.pieces.members):
            met = meeting([table.owners[i] for i in clauses], table.sets)
            slots, cells = [], []
            for members in met.members:
                slot, cell = yield from self._take(one, members)
                slots.append(slot)
                cells.append(cell)
            if met.sets and any(slots):
                rule = self._with_room(partial(self._rules.acquire, met.sets))
                one.rules.append(met.sets)
                columns[number] = len(ruled), 0, rule
                ruled.append((slots, cells))
                yield 1 + sum(map(len, met.sets)) // 256
            elif not met.sets:
                columns[number] = slots[0], cells[0], 0
        if any(one.slots):
            padded = np.zeros((2, len(ruled), VARIANTS), np.int32)
            for number, (slots, cells) in enumerate(ruled):
                padded[:, number, : len(slots)] = slots, cells
            one.ruled = Ruled(*padded)
            one.function = self.functions.add(table.pieces.starts, columns[table.pieces.sets])

    def _take(self, one: Arrangement, members: tuple[int, ...]) -> _Work[tuple[int, int]]:
        """The slot of a variant, and its first cell, counted from 1."""
        acts = one.table.acts
        known = one.measures.knows(members)
        combination: Combination = ()
        for sites, cost in _slices(acts, members, self._slice_effort):
            part = combine(acts, members, sites)
            programs = [program for _, program in part]
            if cost > self._slice_effort:  # a site whose directions alone are more than a slice
                cost -= yield from self._make_directions(one, programs)
            if sites is not None:
                self._with_room(partial(self._bank.programs.acquire, programs, self._vectors))
                one.parts += programs
            combination += part
            if known is None:
                one.measures.measure(members, sites)
            yield cost
        if not combination:
            return 0, 0
        (slot,) = self._with_room(partial(self._bank.acquire, [combination], self._vectors))
        one.slots.append(slot)
        self._release_parts(one)
        if known is None:
            known = one.measures.add(members, Variant(members, combination).cells)
        yield 1
        return slot, 1 + known

    def _make_directions(self, one: Arrangement, programs: Sequence[Program]) -> _Work[int]:
        """Makes directions that are orthogonal to others, before their programs; what it cost."""
        table = self._bank.programs
        basis = table.basis(self._vectors)
        spent = done = 0
        for direction in (step.direction for program in programs for step in program):
            if len(direction) < 2:
                continue
            self._with_room(partial(table.hold, direction, basis))
            one.directions.append(direction)
            spent += direction_effort(len(direction) - 1)
            if spent >= self._slice_effort:
                yield spent
                done, spent = done + spent, 0
        return done

    def _with_room(self, take: Callable[[], _T]) -> _T:
        """Takes something; where there is no room, what nobody uses makes some."""
        while True:
            try:
                return take()
            except Exhausted:
                if self._ending is None and not self._unused:
                    raise
                self.collect(_COLLECTED)

    def _give_slots(self, one: Arrangement, budget: int) -> int:
        """Gives back slots; what that cost."""
        spent = 0
        while one.slots and spent < budget:
            slot = one.slots.pop()
            spent += 1 + self._bank.weight(slot)
            self._bank.release(slot)
        return spent

    def _strip(self, one: Arrangement) -> None:
        """Gives back all that an arrangement holds."""
        if one.work is not None:
            one.work.close()
        for slot in one.slots:
            self._bank.release(slot)
        one.slots = []
        self._release_parts(one)
        for sets in one.rules:
            self._rules.release(sets)
        one.rules = []
        self.functions.drop(one.function)
        one.function = 0

    def _release_parts(self, one: Arrangement) -> None:
        parts, one.parts = one.parts, []
        for program in parts:
            self._bank.programs.release(program)
        directions, one.directions = one.directions, []
        for direction in directions:
            self._bank.programs.let_go(direction)


def _no_variants() -> Int32:
    return np.zeros((0, VARIANTS), np.int32)


def _slices(
    acts: Sequence[Act], members: Sequence[int], most: int
) -> Iterator[tuple[range | None, int]]:
    """The sites at which some acts change anything, in slices, and what each costs.

    A slice costs `most` at most, or is one site. Where all of it is one slice, its sites are None.
    """
    strong = [acts[member] for member in members if acts[member].strong]
    total = sum(len(act.rows) * site_effort(act) for act in strong)
    if total <= most:
        if total:
            yield None, total
        return
    costs = np.zeros(1 + max(int(act.site_rows.sites[-1]) for act in strong), np.int64)
    for act in strong:
        costs[act.site_rows.sites] += site_effort(act)
    first = cost = 0
    for site in np.flatnonzero(costs).tolist():
        if cost and cost + costs[site] > most:
            yield range(first, site), cost
            first, cost = site, 0
        cost += int(costs[site])
    yield range(first, len(costs)), cost
