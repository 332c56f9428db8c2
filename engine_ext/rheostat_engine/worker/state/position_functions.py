"""Piecewise-constant functions of the token position, and the function of each request.

A function maps a position to a few integers, for example to the bank slot of a token there.
Requests with equal plans share a function.

Invariants: a lookup costs one binary search per token in numpy, for any number of requests. A new
function is appended. Dropped functions are removed together once they take more memory than the
others. So the cost of a request's start or end depends only on its own function.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

FOREVER = 2**62
"""A position above every real one."""

_POSITION_BITS = 32
_POSITION_MASK = (1 << _POSITION_BITS) - 1
_EVERYWHERE = 0, 0, FOREVER
"""The window of a request without one; see `Requests.put_window`."""
_SMALLEST = 1024
"""Intervals for which memory is allocated initially."""


def int64_bytes(values: npt.NDArray[np.integer]) -> bytes:
    """An array as little-endian int64."""
    return values.astype("<i8", copy=False).tobytes()


def consecutive(firsts: Int64, counts: Int64) -> Int64:
    """The integers first, first + 1, ... of each range, one range after the other."""
    before = counts.cumsum() - counts
    return np.repeat(firsts - before, counts) + np.arange(counts.sum())


class Functions:
    """Functions by number. Function 0 is zero at every position."""

    def __init__(self, columns: int = 1) -> None:
        """Each function has `columns` values."""
        self._keys: Int64 = np.zeros(_SMALLEST, np.int64)
        self._values: Int32 = np.zeros((_SMALLEST, columns), np.int32)
        self._alive: npt.NDArray[np.bool_] = np.zeros(_SMALLEST, np.bool_)
        self._alive[0] = True
        self._end = 1
        self._dead = 0
        self._last = 0
        self._sizes: dict[int, int] = {}
        self.written = 0
        """Intervals written since the start, including moved intervals."""

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, starts: npt.NDArray[np.integer], values: npt.ArrayLike) -> int:
        """Adds a function; returns its number.

        Args:
            starts: [p]: first position of each interval, ascending from 0.
            values: [p, columns].
        """
        count = len(starts)
        if self._end + count > len(self._keys):
            self._move(count)
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
        """Drops a function, unless it is function 0."""
        if not function:
            return
        count = self._sizes.pop(function)
        first = int(np.searchsorted(self._keys[: self._end], function << _POSITION_BITS))
        self._alive[first : first + count] = False
        self._dead += count
        if self._dead > max(_SMALLEST, self._end // 2):
            self._move()

    def lookup(self, functions: Int64, positions: Int64) -> Int32:
        """The values at positions, [n, columns].

        Args:
            functions: [n]: numbers of existing functions, or 0.
            positions: [n]: absolute positions, not negative.
        """
        keys = (functions << _POSITION_BITS) + positions
        index = np.searchsorted(self._keys[: self._end], keys, side="right") - 1
        values: Int32 = self._values[index]
        return values

    def ends(self, functions: Int64, positions: Int64) -> Int64:
        """The end of each position's interval, [n]; `FOREVER` for the last interval.

        `functions` and `positions` as in `lookup`.
        """
        keys = (functions << _POSITION_BITS) + positions
        index = np.searchsorted(self._keys[: self._end], keys, side="right")
        following = self._keys[np.minimum(index, self._end - 1)]
        inside = (index < self._end) & (following >> _POSITION_BITS == functions)
        return np.where(inside, following & _POSITION_MASK, FOREVER)

    def _move(self, more: int = 0) -> None:
        """Moves all but the dropped functions to arrays with space for `more` intervals."""
        (kept,) = np.nonzero(self._alive[: self._end])
        size = max(_SMALLEST, 2 * (len(kept) + more))
        for name in ("_keys", "_values", "_alive"):
            old = getattr(self, name)
            new = np.zeros((size, *old.shape[1:]), old.dtype)
            new[: len(kept)] = old[kept]
            setattr(self, name, new)
        self._end, self._dead = len(kept), 0
        self.written += self._end


class Segment(NamedTuple):
    """A request's function from a position on."""

    first: int
    function: int
    bases: tuple[int, ...] = ()
    """Integers of this request alone, for example its first dose slot."""


