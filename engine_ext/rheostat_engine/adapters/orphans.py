"""The engine's process ends with the server that started it, even if that was killed.

vLLM's workers watch the engine's process, but nobody tells the engine that its own parent is gone:
it would keep the device's memory for ever.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time

_LOG = logging.getLogger(__name__)

_LOOK = 2.0
"""Seconds between two looks."""


def end_with_parent() -> None:
    """Watches over this process's parent, if it is a child at all, on a thread of its own."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    threading.Thread(target=_watch, args=(parent.pid,), name="rheostat-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    _LOG.error("the server is gone; its engine ends")
    os.kill(os.getpid(), signal.SIGTERM)
