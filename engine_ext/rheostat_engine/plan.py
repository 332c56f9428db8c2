"""A request's interventions, resolved and validated at admission: integers, digests and scales.

Invariant: a plan speaks of absolute token positions and token ids only. Phases, windows and spans
are resolved before, so that chunking, preemption and batching can change nothing about which tokens
it touches. The plan rides into the worker with the request itself (`SamplingParams.extra_args`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from operator import lt
from typing import Annotated, NamedTuple

import msgspec

from rheostat_engine.row_forms import ITEM_BYTES, Coding, Directions, RowForm

OPEN_END = 2**31 - 1
"""End of a span that has none."""

Spans = tuple[tuple[int, int], ...]
"""Half-open [start, end) token positions, ascending, disjoint, not touching."""

TokenSet = tuple[int, ...]
"""Token ids, ascending, each once."""

EXTRA_ARG = "rheostat"
"""The key of the plan in `SamplingParams.extra_args`."""

FORGONE_ARG = "rheostat_forgone"
"""The key, beside the plan, of how many cached tokens are computed because they are captured."""


class Kind(IntEnum):
    """How an act changes a row x of the stream. Norms are L2; u is a row v made a unit vector."""

    ADD = 1
    """x + scale * v."""
    NORM_ADD = 2
    """x + scale * |x| * u."""
    PULL = 3
    """For each direction in turn x + strength * (clip(x.u, low, high) - x.u) * u.

    This is ablation (low = high = 0), clamping (a band) and, with low = high = 0 and strength
    1 - f, scaling by f along u."""


class Band(NamedTuple):
    """Where a pull wants a coordinate, and how much of the way it goes."""

    low: float
    """Lower bound, or -inf."""
    high: float
    """Upper bound, or inf; at least `low`."""
    strength: float
    """Part of the way; finite."""


class Condition(NamedTuple):
    """Positions of which only some tokens are selected."""

    spans: Spans
    """The positions."""
    tokens: TokenSet
    """Token ids, at least one."""
    among: bool
    """Whether the selected tokens are those with such an id, or all others."""


@dataclass(frozen=True, slots=True)
class Act:
    """One intervention: a change of the stream at some sites, for some tokens."""

    kind: Kind
    vectors: tuple[bytes, ...]
    """SHA-256 of its vectors' content: one, or a pull's directions in order."""
    rows: tuple[tuple[int, tuple[int, ...]], ...]
    """(site index, row of each vector that is used there), ascending by site."""
    spans: Spans
    """Positions that are touched, whatever their token."""
    scale: float = 1.0
    """ADD, NORM_ADD: factor; finite."""
    bands: tuple[Band, ...] = ()
    """PULL: one per vector."""
    orthogonal: bool = False
    """PULL: whether each direction is first made orthogonal to those before it, so that together
    they act on the directions' span."""
    conditions: tuple[Condition, ...] = ()
    """Further positions, which are touched only under some tokens; apart from `spans` and from each
    other."""

    @property
    def acts(self) -> bool:
        """Whether it can change anything."""
        if self.kind is Kind.PULL:
            strong = any(band.strength != 0 for band in self.bands)
        else:
            strong = self.scale != 0
        return strong and bool(self.rows) and bool(self.spans or self.conditions)


