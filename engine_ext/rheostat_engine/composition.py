"""What the acts of a plan do together, token by token: pieces, programs, steps.

Positions are cut where the set of acts changes. Within a piece each site has one program: the steps
of the acts that reach it, in their order. Acts that depend on the token make variants of a piece.

Invariant: equal content gives equal programs, combinations and pieces, whatever the names and
however neighbouring additions are ordered; this is what rows, slots and steps are shared by.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from rheostat_engine.clauses import Owner, clauses_of
from rheostat_engine.pieces import sweep
from rheostat_engine.plan import Act, Band, Kind, TokenSet

RowKey = tuple[tuple[bytes, int, float], ...]
"""What a row that is added is made of: every addend's (digest, row, scale), sorted."""

Direction = tuple[tuple[bytes, int], ...]
"""What a unit vector is made of: the last (digest, row), made orthogonal to those before it."""

MAX_TOKEN_SETS = 4
"""Different sets of token ids that may meet at one position."""

MAX_STEPS = 64
"""Steps that a program may have."""


class Step(NamedTuple):
    """One elementary change of a row."""

    kind: Kind
    addends: RowKey = ()
    """ADD: what is added."""
    direction: Direction = ()
    """NORM_ADD, PULL: along which unit vector."""
    low: float = 0.0
    """PULL: lower bound of its band."""
    high: float = 0.0
    """PULL: upper bound of its band."""
    strength: float = 0.0
    """PULL: of its band. NORM_ADD: the scale."""
    last: bool = True
    """Whether the act ends here, and what it changed is measured."""


Program = tuple[Step, ...]
"""What happens at one site to one token."""


def only_adds(program: Program) -> bool:
    """Whether a program is a single row that is added."""
    return len(program) == 1 and program[0].kind is Kind.ADD


Combination = tuple[tuple[int, Program], ...]
"""(site, program) of all that happens to one token, ascending by site."""


class Variant(NamedTuple):
    """What happens in a piece to tokens of some kind."""

    members: tuple[int, ...]
    """The acts, by index in the plan."""
    combination: Combination
    """What they do."""

    @property
    def cells(self) -> int:
        """Measurements that its longest program makes."""
        return max(
            (sum(step.last for step in program) for _, program in self.combination), default=0
        )


class Piece(NamedTuple):
    """Positions at which the same acts apply, up to the next piece."""

    start: int
    """First position."""
    sets: tuple[TokenSet, ...]
    """Sets of token ids that decide which variant applies."""
    variants: tuple[Variant, ...]
    """2 ** len(sets); bit i of the index says whether the token is in set i."""


def compose(acts: Sequence[Act]) -> tuple[Piece, ...]:
    """The pieces of a plan's acts, ascending from position 0.

    Raises:
        ValueError: more than `MAX_TOKEN_SETS` sets meet, or a program is longer than `MAX_STEPS`.
    """
    return _composed(tuple(acts))


def combine(acts: Sequence[Act], members: Sequence[int]) -> Combination:
    """What some acts do together at one token.

    Raises:
        ValueError: a program is longer than `MAX_STEPS`.
    """
    by_site: dict[int, list[Step]] = {}
    adding: dict[int, list[tuple[bytes, int, float]]] = {}
    for member in members:
        act = acts[member]
        if not act.acts:
            continue
        for site, rows in act.rows:
            steps = by_site.setdefault(site, [])
            if act.kind is Kind.ADD:
                adding.setdefault(site, []).append((act.vectors[0], rows[0], act.scale))
                continue
            _flush(adding, site, steps)
            steps += _steps(act, rows)
    for site, steps in by_site.items():
        _flush(adding, site, steps)
        if len(steps) > MAX_STEPS:
            raise ValueError(f"{len(steps)} steps meet at one site; at most {MAX_STEPS} can")
    return tuple((site, tuple(by_site[site])) for site in sorted(by_site))


def attribution(acts: Sequence[Act], members: Sequence[int]) -> dict[int, list[list[int]]]:
    """Which acts each measurement of a program is about, by site; additions are measured together.

    Args:
        acts: the plan's.
        members: those that make the programs, by index.
    """
    by_site: defaultdict[int, list[list[int]]] = defaultdict(list)
    for member in members:
        act = acts[member]
        for site, _ in act.rows if act.acts else ():
            groups = by_site[site]
            if groups and act.kind is Kind.ADD is acts[groups[-1][-1]].kind:
                groups[-1].append(member)
            else:
                groups.append([member])
    return by_site


@lru_cache(maxsize=8)
def _composed(acts: tuple[Act, ...]) -> tuple[Piece, ...]:
    clauses = clauses_of(acts)
    made: dict[tuple[int, ...], tuple[tuple[TokenSet, ...], tuple[Variant, ...]]] = {}
    pieces = []
    for start, held in sweep(clauses.spans):
        if held not in made:
            made[held] = _variants(acts, [clauses.owners[i] for i in held], clauses.sets)
        pieces.append(Piece(start, *made[held]))
    return tuple(pieces)


def _variants(
    acts: Sequence[Act], owners: Sequence[Owner], sets: Sequence[TokenSet]
) -> tuple[tuple[TokenSet, ...], tuple[Variant, ...]]:
    numbers = sorted({owner.tokens for owner in owners if owner.tokens is not None})
    if len(numbers) > MAX_TOKEN_SETS:
        raise ValueError(
            f"{len(numbers)} different sets of token ids meet at one position; at most "
            f"{MAX_TOKEN_SETS} can"
        )
    variants = []
    for held in range(1 << len(numbers)):
        inside = {number: bool(held >> bit & 1) for bit, number in enumerate(numbers)}
        members = tuple(
            owner.act
            for owner in owners
            if owner.tokens is None or inside[owner.tokens] == owner.among
        )
        variants.append(Variant(members, combine(acts, members)))
    return tuple(sets[number] for number in numbers), tuple(variants)


def _flush(adding: dict[int, list[tuple[bytes, int, float]]], site: int, steps: list[Step]) -> None:
    addends = adding.pop(site, None)
    if addends:
        steps.append(Step(Kind.ADD, addends=tuple(sorted(addends))))


def _steps(act: Act, rows: tuple[int, ...]) -> list[Step]:
    parts = tuple(zip(act.vectors, rows, strict=True))
    if act.kind is Kind.NORM_ADD:
        return [Step(act.kind, direction=parts, strength=act.scale)]
    steps = []
    for i, band in enumerate(act.bands):
        direction = parts[: i + 1] if act.orthogonal else parts[i : i + 1]
        steps.append(_pull(direction, band, last=i == len(act.bands) - 1))
    return steps


def _pull(direction: Direction, band: Band, *, last: bool) -> Step:
    return Step(Kind.PULL, (), direction, band.low, band.high, band.strength, last)
