"""Where the time to the first token goes: records of processes, and the figures made of them."""

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rheostat_bench import traced
from rheostat_bench.first_tokens import Burst, figures
from rheostat_bench.traced import (
    ADDED,
    IN_CORE,
    LAUNCH,
    POINTS,
    READ,
    SAMPLE,
    SCHEDULE,
    UPDATE,
    Record,
    environment,
    records,
)
from rheostat_bench.turns import Streamed, streamed

MODULE = """
import time

class Engine:
    def launch(self, seconds):
        time.sleep(seconds)
        return "launched"

    async def add(self):
        return "added"

    def schedule(self, output):
        return output

    def take(self):
        pass
"""


@pytest.mark.parametrize("module", POINTS)
def test_the_recorded_functions_exist(module: str) -> None:
    package, *rest = module.split(".")
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations
    (folder, *_) = found.submodule_search_locations
    tree = ast.parse(Path(folder, *rest).with_suffix(".py").read_text())
    methods = {
        f"{kind.name}.{one.name}"
        for kind in tree.body
        if isinstance(kind, ast.ClassDef)
        for one in kind.body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert POINTS[module].keys() <= methods


def test_samples_have_different_numbers_even_if_they_share_an_address(tmp_path: Path) -> None:
    class Reader:
        pass

    recorder = traced._Recorder(tmp_path)
    take = recorder.wrap(lambda reader: None, READ)
    for _ in range(3):
        reader = Reader()
        take(reader)
        take(reader)
        del reader
    recorder._write()
    assert [record.owner for record in records(tmp_path)] == [1, 1, 2, 2, 3, 3]


async def test_calls_are_recorded_and_return_what_they_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "traced_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    points = {
        "Engine.launch": LAUNCH,
        "Engine.add": ADDED,
        "Engine.schedule": SCHEDULE,
        "Engine.take": READ,
    }
    monkeypatch.setattr(traced, "POINTS", {"traced_module": points})
    recorder = traced._Recorder(tmp_path)
    sys.meta_path.insert(0, traced._Finder(recorder))
    engine = importlib.import_module("traced_module").Engine()
    output = SimpleNamespace(scheduled_new_reqs=["a", "b"], total_num_scheduled_tokens=64)
    assert engine.launch(0.02) == "launched"
    assert await engine.add() == "added"
    assert engine.schedule(output) is output
    engine.take()
    recorder._write()
    launch, add, schedule, take = records(tmp_path)
    assert (launch.name, add.name, schedule.name, take.name) == (LAUNCH, ADDED, SCHEDULE, READ)
    assert (schedule.owner, take.owner) == (0, 1)
    assert launch.seconds >= 0.02 > launch.cpu
    assert (add.seconds, add.cpu) == (0.0, 0.0)
    assert (schedule.prompts, schedule.tokens) == (2, 64)
    assert launch.began < add.began < schedule.began


def test_processes_record_only_with_the_environment(tmp_path: Path) -> None:
    program = "import sys; print([type(one).__module__ for one in sys.meta_path])"

    def finders(extra: dict[str, str]) -> str:
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **extra},
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout

    assert "rheostat_bench.traced" in finders(environment(tmp_path))
    assert "rheostat_bench.traced" not in finders({})


