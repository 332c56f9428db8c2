"""Integer tables of a plan's acts and captures, computed at admission.

Why tables
    All samples of a request, and all requests with equal steering, share one table. A worker
    identifies a table by its digest, and parses and builds it once. Another request costs a
    reference.
Why integers
    The server pays for an expensive plan at admission. A worker receives the intervals of twenty
    thousand spans as two arrays, and handles each distinct set of acts or captures once.
Why a cost
    `plan_cost` estimates the time to build a new table in a worker. A row at a site, a step of a
    program and a set of sites cost about 1 each. Admission limits the cost and the intervals.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rheostat_engine.cached_property import cached_property
from rheostat_engine.plan.acts import OPEN_END, Act, Capture, Kind, Spans
from rheostat_engine.plan.composition import (
    MAX_TOKEN_SETS,
    Clause,
    Program,
    TokenVariants,
    Variant,
    combine,
    means_program,
    variant_acts,
)
from rheostat_engine.plan.gates import MAX_GATES, NEVER, NO_SIGNALS, Gate, Signals, gates_of
from rheostat_engine.plan.intervals import Intervals, PlanTooLarge, cut_intervals

MAX_PLAN_COST = 50_000
"""The largest cost of a table of acts. Workers build it in slices."""

MAX_CAPTURE_COST = 4_000
"""The largest cost of a table of captures. Workers build it at once."""

MAX_INTERVALS = 65_536
"""The most intervals of a table. Each takes eight bytes, on the wire and in the workers."""

REQUEST_COST = 20
"""The cost of updating a running request, in addition to its tables."""

STEP_COST = 1000
"""The largest cost that a worker builds or releases between two steps, in addition to the tables of
small new requests."""

SMALL_PLAN_COST = 100
"""The most that a plan may cost to be built within a step, at once, in about 2 ms."""

_ITEMS_READ = 64
"""Intervals, token ids or sites that numpy reads at cost 1."""

_PAIRS = 4
"""Pairs of directions made orthogonal at cost 1."""

_Table = TypeVar("_Table", "SteeringTable", "CaptureTable")

_ROWS_READ = 16
"""Rows of acts parsed at cost 1."""


@dataclass(frozen=True, eq=False)
class SteeringTable:
    """A plan's acts, without the numbers with which its gates compare readings.

    Requests that differ in these numbers share a table.
    """

    acts: tuple[Act, ...]
    """Without spans and conditions. Gates are as in `gates`."""
    clauses: tuple[Clause, ...]
    """Each act has a clause for its spans, and a clause for each condition."""
    sets: tuple[bytes, ...]
    """The distinct sets of token ids, each as ascending little-endian int32."""
    intervals: Intervals
    """The members are indices into `clauses`."""
    signals: Signals = NO_SIGNALS
    """What of its readings and gates leaves the worker."""

    @cached_property
    def plan_cost(self) -> int:
        """The cost of building it; see the module."""
        cost_of = _clause_cost(self.acts, self.clauses)
        return sum(cost_of(members) for members in self.intervals.members) + self.read_cost

    @cached_property
    def read_cost(self) -> int:
        """The cost of parsing the table, including acts without positions."""
        rows = sum(len(act.rows) * len(act.vectors) for act in self.acts)
        rows += _ROWS_READ * len(self.means)
        ids = sum(len(tokens) // 4 for tokens in self.sets)
        return rows // _ROWS_READ - -(len(self.intervals.starts) + ids) // _ITEMS_READ

    @property
    def ruled(self) -> int:
        """Number of clause sets that depend on the token."""
        conditional = [clause.tokens is not None for clause in self.clauses]
        return sum(any(conditional[i] for i in members) for members in self.intervals.members)

    @property
    def used(self) -> tuple[int, ...]:
        """The indices of the acts that change or read a token."""
        present = {self.clauses[i].act for members in self.intervals.members for i in members}
        return tuple(index for index in sorted(present) if self.acts[index].in_force)

    @cached_property
    def gates(self) -> tuple[Gate, ...]:
        """The distinct gates, by their number in the plan; see `Gate.numbered`."""
        return plan_gates(self.acts, self.signals)

    @cached_property
    def columns(self) -> int:
        """One past the last column to which it reads; 0 without readings."""
        ends = (act.reading.column + len(act.rows) for act in self.acts if act.reading is not None)
        return max(ends, default=0)

    @cached_property
    def means(self) -> Program:
        """The program that reads all numbers of mean rows, one for each sum of a sample."""
        return means_program(self.acts)

    @cached_property
    def mean_at(self) -> int:
        """The position at which `means` reads; `NEVER` if it is empty."""
        return max((act.reading.mean_at for act in self.acts if act.reading), default=NEVER)

    @cached_property
    def gains(self) -> int:
        """The number of its gains: one more than the largest index."""
        return max((1 + act.gain for act in self.acts if act.gain is not None), default=0)

    @cached_property
    def first_read(self) -> int:
        """The lowest position at which a token may be read; `OPEN_END` if none is."""
        reading = [number for number, act in enumerate(self.acts) if act.kind is Kind.READ]
        return min(map(self._first_position, reading), default=OPEN_END)

    @cached_property
    def first_gated(self) -> int:
        """The lowest position at which a gate may change what an act does; `OPEN_END`: none."""
        return min(
            (
                max(self._first_position(number), act.gate.opens_from)
                for number, act in enumerate(self.acts)
                if act.gate is not None and act.strong
            ),
            default=OPEN_END,
        )

    def _first_position(self, act: int) -> int:
        """The lowest position at which an act may select a token; `OPEN_END` if there is none."""
        own = {number for number, clause in enumerate(self.clauses) if clause.act == act}
        return self.intervals.first_position(
            [not own.isdisjoint(m) for m in self.intervals.members]
        )

    def token_variants(self, number: int) -> TokenVariants:
        """Combines the acts of a clause set, `intervals.members[number]`.

        Raises:
            ValueError: more than `MAX_TOKEN_SETS` sets meet, or a program is too long.
        """
        clauses = [self.clauses[i] for i in self.intervals.members[number]]
        acts = variant_acts(clauses, self.sets)
        kept = self.signals.kept
        variants = tuple(
            Variant(members, combine(self.acts, members, kept=kept)) for members in acts.members
        )
        return TokenVariants(acts.sets, variants)


class CaptureNeed(NamedTuple):
    """The ring rows that captures need."""

    rows: int
    """The most rows of one step."""
    sites: int
    """The most sites at which one token is captured."""


@dataclass(frozen=True, eq=False)
class CaptureTable:
    """A plan's captures."""

    captures: tuple[Capture, ...]
    """Without spans."""
    intervals: Intervals
    """The members are indices into `captures`."""

    @cached_property
    def plan_cost(self) -> int:
        """The cost of building it; see the module."""
        sites = [len(capture.sites) for capture in self.captures]
        members_read = sum(sites[i] for members in self.intervals.members for i in members)
        built = len(self.intervals.members) + _directions(self.captures)
        return built - -(members_read + len(self.intervals.starts)) // _ITEMS_READ

    @cached_property
    def first(self) -> int:
        """The lowest captured position; `OPEN_END` if nothing is captured."""
        return self.intervals.first_position([bool(members) for members in self.intervals.members])

    def need(self, *, prompt_len: int, max_step_tokens: int) -> CaptureNeed:
        """The ring rows that one sample needs.

        A step computes at most `max_step_tokens` of the prompt, or one generated token. A preempted
        request recomputes generated tokens in chunks, but their rows were delivered before.
        """
        in_prompt = count(self.intervals, 0, prompt_len)
        later = np.zeros(len(in_prompt), np.bool_)
        later[self.intervals.sets[self.intervals.ends > prompt_len]] = True
        prompt = np.zeros(len(self.captures), np.int64)
        generated = np.zeros(len(self.captures), np.int64)
        for number, members in enumerate(self.intervals.members):
            prompt[list(members)] += in_prompt[number]
            generated[list(members)] |= later[number]
        sites = np.array([len(capture.sites) for capture in self.captures], np.int64)
        rows = sites * np.maximum(np.minimum(prompt, max_step_tokens), generated)
        return CaptureNeed(int(rows.sum()), int(sites.sum()))


