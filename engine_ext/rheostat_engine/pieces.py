"""Positions cut into pieces, within which the same of some spans hold."""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Sequence

from rheostat_engine.plan import OPEN_END, Spans


def segment(spans: Sequence[Spans]) -> list[tuple[int, tuple[int, ...]]]:
    """Cuts the positions where membership changes.

    Returns (start, members) for each piece from position 0 on, ascending by start, where members
    are the indices of the spans that hold the piece. The last piece has no end.
    """
    return list(sweep(spans))


def sweep(spans: Sequence[Spans]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The pieces of `segment`, one by one: each costs what holds in it, and what begins or ends."""
    enter: defaultdict[int, list[int]] = defaultdict(list)
    leave: defaultdict[int, list[int]] = defaultdict(list)
    for index, one in enumerate(spans):
        for start, end in one:
            enter[start].append(index)
            leave[end].append(index)
    held: list[int] = []
    before: tuple[int, ...] | None = None
    for cut in sorted({0, *enter, *leave} - {OPEN_END}):
        for index in leave[cut]:
            held.remove(index)
        for index in enter[cut]:
            insort(held, index)
        members = tuple(held)
        if members != before:
            yield cut, members
        before = members
