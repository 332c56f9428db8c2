"""Tables of integers, made at admission: one of a plan's acts, and one of its captures.

Why tables
    All samples of a request, and all requests with equal steering, share one table. A worker finds
    a table by its digest. It reads and builds a table once. Each further request costs a reference.
Why integers
    The server pays for an expensive plan at admission. A worker receives the intervals of twenty
    thousand spans as two arrays, and handles each different set of acts or captures once.
Why a cost
    `plan_cost` is the cost of building a new table in a worker. Its unit is about the same for
    everything that is built: a row at a site, a step of a program, a set of sites. Admission limits
    the cost and the number of intervals.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.acts import OPEN_END, Act, Capture, Spans
from rheostat_engine.plan.composition import MAX_TOKEN_SETS, Mix, Owner, compose
from rheostat_engine.plan.intervals import Intervals, PlanTooLarge, cut

MAX_PLAN_COST = 50_000
"""The largest cost of a table of acts. Workers build it in slices."""

MAX_CAPTURE_COST = 4_000
"""The largest cost of a table of captures. Workers build it at once."""

MAX_INTERVALS = 65_536
"""The most intervals of a table. One takes eight bytes, on the wire and in the workers."""

REQUEST_COST = 20
"""The cost of an update of a running request, beside its tables."""

STEP_COST = 1000
"""The largest cost that a worker builds or releases between two steps, beside the tables of small
new requests."""

_ITEMS_READ = 64
"""Intervals, token ids or sites that numpy reads at a cost of 1."""

_PAIRS = 4
"""Pairs of directions that are made orthogonal at a cost of 1."""

_Table = TypeVar("_Table", "SteeringTable", "CaptureTable")

_ROWS_READ = 16
"""Rows of acts that are read from the wire at a cost of 1."""


@dataclass(frozen=True, eq=False)
class SteeringTable:
    """The acts of a plan."""

    acts: tuple[Act, ...]
    """The acts, without spans and conditions."""
    owners: tuple[Owner, ...]
    """The act of each clause. An act has a clause for its spans, and one for each condition."""
    sets: tuple[bytes, ...]
    """The different sets of token ids, each as ascending little-endian int32."""
    intervals: Intervals
    """The clauses that hold at each position."""

    @cached_property
    def plan_cost(self) -> int:
        """The cost of building it; see the module."""
        price = _price(self.acts, self.owners)
        return sum(price(members) for members in self.intervals.members) + self.read_cost

    @cached_property
    def read_cost(self) -> int:
        """The cost of reading it, including acts that hold at no position."""
        rows = sum(len(act.rows) * len(act.vectors) for act in self.acts)
        ids = sum(len(tokens) // 4 for tokens in self.sets)
        return rows // _ROWS_READ - -(len(self.intervals.starts) + ids) // _ITEMS_READ

    @property
    def ruled(self) -> int:
        """The number of sets of clauses that depend on the token."""
        conditional = [owner.tokens is not None for owner in self.owners]
        return sum(any(conditional[i] for i in members) for members in self.intervals.members)

    @property
    def used(self) -> tuple[int, ...]:
        """The indices of the acts that change a token."""
        present = {self.owners[i].act for members in self.intervals.members for i in members}
        return tuple(index for index in sorted(present) if self.acts[index].strong)

    def mix(self, number: int) -> Mix:
        """Composes the acts of a set of clauses, given by number.

        Raises:
            ValueError: the acts can't be composed.
        """
        owners = [self.owners[i] for i in self.intervals.members[number]]
        return compose(self.acts, owners, self.sets)

    @property
    def mixes(self) -> tuple[Mix, ...]:
        """Composes the acts of each set of clauses.

        They are not kept, because they take many times the memory of the table.

        Raises:
            ValueError: the acts of a set can't be composed.
        """
        return tuple(map(self.mix, range(len(self.intervals.members))))


class CaptureNeed(NamedTuple):
    """The rows of the ring that captures need."""

    rows: int
    """The most rows that one step can need."""
    sites: int
    """The most sites at which one token is captured."""


@dataclass(frozen=True, eq=False)
class CaptureTable:
    """The captures of a plan."""

    captures: tuple[Capture, ...]
    """The captures, without spans."""
    intervals: Intervals
    """The captures that hold at each position."""

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
        captured = np.array([bool(members) for members in self.intervals.members])
        where = np.flatnonzero(captured[self.intervals.sets])
        return int(self.intervals.starts[where[0]]) if len(where) else OPEN_END

    def need(self, *, prompt_len: int, max_step_tokens: int) -> CaptureNeed:
        """The rows of the ring that one sample needs.

        A chunk of the prompt is at most `max_step_tokens` long. A step computes one generated token
        of a sample. A preempted request computes generated tokens again in chunks, but their rows
        were delivered before.
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
    """Counts the positions of [start, end) at which each set holds, [sets]."""
    inside = np.clip(intervals.ends, start, end) - np.clip(intervals.starts, start, end)
    counts = np.bincount(intervals.sets, inside, minlength=len(intervals.members))
    return counts.astype(np.int64)


