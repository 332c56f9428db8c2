"""Selectors that are resolved against many prompts: work that is the same for all is done once.

Why: a subscription's selectors are resolved during the admission of every request that it observes.
Its client must not be able to slow the admission of other requests.

The selection equals that of `resolve_selector` in a lenient context, or is refused.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rheostat_engine import OPEN_END, Spans
from rheostat_server.selectors.selection import EVERYTHING, Selection, SelectionContext, combine
from rheostat_server.selectors.spans import runs, united
from rheostat_wire.v1 import selector_pb2, types_pb2

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
        self._includes = bool(selector.include)
        self._include, self._exclude = _Side(selector.include), _Side(selector.exclude)
        self._excluded_ids = tuple(sorted(self._exclude.ids))
        self._included_ids = tuple(sorted(self._include.ids - self._exclude.ids))

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

        Raises:
            TooFragmented: the selection has more than `most` spans.
        """
        include = EVERYTHING.spans
        if self._includes:
            include = self._include.spans(context, most)
        selection = combine(
            include,
            self._exclude.spans(context, most),
            excluded_ids=self._excluded_ids,
            included_ids=self._included_ids,
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
        self._columns = np.array(self._windows, np.int64).reshape(-1, 5).T.copy()
        """[5, windows]: the fields of the windows."""
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
        vectorised = len(self._windows) > _FEW
        spans = self._resolve_all(context) if vectorised else self._resolve_each(context)
        if self.ids:
            positions = context.index.positions(self._ids)
            if np.count_nonzero(np.diff(positions) != 1) >= most:
                raise TooFragmented
            spans += runs(positions)
        return united(spans)

    def _resolve_each(self, context: SelectionContext) -> list[tuple[int, int]]:
        length, row_end = context.prompt_len, context.row_end
        spans = []
        for start, start_from_end, end, end_from_end, of_prompt in self._windows:
            first = min(start + length, OPEN_END) if start_from_end else start
            past = min(end + length, OPEN_END) if end_from_end else end
            if not of_prompt or (0 <= first < min(past, row_end) and past >= 0):
                spans.append((first, past))
        return spans

    def _resolve_all(self, context: SelectionContext) -> list[tuple[int, int]]:
        length = context.prompt_len
        starts, starts_from_end, ends, ends_from_end, of_prompt = self._columns
        starts = np.minimum(starts + starts_from_end * length, OPEN_END)
        ends = np.minimum(ends + ends_from_end * length, OPEN_END)
        missing = (starts < 0) | (ends < 0) | (starts >= ends) | (starts >= context.row_end)
        kept = ~(missing & (of_prompt > 0))
        return list(zip(starts[kept].tolist(), ends[kept].tolist(), strict=True))


def _ids(ranges: Iterable[selector_pb2.Range]) -> Iterable[int]:
    return (token for token_range in ranges for token in token_range.token_ids.ids)


def _window(token_range: selector_pb2.Range) -> _Window:
    kind = token_range.WhichOneof("kind")
    if kind == "phase":
        if token_range.phase == types_pb2.PHASE_PROMPT:
            return _Window(0, False, 0, True, False)
        return _Window(0, True, OPEN_END, False, False)
    if kind == "generated":
        generated = token_range.generated
        bounded = generated.HasField("end")
        return _Window(
            generated.start, True, generated.end if bounded else OPEN_END, bounded, False
        )
    start, end = token_range.positions.start, token_range.positions.end
    if not token_range.positions.HasField("end"):
        return _Window(start, start < 0, 0, True, True)
    return _Window(start, start < 0, end, end < 0, True)
