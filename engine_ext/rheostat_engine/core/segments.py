"""Piecewise-constant functions of the position: which one a request has, and its value at a token.

Invariants: a lookup costs one binary search per token in numpy, whatever the number of requests. A
request that begins or ends costs what it brings: functions are shared by requests, a new one is
written behind the others, and what ended is swept out once it is more than what is left.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_POSITION_BITS = 32
_SMALLEST = 1024
"""Pieces for which there is room from the beginning."""


class Functions:
    """Functions by number. Number 0 is the one that is zero everywhere."""

    def __init__(self, columns: int = 1) -> None:
        """There is none but 0; each has `columns` values."""
        self._keys: Int64 = np.zeros(_SMALLEST, np.int64)
        self._values: Int32 = np.zeros((_SMALLEST, columns), np.int32)
        self._alive: npt.NDArray[np.bool_] = np.zeros(_SMALLEST, np.bool_)
        self._alive[0] = True
        self._end = 1
        self._dead = 0
        self._last = 0
        self._sizes: dict[int, int] = {}
        self.written = 0
        """Pieces that were written, each as often as it was."""

    def __len__(self) -> int:
        """How many there are, 0 not counted."""
        return len(self._sizes)

    def add(self, starts: npt.NDArray[np.integer], values: npt.ArrayLike) -> int:
        """A new function; its number.

        Args:
            starts: [p]: first position of each piece, ascending from 0.
            values: [p, columns].
        """
        count = len(starts)
        if self._end + count > len(self._keys):
            self._grow(self._end + count)
        self._last += 1
        end = self._end + count
        self._keys[self._end : end] = (self._last << _POSITION_BITS) + starts.astype(np.int64)
        self._values[self._end : end] = np.asarray(values).reshape(count, -1)
        self._alive[self._end : end] = True
        self._end = end
        self._sizes[self._last] = count
        self.written += count
        return self._last

    def drop(self, function: int) -> None:
        """Forgets a function; nothing if it is 0."""
        if not function:
            return
        count = self._sizes.pop(function)
        first = int(np.searchsorted(self._keys[: self._end], function << _POSITION_BITS))
        self._alive[first : first + count] = False
        self._dead += count
        if self._dead > max(_SMALLEST, self._end // 2):
            self._sweep()

    def lookup(self, functions: Int64, positions: Int64) -> Int32:
        """Values, [n, columns].

        Args:
            functions: [n]: numbers of functions that there are, or 0.
            positions: [n]: absolute positions, not negative.
        """
        keys = (functions << _POSITION_BITS) + positions
        found = np.searchsorted(self._keys[: self._end], keys, side="right") - 1
        values: Int32 = self._values[found]
        return values

    def _grow(self, least: int) -> None:
        size = 2 * least
        for name in ("_keys", "_values", "_alive"):
            old = getattr(self, name)
            new = np.zeros((size, *old.shape[1:]), old.dtype)
            new[: self._end] = old[: self._end]
            setattr(self, name, new)
        self.written += self._end

    def _sweep(self) -> None:
        """Closes the gaps that dropped functions left."""
        alive = self._alive[: self._end]
        keys, values = self._keys[: self._end][alive], self._values[: self._end][alive]
        size = max(_SMALLEST, 2 * len(keys))
        self._end, self._dead = len(keys), 0
        self._keys = np.zeros(size, np.int64)
        self._values = np.zeros((size, values.shape[1]), np.int32)
        self._alive = np.zeros(size, np.bool_)
        self._keys[: self._end], self._values[: self._end] = keys, values
        self._alive[: self._end] = True
        self.written += self._end


class Segment(NamedTuple):
    """What a request has from a position on."""

    first: int
    """The position."""
    function: int
    """The function."""
    bases: tuple[int, ...] = ()
    """What is the request's own, beside the function that it shares."""


class Requests:
    """Which function each request has, by the request's number.

    Request numbers are positive; number 0 stands for every request without a function.
    """

    def __init__(self, functions: Functions, bases: int = 0) -> None:
        """No request has any of `functions`; each has `bases` integers of its own with it."""
        self._functions = functions
        self._last_first: Int64 = np.zeros(1, np.int64)
        self._last_function: Int64 = np.zeros(1, np.int64)
        self._last_bases: Int64 = np.zeros((1, bases), np.int64)
        self._earlier: dict[int, Sequence[Segment]] = {}
        self._held: set[int] = set()

    def __len__(self) -> int:
        """How many requests have a function."""
        return len(self._held)

    def put(self, number: int, segments: Sequence[Segment]) -> None:
        """Gives a request what it has.

        Args:
            number: the request's number, positive.
            segments: ascending from position 0; none: it has no function.
        """
        if not segments:
            self.drop(number)
            return
        if number >= len(self._last_first):
            grow = max(number + 1 - len(self._last_first), len(self._last_first))
            self._last_first = np.pad(self._last_first, (0, grow))
            self._last_function = np.pad(self._last_function, (0, grow))
            self._last_bases = np.pad(self._last_bases, ((0, grow), (0, 0)))
        *earlier, last = segments
        self._last_first[number], self._last_function[number] = last.first, last.function
        self._last_bases[number] = last.bases
        self._earlier.pop(number, None)
        if earlier:
            self._earlier[number] = earlier
        self._held.add(number)

    def drop(self, number: int) -> None:
        """Forgets what a request has, if it has anything."""
        if number in self._held:
            self._held.remove(number)
            self._earlier.pop(number, None)
            self._last_first[number] = self._last_function[number] = 0
            self._last_bases[number] = 0

    def lookup(self, numbers: Int64, positions: Int64) -> tuple[Int32, Int64]:
        """The values at each token, [n, columns], and its request's bases there, [n, bases].

        Args:
            numbers: request number of each token, [n]; one without a function yields zeros.
            positions: absolute position of each token, [n], not negative.
        """
        known = np.where(numbers < len(self._last_first), numbers, 0)
        functions, bases = self._last_function[known], self._last_bases[known]
        if self._earlier:
            early = np.flatnonzero(positions < self._last_first[known])
            for number in np.unique(known[early]).tolist():
                tokens = early[known[early] == number]
                self._look_back(number, positions[tokens], tokens, functions, bases)
        return self._functions.lookup(functions, positions), bases

    def _look_back(
        self, number: int, positions: Int64, tokens: Int64, functions: Int64, bases: Int64
    ) -> None:
        """Writes what a request has before its last segment."""
        segments = self._earlier[number]
        firsts = [segment.first for segment in segments]
        which = np.searchsorted(firsts, positions, side="right") - 1
        functions[tokens] = np.array([segment.function for segment in segments])[which]
        bases[tokens] = np.array([segment.bases for segment in segments], np.int64)[which]
