"""Programs and steps: the combined effect of several acts on a token.

A clause is an act with positions at which it applies, perhaps only to some token ids. Positions are
cut into intervals with the same clauses (`intervals`). In an interval, each site has one program:
the steps of its acts, in order. If clauses depend on the token, there are several variants.

Invariant: equal content gives equal programs and combinations, whatever the request ids and the
order of adjacent additions. So rows, slots and steps are shared by content.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rheostat_engine.plan.acts import Act, Kind, SiteRow
from rheostat_engine.plan.gates import COORDINATE, Gate, Normalise, Reading, Readout, gates_of

RowKey = tuple[tuple[bytes, int, float], ...]
"""A row to add: (digest, row, scale) of each addend, sorted."""

Direction = tuple[tuple[bytes, int], ...]
"""A unit vector: the last (digest, row), made orthogonal to the earlier ones."""

MAX_TOKEN_SETS = 4
"""The most sets of token ids at one position."""

MAX_STEPS = 64
"""The most steps of a program."""


class Step(NamedTuple):
    """An elementary change of a row."""

    kind: Kind
    addends: RowKey = ()
    """ADD, ADD_LAST: the row. REPLACE: the row that replaces x."""
    direction: Direction = ()
    """NORM_ADD, PULL, and steps with a reading: the unit vector."""
    low: float = 0.0
    """PULL: lower bound of the band."""
    high: float = 0.0
    """PULL: upper bound of the band."""
    strength: float = 0.0
    """PULL: strength of the band. NORM_ADD, REPLACE, ADD_LAST: the scale."""
    last: bool = True
    """Whether this is the act's last step, after which its change is measured."""
    mask: RowKey = ()
    """REPLACE, ADD_LAST: the row of the mask; empty if there is none."""
    gate: int | None = None
    """The number of the gate by which the step's strength is multiplied; None: 1."""
    gain: int | None = None
    """The index of the gain by which the step's strength is multiplied; None: 1."""
    one_term: bool = False
    """GATE, which computes how far the gate of the number `gate` is open at the token: whether the
    gate has a single term. The rest of the gate is not in the program, so requests whose gates
    differ only in numbers share programs."""
    reading: Reading | None = None
    """READ, READ_ALONE, READ_MEAN: the number that is read; `column` is that of the site."""
    row_sum: int | None = None
    """SUM, READ_MEAN: the index of the sum among those of the sample."""
    readout: Readout = COORDINATE
    """PULL: the number that is pulled."""
    write: Direction = ()
    """PULL: the vector along which x moves, as it is; empty: as `Band` says."""
    only_on: bool = False
    """PULL: whether rows stay as they are if the number is 0."""

    @property
    def constant(self) -> bool:
        """Whether nothing multiplies its strength."""
        return self.gate is None and self.gain is None

    @property
    def rows(self) -> tuple[RowKey, ...]:
        """The rows of the bank that it needs."""
        return tuple(key for key in (self.addends, self.mask) if key)


Program = tuple[Step, ...]
"""The steps for one token at one site."""


def only_adds(program: Program) -> bool:
    """Whether a program adds a single row, whatever was read, and whatever gains say."""
    return len(program) == 1 and program[0].kind is Kind.ADD and program[0].constant


Combination = tuple[tuple[int, Program], ...]
"""The (site, program) pairs for one token, ascending by site."""


class Variant(NamedTuple):
    """The combination for tokens that are in the same sets of token ids."""

    members: tuple[int, ...]
    """Indices of the acts in the plan."""
    combination: Combination

    @property
    def dose_slots(self) -> int:
        """The number of measurements of the longest program."""
        return max(
            (sum(step.last for step in program) for _, program in self.combination), default=0
        )


class Clause(NamedTuple):
    """An act, and the token ids to which it applies."""

    act: int
    """Index of the act in the plan."""
    tokens: int | None
    """Index of a set of token ids; None: the clause applies to every token."""
    among: bool
    """True: the clause applies to tokens in the set. False: to all other tokens."""


class TokenVariants(NamedTuple):
    """The variants at positions with the same clauses."""

    sets: tuple[bytes, ...]
    """The sets of token ids that select the variant."""
    variants: tuple[Variant, ...]
    """2 ** len(sets); bit i of the index: whether the token is in set i."""


class VariantActs(NamedTuple):
    """As `TokenVariants`, but with the acts of each variant in place of its programs."""

    sets: tuple[bytes, ...]
    members: tuple[tuple[int, ...], ...]
    """Indices of the acts of each variant."""


def variant_acts(clauses: Sequence[Clause], sets: Sequence[bytes]) -> VariantActs:
    """Finds the acts of each variant at positions with all of these clauses.

    Raises:
        ValueError: the clauses refer to more than `MAX_TOKEN_SETS` of the plan's `sets`.
    """
    numbers = sorted({clause.tokens for clause in clauses if clause.tokens is not None})
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
                clause.act
                for clause in clauses
                if clause.tokens is None or inside[clause.tokens] == clause.among
            )
        )
    return VariantActs(tuple(sets[number] for number in numbers), tuple(variants))


