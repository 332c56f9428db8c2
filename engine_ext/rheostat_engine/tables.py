"""A plan's acts and captures as tables of integers, made once at admission.

Why tables
    All samples of a request, and all requests with equal steering, share one table. A worker knows
    a table by its digest. It reads and puts together the first one that comes; every other request
    costs it a reference.
Why integers
    What a client makes expensive is paid where the request is admitted. A worker gets the pieces of
    twenty thousand spans as two arrays, and looks at each different set of acts or captures once.
Why a price
    `effort` says what a worker pays for a table that it does not know, in about the same unit for
    everything that is made: a row at a site, a step of a program, a set of sites. It is bounded at
    admission, and so are the pieces.
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
"""The most that a table of acts may cost (`effort`). Workers put it together in slices."""

MAX_CAPTURE_EFFORT = 4_000
"""The most that a table of captures may cost. Workers put it together at once."""

MAX_PIECES = 65_536
"""The most pieces that a table may have: eight bytes each, on the wire and in the workers."""

STEP_EFFORT = 1000
"""The most that a worker builds or releases between two steps, beside small new requests."""

_GLANCES = 64
"""Pieces, token ids or sites that numpy goes over in the time in which one thing is made."""

_PAIRS = 4
"""Pairs of directions that are made orthogonal in the time in which one thing is made."""

_Table = TypeVar("_Table", "SteeringTable", "CaptureTable")

_READ = 16
"""Rows of acts that are read from the wire in the time in which one thing is made."""


@dataclass(frozen=True, eq=False)
class SteeringTable:
    """The acts of a plan."""

    acts: tuple[Act, ...]
    """Without spans and conditions."""
    owners: tuple[Owner, ...]
    """Whose each clause is: an act's positions, and those under each of its conditions."""
    sets: tuple[bytes, ...]
    """The different sets of token ids, each as ascending little-endian int32."""
    pieces: Pieces
    """Which clauses hold where."""

    @cached_property
    def effort(self) -> int:
        """The cost of building it; see the module."""
        price = _price(self.acts, self.owners)
        return sum(price(members) for members in self.pieces.members) + self.read_effort

    @cached_property
    def read_effort(self) -> int:
        """The cost of reading it, including acts that hold nowhere."""
        rows = sum(len(act.rows) * len(act.vectors) for act in self.acts)
        ids = sum(len(one) // 4 for one in self.sets)
        return rows // _READ - -(len(self.pieces.starts) + ids) // _GLANCES

    @property
    def ruled(self) -> int:
        """The number of sets that depend on the token."""
        conditional = [owner.tokens is not None for owner in self.owners]
        return sum(any(conditional[i] for i in members) for members in self.pieces.members)

    @property
    def used(self) -> tuple[int, ...]:
        """The acts that change something somewhere, by index."""
        held = {self.owners[i].act for members in self.pieces.members for i in members}
        return tuple(index for index in sorted(held) if self.acts[index].strong)

    def mix(self, number: int) -> Mix:
        """Composes the acts of a set of clauses, given by number.

        Raises:
            ValueError: it can't be composed.
        """
        owners = [self.owners[i] for i in self.pieces.members[number]]
        return compose(self.acts, owners, self.sets)

    @property
    def mixes(self) -> tuple[Mix, ...]:
        """Composes the acts of each set of clauses.

        They are not kept, because they take many times the memory of the table.

        Raises:
            ValueError: one can't be composed.
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
    """Without spans."""
    pieces: Pieces
    """Which captures hold where."""

    @cached_property
    def effort(self) -> int:
        """The cost of building it; see the module."""
        sites = [len(capture.sites) for capture in self.captures]
        gone_over = sum(sites[i] for members in self.pieces.members for i in members)
        made = len(self.pieces.members) + _directions(self.captures)
        return made - -(gone_over + len(self.pieces.starts)) // _GLANCES

    @cached_property
    def first(self) -> int:
        """The lowest captured position; `OPEN_END`: nothing is captured."""
        captured = np.array([bool(members) for members in self.pieces.members])
        where = np.flatnonzero(captured[self.pieces.sets])
        return int(self.pieces.starts[where[0]]) if len(where) else OPEN_END

    def need(self, *, prompt_len: int, max_step_tokens: int) -> CaptureNeed:
        """The room that one sample needs in the ring.

        A chunk of the prompt is at most `max_step_tokens` long. Generated tokens come one in a
        step; a preempted request that computes them again has had their rows delivered already.
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
    """The table of a plan's acts; None where there are none.

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
    """The table of a plan's captures; None where nothing is captured.

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