def direction_cost(before: int) -> int:
    """The cost of a unit vector that is made orthogonal to `before` others."""
    return 1 + before // _PAIRS


def site_cost(act: Act) -> int:
    """The cost of an act at each of its sites."""
    count = len(act.vectors)
    return sum(map(direction_cost, range(count))) if act.orthogonal else count


def steering_table(acts: tuple[Act, ...]) -> SteeringTable | None:
    """Makes the table of a plan's acts; None if there are none.

    Raises:
        PlanTooLarge: it would cost more than `MAX_PLAN_COST`, or have more than `MAX_INTERVALS`
            intervals.
    """
    if not acts:
        return None
    sets = tuple(sorted({condition.tokens for act in acts for condition in act.conditions}))
    number = {tokens: index for index, tokens in enumerate(sets)}
    owners: list[Owner] = []
    spans: list[Spans] = []
    for index, act in enumerate(acts):
        owners.append(Owner(index, None, among=True))
        spans.append(act.spans)
        for condition in act.conditions:
            owners.append(Owner(index, number[condition.tokens], condition.among))
            spans.append(condition.spans)
    intervals = cut(spans, price=_price(acts, owners), budget=MAX_PLAN_COST, most=MAX_INTERVALS)
    bare = tuple(
        Act(act.kind, act.vectors, act.rows, (), act.scale, act.bands, act.orthogonal)
        for act in acts
    )
    packed = tuple(np.array(tokens, "<i4").tobytes() for tokens in sets)
    return _affordable(SteeringTable(bare, tuple(owners), packed, intervals), MAX_PLAN_COST)


def capture_table(captures: tuple[Capture, ...]) -> CaptureTable | None:
    """Makes the table of a plan's captures; None if nothing is captured.

    Raises:
        PlanTooLarge: it would cost more than `MAX_CAPTURE_COST`, or have more than `MAX_INTERVALS`
            intervals.
    """
    used = [capture for capture in captures if capture.sites and capture.spans]
    if not used:
        return None
    sites = [len(capture.sites) for capture in used]

    def price(members: tuple[int, ...]) -> int:
        return 1 + sum(sites[i] for i in members) // _ITEMS_READ

    spans = [capture.spans for capture in used]
    intervals = cut(spans, price=price, budget=MAX_CAPTURE_COST, most=MAX_INTERVALS)
    bare = tuple(Capture(capture.sites, (), capture.encoding) for capture in used)
    return _affordable(CaptureTable(bare, intervals), MAX_CAPTURE_COST)


def _affordable(table: _Table, most: int) -> _Table:
    if table.plan_cost > most:
        raise PlanTooLarge(f"It costs {table.plan_cost}; at most {most} is allowed")
    return table


def _price(acts: Sequence[Act], owners: Sequence[Owner]) -> Callable[[tuple[int, ...]], int]:
    """The price of a set of clauses: its acts at their sites, in every variant."""
    sizes = [len(acts[owner.act].rows) * site_cost(acts[owner.act]) for owner in owners]

    def price(members: tuple[int, ...]) -> int:
        sets = {owners[i].tokens for i in members} - {None}
        variants = 1 << min(len(sets), MAX_TOKEN_SETS + 1)
        return variants * sum(sizes[i] for i in members)

    return price


def _directions(captures: Sequence[Capture]) -> int:
    """The cost of gathering the directions of the different encodings."""
    encodings = {capture.encoding for capture in captures if capture.encoding is not None}
    return sum(len(encoding.directions.vectors) for encoding in encodings if encoding.directions)
