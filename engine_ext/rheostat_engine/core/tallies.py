"""How far each request has come, and what it got: arrays by request number.

Invariant: advancing a batch is a handful of numpy calls; nothing is counted per token.
"""

import numpy as np
import numpy.typing as npt

from rheostat_engine.acts import OPEN_END
from rheostat_engine.core.ring import Blocks
from rheostat_engine.core.segments import Int64
from rheostat_engine.events import ReleasedHead


class Tallies:
    """Progress and counts of every request that holds a plan."""

    def __init__(self) -> None:
        """Room for number 0 alone, which belongs to requests without a plan."""
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
        self._lost: dict[int, Int64] = {}
        """[sites]: rows that found no place, by request number."""

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
        numbers, classes = blocks.request[lost], blocks.sites_class[lost]
        counts = blocks.count[lost]
        for number in np.unique(numbers).tolist():
            own = numbers == number
            rows = counts[own] @ (class_sites[classes[own]] >= 0)
            self._lost[number] = self._lost.get(number, 0) + rows

    def span(self, number: int) -> tuple[int, int]:
        """[start, end) positions that were computed of a request."""
        start, end = int(self.computed_start[number]), int(self.computed_end[number])
        return min(start, end), end

    def released(
        self, number: int, request_id: str, rank: int, selected: Int64 | None, *, measured: bool
    ) -> ReleasedHead:
        """The last word on a request, without its doses.

        Args:
            number: the request's number.
            request_id: its name.
            rank: this worker's.
            selected: [sites]: rows of this worker's sites that were to be captured of it; None:
                nothing was.
            measured: whether every row that was touched was measured.
        """
        start, end = self.span(number)
        again = int(self.computed_tokens[number]) - (end - start)
        captured: dict[int, int] = {}
        lost = self._lost.pop(number, None)
        if selected is not None:
            sent = selected if lost is None else selected - lost
            sites = np.flatnonzero(sent > 0)
            captured = dict(zip(sites.tolist(), sent[sites].tolist(), strict=True))
        return ReleasedHead(
            rank=rank,
            number=number,
            request_id=request_id,
            doses=[],
            measured=measured,
            captured=captured,
            lost_rows=0 if lost is None else int(lost.sum()),
            preemptions=int(self.preemptions[number]),
            computed=(start, end),
            recomputed=again + min(int(self.forgone[number]), end - start),
        )
