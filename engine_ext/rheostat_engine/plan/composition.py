"""Programs and steps: the combined effect of several acts on a token.

Positions are cut into intervals with the same acts (`intervals`). In an interval each site has one
program: the steps of the acts at this site, in their order. Acts that depend on the token make
variants.

Invariant: equal content gives equal programs and combinations, whatever the names and the order of
neighbouring additions. Rows, slots and steps are therefore shared by content.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rheostat_engine.plan.acts import Act, Band, Kind, SiteRow

RowKey = tuple[tuple[bytes, int, float], ...]
"""Content of a row that is added: (digest, row, scale) of each addend, sorted."""

Direction = tuple[tuple[bytes, int], ...]
"""Content of a unit vector: the last (digest, row), made orthogonal to the rows before it."""

MAX_TOKEN_SETS = 4
"""The most sets of token ids that may meet at one position."""

MAX_STEPS = 64
"""The most steps of a program."""


class Step(NamedTuple):
    """One elementary change of a row."""

    kind: Kind
    addends: RowKey = ()
    """ADD: the row that is added."""
    direction: Direction = ()
    """NORM_ADD, PULL: the unit vector."""
    low: float = 0.0
    """PULL: lower bound of its band."""
    high: float = 0.0
    """PULL: upper bound of its band."""
    strength: float = 0.0
    """PULL: of its band. NORM_ADD: the scale."""
    last: bool = True
    """Whether this is the last step of its act, after which the act's change is measured."""


Program = tuple[Step, ...]
"""The steps for one token at one site."""


def only_adds(program: Program) -> bool:
    """Whether a program is a single row that is added."""
    return len(program) == 1 and program[0].kind is Kind.ADD


Combination = tuple[tuple[int, Program], ...]
"""All (site, program) for one token, ascending by site."""


class Variant(NamedTuple):
    """The combination of an interval for tokens that are in the same sets of token ids."""

    members: tuple[int, ...]
    """The acts, by index in the plan."""
    combination: Combination
    """Their programs."""

    @property
    def dose_slots(self) -> int:
        """Measurements that its longest program makes."""
        return max(
            (sum(step.last for step in program) for _, program in self.combination), default=0
        )


class Owner(NamedTuple):
    """The act of a clause, and the tokens for which the clause holds."""

    act: int
    """Index in the plan."""
    tokens: int | None
    """The set of token ids that it depends on, by number."""
    among: bool
    """Whether the selected tokens are those with such an id."""


class Mix(NamedTuple):
    """The variants for positions at which the same clauses hold."""

    sets: tuple[bytes, ...]
    """The sets of token ids that decide which variant applies."""
    variants: tuple[Variant, ...]
    """2 ** len(sets); bit i of the index says whether the token is in set i."""


class Meeting(NamedTuple):
    """The acts of clauses that hold at the same positions, before they are combined."""

    sets: tuple[bytes, ...]
    """As in `Mix`."""
    members: tuple[tuple[int, ...], ...]
    """The acts of each variant."""


def meeting(owners: Sequence[Owner], sets: Sequence[bytes]) -> Meeting:
    """Finds the acts of each variant at positions where some clauses hold together.

    Args:
        owners: the owners of the clauses.
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
    for variant in range(1 << len(numbers)):
        inside = {number: bool(variant >> bit & 1) for bit, number in enumerate(numbers)}
        variants.append(
            tuple(
                owner.act
                for owner in owners
                if owner.tokens is None or inside[owner.tokens] == owner.among
            )
        )
    return Meeting(tuple(sets[number] for number in numbers), tuple(variants))


def compose(acts: Sequence[Act], owners: Sequence[Owner], sets: Sequence[bytes]) -> Mix:
    """Combines the acts of clauses that hold together.

    Args:
        acts: the acts of the plan.
        owners: the owners of the clauses.
        sets: the plan's sets of token ids.

    Raises:
        ValueError: more than `MAX_TOKEN_SETS` sets meet, or a program is longer than `MAX_STEPS`.
    """
    met = meeting(owners, sets)
    variants = (Variant(members, combine(acts, members)) for members in met.members)
    return Mix(met.sets, tuple(variants))


def combine(acts: Sequence[Act], members: Sequence[int], sites: range | None = None) -> Combination:
    """Combines acts that apply to one token.

    Args:
        acts: the acts of the plan.
        members: the indices of the acts that apply.
        sites: the sites to combine; None for all.

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
    """The acts of each measurement, by site. Neighbouring additions are measured together.

    Args:
        acts: the acts of the plan.
        members: the indices of the acts that make the programs.
        sites: the sites to list; None for all.
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
