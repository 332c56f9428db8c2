"""The lock of a front end's two threads, and calls of the core."""

import statistics
import threading
import time

import pytest

from rheostat_server.front_ends.core_server import FairLock


def test_a_thread_that_waits_for_the_lock_gets_it_next() -> None:
    lock, stop, turns = FairLock(lambda: None), threading.Event(), 0

    def work() -> None:
        nonlocal turns
        while not stop.is_set():
            with lock:
                turns += 1
                time.sleep(0.001)

    thread = threading.Thread(target=work)
    thread.start()
    waited = []
    try:
        for _ in range(30):
            time.sleep(0.002)
            before = turns
            with lock:
                waited.append(turns - before)
    finally:
        stop.set()
        thread.join()
    assert statistics.median(waited) <= 2  # the turn that ran, and one that began meanwhile


def test_the_lock_is_released_if_what_comes_before_fails() -> None:
    def fail() -> None:
        raise KeyError("defect")

    lock = FairLock(fail)
    for _ in range(2):
        with pytest.raises(KeyError), lock:
            pass
