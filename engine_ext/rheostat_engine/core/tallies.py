"""How far each request has come, and what it got: arrays by request number.

Invariant: advancing a batch is a handful of numpy calls; nothing is counted per token.
"""

from collections import Counter

import numpy as np
import numpy.typing as npt

from rheostat_engine.core.ring import Blocks
from rheostat_engine.core.segments import Int64
from rheostat_engine.events import ReleasedHead
from rheostat_engine.pieces import segment
from rheostat_engine.plan import OPEN_END, Plan, Spans


class Tallies:
    """Progress and counts of every request that holds a plan."""

    def __init__(self, sites: frozenset[int]) -> None:
        """Room for number 0 alone, which belongs to requests without a plan.

        Args:
            sites: the sites whose rows this worker sends.
        """
        self._sites = sites
        self.computed_start: Int64 = np.zeros(1, np.int64)
        """First position that was computed."""
        self.computed_end: Int64 = np.zeros(1, np.int64)
        """One past the last position that was computed, the furthest ever."""
        self.computed_tokens: Int64 = np.zeros(1, np.int64)
        """Tokens computed, each as often as it was."""
        self.preemptions: Int64 = np.zeros(1, np.int64)
        """Preemptions."""
        self.forgone: Int64 = np.zeros(1, np.int64)
        """Cached tokens that are computed all the same, because rows of them are captured."""
        self._lost: dict[int, Counter[int]] = {}

    def make_room(self, numbers: int) -> None:
        """Grows to hold `numbers` numbers."""
        missing = numbers - len(self.computed_end)
        if missing <= 0:
            return
        grow = max(missing, len(self.computed_end))
        self.computed_start = np.pad(self.computed_start, (0, grow))
        self.computed_end = np.pad(self.computed_end, (0, grow))
        self.computed_tokens = np.pad(self.computed_tokens, (0, grow))
        self.preemptions = np.pad(self.preemptions, (0, grow))
        self.forgone = np.pad(self.forgone, (0, grow))

    def start(self, number: int, forgone: int) -> None:
        """A request takes the number, and computes `forgone` tokens that are cached."""
        self.computed_start[number] = OPEN_END
        self.computed_end[number] = 0
        self.computed_tokens[number] = 0
        self.preemptions[number] = 0
        self.forgone[number] = forgone
        self._lost.pop(number, None)

    def advance(self, numbers: Int64, start: Int64, end: Int64) -> None:
        """The requests compute positions [start, end) in this step."""
        self.computed_start[numbers] = np.minimum(self.computed_start[numbers], start)
        self.computed_end[numbers] = np.maximum(self.computed_end[numbers], end)
        self.computed_end[0] = 0
        self.computed_tokens[numbers] += end - start

    def lose(
        self, blocks: Blocks, lost: npt.NDArray[np.bool_], class_sites: npt.NDArray[np.int32]
    ) -> None:
        """Books blocks that found no place.

        Args:
            blocks: the step's blocks.
            lost: [b]: which of them.
            class_sites: [classes, sites]: at least 0 where a class has the site.
        """
        for block in np.flatnonzero(lost):
            sites = np.flatnonzero(class_sites[blocks.sites_class[block]] >= 0)
            counter = self._lost.setdefault(int(blocks.request[block]), Counter())
            counter.update({int(site): int(blocks.count[block]) for site in sites})

    def released(self, number: int, plan: Plan, rank: int, *, measured: bool) -> ReleasedHead:
        """The last word on a request, without its doses.

        Args:
            number: the request's number.
            plan: what was done to it.
            rank: this worker's.
            measured: whether every row that was touched was measured.
        """
        start = int(min(self.computed_start[number], self.computed_end[number]))
        end = int(self.computed_end[number])
        again = int(self.computed_tokens[number]) - (end - start)
        lost = self._lost.pop(number, Counter())
        return ReleasedHead(
            rank=rank,
            number=number,
            request_id=plan.request_id,
            doses=[],
            measured=measured,
            captured=_captured(plan, self._sites, start, end, lost),
            lost_rows=lost.total(),
            preemptions=int(self.preemptions[number]),
            computed=(start, end),
            recomputed=again + min(int(self.forgone[number]), end - start),
        )


def _captured(
    plan: Plan, sites: frozenset[int], start: int, end: int, lost: Counter[int]
) -> dict[int, int]:
    counts: Counter[int] = Counter()
    pieces = segment([capture.spans for capture in plan.captures])
    ends = [piece for piece, _ in pieces[1:]] + [OPEN_END]
    for (begin, members), stop in zip(pieces, ends, strict=True):
        rows = _overlap(((begin, stop),), start, end)
        for site in sites.intersection(s for m in members for s in plan.captures[m].sites):
            counts[site] += rows
    counts.subtract(lost)
    return {site: count for site, count in sorted(counts.items()) if count > 0}


def _overlap(spans: Spans, start: int, end: int) -> int:
    return sum(max(0, min(b, end) - max(a, start)) for a, b in spans)