def combine(
    acts: Sequence[Act],
    members: Sequence[int],
    sites: range | None = None,
    kept: Sequence[Gate] = (),
) -> Combination:
    """Combines acts that apply to one token.

    Args:
        acts: the acts of the plan.
        members: the indices of the acts that apply.
        sites: the sites to combine; None for all.
        kept: the plan's `Signals.kept`, whose numbers precede those of the acts' other gates.

    Raises:
        ValueError: a program is longer than `MAX_STEPS`.
    """
    gated = any(acts[member].gate is not None for member in members)
    sums = row_sums(acts) if gated or any(_of_mean(acts[member]) for member in members) else {}
    if len(members) == 1 and not gated:
        by_site = _steps_alone(acts[members[0]], sites, sums)
    else:
        gates = gates_of([*kept, *(act.gate for act in acts)]) if gated else ()
        by_site = _steps_together(acts, members, sites, gates, sums)
    for steps in by_site.values():
        if len(steps) > MAX_STEPS:
            raise ValueError(f"{len(steps)} steps meet at one site; at most {MAX_STEPS} can")
    return tuple([(site, tuple(by_site[site])) for site in sorted(by_site)])


def row_sums(acts: Sequence[Act]) -> dict[int, int]:
    """The sums that each sample of a plan needs: the index of each, by the column of what is read.

    Composing looks them up for each set of acts, so their steps are not made here.
    """
    found: dict[int, int] = {}
    for act in acts:
        if act.reading is not None and act.reading.of_mean:
            first, number = act.reading.column, len(found)
            found.update((first + at, number + at) for at in range(len(act.rows)))
    return found


def _mean_step(acts: Sequence[Act], column: int, number: int) -> Step:
    """The step that reads the number of a mean: its column, and the index of its sum."""
    for act in acts:
        if act.reading is None or not act.reading.of_mean:
            continue
        at = column - act.reading.column
        if 0 <= at < len(act.rows):
            parts = tuple(zip(act.vectors, act.rows[at][1], strict=True))
            reading = act.reading._replace(column=column)
            return Step(
                Kind.READ_MEAN, direction=parts, last=False, reading=reading, row_sum=number
            )
    raise KeyError(column)


def _of_mean(act: Act) -> bool:
    return act.reading is not None and act.reading.of_mean


def means_program(acts: Sequence[Act]) -> Program:
    """The program that reads a plan's numbers of mean rows; empty if there are none."""
    return tuple([_mean_step(acts, *row_sum) for row_sum in row_sums(acts).items()])


def _steps_alone(act: Act, sites: range | None, sums: Mapping[int, int]) -> dict[int, list[Step]]:
    """The steps of a single act without a gate, by site. A sweep has one at most positions."""
    if not act.in_force:
        return {}
    return {site: _steps(act, site, rows, None, sums) for site, rows in _rows_at(act, sites)}


def _steps_together(
    acts: Sequence[Act],
    members: Sequence[int],
    sites: range | None,
    gates: Sequence[Gate],
    sums: Mapping[int, int],
) -> dict[int, list[Step]]:
    """The steps of several acts, by site. Adjacent additions become one step.

    Those under a gate or a gain are steps of their own behind it. So a shut gate between two
    additions changes nothing: the sum of these is still rounded once.
    """
    by_site = _openings(acts, members, sites, gates, sums)
    adding: dict[int, list[tuple[bytes, int, float]]] = {}
    apart: dict[int, list[Step]] = {}
    for member in ordered(acts, members):
        act = acts[member]
        gate = None if act.gate is None else gates.index(act.gate)
        for site, rows in _rows_at(act, sites):
            steps = by_site.setdefault(site, [])
            if _merges(act):
                adding.setdefault(site, []).append((act.vectors[0], rows[0], act.scale))
            elif act.kind is Kind.ADD:
                apart.setdefault(site, []).extend(_steps(act, site, rows, gate, sums))
            else:
                _flush(adding, apart, site, steps)
                steps += _steps(act, site, rows, gate, sums)
    for site, steps in by_site.items():
        _flush(adding, apart, site, steps)
    return by_site


def attribution(
    acts: Sequence[Act], members: Sequence[int], sites: range | None = None
) -> dict[int, list[list[int]]]:
    """The acts of each measurement, by site, in the order of the steps.

    Adjacent additions are measured together, before those under a gate or a gain.

    Args:
        acts: the acts of the plan.
        members: the indices of the acts that apply.
        sites: the sites to list; None for all.
    """
    by_site: defaultdict[int, list[list[int]]] = defaultdict(list)
    begins: dict[int, int] = {}  # by site: where its last groups, all of additions, begin
    for member in ordered(acts, members):
        act = acts[member]
        if not act.strong:
            continue
        for site, _ in _rows_at(act, sites):
            groups = by_site[site]
            if act.kind is not Kind.ADD:
                begins.pop(site, None)
                groups.append([member])
                continue
            begin = begins.setdefault(site, len(groups))
            if not _merges(act):
                groups.append([member])
            elif begin < len(groups) and _merges(acts[groups[begin][0]]):
                groups[begin].append(member)
            else:
                groups.insert(begin, [member])
    return by_site


