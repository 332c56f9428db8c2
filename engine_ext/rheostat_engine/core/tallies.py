"""How far each request has come, and what it got: arrays by request number.

Invariant: advancing a batch is a handful of numpy calls; nothing is counted per token.
"""

import numpy as np

from rheostat_engine.core.capture import Blocks
from rheostat_engine.core.segments import Int64
from rheostat_engine.events import ReleasedHead
from rheostat_engine.plan import OPEN_END, Plan, Spans


class Tallies:
    """Progress and counts of every request that holds a plan."""

    def __init__(self, sites: int) -> None:
        """Room for number 0 alone, which belongs to requests without a plan."""
        self._sites = sites
        self.computed_start: Int64 = np.zeros(1, np.int64)
        """First position that was computed."""
        self.computed_end: Int64 = np.zeros(1, np.int64)
        """One past the last position that was computed, the furthest ever."""
        self.preemptions: Int64 = np.zeros(1, np.int64)
        """Preemptions."""
        self.lost_rows: Int64 = np.zeros(1, np.int64)
        """Rows that didn't fit into the ring."""
        self.captured: Int64 = np.zeros((1, sites), np.int64)
        """[numbers, sites]: rows captured."""

    def make_room(self, numbers: int) -> None:
        """Grows to hold `numbers` numbers."""
        missing = numbers - len(self.computed_end)
        if missing <= 0:
            return
        grow = max(missing, len(self.computed_end))
        self.computed_start = np.pad(self.computed_start, (0, grow))
        self.computed_end = np.pad(self.computed_end, (0, grow))
        self.preemptions = np.pad(self.preemptions, (0, grow))
        self.lost_rows = np.pad(self.lost_rows, (0, grow))
        self.captured = np.pad(self.captured, ((0, grow), (0, 0)))

    def start(self, number: int) -> None:
        """A request takes the number."""
        self.computed_start[number] = OPEN_END
        self.computed_end[number] = 0
        self.preemptions[number] = 0
        self.lost_rows[number] = 0
        self.captured[number] = 0

    def advance(self, numbers: Int64, start: Int64, end: Int64) -> None:
        """The requests compute positions [start, end) in this step."""
        self.computed_start[numbers] = np.minimum(self.computed_start[numbers], start)
        self.computed_end[numbers] = np.maximum(self.computed_end[numbers], end)
        self.computed_end[0] = 0

    def count_rows(self, blocks: Blocks, captured: np.ndarray, rows: Int64) -> None:
        """Books a step's blocks.

        Args:
            blocks: the step's blocks.
            captured: [b, sites]: where a block's rows were given a place.
            rows: [b]: rows that each block wanted.
        """
        np.add.at(self.captured, blocks.request, captured * blocks.count[:, None])
        lost = np.where(captured.any(axis=1), 0, rows)
        np.add.at(self.lost_rows, blocks.request, lost)

    def released(self, number: int, plan: Plan, rank: int) -> ReleasedHead:
        """The last word on a request."""
        start = int(min(self.computed_start[number], self.computed_end[number]))
        end = int(self.computed_end[number])
        captured = self.captured[number]
        return ReleasedHead(
            rank=rank,
            request_id=plan.request_id,
            tokens_added=[_overlap(a.spans, start, end) for a in plan.additions],
            captured={int(s): int(captured[s]) for s in np.flatnonzero(captured)},
            lost_rows=int(self.lost_rows[number]),
            preemptions=int(self.preemptions[number]),
            computed=(start, end),
        )


def _overlap(spans: Spans, start: int, end: int) -> int:
    return sum(max(0, min(b, end) - max(a, start)) for a, b in spans)