class Requests:
    """The functions of each request, by request number; number 0 has no function."""

    def __init__(self, functions: Functions, bases: int = 0) -> None:
        """Each request has `bases` integers of its own."""
        self.changes = 0
        """Changes of a request's functions since the start."""
        self._functions = functions
        self._last_first: Int64 = np.zeros(1, np.int64)
        self._last_function: Int64 = np.zeros(1, np.int64)
        self._last_bases: Int64 = np.zeros((1, bases), np.int64)
        self._windows: Int64 = np.array([_EVERYWHERE])
        """[n, 3]: the function outside of the window, the window's start and end."""
        self._windowed: set[int] = set()
        self._earlier: dict[int, Sequence[Segment]] = {}
        self._numbers: set[int] = set()

    def __len__(self) -> int:
        return len(self._numbers)

    def put(self, number: int, segments: Sequence[Segment]) -> None:
        """Sets the functions of a request.

        Args:
            number: the request's number, positive.
            segments: ascending from position 0; empty if the request has no function.
        """
        if not segments:
            self.drop(number)
            return
        self.changes += 1
        self._make_room(number)
        self._drop_window(number)
        *earlier, last = segments
        self._last_first[number], self._last_function[number] = last.first, last.function
        self._last_bases[number] = last.bases
        self._earlier.pop(number, None)
        if earlier:
            self._earlier[number] = earlier
        self._numbers.add(number)

    def put_window(self, number: int, inside: int, outside: int, start: int, end: int) -> None:
        """Sets the functions of a new request: one in a window, another elsewhere. No bases.

        A step may begin hundreds of such requests, so their tokens are looked up together.

        Args:
            number: the request's number, positive.
            inside: the function of positions [start, end).
            outside: the function of all other positions.
            start: the first position of the window.
            end: the position after its last.
        """
        self.changes += 1
        self._make_room(number)
        self._last_function[number] = inside
        self._windows[number] = outside, start, end
        self._windowed.add(number)
        self._numbers.add(number)

    def _make_room(self, number: int) -> None:
        size = len(self._last_first)
        if number < size:
            return
        grow = max(number + 1 - size, size)
        self._last_first = np.pad(self._last_first, (0, grow))
        self._last_function = np.pad(self._last_function, (0, grow))
        self._last_bases = np.pad(self._last_bases, ((0, grow), (0, 0)))
        self._windows = np.concatenate([self._windows, np.tile(_EVERYWHERE, (grow, 1))])

    def _drop_window(self, number: int) -> None:
        if number in self._windowed:
            self._windowed.remove(number)
            self._windows[number] = _EVERYWHERE

    def drop(self, number: int) -> None:
        """Removes the functions of a request, if there are any."""
        if number in self._numbers:
            self.changes += 1
            self._numbers.remove(number)
            self._drop_window(number)
            self._earlier.pop(number, None)
            self._last_first[number] = self._last_function[number] = 0
            self._last_bases[number] = 0

    def find(self, numbers: Int64, positions: Int64) -> tuple[Int64, Int64]:
        """The function, [n], and the request's bases, [n, bases], at each token.

        Args:
            numbers: request number of each token, [n]; a request without functions yields zeros.
            positions: absolute position of each token, [n], not negative.
        """
        existing = np.where(numbers < len(self._last_first), numbers, 0)
        functions, bases = self._last_function[existing], self._last_bases[existing]
        if self._windowed:
            outside, start, end = self._windows[existing].T
            functions = np.where((start <= positions) & (positions < end), functions, outside)
        if self._earlier:
            early = np.flatnonzero(positions < self._last_first[existing])
            for number in np.unique(existing[early]).tolist():
                tokens = early[existing[early] == number]
                self._look_back(number, positions[tokens], tokens, functions, bases)
        return functions, bases

    def lookup(self, numbers: Int64, positions: Int64) -> tuple[Int32, Int64]:
        """The values, [n, columns], and the bases, [n, bases], at each token; see `find`."""
        functions, bases = self.find(numbers, positions)
        return self._functions.lookup(functions, positions), bases

    def steps_alike(self, numbers: Int64, positions: Int64) -> int:
        """For how many more steps `lookup` returns the same, as long as `changes` stays the same.

        Each step raises the position of each token by one. `numbers` and `positions` as in `find`.
        The result may be 0, which is too low, if a request's functions were changed earlier.
        """
        existing = np.where(numbers < len(self._last_first), numbers, 0)
        if self._earlier and (positions < self._last_first[existing]).any():
            return 0
        functions, _ = self.find(numbers, positions)
        ends = self._functions.ends(functions, positions)
        if self._windowed:
            for edge in self._windows[existing, 1:].T:
                ends = np.where(edge > positions, np.minimum(edge, ends), ends)
        return int((ends - positions).min(initial=FOREVER)) - 1

    def _look_back(
        self, number: int, positions: Int64, tokens: Int64, functions: Int64, bases: Int64
    ) -> None:
        """Writes the functions and bases of tokens before the last segment of a request."""
        segments = self._earlier[number]
        firsts = [segment.first for segment in segments]
        which = np.searchsorted(firsts, positions, side="right") - 1
        functions[tokens] = np.array([segment.function for segment in segments])[which]
        bases[tokens] = np.array([segment.bases for segment in segments], np.int64)[which]
