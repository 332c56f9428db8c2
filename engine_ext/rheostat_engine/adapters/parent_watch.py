"""Ends the engine's process with the server that started it, even if the server was killed.

Why the engine watches the server
    vLLM's workers watch the engine's process, but the engine does not watch its parent, and would
    keep the device memory forever. It also must not finish running requests, because their results
    have no reader.
Why the engine leaves the server's process group
    A signal to the group (Ctrl-C, `timeout`, a shell's job) would end vLLM's workers. The server
    first finishes its requests, and then ends the engine.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time

from vllm.config import VllmConfig

_LOG = logging.getLogger(__name__)

_POLL_INTERVAL = 2.0
"""Seconds between two checks of the parent."""
_GRACE = 10.0
"""Seconds until the engine is killed, because it can't end while it waits for another rank. vLLM
gives its workers nine of them."""


def leave_group() -> None:
    """Moves this process to its own process group, if it is a child of the server."""
    if multiprocessing.parent_process() is not None and os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)


def end_with_parent(config: VllmConfig) -> None:
    """Watches the parent of this process on a thread, if this process is a child of the server.

    `config.shutdown_timeout` is the time that requests have to finish; it is set to 0 then.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    threading.Thread(
        target=_watch, args=(parent.pid, config), name="rheostat-parent", daemon=True
    ).start()


def _watch(parent: int, config: VllmConfig) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_INTERVAL)
    _LOG.error("the server process has ended; shutting down its engine")
    config.shutdown_timeout = 0
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    _LOG.error("the engine did not shut down within %s seconds; killing it", _GRACE)
    for worker in multiprocessing.active_children():
        worker.kill()
    os.kill(os.getpid(), signal.SIGKILL)
