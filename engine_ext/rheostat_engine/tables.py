"""Tables of integers, made at admission: one of a plan's acts, and one of its captures.

Why tables
    All samples of a request, and all requests with equal steering, share one table. A worker finds
    a table by its digest. It reads and builds a table once. Each further request costs a reference.
Why integers
    The server pays for an expensive plan at admission. A worker receives the pieces of twenty
    thousand spans as two arrays, and handles each different set of acts or captures once.
Why a price
    `effort` is the cost of building a new table in a worker. Its unit is about the same for
    everything that is built: a row at a site, a step of a program, a set of sites. Admission limits
    the effort and the number of pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rheostat_engine.acts import OPEN_END, Act, Capture, Spans
from rheostat_engine.composition import MAX_TOKEN_SETS, Mix, Owner, compose
from rheostat_engine.pieces import Pieces, TooMuch, cut

MAX_EFFORT = 50_000
"""The largest effort of a table of acts. Workers build it in slices."""

MAX_CAPTURE_EFFORT = 4_000
"""The largest effort of a table of captures. Workers build it at once."""

MAX_PIECES = 65_536
"""The most pieces of a table. A piece takes eight bytes, on the wire and in the workers."""

STEP_EFFORT = 1000
"""The largest effort that a worker builds or releases between two steps, beside the tables of small
new requests."""

_GLANCES = 64
"""Pieces, token ids or sites that numpy reads at the cost of one unit of effort."""

_PAIRS = 4
"""Pairs of directions that are made orthogonal at the cost of one unit of effort."""

_Table = TypeVar("_Table", "SteeringTable", "CaptureTable")

_READ = 16
"""Rows of acts that are read from the wire at the cost of one unit of effort."""


@dataclass(frozen=True, eq=False)
class SteeringTable:
    """The acts of a plan."""

    acts: tuple[Act, ...]
    """The acts, without spans and conditions."""
    owners: tuple[Owner, ...]
    """The act of each clause. An act has a clause for its spans, and one for each condition."""
    sets: tuple[bytes, ...]
    """The different sets of token ids, each as ascending little-endian int32."""
    pieces: Pieces
    """The clauses that hold at each position."""

    @cached_property
    def effort(self) -> int:
        """The cost of building it; see the module."""
        price = _price(self.acts, self.owners)
        return sum(price(members) for members in self.pieces.members) + self.read_effort

    @cached_property
    def read_effort(self) -> int:
        """The cost of reading it, including acts that hold at no position."""
        rows = sum(len(act.rows) * len(act.vectors) for act in self.acts)
        ids = sum(len(one) // 4 for one in self.sets)
        return rows // _READ - -(len(self.pieces.starts) + ids) // _GLANCES

    @property
    def ruled(self) -> int:
        """The number of sets of clauses that depend on the token."""
        conditional = [owner.tokens is not None for owner in self.owners]
        return sum(any(conditional[i] for i in members) for members in self.pieces.members)

    @property
    def used(self) -> tuple[int, ...]:
        """The indices of the acts that change a token."""
        held = {self.owners[i].act for members in self.pieces.members for i in members}
        return tuple(index for index in sorted(held) if self.acts[index].strong)

    def mix(self, number: int) -> Mix:
        """Composes the acts of a set of clauses, given by number.

        Raises:
            ValueError: the acts can't be composed.
        """
        owners = [self.owners[i] for i in self.pieces.members[number]]
        return compose(self.acts, owners, self.sets)

    @property
    def mixes(self) -> tuple[Mix, ...]:
        """Composes the acts of each set of clauses.

        They are not kept, because they take many times the memory of the table.

        Raises:
            ValueError: the acts of a set can't be composed.
        """
        return tuple(map(self.mix, range(len(self.pieces.members))))


class CaptureNeed(NamedTuple):
    """The room that captures need in the ring."""

    rows: int
    """The most rows that one step can need."""
    sites: int
    """The most sites at which one token is captured."""


@dataclass(frozen=True, eq=False)
class CaptureTable:
    """The captures of a plan."""

    captures: tuple[Capture, ...]
    """The captures, without spans."""
    pieces: Pieces
    """The captures that hold at each position."""

    @cached_property
    def effort(self) -> int:
        """The cost of building it; see the module."""
        sites = [len(capture.sites) for capture in self.captures]
        gone_over = sum(sites[i] for members in self.pieces.members for i in members)
        made = len(self.pieces.members) + _directions(self.captures)
        return made - -(gone_over + len(self.pieces.starts)) // _GLANCES

    @cached_property
    def first(self) -> int:
        """The lowest captured position; `OPEN_END` if nothing is captured."""
        captured = np.array([bool(members) for members in self.pieces.members])
        where = np.flatnonzero(captured[self.pieces.sets])
        return int(self.pieces.starts[where[0]]) if len(where) else OPEN_END

    def need(self, *, prompt_len: int, max_step_tokens: int) -> CaptureNeed:
        """The room that one sample needs in the ring.

        A chunk of the prompt is at most `max_step_tokens` long. A step computes one generated token
        of a sample. A preempted request computes generated tokens again in chunks, but their rows
        were delivered before.
        """
        in_prompt = count(self.pieces, 0, prompt_len)
        later = np.zeros(len(in_prompt), np.bool_)
        later[self.pieces.sets[self.pieces.ends > prompt_len]] = True
        prompt = np.zeros(len(self.captures), np.int64)
        generated = np.zeros(len(self.captures), np.int64)
        for number, members in enumerate(self.pieces.members):
            prompt[list(members)] += in_prompt[number]
            generated[list(members)] |= later[number]
        sites = np.array([len(capture.sites) for capture in self.captures], np.int64)
        rows = sites * np.maximum(np.minimum(prompt, max_step_tokens), generated)
        return CaptureNeed(int(rows.sum()), int(sites.sum()))


def count(pieces: Pieces, start: int, end: int) -> npt.NDArray[np.int64]:
    """Counts the positions of [start, end) at which each set holds, [sets]."""
    inside = np.clip(pieces.ends, start, end) - np.clip(pieces.starts, start, end)
    counts = np.bincount(pieces.sets, inside, minlength=len(pieces.members))
    return counts.astype(np.int64)


def direction_effort(before: int) -> int:
    """The cost of a unit vector that is made orthogonal to `before` others."""
    return 1 + before // _PAIRS


def site_effort(act: Act) -> int:
    """The cost of an act at each of its sites."""
    count = len(act.vectors)
    return sum(map(direction_effort, range(count))) if act.orthogonal else count


def steering_table(acts: tuple[Act, ...]) -> SteeringTable | None:
    """Makes the table of a plan's acts; None if there are none.

    Raises:
        TooMuch: it would cost more than `MAX_EFFORT`, or have more than `MAX_PIECES` pieces.
    """
    if not acts:
        return None
    sets = tuple(sorted({one.tokens for act in acts for one in act.conditions}))
    number = {tokens: place for place, tokens in enumerate(sets)}
    owners: list[Owner] = []
    spans: list[Spans] = []
    for index, act in enumerate(acts):
        owners.append(Owner(index, None, among=True))
        spans.append(act.spans)
        for one in act.conditions:
            owners.append(Owner(index, number[one.tokens], one.among))
            spans.append(one.spans)
    pieces = cut(spans, price=_price(acts, owners), budget=MAX_EFFORT, most=MAX_PIECES)
    bare = tuple(
        Act(act.kind, act.vectors, act.rows, (), act.scale, act.bands, act.orthogonal)
        for act in acts
    )
    packed = tuple(np.array(tokens, "<i4").tobytes() for tokens in sets)
    return _affordable(SteeringTable(bare, tuple(owners), packed, pieces), MAX_EFFORT)


def capture_table(captures: tuple[Capture, ...]) -> CaptureTable | None:
    """Makes the table of a plan's captures; None if nothing is captured.

    Raises:
        TooMuch: it would cost more than `MAX_CAPTURE_EFFORT`, or have more than `MAX_PIECES`
            pieces.
    """
    some = [capture for capture in captures if capture.sites and capture.spans]
    if not some:
        return None
    sites = [len(capture.sites) for capture in some]

    def price(members: tuple[int, ...]) -> int:
        return 1 + sum(sites[i] for i in members) // _GLANCES

    spans = [one.spans for one in some]
    pieces = cut(spans, price=price, budget=MAX_CAPTURE_EFFORT, most=MAX_PIECES)
    bare = tuple(Capture(one.sites, (), one.form) for one in some)
    return _affordable(CaptureTable(bare, pieces), MAX_CAPTURE_EFFORT)


def _affordable(table: _Table, most: int) -> _Table:
    if table.effort > most:
        raise TooMuch(f"It costs {table.effort}; at most {most} is allowed")
    return table


def _price(acts: Sequence[Act], owners: Sequence[Owner]) -> Callable[[tuple[int, ...]], int]:
    """The price of a set of clauses: its acts at their sites, in every variant."""
    sizes = [len(acts[owner.act].rows) * site_effort(acts[owner.act]) for owner in owners]

    def price(members: tuple[int, ...]) -> int:
        sets = {owners[i].tokens for i in members} - {None}
        variants = 1 << min(len(sets), MAX_TOKEN_SETS + 1)
        return variants * sum(sizes[i] for i in members)

    return price


def _directions(captures: Sequence[Capture]) -> int:
    """The cost of gathering the directions of the different forms."""
    forms = {capture.form for capture in captures if capture.form is not None}
    return sum(len(one.directions.vectors) for one in forms if one.directions is not None)
