"""The engine's process ends with the server that started it, even if that was killed.

vLLM's workers watch the engine's process, but nobody tells the engine that its own parent is gone:
it would keep the device's memory for ever. Nor may it finish what runs, which nobody reads.

Why the engine leaves the server's process group: a signal to the group (Ctrl-C, `timeout`, a
shell's job) would end vLLM's workers while the server lets its requests finish. The server alone
ends the engine.
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
"""Seconds between two looks."""
_GRACE = 10.0
"""Seconds that the engine has to end by itself, of which vLLM grants its workers nine. It can't
end while it waits for another rank."""


def leave_group() -> None:
    """Puts this process into a process group of its own, if it is a child of the server at all."""
    if multiprocessing.parent_process() is not None and os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)


def end_with_parent(config: VllmConfig) -> None:
    """Watches over this process's parent, if it is a child at all, on a thread of its own.

    Args:
        config: the engine's own, which says how long its requests may go on once it is to end.
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
