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


async def test_calls_are_recorded_and_return_what_they_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "traced_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    points = {"Engine.launch": LAUNCH, "Engine.add": ADDED, "Engine.schedule": SCHEDULE}
    monkeypatch.setattr(traced, "POINTS", {"traced_module": points})
    recorder = traced._Recorder(tmp_path)
    sys.meta_path.insert(0, traced._Finder(recorder))
    engine = importlib.import_module("traced_module").Engine()
    output = SimpleNamespace(scheduled_new_reqs=["a", "b"], total_num_scheduled_tokens=64)
    assert engine.launch(0.02) == "launched"
    assert await engine.add() == "added"
    assert engine.schedule(output) is output
    recorder._write()
    launch, add, schedule = records(tmp_path)
    assert (launch.name, add.name, schedule.name) == (LAUNCH, ADDED, SCHEDULE)
    assert launch.seconds >= 0.02 > launch.cpu
    assert (add.seconds, add.cpu) == (0.0, 0.0)
    assert (schedule.prompts, schedule.tokens) == (2, 64)
    assert launch.began < add.began < schedule.began


def test_processes_record_only_with_the_environment(tmp_path: Path) -> None:
    program = "import sys; print([type(one).__name__ for one in sys.meta_path])"

    def finders(extra: dict[str, str]) -> str:
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **extra},
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout

    assert "_Finder" in finders(environment(tmp_path))
    assert "_Finder" not in finders({})


def test_the_figures_follow_requests_and_steps_of_a_burst() -> None:
    def stream(began: float, first: float) -> Streamed:
        return streamed(began, [first, 10.5], 2)

    def burst_at(start: float) -> tuple[Burst, list[Record]]:
        streams = [stream(start + 0.001 * number, start + 0.05 + number) for number in range(3)]
        streams = [one._replace(last=start + 5.0) for one in streams]
        found = [Record(IN_CORE, start + 0.002 * number, 0.0, 0.0) for number in (1, 2, 3)]
        found += [
            Record(SCHEDULE, start + 0.003, 0.0, 0.0, 1, 32),
            Record(LAUNCH, start + 0.004, 0.020, 0.015),
            Record(SCHEDULE, start + 0.030, 0.0, 0.0, 2, 65),
            Record(LAUNCH, start + 0.031, 0.030, 0.025),
            Record(UPDATE, start + 0.062, 0.0, 0.0),
            Record(SCHEDULE, start + 0.070, 0.0, 0.0, 0, 3),  # computes no prompt
            Record(LAUNCH, start + 0.071, 0.005, 0.005),
            Record(UPDATE, start + 0.080, 0.0, 0.0),
        ]
        return Burst("idle", streams), found

    first, second = burst_at(100.0), burst_at(200.0)
    made = figures([first[0], second[0]], [*first[1], *second[1]])
    assert made["called"] == pytest.approx([0.0, 1.0, 2.0])
    assert made[IN_CORE] == pytest.approx([2.0, 4.0, 6.0])
    assert made["first_token"] == pytest.approx([50.0, 1050.0, 2050.0])
    assert "accepted" not in made
    assert made["steps"] == [
        {
            "prompts": 1,
            "tokens": 32,
            "scheduled": 3.0,
            "launch": 20.0,
            "launch_cpu": 15.0,
            "processed": 62.0,
        },
        {
            "prompts": 2,
            "tokens": 65,
            "scheduled": 30.0,
            "launch": 30.0,
            "launch_cpu": 25.0,
            "processed": 80.0,
        },
    ]
