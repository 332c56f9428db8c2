"""The CPU time of a server's threads."""

import json
import os
import selectors
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType

import pytest

from rheostat_bench.costs import ThreadTime, taken, thread_times
from rheostat_bench.sampled_server import Sampler, function_name, shares
from rheostat_bench.tables import tables

from .pages import DOCS, PAGES


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


def test_the_page_shows_what_functions_cost() -> None:
    shown = tables(DOCS / "cpu" / "costs-demo.json")
    assert len(shown) == 2
    assert all(table in PAGES for table in shown)


def test_the_page_on_front_ends_shows_what_they_cost() -> None:
    page = (DOCS.parent / "front-ends.md").read_text()
    names = ("costs-1-front-end", "costs-4-front-ends")
    runs = [
        [json.loads((DOCS / "cpu" / f"{name}{again}.json").read_text()) for again in ("", "-again")]
        for name in names
    ]
    for arm in ("idle", "one layer captured, in the answer"):
        for workload in ("token", "request"):
            cells = []
            for pair in runs:
                times = [run["arms"][arm][workload]["us"] for run in pair]
                server = [row["server, main thread"] for row in times]
                fronts = [sum(us for of, us in row.items() if "front" in of) for row in times]
                cells += [", ".join(f"{us:.0f}" for us in kind) for kind in (server, fronts)]
            assert f" | {' | '.join(cells)} |" in page


def code(file: str, name: str) -> CodeType:
    return (lambda: None).__code__.replace(co_filename=file, co_name=name, co_qualname=name)


def test_functions_count_with_and_without_those_that_they_call() -> None:
    rpc = code("/a/rheostat_server/api/rpc.py", "Rpcs.answer")
    admit = code("/a/rheostat_server/admission/admit.py", "admit")
    library = code("/usr/lib/python3/json/decoder.py", "loads")
    waiting = code(selectors.__file__, "EpollSelector.select")
    loop = code("/usr/lib/python3/asyncio/events.py", "Handle._run")
    stacks = Counter(
        {
            (library, admit, rpc, loop): 6,
            (rpc, loop): 3,
            (loop,): 1,
            (waiting, loop): 50,
        }
    )
    found = shares(stacks)
    assert found["samples"] == 10
    assert found["with_callees"] == {
        "rheostat_server/api/rpc: Rpcs.answer": 0.9,
        "rheostat_server/admission/admit: admit": 0.6,
    }
    assert found["alone"] == {
        "rheostat_server/admission/admit: admit": 0.6,
        "rheostat_server/api/rpc: Rpcs.answer": 0.3,
        "the event loop": 0.1,
    }


def test_functions_of_other_packages_have_no_name() -> None:
    assert function_name(code("/usr/lib/python3/json/decoder.py", "loads")) is None
    inner = code("/x/vllm/site-packages/vllm/v1/engine/async_llm.py", "AsyncLLM.abort")
    assert function_name(inner) == "vllm/v1/engine/async_llm: AsyncLLM.abort"


def test_samples_are_written_and_forgotten(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path)
    sampler.sample(signal.SIGPROF, sys._getframe())
    sampler.write(signal.SIGUSR1, None)
    sampler.write(signal.SIGUSR1, None)
    first, second = (json.loads((tmp_path / f"samples-{i}.json").read_text()) for i in range(2))
    assert (first["samples"], second["samples"]) == (1, 0)
