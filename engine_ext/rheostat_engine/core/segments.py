"""Piecewise-constant functions of the position, for many requests, looked up batch by batch.

Invariant: a lookup costs one binary search per token in numpy, whatever the number of requests; a
request that has no function yields 0.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_POSITION_BITS = 32


class PositionTable:
    """Maps (request number, position) to a small integer.

    Request numbers are positive; number 0 stands for every request without a function.
    """

    def __init__(self) -> None:
        """Empty: every lookup yields 0."""
        self._pieces: dict[int, tuple[Int64, Int32]] = {}
        self._keys: Int64 = np.zeros(1, np.int64)
        self._values: Int32 = np.zeros(1, np.int32)
        self._stale = False

    def __len__(self) -> int:
        """How many requests have a function."""
        return len(self._pieces)

    def put(self, number: int, pieces: Sequence[tuple[int, int]]) -> None:
        """Gives a request its function.

        Args:
            number: the request's number, positive.
            pieces: (first position, value), ascending; the first at position 0.
        """
        starts = np.array([start for start, _ in pieces], np.int64)
        values = np.array([value for _, value in pieces], np.int32)
        self._pieces[number] = (starts + (number << _POSITION_BITS), values)
        self._stale = True

    def drop(self, number: int) -> None:
        """Forgets a request's function, if it has one."""
        if self._pieces.pop(number, None) is not None:
            self._stale = True

    def lookup(self, numbers: Int64, positions: Int64) -> Int32:
        """The value at each token.

        Args:
            numbers: request number of each token, [n]; one without a function yields 0.
            positions: absolute position of each token, [n], not negative.
        """
        if self._stale:
            self._rebuild()
        keys = (numbers << _POSITION_BITS) + positions
        found: Int32 = self._values[np.searchsorted(self._keys, keys, side="right") - 1]
        return found

    def _rebuild(self) -> None:
        # Each function is followed by an entry that ends it, so that a number between two known
        # ones finds 0 and not its neighbour's last value.
        keys, values = [np.zeros(1, np.int64)], [np.zeros(1, np.int32)]
        for number in sorted(self._pieces):
            starts, piece_values = self._pieces[number]
            keys += [starts, np.array([(number + 1) << _POSITION_BITS], np.int64)]
            values += [piece_values, np.zeros(1, np.int32)]
        self._keys, self._values = np.concatenate(keys), np.concatenate(values)
        self._stale = False
