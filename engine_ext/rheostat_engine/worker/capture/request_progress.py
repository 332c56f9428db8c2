"""The progress of requests and the counts of their last report, as arrays by request number.

Invariant: advancing a batch takes a few numpy calls and no work per token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine.channel.events import Released
from rheostat_engine.plan.acts import OPEN_END
from rheostat_engine.worker.capture.ring import RowBlocks
from rheostat_engine.worker.state.position_functions import Int64


class Ended(NamedTuple):
    """A request that has ended."""

    number: int
    request_id: str
    rows: Int64 | None
    """[sites]: the rows that its captures selected; None: it never had captures."""
    measured: bool
    """Whether its acts are measured."""
    gains: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """See `Released.gains`."""


class RequestProgress:
    """Progress and counts of all requests with a plan. Number 0 stands for all other requests."""

    def __init__(self, site_numbers: Int64) -> None:
        """`site_numbers`, [sites], are the sites' indices in reports."""
        self._site_numbers = site_numbers
        self.computed_start: Int64 = np.zeros(1, np.int64)
        """First computed position."""
        self.computed_end: Int64 = np.zeros(1, np.int64)
        """One past the highest position computed so far."""
        self.computed_tokens: Int64 = np.zeros(1, np.int64)
        """Computed tokens, including recomputed tokens."""
        self.preemptions: Int64 = np.zeros(1, np.int64)
        self.cached_tokens_recomputed: Int64 = np.zeros(1, np.int64)
        """Cached tokens recomputed for captures."""
        self._lost: dict[int, Int64] = {}
        """[sites]: rows that did not fit into the ring, by request number."""

    def make_room(self, numbers: int) -> None:
        """Grows the arrays to `numbers` numbers."""
        missing = numbers - len(self.computed_end)
        if missing <= 0:
            return
        grow = max(missing, len(self.computed_end))
        self.computed_start = np.pad(self.computed_start, (0, grow))
        self.computed_end = np.pad(self.computed_end, (0, grow))
        self.computed_tokens = np.pad(self.computed_tokens, (0, grow))
        self.preemptions = np.pad(self.preemptions, (0, grow))
        self.cached_tokens_recomputed = np.pad(self.cached_tokens_recomputed, (0, grow))

    def start(self, number: int, cached_tokens_recomputed: int) -> None:
        """Resets a number for a new request."""
        self.computed_start[number] = OPEN_END
        self.computed_end[number] = 0
        self.computed_tokens[number] = 0
        self.preemptions[number] = 0
        self.cached_tokens_recomputed[number] = cached_tokens_recomputed
        self._lost.pop(number, None)

    def advance(self, numbers: Int64, start: Int64, end: Int64, *, repeated: bool = False) -> None:
        """Records that the requests compute positions [start, end), in one or several steps.

        `repeated`: see `StepTokens`. Such steps compute no position before the last step's.
        """
        if not repeated:
            self.computed_start[numbers] = np.minimum(self.computed_start[numbers], start)
        self.computed_end[numbers] = np.maximum(self.computed_end[numbers], end)
        self.computed_end[0] = 0
        self.computed_tokens[numbers] += end - start

    def count_lost(
        self, blocks: RowBlocks, lost: npt.NDArray[np.bool_], site_set_ranks: npt.NDArray[np.int32]
    ) -> None:
        """Counts the blocks of a mask, [b], that did not fit into the ring.

        `site_set_ranks` is `SiteSetTable.ranks`.
        """
        numbers, site_sets = blocks.request[lost], blocks.site_set[lost]
        counts = blocks.count[lost]
        for number in np.unique(numbers).tolist():
            own = numbers == number
            rows = counts[own] @ (site_set_ranks[site_sets[own]] >= 0)
            self._lost[number] = self._lost.get(number, 0) + rows

    def span(self, number: int) -> tuple[int, int]:
        """[start, end): the computed positions of a request."""
        start, end = int(self.computed_start[number]), int(self.computed_end[number])
        return min(start, end), end

    def released(self, ended: Sequence[Ended]) -> list[Released]:
        """The last report of each request, without its doses."""
        numbers = [each.number for each in ended]
        # A step may end hundreds of requests, so the counts of all are read at once.
        ends = self.computed_end[numbers]
        starts = np.minimum(self.computed_start[numbers], ends)
        again = self.computed_tokens[numbers] - (ends - starts)
        again += np.minimum(self.cached_tokens_recomputed[numbers], ends - starts)
        counts = (starts, ends, again, self.preemptions[numbers])
        reports = []
        for each, *found in zip(ended, *[count.tolist() for count in counts], strict=True):
            start, end, recomputed, preemptions = found
            lost = self._lost.pop(each.number, None)
            reports.append(
                Released(
                    each.request_id,
                    (),
                    each.measured,
                    {} if each.rows is None else self._captured(each.rows, lost),
                    0 if lost is None else int(lost.sum()),
                    preemptions,
                    (start, end),
                    recomputed,
                    each.gains,
                )
            )
        return reports

    def _captured(self, selected: Int64, lost: Int64 | None) -> dict[int, int]:
        """The rows that were sent, by site index; `lost` were selected and not sent."""
        sent = selected if lost is None else selected - lost
        sites = np.flatnonzero(sent > 0)
        numbers = self._site_numbers[sites]
        return dict(zip(numbers.tolist(), sent[sites].tolist(), strict=True))
