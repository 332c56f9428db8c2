"""Captured rows and words about requests leave the worker here, on a thread of their own.

Invariant: everything leaves in the order in which it was handed over; handing over never waits for
the device nor for the server. A frame that can't be made or sent is logged, what it has to say
otherwise is said, and it takes no other with it. A server that falls behind stops the thread, not
the step. Rows themselves lie in the staging area, which bounds how many can wait.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from rheostat_engine.core.ring import Fence
from rheostat_engine.events import Head, RowsHead, encode_head

_LOG = logging.getLogger(__name__)


_FRAMES = 16
"""Frames that ZeroMQ may hold before the thread waits."""


_UNREADABLE = "what was measured could not be read; its requests are released without it"
_LOST = "captured rows could not be read and are lost"


class Frame(NamedTuple):
    """Something to send."""

    head: Head | Callable[[], Sequence[Head]]
    """The head, or what makes the heads of several frames once `ready` has happened."""
    ready: Fence | None = None
    """When the rows that it describes, or what it is made of, are what they should be."""
    otherwise: Sequence[Head] = ()
    """What is sent where the heads can't be made, or the rows can't be read."""
    rows: int = 0
    """How many rows it describes."""


class Delivery:
    """The worker's end of the side channel."""

    def __init__(self, address: str) -> None:
        """Connects to the server's address; it need not be bound yet."""
        self.lost_rows = 0
        """Rows whose frames could not be sent as they were handed over."""
        self._queue: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, _FRAMES)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._thread = threading.Thread(target=self._run, name="rheostat-delivery", daemon=True)
        self._thread.start()

    def send(self, frame: Frame) -> None:
        """Hands a frame over."""
        self._queue.put(frame)

    def close(self) -> None:
        """Sends what has been handed over, then stops; a server that is behind may miss some."""
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (frame := self._queue.get()) is not None:
            said = False
            try:
                said = self._say(frame)
            except Exception:  # whatever it is, other requests wait for what comes after
                _LOG.exception("a frame of the side channel could not be sent and is lost")
            if not said:
                self.lost_rows += frame.rows
        self._socket.close()
        self._context.term()

    def _say(self, frame: Frame) -> bool:
        """Sends a frame, or what is said otherwise; whether it was the frame."""
        made = True
        try:
            heads = _heads(frame)
        except Exception:  # whatever it is, the requests wait for what is said of them
            _LOG.exception(_LOST if isinstance(frame.head, RowsHead) else _UNREADABLE)
            made, heads = False, frame.otherwise
        for head in heads:
            self._socket.send(encode_head(head))
        return made


def _heads(frame: Frame) -> Sequence[Head]:
    """The frame's heads, once they can be made."""
    if frame.ready is not None:
        frame.ready.synchronize()
    return frame.head() if callable(frame.head) else (frame.head,)
