"""Selectors that are resolved against many prompts: work that no prompt changes is done once.

Why: a subscription's selectors are resolved during the admission of every request that it observes.
Its client must not be able to slow the admission of other requests.

Invariant: the selection equals that of `resolve_selector` in a lenient context, or is refused.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import OPEN_END, Spans
from rheostat_server.selectors.selection import EVERYTHING, Selection, SelectionContext, combine
from rheostat_server.selectors.spans import runs, united
from rheostat_wire.v1 import selector_pb2, types_pb2

Numbers = npt.NDArray[np.int64]


_FEW = 32
"""Up to this many windows, plain Python is faster than numpy."""


class TooFragmented(Exception):
    """The selection has more spans than it may."""


class _Window(NamedTuple):
    """Positions [start, end). A bound `from_end` counts from P, the number of prompt tokens."""

    start: int
    start_from_end: bool
    end: int
    end_from_end: bool
    of_prompt: bool
    """Whether it selects nothing if the prompt does not have all of it."""


class PreparedSelector:
    """A selector that `resolve_selector` has accepted in a lenient context."""

    def __init__(self, selector: selector_pb2.Selector) -> None:
        """Does the work that no prompt changes."""
        self._includes = bool(selector.include)
        self._include, self._exclude = _Side(selector.include), _Side(selector.exclude)
        self._barred = tuple(sorted(self._exclude.ids))
        self._among = tuple(sorted(self._include.ids - self._exclude.ids))

    @property
    def reads_tokens(self) -> bool:
        """Whether it selects tokens of the prompt by id."""
        return bool(self._include.ids or self._exclude.ids)

    def most_spans(self, prompt_len: int) -> int:
        """The most spans that it can select in a prompt of this length and in the answer."""
        sides = (self._include, self._exclude)
        spans = sum(side.windows for side in sides) + 1
        return spans + prompt_len // 2 if self.reads_tokens else spans

    def resolve(self, context: SelectionContext, most: int) -> Selection:
        """Resolves the selector for a request.

        Args:
            context: the request.
            most: spans that the selection may have.

        Raises:
            TooFragmented: the selection has more spans.
        """
        include = EVERYTHING.spans
        if self._includes:
            include = self._include.spans(context, most)
        selection = combine(
            include,
            self._exclude.spans(context, most),
            barred=self._barred,
            among=self._among,
            prompt_len=context.prompt_len,
        )
        if selection.span_count > most:
            raise TooFragmented
        return selection


class _Side:
    """The includes or the excludes of a selector."""

    def __init__(self, ranges: Sequence[selector_pb2.Range]) -> None:
        self._windows = [
            _window(token_range)
            for token_range in ranges
            if token_range.WhichOneof("kind") != "token_ids"
        ]
        starts, starts_from_end, ends, ends_from_end, of_prompt = (
            zip(*self._windows, strict=True) if self._windows else ((),) * 5
        )
        self._starts = np.array(starts, np.int64), np.array(starts_from_end, np.int64)
        self._ends = np.array(ends, np.int64), np.array(ends_from_end, np.int64)
        self._of_prompt = np.array(of_prompt, np.bool_)
        self.ids = frozenset(_ids(ranges))
        self._ids = np.fromiter(self.ids, np.int64, len(self.ids))

    @property
    def windows(self) -> int:
        """The number of its ranges that name positions."""
        return len(self._windows)

    def spans(self, context: SelectionContext, most: int) -> Spans:
        """The positions in a request, with the prompt's tokens that are selected by id.

        Raises:
            TooFragmented: these tokens alone have more spans than `most`.
        """
        found = self._resolved(context) if len(self._windows) > _FEW else self._one_by_one(context)
        if self.ids:
            positions = context.index.positions(self._ids)
            if np.count_nonzero(np.diff(positions) != 1) >= most:
                raise TooFragmented
            found += runs(positions)
        return united(found)

    def _one_by_one(self, context: SelectionContext) -> list[tuple[int, int]]:
        length, row_end = context.prompt_len, context.row_end
        found = []
        for start, start_from_end, end, end_from_end, of_prompt in self._windows:
            first = min(start + length, OPEN_END) if start_from_end else start
            past = min(end + length, OPEN_END) if end_from_end else end
            if not of_prompt or (0 <= first < min(past, row_end) and past >= 0):
                found.append((first, past))
        return found

    def _resolved(self, context: SelectionContext) -> list[tuple[int, int]]:
        length = context.prompt_len
        starts, ends = (
            np.minimum(values + from_end * length, OPEN_END)
            for values, from_end in (self._starts, self._ends)
        )
        missing = (starts < 0) | (ends < 0) | (starts >= ends) | (starts >= context.row_end)
        kept = ~(missing & self._of_prompt)
        return list(zip(starts[kept].tolist(), ends[kept].tolist(), strict=True))


def _ids(ranges: Iterable[selector_pb2.Range]) -> Iterable[int]:
    return (token for token_range in ranges for token in token_range.token_ids.ids)


def _window(one: selector_pb2.Range) -> _Window:
    kind = one.WhichOneof("kind")
    if kind == "phase":
        if one.phase == types_pb2.PHASE_PROMPT:
            return _Window(0, False, 0, True, False)
        return _Window(0, True, OPEN_END, False, False)
    if kind == "generated":
        bounded = one.generated.HasField("end")
        end = one.generated.end if bounded else OPEN_END
        return _Window(one.generated.start, True, end, bounded, False)
    start = one.positions.start
    if not one.positions.HasField("end"):
        return _Window(start, start < 0, 0, True, True)
    end = one.positions.end
    return _Window(start, start < 0, end, end < 0, True)