def test_a_process_and_its_fork_write_all_their_records(tmp_path: Path) -> None:
    program = """
import os, sys
from pathlib import Path
from rheostat_bench.traced import _Recorder

call = _Recorder(Path(sys.argv[1])).wrap(lambda: None, "x")
call()
child = os.fork()
for _ in range(2 if child else 3):
    call()
if child:
    os.waitpid(child, 0)
sys.exit()
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert sorted(len(path.read_text().splitlines()) for path in tmp_path.iterdir()) == [3, 3]
    assert len(records(tmp_path)) == 6


def burst_at(start: float, late: float = 0.0, *, steps: int = 3) -> tuple[Burst, list[Record]]:
    """A burst of three streams and its records, some of which come `late` seconds later."""

    def stream(number: int) -> Streamed:
        began, first = start + 0.001 * number, start + late + 0.05 + number
        return streamed(began, [first, start + 5.0], 2)

    at = start + late
    found = [Record(IN_CORE, at + 0.002 * number, 0.0, 0.0) for number in (1, 2, 3)]
    found += [
        Record(SCHEDULE, at + 0.003, 0.0, 0.0, 1, 32),
        Record(LAUNCH, at + 0.004, 0.020 + late, 0.015),
        Record(SAMPLE, at + 0.025 + late, 0.001, 0.001),
        Record(SCHEDULE, at + 0.030, 0.0, 0.0, 0, 1),  # no prompt begins
        Record(LAUNCH, at + 0.031, 0.005, 0.005),
        Record(SAMPLE, at + 0.037, 0.001, 0.001),
        Record(UPDATE, at + 0.062, 0.0, 0.0),
        Record(UPDATE, at + 0.065, 0.0, 0.0),
    ]
    if steps == 3:
        found += [
            Record(SCHEDULE, at + 0.070, 0.0, 0.0, 2, 65),
            Record(LAUNCH, at + 0.071, 0.030, 0.025),
            Record(SAMPLE, at + 0.102, 0.001, 0.001),
            Record(UPDATE, at + 0.110, 0.0, 0.0),
        ]
    return Burst("idle", [stream(number) for number in range(3)]), found


def test_the_figures_are_medians_of_bursts_and_of_their_steps() -> None:
    made = [burst_at(100.0), burst_at(200.0, 0.001, steps=2), burst_at(300.0, 0.009)]
    found = figures([burst for burst, _ in made], [one for _, some in made for one in some])
    assert found["called"] == pytest.approx([0.0, 1.0, 2.0])
    assert found[IN_CORE] == pytest.approx([3.0, 5.0, 7.0])
    assert found["first_token"] == pytest.approx([51.0, 1051.0, 2051.0])
    assert found["last_token"] == pytest.approx([5000.0, 5000.0, 5000.0])
    assert "accepted" not in found
    assert found["unmatched"] == 0
    first = {"prompts": 1, "tokens": 32, "scheduled": 4.0, "launch": 21.0, "launch_cpu": 15.0}
    second = {"prompts": 0, "tokens": 1, "scheduled": 31.0, "launch": 5.0, "launch_cpu": 5.0}
    third = {"prompts": 2, "tokens": 65, "scheduled": 74.5, "launch": 30.0, "launch_cpu": 25.0}
    assert found["steps"] == [
        {**first, "sampled": 28.0, "processed": 63.0},
        {**second, "sampled": 39.0, "processed": 66.0},
        {**third, "sampled": 107.5, "processed": 114.5},
    ]


def test_the_first_and_last_tokens_that_the_server_reads_are_counted() -> None:
    burst, some = burst_at(100.0)
    read = [
        Record(READ, 100.0 + at, 0.0, 0.0, owner=owner)
        for at, owner in ((0.04, 7), (0.05, 8), (0.06, 7), (0.09, 9), (0.1, 8))
    ]
    found = figures([burst], [*some, *read])
    assert found["read"] == pytest.approx([40.0, 50.0, 90.0])
    assert found["last_read"] == pytest.approx([60.0, 90.0, 100.0])


@pytest.mark.parametrize("missing", [LAUNCH, SAMPLE])
def test_a_burst_with_missing_records_has_no_steps(missing: str) -> None:
    (burst, some), (whole, all_of_it) = burst_at(100.0), burst_at(200.0, 0.001)
    lost = [one for one in some if one.name != missing]
    found = figures([burst, whole], [*lost, *all_of_it])
    assert found["unmatched"] == 1
    assert isinstance(found["steps"], list)
    assert [step["scheduled"] for step in found["steps"]] == pytest.approx([4.0, 31.0, 71.0])