@dataclass(frozen=True, slots=True)
class Capture:
    """Rows of the stream to copy out."""

    sites: tuple[int, ...]
    """Site indices, ascending."""
    spans: Spans
    """Positions that are captured."""
    form: RowForm | None = None
    """In which the rows may leave the device, where all who read them want no more; None: as they
    are."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the engine does to one request."""

    request_id: str
    """The server's name of the request; events come back under it."""
    acts: tuple[Act, ...] = ()
    """Interventions, in the order in which they act at a site."""
    captures: tuple[Capture, ...] = ()
    """Captures. Where several meet, a row is copied once. They see the stream after all acts."""
    epoch: int = 0
    """Part of the prefix cache's keys of every touched block; see `BlockKeys`."""
    private_from: int | None = None
    """Position from which on no other request may use the KV; None: it may be shared."""

    @property
    def touches_kv(self) -> bool:
        """Whether the request's KV differs from that of the same tokens without interventions."""
        return self.private_from is not None or any(act.acts for act in self.acts)

    @property
    def first_captured(self) -> int:
        """The lowest captured position; `OPEN_END` if nothing is captured."""
        starts = (c.spans[0][0] for c in self.captures if c.sites and c.spans)
        return min(starts, default=OPEN_END)

    def to_wire(self) -> bytes:
        """The plan as vLLM carries it: bytes, which nobody on the way looks into or copies."""
        wire: dict[str, object] = {"id": self.request_id}
        if self.acts:
            sets = {one.tokens: 0 for act in self.acts for one in act.conditions}
            numbers = {tokens: number for number, tokens in enumerate(sets)}
            wire["acts"] = [_act_to_wire(act, numbers) for act in self.acts]
            if sets:
                wire["sets"] = [list(tokens) for tokens in sets]
        if self.captures:
            wire["capture"] = [[list(c.sites), _plain(c.spans)] for c in self.captures]
            wire |= _forms_to_wire(self.captures)
        if self.epoch:
            wire["epoch"] = self.epoch
        if self.private_from is not None:
            wire["private_from"] = self.private_from
        return msgspec.msgpack.encode(wire)

    @staticmethod
    def name_of(wire: object) -> str | None:
        """The request's name in what may be a wire; None if it can't be read."""
        try:
            return msgspec.msgpack.decode(wire, type=_Named).id if isinstance(wire, bytes) else None
        except msgspec.MsgspecError:
            return None

    @classmethod
    def from_wire(cls, wire: object) -> "Plan":
        """The plan that `to_wire` wrote.

        Raises:
            ValueError: `wire` is no plan; says where.
        """
        if not isinstance(wire, bytes):
            raise ValueError("this is no plan: it is not made of bytes")
        try:
            plain = msgspec.msgpack.decode(wire, type=_Wire)
        except msgspec.MsgspecError as error:
            raise ValueError(f"this is no plan: {error}") from error
        plan = cls(
            request_id=plain.id,
            acts=tuple(
                Act(
                    kind=one.kind,
                    vectors=one.vectors,
                    rows=one.rows,
                    spans=one.spans,
                    scale=one.scale,
                    bands=tuple(
                        Band(
                            -math.inf if low is None else low,
                            math.inf if high is None else high,
                            strength,
                        )
                        for low, high, strength in one.bands
                    ),
                    orthogonal=one.orthogonal,
                    conditions=tuple(
                        Condition(spans, _set(plain.sets, number), among)
                        for spans, number, among in one.conditions
                    ),
                )
                for one in plain.acts
            ),
            captures=tuple(
                Capture(sites, spans, form)
                for (sites, spans), form in zip(plain.capture, _forms(plain), strict=True)
            ),
            epoch=plain.epoch,
            private_from=plain.private_from,
        )
        if not all(tokens and _ascending(tokens) for tokens in plain.sets):
            raise ValueError("this is no plan: token ids are missing or not ascending")
        for act in plan.acts:
            _check(act)
        if not all(_in_order(capture.spans) for capture in plan.captures):
            raise ValueError("this is no plan: spans are not ascending and apart")
        return plan


_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class _WireAct(msgspec.Struct):
    kind: Kind
    vectors: tuple[_Digest, ...]
    rows: tuple[tuple[_Number, tuple[_Number, ...]], ...]
    spans: Spans
    scale: float = 1.0
    bands: tuple[tuple[float | None, float | None, float], ...] = ()
    orthogonal: bool = False
    conditions: tuple[tuple[Spans, _Number, bool], ...] = ()


class _WireForm(msgspec.Struct):
    coding: Coding
    dtype: str = ""
    kept: _Number = 0
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    vectors: tuple[_Number, ...] = ()
    rows: tuple[_Number, ...] = ()


class _Named(msgspec.Struct):
    id: str


class _Wire(_Named):
    acts: tuple[_WireAct, ...] = ()
    sets: tuple[tuple[_Number, ...], ...] = ()
    capture: list[tuple[tuple[_Number, ...], Spans]] = []
    form_of: tuple[_Number | None, ...] = ()
    forms: tuple[_WireForm, ...] = ()
    digests: tuple[_Digest, ...] = ()
    epoch: _Number = 0
    private_from: _Number | None = None


def _act_to_wire(act: Act, sets: Mapping[TokenSet, int]) -> dict[str, object]:
    wire: dict[str, object] = {
        "kind": int(act.kind),
        "vectors": list(act.vectors),
        "rows": [[site, list(rows)] for site, rows in act.rows],
        "spans": _plain(act.spans),
    }
    if act.kind is Kind.PULL:
        wire["bands"] = [
            [_finite(band.low), _finite(band.high), band.strength] for band in act.bands
        ]
        wire["orthogonal"] = act.orthogonal
    else:
        wire["scale"] = act.scale
    if act.conditions:
        wire["conditions"] = [
            [_plain(one.spans), sets[one.tokens], one.among] for one in act.conditions
        ]
    return wire


