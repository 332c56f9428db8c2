"""Ends a process that has imported vLLM without delay.

At exit, Python collects garbage among all objects; vLLM's and torch's modules have 600,000, which
takes seconds. vLLM waits 5 s for its engine and then kills it, and so leaves its shared memory to
Python's resource tracker. vLLM itself freezes the objects on ROCm.
"""

import atexit
import gc
import multiprocessing
import os
import sys


def skip_last_collection(*, own_process: bool = False) -> None:
    """Skips Python's garbage collection when this process ends.

    Args:
        own_process: whether this process runs nothing but the server. If not, only child processes
            are changed, because a program may run the engine in its own process.
    """
    if own_process or multiprocessing.parent_process() is not None:
        atexit.unregister(_freeze)
        atexit.register(_freeze)


def _freeze() -> None:
    gc.freeze()
    # nanobind reports uncollected types as leaks, in dozens of lines on descriptor 2. So descriptor
    # 2 is closed, and Python reports errors of finalizers on a copy.
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    sys.__stderr__ = sys.stderr  # type: ignore[misc]  # Python restores it while modules go
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
