"""Copies of small frames of rows, each as a whole.

A step of hundreds of requests has one row for each. To copy the frame at once takes a tenth of the
time that a copy for each request takes. In return the frame stays as long as one of its rows waits.
Readers that keep up take their rows within half a second. If readers are slow, the bytes of
all such frames reach a limit. From then on each request's rows are copied by themselves, until
frames are free again.
"""

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

FRAME_BYTES = 8 << 20
"""The largest frame that is copied as a whole."""

ALL_FRAMES_BYTES = 256 << 20
"""Bytes of all such frames whose rows wait."""


class FrameCopies:
    """The copies of frames that are in use. One thread makes them, any thread may free them."""

    def __init__(self) -> None:
        """No frame was copied yet."""
        self._bytes = 0
        """Bytes of the frames that are in use, and of those in `_freed`."""
        self._freed: deque[int] = deque()
        """Bytes of each frame that was freed since the last copy."""

    def copy(self, rows: memoryview) -> npt.NDArray[np.uint8] | None:
        """A copy of a frame's rows; None if the frame is too large, or too many are in use."""
        copied = self.empty(len(rows)) if len(rows) <= FRAME_BYTES else None
        if copied is not None:
            copied[:] = np.frombuffer(rows, np.uint8)
        return copied

    def empty(self, size: int) -> npt.NDArray[np.uint8] | None:
        """Memory for so many bytes of rows; None if too much is in use."""
        while self._freed:
            self._bytes -= self._freed.popleft()
        if self._bytes + size > ALL_FRAMES_BYTES:
            return None
        memory = np.empty(size, np.uint8)
        self._bytes += size
        weakref.finalize(memory, self._freed.append, size)
        return memory