def ordered(acts: Sequence[Act], members: Sequence[int]) -> list[int]:
    """The acts that change or read a token, in the order in which they act."""
    present = [member for member in members if acts[member].in_force]
    if len(present) < 2:
        return present
    return sorted(present, key=lambda member: _rank(acts[member]))


def _rank(act: Act) -> int:
    """Acts of a lower rank act first. `Kind.READ` is last, because kernels run four at once."""
    if act.reading is not None:
        return 2 if _reading_kind(act.reading) is not Kind.READ else 3
    return int(act.kind.acts_last)


def _reading_kind(reading: Reading) -> Kind:
    """The kind of step that an act of `Kind.READ` becomes in a program."""
    if reading.of_mean:
        return Kind.SUM
    projected = reading.normalise is Normalise.PROJECTED_COSINE
    return Kind.READ_ALONE if projected else Kind.READ


def _merges(act: Act) -> bool:
    """Whether neighbours of its kind become one step with it."""
    return act.kind is Kind.ADD and act.constant


def _openings(
    acts: Sequence[Act],
    members: Sequence[int],
    sites: range | None,
    gates: Sequence[Gate],
    sums: Mapping[int, int],
) -> dict[int, list[Step]]:
    """The steps that open gates, each at the first site at which the gate's acts act.

    Numbers of means are read before. A late gate does not need them in the same forward pass.
    """
    first: dict[int, int] = {}
    for member in members if gates else ():
        act = acts[member]
        if act.gate is not None and act.strong:
            number, site = gates.index(act.gate), int(act.site_rows.sites[0])
            first[number] = min(site, first.get(number, site))
    by_site: dict[int, list[Step]] = {}
    for number in sorted(first):
        if sites is None or first[number] in sites:
            gate = gates[number]
            steps = by_site.setdefault(first[number], [])
            for column in () if gate.late or not sums else gate.columns:
                step = _mean_step(acts, column, sums[column]) if column in sums else None
                if step is not None and step not in steps:
                    steps.append(step)
            one_term = len(gate.columns) == 1
            steps.append(Step(Kind.GATE, last=False, gate=number, one_term=one_term))
    return by_site


def _rows_at(act: Act, sites: range | None) -> Iterator[SiteRow]:
    return iter(act.rows) if sites is None else act.site_rows.within(sites)


def _flush(
    adding: dict[int, list[tuple[bytes, int, float]]],
    apart: dict[int, list[Step]],
    site: int,
    steps: list[Step],
) -> None:
    """Adds the steps of the additions so far."""
    addends = adding.pop(site, None)
    if addends:
        steps.append(Step(Kind.ADD, addends=tuple(sorted(addends))))
    steps += apart.pop(site, ())


def _steps(
    act: Act,
    site: int,
    rows: tuple[int, ...],
    gate: int | None,
    sums: Mapping[int, int],
) -> list[Step]:
    parts = tuple(zip(act.vectors, rows, strict=True))
    if act.reading is not None:
        at = int(np.searchsorted(act.site_rows.sites, site))
        reading = act.reading._replace(column=act.reading.column + at)
        kind = _reading_kind(reading)
        if kind is Kind.SUM:
            return [Step(kind, last=False, row_sum=sums[reading.column])]
        return [Step(kind, direction=parts, last=False, reading=reading)]
    if act.kind is Kind.ADD:
        return [Step(act.kind, ((*parts[0], act.scale),), gate=gate, gain=act.gain)]
    if act.kind is Kind.NORM_ADD:
        return [Step(act.kind, direction=parts, strength=act.scale, gate=gate, gain=act.gain)]
    if act.kind.acts_last:
        row, *mask = (((*part, 1.0),) for part in parts)
        masked = mask[0] if mask else ()
        return [Step(act.kind, row, strength=act.scale, mask=masked, gate=gate, gain=act.gain)]
    steps = []
    first = 0
    for i, band in enumerate(act.bands):
        direction = parts[: first + 1] if act.orthogonal else parts[first : first + 1]
        last = i == len(act.bands) - 1
        step = Step(Kind.PULL, (), direction, band.low, band.high, band.strength, last)
        step = step._replace(gate=gate, gain=act.gain)
        if not band.plain:
            write = parts[first + 1 : first + band.vectors]
            step = step._replace(readout=band.readout, write=write, only_on=band.only_on)
        steps.append(step)
        first += band.vectors
    return steps
