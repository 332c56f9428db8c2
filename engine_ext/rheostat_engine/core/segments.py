"""Piecewise-constant functions of the position, for many requests, looked up batch by batch.

Invariant: a lookup costs one binary search per token in numpy, whatever the number of requests; a
request that has no function yields zeros.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_POSITION_BITS = 32


class PositionTable:
    """Maps (request number, position) to some small integers.

    Request numbers are positive; number 0 stands for every request without a function.
    """

    def __init__(self, columns: int = 1) -> None:
        """Empty: every lookup yields `columns` zeros."""
        self._columns = columns
        self._pieces: dict[int, tuple[Int64, Int32]] = {}
        self._keys: Int64 = np.zeros(1, np.int64)
        self._values: Int32 = np.zeros((1, columns), np.int32)
        self._stale = False

    def __len__(self) -> int:
        """How many requests have a function."""
        return len(self._pieces)

    def put(self, number: int, starts: Sequence[int], values: npt.ArrayLike) -> None:
        """Gives a request its function.

        Args:
            number: the request's number, positive.
            starts: first position of each piece, ascending; the first is 0.
            values: [pieces, columns].
        """
        keys = np.array(starts, np.int64) + (number << _POSITION_BITS)
        self._pieces[number] = (keys, np.array(values, np.int32).reshape(-1, self._columns))
        self._stale = True

    def drop(self, number: int) -> None:
        """Forgets a request's function, if it has one."""
        if self._pieces.pop(number, None) is not None:
            self._stale = True

    def lookup(self, numbers: Int64, positions: Int64) -> Int32:
        """The values at each token, [n, columns].

        Args:
            numbers: request number of each token, [n]; one without a function yields zeros.
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
        nothing = np.zeros((1, self._columns), np.int32)
        keys, values = [np.zeros(1, np.int64)], [nothing]
        for number in sorted(self._pieces):
            starts, piece_values = self._pieces[number]
            keys += [starts, np.array([(number + 1) << _POSITION_BITS], np.int64)]
            values += [piece_values, nothing]
        self._keys, self._values = np.concatenate(keys), np.concatenate(values)
        self._stale = False
