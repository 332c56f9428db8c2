"""Arrangements: the slots, programs and rules of a table of acts, shared by its requests.

Why in slices
    A table may name thousands of rows. Building all of them at once would delay every request of
    the step, so a table is built in slices of bounded cost. A request builds the rest of its table
    when it starts. The server has large tables built before, so that little is left then.
Why unused arrangements stay
    Releasing a large arrangement takes long too, so each step releases a part of the unused ones.
    If a new table lacks room, they are released at once. A request with an equal table reuses an
    arrangement that is not released yet.

Invariant: a table holds its slots, programs and rules once, or nothing. Unused arrangements never
make a request fail for lack of room.
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
"""Work in parts. Each part yields its cost."""

_ROW_BYTES = 8 << 20
"""Bytes of float32 rows that a slice makes at most, about, because wide rows take longer."""

_COLLECTED = 1000
"""Effort of the parts in which unused arrangements are released for lack of room."""


class Ruled(NamedTuple):
    """The combinations of a table that depend on the token."""

    slots: Int32
    """[k, variants]."""
    cells: Int32
    """[k, variants]: the first cell of each variant, from 1; 0 is not measured."""


@dataclass
class Arrangement:
    """The slots, programs and rules of a table, however many requests share it."""

    digest: bytes
    table: SteeringTable
    measures: Measures
    users: int = 0
    function: int = 0
    """Slot, cell and rule of each piece. Under a rule, the slot is the number of the combination
    among `ruled`. Cells count from 1; 0 is not measured."""
    ruled: Ruled = field(default_factory=lambda: Ruled(_no_variants(), _no_variants()))
    slots: list[int] = field(default_factory=list)
    rules: list[tuple[bytes, ...]] = field(default_factory=list)
    parts: list[Program] = field(default_factory=list)
    """Programs of a combination that several slices build, held until it is complete."""
    directions: list[Direction] = field(default_factory=list)
    """Directions that were made before their programs, held until the combination is complete."""
    work: Generator[int, None, None] | None = None
    """The work that is left; None if the arrangement is complete."""
    problem: str = ""
    """The reason why it cannot be built; empty if it can."""


class Arrangements:
    """The arrangements in use, and unused ones that are not released yet."""

    def __init__(
        self, bank: Bank, rules: TokenRules, functions: Functions, vectors: Vectors, norms: Norms
    ) -> None:
        """There is none.

        Args:
            bank: holds slots and programs.
            rules: holds rules about token ids.
            functions: three columns; see `Arrangement.function`.
            vectors: the worker's vectors; a live view.
            norms: the norms of their rows; a live view.
        """
        self._bank = bank
        self._rules = rules
        self.functions = functions
        self._vectors = vectors
        self._norms = norms
        self._used: dict[bytes, Arrangement] = {}
        self._unused: OrderedDict[bytes, Arrangement] = OrderedDict()
        self._ending: Arrangement | None = None
        """An arrangement that is partly released, so that no request can reuse it."""
        rows = _ROW_BYTES // (4 * bank.programs.rows.shape[1])
        self._slice_effort = max(1, min(rows, STEP_EFFORT))
        self.built = 0
        """Effort that was built since the start."""

    def use(self, digest: bytes, read: Callable[[], SteeringTable]) -> Arrangement:
        """Adds a use of a table's arrangement, which may be incomplete; see `build`.

        Args:
            digest: the table's.
            read: reads the table if the worker does not have it.

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
        """Builds a part of an arrangement, which is complete once its `work` is None.

        Args:
            one: its arrangement.
            budget: the cost after which it stops, or one slice if that is less; None: no limit.

        Returns:
            The cost of the part.

        Raises:
            BankError, ValueError: it cannot be built. It holds nothing then; its users must still
                release it.
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
        """Ends one use. `collect` releases unused arrangements."""
        one.users -= 1
        if not one.users and self._used.get(one.digest) is one:
            del self._used[one.digest]
            self._unused[one.digest] = one

    def collect(self, budget: int) -> bool:
        """Releases unused arrangements, the oldest first.

        Args:
            budget: the cost after which it stops.

        Returns:
            Whether any is left.
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
            BankError: a vector, or a row that is used, is missing.
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
        """Builds a table, slice by slice."""
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
        """Takes the slot of a variant; its number and first cell, counted from 1."""
        acts = one.table.acts
        known = one.measures.knows(members)
        combination: Combination = ()
        for sites, cost in _slices(acts, members, self._slice_effort):
            part = combine(acts, members, sites)
            programs = [program for _, program in part]
            if cost > self._slice_effort:  # the directions of one site exceed a slice
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
        """Makes the directions of a subspace before their programs; the cost."""
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
        """Calls `take`, and releases unused arrangements as long as it lacks room."""
        while True:
            try:
                return take()
            except Exhausted:
                if self._ending is None and not self._unused:
                    raise
                self.collect(_COLLECTED)

    def _give_slots(self, one: Arrangement, budget: int) -> int:
        """Gives back slots; the cost."""
        spent = 0
        while one.slots and spent < budget:
            slot = one.slots.pop()
            spent += 1 + self._bank.weight(slot)
            self._bank.release(slot)
        return spent

    def _strip(self, one: Arrangement) -> None:
        """Gives back everything that an arrangement holds."""
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
    """The sites at which some acts change anything, in slices, and the cost of each slice.

    A slice costs at most `most`, or is a single site. The sites of an only slice are None.
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
