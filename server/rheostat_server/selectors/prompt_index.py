"""Where a prompt's tokens and texts are: made once per prompt, however many ranges ask.

Invariant: a text is searched for once, and no answer goes over all tokens in plain Python.
"""

import re
from collections.abc import Iterable
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt

from rheostat_engine import Spans
from rheostat_server.limits import SPAN_SEARCH
from rheostat_server.prompts.prompts import PromptTokens
from rheostat_server.selectors.spans import runs

Places = npt.NDArray[np.int64]

_TEXTS = 1024
"""Texts whose occurrences are remembered."""


_MATCH = 128
"""Characters that a search goes over in the time that an occurrence takes."""


class SearchTooLong(Exception):
    """The texts that were looked for go over more characters than they may."""


class PromptIndex:
    """Finds token ids and texts in a prompt."""

    def __init__(self, prompt: PromptTokens, vocabulary: int) -> None:
        """An index of a prompt, all of whose token ids are below `vocabulary`."""
        self._prompt = prompt
        self._vocabulary = vocabulary
        self._occurrences = lru_cache(_TEXTS)(self._find)
        self._searched = 0

    @property
    def has_places(self) -> bool:
        """Whether texts can be found: the prompt's text and where its tokens stand are known."""
        return self._prompt.text is not None and self._prompt.offsets is not None

    def tokens(self, ids: Iterable[int]) -> Spans:
        """The positions of tokens with these ids, all below the vocabulary's size."""
        return runs(self.positions(np.fromiter(ids, np.int64)))

    def positions(self, ids: Places) -> Places:
        """The same, ascending and one by one."""
        wanted = np.zeros(self._vocabulary, dtype=np.bool_)
        wanted[ids] = True
        return np.flatnonzero(wanted[self._ids])

    def occurrences(self, text: str) -> Places:
        """Where a text begins in the prompt's, ascending; occurrences do not overlap.

        Raises:
            SearchTooLong: too much was searched already.
        """
        return self._occurrences(text)

    def holding(self, start: int, end: int) -> tuple[int, int] | None:
        """The tokens that hold some of the characters [start, end): from the first to the last."""
        starts, ends, reached, ahead = self._places
        first = int(np.searchsorted(reached, start, side="right"))
        past = int(np.searchsorted(ahead, end, side="left"))
        begins, stops = starts[first:past], ends[first:past]
        held = np.flatnonzero((begins < end) & (stops > start) & (begins < stops))
        return (first + int(held[0]), first + int(held[-1]) + 1) if len(held) else None

    def _find(self, text: str) -> Places:
        assert self._prompt.text is not None
        self._searched += len(self._prompt.text) + _MATCH * self._prompt.text.count(text)
        if self._searched > SPAN_SEARCH:
            raise SearchTooLong
        found = re.finditer(re.escape(text), self._prompt.text)
        return np.fromiter((match.start() for match in found), np.int64)

    @cached_property
    def _ids(self) -> Places:
        return np.array(self._prompt.token_ids, dtype=np.int64)

    @cached_property
    def _places(self) -> tuple[Places, Places, Places, Places]:
        """Where each token's characters begin and end, and bounds of that.

        The bounds are the furthest end up to each token and the first beginning from each token on.
        They ascend, though special tokens stand at 0 wherever they are.
        """
        assert self._prompt.offsets is not None
        flat = np.fromiter(chain.from_iterable(self._prompt.offsets), np.int64)
        starts, ends = flat[::2], flat[1::2]
        from_here = np.where(starts < ends, starts, np.iinfo(np.int64).max)
        ahead = np.minimum.accumulate(from_here[::-1])[::-1]
        return starts, ends, np.maximum.accumulate(ends), ahead
