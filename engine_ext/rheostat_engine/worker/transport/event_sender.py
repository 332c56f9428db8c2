"""Sends frames to the server, on its own thread.

Invariants: frames are sent in the order of the calls of `send`, which waits neither for the device
nor for the server. If a frame cannot be built or sent, the error is logged and its fallback heads
are sent. Later frames are unaffected. If the server falls behind, only this thread waits. The rows
are in the staging area, whose size bounds them.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import zmq

from rheostat_engine.channel.events import Head, RowsHead, SignalsHead, encode_head

_LOG = logging.getLogger(__name__)

_FRAMES = 16
"""Frames that ZeroMQ queues before the thread waits."""

_UNREADABLE = "measurements could not be read; their requests are released without doses"
_LOST = "captured rows or signals could not be read and are lost"


class Fence(Protocol):
    """A point in a device stream."""

    def synchronize(self) -> None:
        """Waits until the device has reached it."""


class Frame(NamedTuple):
    """One or more heads to send, in one message."""

    head: Head | Sequence[Head] | Callable[[], Sequence[Head]]
    """The head, several heads, or a function that makes several heads after `ready`."""
    ready: Fence | None = None
    """The fence after which the rows, or the input of the function, are complete."""
    fallback: Sequence[Head] = ()
    """Heads to send if the heads can't be made or the rows can't be read."""
    rows: int = 0
    """The number of described rows."""


class EventSender:
    """The worker's end of the side channel."""

    def __init__(self, address: str) -> None:
        """Connects to the server's address, which may not be bound yet."""
        self.lost_rows = 0
        """Rows of frames that were not sent."""
        self._queue: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, _FRAMES)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._thread = threading.Thread(target=self._run, name="rheostat-events", daemon=True)
        self._thread.start()

    def send(self, frame: Frame) -> None:
        """Queues a frame."""
        self._queue.put(frame)

    def close(self) -> None:
        """Sends the queued frames, then stops. If the server is behind, some may be lost."""
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (frame := self._queue.get()) is not None:
            sent = False
            try:
                sent = self._send(frame)
            except Exception:  # any error, because other requests wait for later frames
                _LOG.exception("a frame of the side channel could not be sent and is lost")
            if not sent:
                self.lost_rows += frame.rows
        self._socket.close()
        self._context.term()

    def _send(self, frame: Frame) -> bool:
        """Sends a frame or its fallback; returns whether the frame was sent."""
        complete = True
        try:
            heads = _heads(frame)
        except Exception:  # any error, because the requests wait for their reports
            _LOG.exception(_LOST if isinstance(frame.head, RowsHead | SignalsHead) else _UNREADABLE)
            complete, heads = False, frame.fallback
        if heads:
            self._socket.send_multipart([encode_head(head) for head in heads])
        return complete


def _heads(frame: Frame) -> Sequence[Head]:
    """Waits for `ready`, then makes the frame's heads."""
    if frame.ready is not None:
        frame.ready.synchronize()
    if callable(frame.head):
        return frame.head()
    return frame.head if isinstance(frame.head, Sequence) else (frame.head,)