def count(intervals: Intervals, start: int, end: int) -> npt.NDArray[np.int64]:
    """[sets]: the number of positions in [start, end) of each set of members."""
    edges = np.append(intervals.starts, OPEN_END)
    inside = np.diff(np.minimum(np.maximum(edges, start), end))
    counts = np.bincount(intervals.sets, inside, minlength=len(intervals.members))
    return counts.astype(np.int64)


def direction_cost(before: int) -> int:
    """The cost of making a unit vector orthogonal to `before` others."""
    return 1 + before // _PAIRS


def site_cost(act: Act) -> int:
    """The cost of an act at one site."""
    count = len(act.vectors)
    return sum(map(direction_cost, range(count))) if act.orthogonal else count


def steering_table(acts: tuple[Act, ...], signals: Signals = NO_SIGNALS) -> SteeringTable | None:
    """The table of a plan's acts; None if there are none.

    Raises:
        PlanTooLarge: it costs more than `MAX_PLAN_COST`, or has more than
            `MAX_INTERVALS` intervals.
        ValueError: it has more than `MAX_GATES` gates.
    """
    if not acts:
        return None
    gates = plan_gates(acts, signals)
    if len(gates) > MAX_GATES:
        raise ValueError(f"{len(gates)} different gates; at most {MAX_GATES} are allowed")
    numbered = {gate: gate.numbered(number) for number, gate in enumerate(gates)}
    sets = tuple(sorted({condition.tokens for act in acts for condition in act.conditions}))
    number = {tokens: index for index, tokens in enumerate(sets)}
    clauses: list[Clause] = []
    spans: list[Spans] = []
    for index, act in enumerate(acts):
        clauses.append(Clause(index, None, among=True))
        spans.append(_open_spans(act, act.spans))
        for condition in act.conditions:
            clauses.append(Clause(index, number[condition.tokens], condition.among))
            spans.append(_open_spans(act, condition.spans))
    intervals = cut_intervals(
        spans,
        cost_of=_clause_cost(acts, clauses),
        max_cost=MAX_PLAN_COST,
        max_intervals=MAX_INTERVALS,
    )
    bare = tuple(
        [
            act.with_gate(None if act.gate is None else numbered[act.gate], positions=False)
            for act in acts
        ]
    )
    packed = tuple(np.array(tokens, "<i4").tobytes() for tokens in sets)
    shown = signals.with_gates(numbered)
    table = SteeringTable(bare, tuple(clauses), packed, intervals, shown)
    return _affordable(table, MAX_PLAN_COST)


