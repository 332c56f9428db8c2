"""How a process that has imported vLLM ends without delay.

At its end Python looks for garbage among all objects, of which vLLM's and torch's modules have
600,000. This takes seconds. vLLM waits 5 s for its engine and then kills it, so that its shared
memory is left to Python's resource tracker. vLLM itself freezes the objects on ROCm.
"""

import atexit
import gc
import multiprocessing
import os
import sys


def skip_last_collection(*, own_process: bool = False) -> None:
    """Keeps Python from looking for garbage while this process ends.

    Args:
        own_process: whether the process is known to run nothing but the server. Without it, only a
            child process is changed: a program may have the engine in its own process.
    """
    if own_process or multiprocessing.parent_process() is not None:
        atexit.unregister(_freeze)
        atexit.register(_freeze)


def _freeze() -> None:
    gc.freeze()
    # nanobind reports types of modules that are not collected as leaked, in dozens of lines. It
    # writes to descriptor 2. Python still reports errors of finalisers, on a copy of it.
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    sys.__stderr__ = sys.stderr  # type: ignore[misc]  # Python restores it while modules go
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
