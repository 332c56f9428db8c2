"""What acts do together at a token: programs and steps.

Positions are cut where the set of acts that hold changes (`pieces`). Where the same acts hold, each
site has one program: the steps of the acts that reach it, in their order. Acts that depend on the
token make variants.

Invariant: equal content gives equal programs and combinations, whatever the names and however
neighbouring additions are ordered; this is what rows, slots and steps are shared by.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rheostat_engine.acts import Act, Band, Kind, SiteRow

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


class Owner(NamedTuple):
    """Whose a clause is, and under which tokens it holds."""

    act: int
    """Index in the plan."""
    tokens: int | None
    """The set of token ids that it depends on, by number."""
    among: bool
    """Whether the selected tokens are those with such an id."""


class Mix(NamedTuple):
    """What happens to tokens at which the same clauses hold."""

    sets: tuple[bytes, ...]
    """Sets of token ids that decide which variant applies."""
    variants: tuple[Variant, ...]
    """2 ** len(sets); bit i of the index says whether the token is in set i."""


class Meeting(NamedTuple):
    """Clauses that hold at the same tokens, before it is known what their acts do there."""

    sets: tuple[bytes, ...]
    """As in `Mix`."""
    members: tuple[tuple[int, ...], ...]
    """The acts of each variant."""


def meeting(owners: Sequence[Owner], sets: Sequence[bytes]) -> Meeting:
    """Which acts apply where some clauses hold together.

    Args:
        owners: of the clauses.
        sets: the plan's sets of token ids.

    Raises:
        ValueError: more than `MAX_TOKEN_SETS` sets meet.
    """
    numbers = sorted({owner.tokens for owner in owners if owner.tokens is not None})
    if len(numbers) > MAX_TOKEN_SETS:
        raise ValueError(
            f"{len(numbers)} different sets of token ids meet at one position; at most "
            f"{MAX_TOKEN_SETS} can"
        )
    variants = []
    for held in range(1 << len(numbers)):
        inside = {number: bool(held >> bit & 1) for bit, number in enumerate(numbers)}
        variants.append(
            tuple(
                owner.act
                for owner in owners
                if owner.tokens is None or inside[owner.tokens] == owner.among
            )
        )
    return Meeting(tuple(sets[number] for number in numbers), tuple(variants))


def compose(acts: Sequence[Act], owners: Sequence[Owner], sets: Sequence[bytes]) -> Mix:
    """What clauses do that hold together.

    Args:
        acts: the plan's.
        owners: of the clauses.
        sets: the plan's sets of token ids.

    Raises:
        ValueError: more than `MAX_TOKEN_SETS` sets meet, or a program is longer than `MAX_STEPS`.
    """
    met = meeting(owners, sets)
    variants = (Variant(members, combine(acts, members)) for members in met.members)
    return Mix(met.sets, tuple(variants))


def combine(acts: Sequence[Act], members: Sequence[int], sites: range | None = None) -> Combination:
    """What some acts do together at one token.

    Args:
        acts: the plan's.
        members: those that apply, by index.
        sites: the only sites that are looked at; None: all.

    Raises:
        ValueError: a program is longer than `MAX_STEPS`.
    """
    by_site: dict[int, list[Step]] = {}
    adding: dict[int, list[tuple[bytes, int, float]]] = {}
    for member in members:
        act = acts[member]
        if not act.strong:
            continue
        for site, rows in _rows_at(act, sites):
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


def attribution(
    acts: Sequence[Act], members: Sequence[int], sites: range | None = None
) -> dict[int, list[list[int]]]:
    """Which acts each measurement of a program is about, by site; additions are measured together.

    Args:
        acts: the plan's.
        members: those that make the programs, by index.
        sites: the only sites that are looked at; None: all.
    """
    by_site: defaultdict[int, list[list[int]]] = defaultdict(list)
    for member in members:
        act = acts[member]
        for site, _ in _rows_at(act, sites) if act.strong else ():
            groups = by_site[site]
            if groups and act.kind is Kind.ADD is acts[groups[-1][-1]].kind:
                groups[-1].append(member)
            else:
                groups.append([member])
    return by_site


def _rows_at(act: Act, sites: range | None) -> Iterator[SiteRow]:
    return iter(act.rows) if sites is None else act.site_rows.within(sites)


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