def _forms_to_wire(captures: Sequence[Capture]) -> dict[str, object]:
    """The forms of captures, by number, and the digests that these name by number."""
    forms = list(dict.fromkeys(c.form for c in captures if c.form is not None))
    if not forms:
        return {}
    numbers = {form: number for number, form in enumerate(forms)}
    digests: dict[bytes, int] = {}
    wires = []
    for form in forms:
        wire: dict[str, object] = {"coding": int(form.coding), "dtype": form.dtype}
        wire |= {"kept": form.kept, "seed": form.seed}
        if form.directions is not None:
            vectors, rows = form.directions.vectors, form.directions.rows
            wire["vectors"] = [digests.setdefault(digest, len(digests)) for digest in vectors]
            wire["rows"] = list(rows)
        wires.append(wire)
    form_of = [None if c.form is None else numbers[c.form] for c in captures]
    return {"form_of": form_of, "forms": wires, "digests": list(digests)}


def _forms(plain: "_Wire") -> Sequence[RowForm | None]:
    """The form of each capture."""
    if not plain.form_of:
        return [None] * len(plain.capture)
    forms = [_form(one, plain.digests) for one in plain.forms]
    if len(plain.form_of) != len(plain.capture) or any(
        number is not None and number >= len(forms) for number in plain.form_of
    ):
        raise ValueError("this is no plan: captures and forms don't fit")
    return [None if number is None else forms[number] for number in plain.form_of]


def _form(one: "_WireForm", digests: Sequence[bytes]) -> RowForm:
    if (one.coding is Coding.CAST) != (one.dtype in ITEM_BYTES) or one.seed >= 1 << 64:
        raise ValueError(f"this is no plan: {one.coding.name}: its type or seed is none")
    if len(one.vectors) != len(one.rows) or any(i >= len(digests) for i in one.vectors):
        raise ValueError(f"this is no plan: {one.coding.name}: directions and vectors don't fit")
    directions = None
    if one.vectors:
        directions = Directions(tuple(digests[i] for i in one.vectors), one.rows)
    return RowForm(one.coding, one.dtype, one.kept, one.seed, directions)


def _plain(spans: Spans) -> list[list[int]]:
    return [[start, end] for start, end in spans]


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


def _check(act: Act) -> None:
    """Raises ValueError for an act that no admission would have let through."""
    problem = ""
    if not act.vectors or any(len(rows) != len(act.vectors) for _, rows in act.rows):
        problem = "rows and vectors don't fit"
    elif act.kind is Kind.PULL and len(act.bands) != len(act.vectors):
        problem = "bands and vectors don't fit"
    elif act.kind is not Kind.PULL and (len(act.vectors) != 1 or act.bands):
        problem = "it takes one vector and no bands"
    elif not math.isfinite(act.scale):
        problem = "its scale is not finite"
    elif not all(_possible(band) for band in act.bands):
        problem = "a band is empty or its strength not finite"
    elif not all(map(_in_order, (act.spans, *(one.spans for one in act.conditions)))):
        problem = "spans are not ascending and apart"
    elif not _apart([act.spans, *(one.spans for one in act.conditions)]):
        problem = "conditions hold positions twice"
    if problem:
        raise ValueError(f"this is no plan: {act.kind.name}: {problem}")


def _possible(band: Band) -> bool:
    held = band.low <= band.high and band.low < math.inf and band.high > -math.inf
    return held and math.isfinite(band.strength)


def _apart(many: Iterable[Spans]) -> bool:
    pairs = sorted(pair for spans in many for pair in spans)
    return all(one[1] <= other[0] for one, other in pairwise(pairs))


def _ascending(numbers: Sequence[int]) -> bool:
    return all(map(lt, numbers, numbers[1:]))


def _set(sets: Sequence[TokenSet], number: int) -> TokenSet:
    if number >= len(sets):
        raise ValueError(f"this is no plan: there is no set {number} of token ids")
    return sets[number]


def _in_order(spans: Spans) -> bool:
    last = -1
    for start, end in spans:
        if not last < start < end <= OPEN_END:
            return False
        last = end
    return True
