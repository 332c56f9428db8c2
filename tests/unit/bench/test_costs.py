"""The CPU time of a server's threads."""

import os
import threading

import pytest

from rheostat_bench.costs import ThreadTime, taken, thread_times


def test_threads_of_a_kind_are_summed_and_new_ones_count_whole() -> None:
    before = {1: ThreadTime("server", True, 10.0), 2: ThreadTime("server", False, 1.0)}
    after = {
        1: ThreadTime("server", True, 14.0),
        2: ThreadTime("server", False, 1.5),
        3: ThreadTime("server", False, 0.25),
        4: ThreadTime("front ends", True, 2.0),
        5: ThreadTime("VLLM::EngineCor", True, 0.0),
    }
    assert taken(before, after) == {
        "server, main thread": 4.0,
        "front ends, main thread": 2.0,
        "server, other threads": pytest.approx(0.75),
    }


def test_every_thread_of_a_process_is_found() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        times = thread_times(os.getpid())
    finally:
        stop.set()
        thread.join()
    assert times[os.getpid()].main
    assert thread.native_id is not None
    assert not times[thread.native_id].main
    assert {times[os.getpid()].process, times[thread.native_id].process} == {"server"}