def plan_gates(acts: tuple[Act, ...], signals: Signals) -> tuple[Gate, ...]:
    """The distinct gates of a plan. A gate's index is its number in the plan."""
    return gates_of([*signals.kept, *(act.gate for act in acts), *signals.gates])


def capture_table(captures: tuple[Capture, ...]) -> CaptureTable | None:
    """The table of a plan's captures; None if nothing is captured.

    Raises:
        PlanTooLarge: it costs more than `MAX_CAPTURE_COST`, or has more than
            `MAX_INTERVALS` intervals.
    """
    used = [capture for capture in captures if capture.sites and capture.spans]
    if not used:
        return None
    sites = [len(capture.sites) for capture in used]

    def cost_of(members: tuple[int, ...]) -> int:
        return 1 + sum(sites[i] for i in members) // _ITEMS_READ

    spans = [capture.spans for capture in used]
    intervals = cut_intervals(
        spans, cost_of=cost_of, max_cost=MAX_CAPTURE_COST, max_intervals=MAX_INTERVALS
    )
    bare = tuple(Capture(capture.sites, (), capture.encoding) for capture in used)
    return _affordable(CaptureTable(bare, intervals), MAX_CAPTURE_COST)


def _open_spans(act: Act, spans: Spans) -> Spans:
    """The part of spans in which an act's gate may be open. Other tokens need no program for it."""
    first = 0 if act.gate is None else act.gate.opens_from
    return tuple([(max(start, first), end) for start, end in spans if end > first])


def _affordable(table: _Table, most: int) -> _Table:
    if table.plan_cost > most:
        raise PlanTooLarge(f"It costs {table.plan_cost}; at most {most} is allowed")
    return table


def _clause_cost(
    acts: Sequence[Act], clauses: Sequence[Clause]
) -> Callable[[tuple[int, ...]], int]:
    """A function for the cost of a clause set: its acts at their sites, in every variant."""
    sizes = [len(acts[clause.act].rows) * site_cost(acts[clause.act]) for clause in clauses]

    if all(clause.tokens is None for clause in clauses):
        return lambda members: sum([sizes[i] for i in members])

    def cost_of(members: tuple[int, ...]) -> int:
        sets = {clauses[i].tokens for i in members} - {None}
        variants = 1 << min(len(sets), MAX_TOKEN_SETS + 1)
        return variants * sum(sizes[i] for i in members)

    return cost_of


def _directions(captures: Sequence[Capture]) -> int:
    """The cost of gathering the directions of the different encodings."""
    encodings = {capture.encoding for capture in captures if capture.encoding is not None}
    return sum(len(encoding.directions.vectors) for encoding in encodings if encoding.directions)
