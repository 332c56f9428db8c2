"""Lets the engine core wait for its worker without a busy loop, on few cores.

Why
    For a second after each message, vLLM's reader waits for the next one in a loop that yields the
    processor. So while requests run, the engine core uses up to a core to wait for the worker's
    steps. On a machine with two cores, the event loop of the server then waits for a processor.
How
    A reader sleeps for a hundredth of the time that it has waited, and looks for a message again.
    So it notices a message at most one percent too late, and the loop takes little time.
Why not in the worker too
    Beside sessions that update their steering, first tokens of others then came after 320 to 410 ms
    (five runs) instead of 105 to 137 (four). The cause is not known. A worker waits little.
Why not until the writer notifies it
    vLLM's readers do so after a second. The writer's socket drops a notification if it has not
    noticed yet that the last one was received, and it looks for that once in a millisecond.
"""

import os
import time

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

_FEW_CORES = 4
"""Cores up to which readers sleep. The server, the engine core and the threads of the worker use as
many."""
_SPINS = 0.0002
"""Seconds after a message for which a reader does not sleep."""
_SHARE = 0.01
"""A sleep's share of the time since the last message."""
_LONGEST = 0.0005
"""Seconds of the longest sleep."""

_STOCK = SpinCondition.wait


def sleep_between_messages(device: str) -> None:
    """Makes all readers of this process sleep, if it runs on the few cores of a CPU machine.

    Args:
        device: the type of the worker's device.
    """
    if device == "cpu" and len(os.sched_getaffinity(0)) <= _FEW_CORES:
        # On the class, because some queues exist already.
        SpinCondition.wait = _wait  # type: ignore[assignment]  # it becomes a method


def _wait(condition: SpinCondition, timeout_ms: int | None = None) -> None:
    waited = time.monotonic() - condition.last_read
    if _SPINS <= waited <= condition.busy_loop_s:
        time.sleep(min(_LONGEST, _SHARE * waited))
    else:
        _STOCK(condition, timeout_ms)
