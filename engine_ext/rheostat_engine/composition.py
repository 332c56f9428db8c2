"""What the acts of a plan do together, token by token: pieces, programs, steps.

Positions are cut where the set of acts changes. Within a piece each site has one program: the steps
of the acts that reach it, in their order. Acts that depend on the token make variants of a piece.

Invariant: equal content gives equal programs, combinations and pieces, whatever the names and
however neighbouring additions are ordered; this is what rows, slots and steps are shared by.
"""

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from rheostat_engine.plan import OPEN_END, Act, Band, Kind, Plan, Spans, TokenSet

RowKey = tuple[tuple[bytes, int, float], ...]
"""What a row that is added is made of: every addend's (digest, row, scale), sorted."""

Direction = tuple[tuple[bytes, int], ...]
"""What a unit vector is made of: the last (digest, row), made orthogonal to those before it."""

MAX_EFFORT = 200_000
"""The most that a plan may cost (`effort`), so that no plan holds up a step."""

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


def segment(spans: Sequence[Spans]) -> list[tuple[int, tuple[int, ...]]]:
    """Cuts the positions where membership changes.

    Returns (start, members) for each piece from position 0 on, ascending by start, where members
    are the indices of the spans that hold the piece. The last piece has no end.
    """
    cuts = sorted({0, *(edge for one in spans for span in one for edge in span)} - {OPEN_END})
    pieces: list[tuple[int, tuple[int, ...]]] = []
    for start in cuts:
        members = tuple(i for i, one in enumerate(spans) if _holds(one, start))
        if not pieces or pieces[-1][1] != members:
            pieces.append((start, members))
    return pieces


def compose(acts: Sequence[Act]) -> list[Piece]:
    """The pieces of a plan's acts, ascending from position 0.

    Raises:
        ValueError: more than `MAX_TOKEN_SETS` sets meet, or a program is longer than `MAX_STEPS`.
    """
    owners, spans = _clauses(acts)
    made: dict[tuple[int, ...], tuple[tuple[TokenSet, ...], tuple[Variant, ...]]] = {}
    pieces = []
    for start, held in segment(spans):
        if held not in made:
            made[held] = _variants(acts, [owners[i] for i in held])
        pieces.append(Piece(start, *made[held]))
    return pieces


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


def attribution(acts: Sequence[Act], members: Sequence[int], site: int) -> list[tuple[int, ...]]:
    """Which acts each measurement of a site's program is about; additions are measured together."""
    groups: list[tuple[int, ...]] = []
    adding: tuple[int, ...] = ()
    for member in members:
        act = acts[member]
        if not act.acts or all(at != site for at, _ in act.rows):
            continue
        if act.kind is Kind.ADD:
            adding += (member,)
            continue
        if adding:
            groups.append(adding)
            adding = ()
        groups.append((member,))
    return [*groups, adding] if adding else groups


def effort(plan: Plan) -> int:
    """What it costs to put a plan in force: its pieces, and what each combination holds."""
    owners, spans = _clauses(plan.acts)
    sizes = [sum(len(rows) for _, rows in plan.acts[owner].rows) for owner, _, _ in owners]
    total = 0
    pieces = segment(spans)
    for members in {members for _, members in pieces}:
        sets = {owners[i][1] for i in members} - {()}
        variants = 1 << min(len(sets), MAX_TOKEN_SETS + 1)
        total += variants * sum(sizes[i] for i in members)
    captured = segment([capture.spans for capture in plan.captures])
    for members in {members for _, members in captured}:
        total += sum(len(plan.captures[i].sites) for i in members)
    return total + len(pieces) + len(captured)


_Owner = tuple[int, TokenSet, bool]


def _clauses(acts: Sequence[Act]) -> tuple[list[_Owner], list[Spans]]:
    """Every act's spans, the conditional ones apart: (act, token ids, among) and positions."""
    owners: list[_Owner] = []
    spans: list[Spans] = []
    for index, act in enumerate(acts):
        owners.append((index, (), True))
        spans.append(act.spans)
        for condition in act.conditions:
            owners.append((index, condition.tokens, condition.among))
            spans.append(condition.spans)
    return owners, spans


def _variants(
    acts: Sequence[Act], owners: Sequence[_Owner]
) -> tuple[tuple[TokenSet, ...], tuple[Variant, ...]]:
    sets = tuple(sorted({tokens for _, tokens, _ in owners if tokens}))
    if len(sets) > MAX_TOKEN_SETS:
        raise ValueError(
            f"{len(sets)} different sets of token ids meet at one position; at most "
            f"{MAX_TOKEN_SETS} can"
        )
    variants = []
    for number in range(1 << len(sets)):
        held = {tokens: bool(number >> bit & 1) for bit, tokens in enumerate(sets)}
        members = tuple(
            index for index, tokens, among in owners if not tokens or held[tokens] == among
        )
        variants.append(Variant(members, combine(acts, members)))
    return sets, tuple(variants)


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


def _holds(spans: Spans, position: int) -> bool:
    after = bisect_right(spans, position, key=itemgetter(0))
    return after > 0 and position < spans[after - 1][1]
