"""Copies small frames of rows as a whole, up to a limit of memory.

A step of hundreds of requests has one row for each. Copying the frame at once takes a tenth of the
time of a copy for each request. But the frame stays in memory until all its rows are read, usually
within half a second. If slow readers keep frames up to the limit, each request's rows are copied
alone, until frames are freed.
"""

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

FRAME_BYTES = 8 << 20
"""The largest frame to copy as a whole."""

ALL_FRAMES_BYTES = 256 << 20
"""The most bytes of all copied frames in use."""


class FrameCopies:
    """Counts the copied frames in use. One thread makes copies; any thread may free them."""

    def __init__(self) -> None:
        self._bytes = 0
        """Bytes of the frames in use and of those in `_freed`."""
        self._freed: deque[int] = deque()
        """Bytes of each frame freed since the last copy."""

    def copy(self, rows: memoryview) -> npt.NDArray[np.uint8] | None:
        """Copies a frame's rows; None if the frame is too large, or too much memory is in use."""
        copied = self.empty(len(rows)) if len(rows) <= FRAME_BYTES else None
        if copied is not None:
            copied[:] = np.frombuffer(rows, np.uint8)
        return copied

    def empty(self, size: int) -> npt.NDArray[np.uint8] | None:
        """Memory for `size` bytes of rows; None if too much is in use."""
        while self._freed:
            self._bytes -= self._freed.popleft()
        if self._bytes + size > ALL_FRAMES_BYTES:
            return None
        memory = np.empty(size, np.uint8)
        self._bytes += size
        weakref.finalize(memory, self._freed.append, size)
        return memory
