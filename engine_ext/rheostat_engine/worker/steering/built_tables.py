"""Built tables: the slots, programs and rules of a table of acts, shared by its requests.

Why in slices
    A table may name thousands of rows. Building all of them at once would delay every request of
    the step, so a table is built in slices of bounded cost. A request builds the rest of its table
    when it starts. The server has large tables built before, so that little is left then.
Why unused tables stay
    Releasing a large table takes long too, so each step releases a part of the unused tables. If a
    new table lacks resources, they are released at once. A request with an equal table reuses a
    table that is not released yet.
Why tables of windows stay longer
    Requests with different windows share a table; see `Window`. In a sweep of many pairs, the cells
    of a pair run some steps apart, because the cells of the other pairs run in between. So steps
    release such a table later: once it is old, if there are many, or while a resource is scarce.

Invariants: a table has its slots, programs and rules once, or nothing. Unused tables never make a
request fail for lack of resources.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from rheostat_engine.plan.acts import Act
from rheostat_engine.plan.composition import (
    Combination,
    Direction,
    Program,
    Variant,
    combine,
    variant_acts,
)
from rheostat_engine.plan.plan import EncodedTable, steering_of
from rheostat_engine.plan.tables import (
    MAX_PLAN_COST,
    SMALL_PLAN_COST,
    STEP_COST,
    SteeringTable,
    direction_cost,
    site_cost,
)
from rheostat_engine.worker.state.id_allocators import BankError, Exhausted
from rheostat_engine.worker.state.position_functions import Functions, Int32
from rheostat_engine.worker.state.site_slots import SiteSlots
from rheostat_engine.worker.steering.bank import Bank
from rheostat_engine.worker.steering.doses import Measures, Norms
from rheostat_engine.worker.steering.token_rules import VARIANTS, TokenRules
from rheostat_engine.worker.steering.vectors import Vectors

_T = TypeVar("_T")
_Work = Generator[int, None, _T]
"""Work in parts. Each part yields its cost."""

_ROW_BYTES = 8 << 20
"""About the most bytes of float32 rows that a slice makes, because wide rows take longer."""

_KEPT_STEPS = 1000
"""Steps after which an unused table of windows is released."""

_KEPT_COST = 4000
"""The most that all unused tables of windows together may have cost to build."""

_COLLECTED = 1000
"""The cost of the parts in which unused tables are released for lack of resources."""


class RuledCombinations(NamedTuple):
    """The combinations of a table that depend on the token."""

    slots: Int32
    """[k, variants]."""
    dose_slots: Int32
    """[k, variants]: the first dose slot of each variant, from 1; 0 is not measured."""


_NOT_RULED = RuledCombinations(*np.zeros((2, 0, VARIANTS), np.int32))


@dataclass
class BuiltTable:
    """The slots, programs and rules of a table, which its requests share."""

    digest: bytes
    table: SteeringTable
    measures: Measures
    users: int = 0
    function: int = 0
    """Slot, dose slot and rule of each interval. Under a rule, the slot is the number of the
    combination among `ruled`. Dose slots count from 1; 0 is not measured."""
    ruled: RuledCombinations = _NOT_RULED
    slots: list[int] = field(default_factory=list)
    rules: list[tuple[bytes, ...]] = field(default_factory=list)
    parts: list[Program] = field(default_factory=list)
    """Programs of a combination that several slices build, used until it is complete."""
    directions: list[Direction] = field(default_factory=list)
    """Directions that were made before their programs, used until the combination is complete."""
    work: Generator[int, None, None] | None = None
    """The work that is left; None if the table is complete."""
    problem: str = ""
    """The reason why it cannot be built; empty if it can."""
    means_code: int = 0
    """The code of the program that reads numbers of means; 0: there is none."""
    windowed: bool = False
    """Whether a request with a window has used it. It is complete then, without gates and rules."""
    unused_since: int = 0
    """The number of the step after which it had no user."""


class BuiltTables:
    """The built tables in use, and unused ones that are not released yet."""

    def __init__(
        self,
        bank: Bank,
        rules: TokenRules,
        functions: Functions,
        site_slots: SiteSlots,
        vectors: Vectors,
        norms: Norms,
    ) -> None:
        """There is none.

        Args:
            bank: slots and programs.
            rules: rules about token ids.
            functions: three columns; see `BuiltTable.function`.
            site_slots: the sites that a table may name.
            vectors: the worker's vectors; a live view.
            norms: the norms of their rows; a live view.
        """
        self._bank = bank
        self._rules = rules
        self.functions = functions
        self._site_slots = site_slots
        self._vectors = vectors
        self._norms = norms
        self._used: dict[bytes, BuiltTable] = {}
        self._unused: OrderedDict[bytes, BuiltTable] = OrderedDict()
        self._kept: OrderedDict[bytes, BuiltTable] = OrderedDict()
        """Unused tables of windows. As in `_unused`, the oldest is first."""
        self._kept_cost = 0
        """The cost of building them."""
        self._steps = 0
        self._releasing: BuiltTable | None = None
        """A table that is partly released, so that no request can reuse it."""
        rows = _ROW_BYTES // (4 * bank.programs.rows.shape[1])
        self._slice_cost = max(1, min(rows, STEP_COST))
        self.built = 0
        """The cost of all that was built since the start."""

    def use(self, acts: EncodedTable) -> BuiltTable:
        """Adds a use of a table, which may be incomplete; see `build`.

        Raises:
            BankError: a vector is missing.
            ValueError: the bytes are no table, or it costs too much or names other sites.
        """
        digest = acts.digest
        built = self._used.get(digest) or self._take_unused(digest)
        if built is None:
            table = steering_of(acts)
            if table.plan_cost > MAX_PLAN_COST:
                raise ValueError(f"the plan is too fragmented: its cost is over {MAX_PLAN_COST}")
            self._site_slots.check(table)
            built = BuiltTable(digest, table, Measures(table.acts, self._norms_of(table)))
            built.work = self._build_all(built)
        self._used[digest] = built
        built.users += 1
        return built

    def build(self, built: BuiltTable, budget: int | None = None) -> int:
        """Builds a part of a table, which is complete once its `work` is None.

        Args:
            built: the table.
            budget: the cost after which it stops, or one slice if that is less; None: no limit.

        Returns:
            The cost of the part.

        Raises:
            BankError, ValueError: it cannot be built. It has no resources then, but its users must
                still release it.
        """
        if built.problem:
            raise BankError(built.problem)
        spent = 0
        most = None if budget is None else min(budget, self._slice_cost)
        try:
            while built.work is not None and (most is None or spent < most):
                cost = next(built.work, None)
                if cost is None:
                    built.work = None
                else:
                    spent += cost
        except (BankError, ValueError) as error:
            built.problem = str(error)
            self._used.pop(built.digest, None)
            self._free(built)
            raise
        self.built += spent
        return spent

    def release(self, built: BuiltTable) -> None:
        """Ends one use. `collect` releases unused tables."""
        built.users -= 1
        if not built.users and self._used.get(built.digest) is built:
            del self._used[built.digest]
            if not built.windowed:
                self._unused[built.digest] = built
                return
            built.unused_since = self._steps
            self._kept[built.digest] = built
            self._kept_cost += built.table.plan_cost

    def end_step(self, budget: int) -> None:
        """Releases unused tables after a step.

        Tables of windows are released only if they are old or many, or if a resource is scarce.

        Args:
            budget: the cost after which it stops.
        """
        self._steps += 1
        while budget > 0 and (self._releasing or self._unused or self._should_release_kept()):
            budget -= self._release_part(budget)

    def collect(self, budget: int) -> bool:
        """Releases unused tables, the oldest first, and those of windows last.

        Args:
            budget: the cost after which it stops.

        Returns:
            Whether any is left.
        """
        while budget > 0 and self.has_unused:
            budget -= self._release_part(budget)
        return self.has_unused

    @property
    def has_unused(self) -> bool:
        """Whether a table without users holds resources."""
        return self._releasing is not None or bool(self._unused) or bool(self._kept)

    def _should_release_kept(self) -> bool:
        """Whether the oldest unused table of windows should be released."""
        if not self._kept:
            return False
        oldest = next(iter(self._kept.values()))
        return (
            self._steps - oldest.unused_since > _KEPT_STEPS
            or self._kept_cost > _KEPT_COST
            or self._bank.more_than_half_used
        )

    def _take_unused(self, digest: bytes) -> BuiltTable | None:
        """Takes a table out of the unused tables; None if it is not among them."""
        built = self._unused.pop(digest, None)
        if built is None and (built := self._kept.pop(digest, None)) is not None:
            self._kept_cost -= built.table.plan_cost
        return built

    def _release_part(self, budget: int) -> int:
        """Releases a part of the oldest unused table; returns the cost."""
        if self._releasing is None:
            self._releasing = self._take_unused(next(iter(self._unused or self._kept)))
            assert self._releasing is not None
        slots, spent = self._releasing.slots, 0
        while slots and spent < budget:
            slot = slots.pop()
            spent += 1 + self._bank.weight(slot)
            self._bank.release(slot)
        if not slots:
            self._free(self._releasing)
            self._releasing = None
        return 1 + spent

    def _norms_of(self, table: SteeringTable) -> Norms:
        """The norms of the vectors that a table uses.

        Raises:
            BankError: a vector, or a row that is used, is missing.
        """
        last: dict[bytes, int] = {}
        for index in table.used:
            act = table.acts[index]
            rows = act.site_rows.rows
            largest = (rows[0] if len(rows) == 1 else rows.max(axis=0)).tolist()  # mostly one
            for digest, row in zip(act.vectors, largest, strict=True):
                last[digest] = max(row, last.get(digest, 0))
        for digest, row in last.items():
            if digest not in self._norms:
                raise BankError(f"vector {digest.hex()} is not in the worker")
            if row >= len(self._norms[digest]):
                raise BankError(f"vector {digest.hex()} has no row {row}")
        return {digest: self._norms[digest] for digest in last}

    def _build_all(self, built: BuiltTable) -> _Work[None]:
        """Builds a table, slice by slice."""
        table = built.table
        if table.means:
            take = partial(self._bank.programs.acquire, [table.means], self._vectors)
            (built.means_code,) = self._with_space(take)
        if not table.sets and table.plan_cost <= min(SMALL_PLAN_COST, self._slice_cost):
            self._build_at_once(built)
            yield table.plan_cost
            return
        ruled: list[tuple[list[int], list[int]]] = []
        columns = np.zeros((len(table.intervals.members), 3), np.int32)
        for number, clauses in enumerate(table.intervals.members):
            variants_there = variant_acts([table.clauses[i] for i in clauses], table.sets)
            slots, dose_slots = [], []
            for members in variants_there.members:
                slot, dose_slot = yield from self._take_slot(built, members)
                slots.append(slot)
                dose_slots.append(dose_slot)
            if variants_there.sets and any(slots):
                rule = self._with_space(partial(self._rules.acquire, variants_there.sets))
                built.rules.append(variants_there.sets)
                columns[number] = len(ruled), 0, rule
                ruled.append((slots, dose_slots))
                yield 1 + sum(map(len, variants_there.sets)) // 256
            elif not variants_there.sets:
                columns[number] = slots[0], dose_slots[0], 0
        if any(built.slots):
            padded = np.zeros((2, len(ruled), VARIANTS), np.int32)
            for number, (slots, dose_slots) in enumerate(ruled):
                padded[:, number, : len(slots)] = slots, dose_slots
            built.ruled = RuledCombinations(*padded)
            built.function = self.functions.add(
                table.intervals.starts, columns[table.intervals.sets]
            )

    def _build_at_once(self, built: BuiltTable) -> None:
        """Builds a small table without rules, several times as fast as slice by slice."""
        table = built.table
        by_set = [tuple(table.clauses[i].act for i in each) for each in table.intervals.members]
        kept = table.signals.kept
        combinations = [combine(table.acts, members, kept=kept) for members in by_set]
        slots = self._with_space(partial(self._bank.acquire, combinations, self._vectors))
        columns = np.zeros((len(slots), 3), np.int32)
        for number, (members, combination) in enumerate(zip(by_set, combinations, strict=True)):
            if combination:
                variant = Variant(members, combination)
                first = built.measures.add_small(members, variant.dose_slots)
                columns[number] = slots[number], 1 + first, 0
        built.slots = [slot for slot in slots if slot]
        if built.slots:
            built.function = self.functions.add(
                table.intervals.starts, columns[table.intervals.sets]
            )

    def _take_slot(self, built: BuiltTable, members: tuple[int, ...]) -> _Work[tuple[int, int]]:
        """Takes the slot of a variant; returns it and the first dose slot, counted from 1."""
        acts, kept = built.table.acts, built.table.signals.kept
        first_slot = built.measures.first_slot(members)
        combination: Combination = ()
        for sites, cost in _slices(acts, members, self._slice_cost):
            part = combine(acts, members, sites, kept)
            programs = [program for _, program in part]
            if cost > self._slice_cost:  # the directions of one site exceed a slice
                cost -= yield from self._make_directions(built, programs)
            if sites is not None:
                self._with_space(partial(self._bank.programs.acquire, programs, self._vectors))
                built.parts += programs
            combination += part
            if first_slot is None:
                built.measures.measure(members, sites)
            yield cost
        if not combination:
            return 0, 0
        (slot,) = self._with_space(partial(self._bank.acquire, [combination], self._vectors))
        built.slots.append(slot)
        self._release_parts(built)
        if first_slot is None:
            first_slot = built.measures.add(members, Variant(members, combination).dose_slots)
        yield 1
        return slot, 1 + first_slot

    def _make_directions(self, built: BuiltTable, programs: Sequence[Program]) -> _Work[int]:
        """Makes the directions of a subspace before their programs; returns the cost."""
        table = self._bank.programs
        basis = table.basis(self._vectors)
        spent = done = 0
        for direction in (step.direction for program in programs for step in program):
            if len(direction) < 2:
                continue
            self._with_space(partial(table.use_direction, direction, basis))
            built.directions.append(direction)
            spent += direction_cost(len(direction) - 1)
            if spent >= self._slice_cost:
                yield spent
                done, spent = done + spent, 0
        return done

    def _with_space(self, take: Callable[[], _T]) -> _T:
        """Calls `take`, and releases unused tables as long as it lacks resources."""
        while True:
            try:
                return take()
            except Exhausted:
                if not self.has_unused:
                    raise
                self.collect(_COLLECTED)

    def _free(self, built: BuiltTable) -> None:
        """Releases all resources of a table."""
        if built.work is not None:
            built.work.close()
        for slot in built.slots:
            self._bank.release(slot)
        built.slots = []
        self._release_parts(built)
        if built.means_code:
            self._bank.programs.release(built.table.means)
            built.means_code = 0
        for sets in built.rules:
            self._rules.release(sets)
        built.rules = []
        self.functions.drop(built.function)
        built.function = 0

    def _release_parts(self, built: BuiltTable) -> None:
        parts, built.parts = built.parts, []
        for program in parts:
            self._bank.programs.release(program)
        directions, built.directions = built.directions, []
        for direction in directions:
            self._bank.programs.release_direction(direction)


def _slices(
    acts: Sequence[Act], members: Sequence[int], most: int
) -> Iterator[tuple[range | None, int]]:
    """The sites at which some acts change anything, in slices, and the cost of each slice.

    A slice costs at most `most`, or is a single site. The sites of an only slice are None.
    """
    present = [acts[member] for member in members if acts[member].in_force]
    total = sum(len(act.rows) * site_cost(act) for act in present)
    if total <= most:
        if total:
            yield None, total
        return
    costs = np.zeros(1 + max(int(act.site_rows.sites[-1]) for act in present), np.int64)
    for act in present:
        costs[act.site_rows.sites] += site_cost(act)
    first = cost = 0
    for site in np.flatnonzero(costs).tolist():
        if cost and cost + costs[site] > most:
            yield range(first, site), cost
            first, cost = site, 0
        cost += int(costs[site])
    yield range(first, len(costs)), cost
