"""Plans of every kind over a few positions, and what they mean position by position."""

from collections import Counter

from hypothesis import strategies as st

from rheostat_engine import OPEN_END, Addition, Capture, Plan, Spans

LIMIT = 20
"""Spans begin and end below this position, or never end."""
SITES = 5
DIGESTS = tuple(bytes([i]) * 32 for i in range(1, 4))
ROWS = 2
"""Rows of each vector."""
SCALES = (0.0, 0.5, 1.0, 2.0)


@st.composite
def spans(draw: st.DrawFn) -> Spans:
    """Any spans, none included."""
    cuts = sorted(draw(st.sets(st.integers(0, LIMIT - 1), max_size=6)))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    if len(cuts) % 2 and draw(st.booleans()):
        pairs.append((cuts[-1], OPEN_END))
    return tuple(pairs)


def rows() -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """Which vector row goes to which site."""
    chosen = st.dictionaries(st.integers(0, SITES - 1), st.integers(0, ROWS - 1), max_size=3)
    return chosen.map(lambda by_site: tuple(sorted(by_site.items())))


def additions() -> st.SearchStrategy[Addition]:
    """Any addition of a known vector."""
    return st.builds(
        Addition,
        digest=st.sampled_from(DIGESTS),
        rows=rows(),
        scale=st.sampled_from(SCALES),
        spans=spans(),
    )


def captures() -> st.SearchStrategy[Capture]:
    """Any capture."""
    sites = st.sets(st.integers(0, SITES - 1), max_size=3).map(lambda s: tuple(sorted(s)))
    return st.builds(Capture, sites=sites, spans=spans())


def plans(request_id: str = "r") -> st.SearchStrategy[Plan]:
    """Any plan."""
    return st.builds(
        Plan,
        request_id=st.just(request_id),
        additions=st.lists(additions(), max_size=4).map(tuple),
        captures=st.lists(captures(), max_size=3).map(tuple),
    )


def holds(one: Spans, position: int) -> bool:
    """Whether the position lies in the spans."""
    return any(position in range(*span) for span in one)


def effect(plan: Plan, position: int) -> dict[int, Counter[tuple[bytes, int, float]]]:
    """What is added at a position: by site, how often each row with each scale."""
    found: dict[int, Counter[tuple[bytes, int, float]]] = {}
    for addition in plan.additions:
        if addition.scale and holds(addition.spans, position):
            for site, row in addition.rows:
                found.setdefault(site, Counter())[addition.digest, row, addition.scale] += 1
    return found


def captured(plan: Plan, position: int) -> set[int]:
    """The sites that are captured at a position."""
    return {s for c in plan.captures if holds(c.spans, position) for s in c.sites}
