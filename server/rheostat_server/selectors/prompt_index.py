"""Finds tokens and texts in a prompt, for all ranges of a request.

Each text is searched once, and no search iterates over all tokens in plain Python.
"""

import re
from collections.abc import Iterable
from itertools import chain

import numpy as np
import numpy.typing as npt

from rheostat_engine import Spans
from rheostat_engine.cached_property import cached_property
from rheostat_server.limits import SPAN_SEARCH
from rheostat_server.prompts.prompts import PromptTokens
from rheostat_server.selectors.spans import runs

Offsets = npt.NDArray[np.int64]

_MATCH = 128
"""An occurrence costs as much time as searching this many characters."""


class SearchTooLong(Exception):
    """The searches of a request exceed their limit of characters."""


class PromptIndex:
    """Finds token ids and texts in a prompt, all of whose token ids are below `vocabulary`."""

    def __init__(self, prompt: PromptTokens, vocabulary: int) -> None:
        self._prompt = prompt
        self._vocabulary = vocabulary
        self._occurrences: dict[str, Offsets] = {}
        self._searched = 0

    @property
    def has_offsets(self) -> bool:
        """Whether texts can be found, because the prompt's text and offsets are known."""
        return self._prompt.text is not None and self._prompt.offsets is not None

    def tokens(self, ids: Iterable[int]) -> Spans:
        """The positions of tokens with these ids, all below the vocabulary's size."""
        return runs(self.positions(np.fromiter(ids, np.int64)))

    def positions(self, ids: Offsets) -> Offsets:
        """The positions of tokens with these ids, ascending."""
        wanted = np.zeros(self._vocabulary, dtype=np.bool_)
        wanted[ids] = True
        return np.flatnonzero(wanted[self._ids])

    def occurrences(self, text: str) -> Offsets:
        """The offsets at which a text begins in the prompt, ascending. Occurrences do not overlap.

        Raises:
            SearchTooLong: the searches of this request exceed their limit.
        """
        if text not in self._occurrences:
            self._occurrences[text] = self._find(text)
        return self._occurrences[text]

    def tokens_of_text(self, start: int, end: int) -> tuple[int, int] | None:
        """The span of the tokens that contain some of the characters [start, end)."""
        starts, ends, largest_ends, least_starts = self._offsets
        first = int(np.searchsorted(largest_ends, start, side="right"))
        past = int(np.searchsorted(least_starts, end, side="left"))
        begins, stops = starts[first:past], ends[first:past]
        tokens = np.flatnonzero((begins < end) & (stops > start) & (begins < stops))
        return (first + int(tokens[0]), first + int(tokens[-1]) + 1) if len(tokens) else None

    def _find(self, text: str) -> Offsets:
        assert self._prompt.text is not None
        self._searched += len(self._prompt.text) + _MATCH * self._prompt.text.count(text)
        if self._searched > SPAN_SEARCH:
            raise SearchTooLong
        matches = re.finditer(re.escape(text), self._prompt.text)
        return np.fromiter((match.start() for match in matches), np.int64)

    @cached_property
    def _ids(self) -> Offsets:
        return np.array(self._prompt.token_ids, dtype=np.int64)

    @cached_property
    def _offsets(self) -> tuple[Offsets, Offsets, Offsets, Offsets]:
        """The start and the end of each token in the text, and two ascending bounds.

        The bounds are the largest end up to each token, and the least start from each token on.
        They are needed for the binary search, because special tokens have the offset 0 at any
        position.
        """
        assert self._prompt.offsets is not None
        flat = np.fromiter(chain.from_iterable(self._prompt.offsets), np.int64)
        starts, ends = flat[::2], flat[1::2]
        nonempty_starts = np.where(starts < ends, starts, np.iinfo(np.int64).max)
        least_starts = np.minimum.accumulate(nonempty_starts[::-1])[::-1]
        return starts, ends, np.maximum.accumulate(ends), least_starts
