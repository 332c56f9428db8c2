"""Plans of every kind over a few positions and token ids, and what they select."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from hypothesis import strategies as st

from rheostat_engine import (
    OPEN_END,
    Act,
    Activation,
    Band,
    Capture,
    Codec,
    Directions,
    Kind,
    Normalise,
    Plan,
    Readout,
    RowEncoding,
    Spans,
    TokenCondition,
    Window,
)
from rheostat_engine.plan.acts import TokenSet

LIMIT = 20
"""Spans begin and end below this position, or never end."""
POSITIONS = (*range(LIMIT + 3), OPEN_END - 1)
"""At least one position of every piece."""
SITES = 5
VOCABULARY = 6
DIGESTS = tuple(bytes([i]) * 32 for i in range(1, 4))
ROWS = 2
"""Rows of each vector."""
EVERYWHERE = ((0, OPEN_END),)
CHANGES = (Kind.ADD, Kind.NORM_ADD, Kind.PULL, Kind.REPLACE, Kind.ADD_LAST)
"""Kinds of acts that change the stream."""
LAST = (Kind.REPLACE, Kind.ADD_LAST)
"""Kinds that act after the others."""
SCALES = (0.0, 0.5, 1.0, 2.0)
SETS: tuple[TokenSet, ...] = ((0,), (1, 3), (2,), (0, 1, 2, 4), (5,))
BANDS = (
    Band(0.0, 0.0, 1.0),
    Band(-0.5, 0.5, 1.0),
    Band(float("-inf"), 0.25, 0.5),
    Band(1.0, float("inf"), 2.0),
    Band(0.0, 0.0, 0.0),
)
READING_BANDS = (
    Band(0.0, 0.5, 1.0, Readout(Normalise.NONE, bias=0.25)),
    Band(2.0, 2.0, 1.0, Readout(Normalise.NONE, Activation.RELU, -0.25), writes=True),
    Band(1.0, 1.5, 0.5, Readout(Normalise.NONE, Activation.JUMP_RELU, 0.0, 0.5), True, True),
    Band(0.1, 0.2, 2.0, Readout(Normalise.COSINE, Activation.TANH, 0.1), writes=True),
    Band(0.0, 0.0, 0.5, Readout(Normalise.UNIT, Activation.RELU), only_on=True),
)
"""Bands that read otherwise than the coordinate along a vector, or write another vector."""


def _merged(pairs: Sequence[tuple[int, int]]) -> Spans:
    merged: list[tuple[int, int]] = []
    for start, end in pairs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return tuple(merged)


@st.composite
def spans(draw: st.DrawFn) -> Spans:
    """Any spans, none included."""
    cuts = sorted(draw(st.sets(st.integers(0, LIMIT - 1), max_size=6)))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    if len(cuts) % 2 and draw(st.booleans()):
        pairs.append((cuts[-1], OPEN_END))
    return tuple(pairs)


@st.composite
def selections(draw: st.DrawFn) -> tuple[Spans, tuple[TokenCondition, ...]]:
    """Positions that are always touched, and others that are under conditions."""
    cuts = sorted(draw(st.sets(st.integers(0, LIMIT - 1), max_size=5)))
    pairs = list(pairwise([*cuts, OPEN_END]))
    owners = [draw(st.sampled_from(["-", "always", "one", "other"])) for _ in pairs]

    def owned(name: str) -> Spans:
        return _merged([pair for pair, owner in zip(pairs, owners, strict=True) if owner == name])

    conditions = tuple(
        TokenCondition(owned(name), draw(st.sampled_from(SETS)), draw(st.booleans()))
        for name in ("one", "other")
        if owned(name)
    )
    return owned("always"), conditions


def _few_vectors(bands: list[Band]) -> bool:
    return sum(band.vectors for band in bands) <= len(DIGESTS)


@st.composite
def acts(draw: st.DrawFn) -> Act:
    """Any act with known vectors."""
    kind = draw(st.sampled_from(CHANGES))
    pull, bands = kind is Kind.PULL, ()
    orthogonal = pull and draw(st.booleans())
    if pull:
        some = st.sampled_from(BANDS if orthogonal else BANDS + READING_BANDS)
        bands = tuple(draw(st.lists(some, min_size=1, max_size=3).filter(_few_vectors)))
    most = {Kind.REPLACE: 2, Kind.ADD_LAST: 2}.get(kind, 1)
    count = sum(band.vectors for band in bands) if pull else draw(st.integers(1, most))
    vectors = draw(st.permutations(DIGESTS))[:count]
    row = st.tuples(*[st.integers(0, ROWS - 1)] * count)
    rows = draw(st.dictionaries(st.integers(0, SITES - 1), row, max_size=3))
    where, conditions = draw(selections())
    return Act(
        kind,
        tuple(vectors),
        tuple(sorted(rows.items())),
        where,
        scale=1.0 if pull else draw(st.sampled_from(SCALES[: 3 if kind in LAST else 4])),
        bands=bands,
        orthogonal=orthogonal,
        conditions=conditions,
    )


def packed_ids(tokens: TokenSet) -> bytes:
    """A set of token ids as it travels."""
    return b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)


DIRECTIONS = (
    Directions((DIGESTS[0],), (1,)),
    Directions((DIGESTS[1], DIGESTS[0], DIGESTS[1]), (0, 1, 1)),
)
FORMS = (
    RowEncoding(Codec.CAST, "bfloat16"),
    RowEncoding(Codec.CAST, "float16"),
    RowEncoding(Codec.FULL8),
    RowEncoding(Codec.RP8, kept=3, seed=2**64 - 1),
    RowEncoding(Codec.TOPK8, kept=4),
    RowEncoding(Codec.CAST, "float32", directions=DIRECTIONS[0]),
    RowEncoding(Codec.CAST, "float16", directions=DIRECTIONS[1]),
    RowEncoding(Codec.FULL8, directions=DIRECTIONS[1]),
    RowEncoding(Codec.TOPK8, kept=8),
    RowEncoding(Codec.RP8, kept=9),
    RowEncoding(Codec.CAST, "float32", directions=Directions((b"?" * 32,), (0,))),
)
POSSIBLE = FORMS[:8]
"""Those that can be made of 8 float32 numbers with the vectors that there are, and are smaller."""


def captures() -> st.SearchStrategy[Capture]:
    """Any capture, in any form."""
    sites = st.sets(st.integers(0, SITES - 1), max_size=3).map(lambda s: tuple(sorted(s)))
    encodings = st.none() | st.sampled_from(FORMS)
    return st.builds(Capture, sites=sites, spans=spans(), encoding=encodings)


def plans(request_id: str = "r") -> st.SearchStrategy[Plan]:
    """Any plan whose KV may be shared."""
    return st.builds(
        Plan,
        request_id=st.just(request_id),
        acts=st.lists(acts(), max_size=4).map(tuple),
        captures=st.lists(captures(), max_size=3).map(tuple),
    )


class Windowed(NamedTuple):
    """A plan with a window, and one without that does the same."""

    plan: Plan
    same: Plan


@st.composite
def windowed(draw: st.DrawFn, request_id: str = "r") -> Windowed:
    """Any plan with a window."""
    listed = tuple(
        replace(act, conditions=()) for act in draw(st.lists(acts(), min_size=1, max_size=5))
    )
    first_act = draw(st.integers(0, len(listed)))
    start = draw(st.integers(0, LIMIT))
    end = draw(st.integers(start + 1, LIMIT + 3) | st.just(OPEN_END))
    limited = tuple(
        replace(
            act,
            spans=tuple(
                (max(low, start), min(high, end))
                for low, high in act.spans
                if max(low, start) < min(high, end)
            ),
        )
        for act in listed[first_act:]
    )
    plan = Plan(request_id, listed, measured=False, window=Window(start, end, first_act))
    return Windowed(plan, Plan(request_id, (*listed[:first_act], *limited)))


def add(
    *sites: int,
    digest: bytes = DIGESTS[0],
    scale: float = 1.0,
    where: Spans = EVERYWHERE,
    conditions: tuple[TokenCondition, ...] = (),
) -> Act:
    """Row 0 of a vector, added at some sites."""
    rows = tuple((site, (0,)) for site in sites)
    return Act(Kind.ADD, (digest,), rows, where, scale, conditions=conditions)


def ablate(
    *sites: int, digests: tuple[bytes, ...] = DIGESTS[1:2], where: Spans = EVERYWHERE
) -> Act:
    """Rows 0 of some vectors, taken out of the stream at some sites."""
    rows = tuple((site, (0,) * len(digests)) for site in sites)
    bands = (Band(0.0, 0.0, 1.0),) * len(digests)
    return Act(Kind.PULL, digests, rows, where, bands=bands, orthogonal=True)


def holds(one: Spans, position: int) -> bool:
    """Whether the position lies in the spans."""
    return any(position in range(*span) for span in one)


def selects(act: Act, position: int, token: int) -> bool:
    """Whether an act touches a token at a position."""
    return holds(act.spans, position) or any(
        holds(c.spans, position) and (token in c.tokens) == c.among for c in act.conditions
    )


def captured(plan: Plan, position: int) -> dict[int, RowEncoding | None]:
    """The sites that are captured at a position, each with the form in which its rows leave."""
    found: dict[int, set[RowEncoding | None]] = {}
    for one in plan.captures:
        for site in one.sites if holds(one.spans, position) else ():
            found.setdefault(site, set()).add(one.encoding if one.encoding in POSSIBLE else None)
    return {
        site: encodings.pop() if len(encodings) == 1 else None for site, encodings in found.items()
    }
