"""The engine's process ends with the server that started it, even if the server was killed.

Why the engine watches the server
    vLLM's workers watch the engine's process, but vLLM's engine does not watch its own parent. It
    would keep the device's memory for ever. It also must not finish running requests, because
    nobody reads them.
Why the engine leaves the server's process group
    A signal to the group (Ctrl-C, `timeout`, a shell's job) would end vLLM's workers. The server
    lets its requests finish first, and then ends the engine itself.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time

from vllm.config import VllmConfig

_LOG = logging.getLogger(__name__)

_LOOK = 2.0
"""Seconds between two checks of the parent."""
_GRACE = 10.0
"""Seconds that the engine has to end by itself. vLLM gives its workers nine of them. The engine
can't end while it waits for another rank."""


def leave_group() -> None:
    """Gives this process a process group of its own, if it is a child of the server."""
    if multiprocessing.parent_process() is not None and os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)


def end_with_parent(config: VllmConfig) -> None:
    """Watches the parent of this process on a thread, if this process is a child of the server.

    Args:
        config: the engine's config, which holds the time that requests have to finish at its end.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    threading.Thread(
        target=_watch, args=(parent.pid, config), name="rheostat-parent", daemon=True
    ).start()


def _watch(parent: int, config: VllmConfig) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    _LOG.error("the server is gone; its engine ends")
    config.shutdown_timeout = 0
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    _LOG.error("the engine did not end within %s seconds and is killed", _GRACE)
    for worker in multiprocessing.active_children():
        worker.kill()
    os.kill(os.getpid(), signal.SIGKILL)
