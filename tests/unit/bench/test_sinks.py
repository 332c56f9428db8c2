"""The benchmark of sinks works, and its file is what the documentation shows."""

import json
import subprocess
import sys
from pathlib import Path

from rheostat_bench.sinks import ARMS, tables

ROOT = Path(__file__).parents[3]


def test_every_arm_is_measured(tmp_path: Path) -> None:
    small = "--requests 2 --layers 2 --positions 3 --width 4 --repeats 1"
    command = [sys.executable, "-m", "rheostat_bench.sinks", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, *small.split()], capture_output=True, text=True, check=True, timeout=120
    )
    result = json.loads((tmp_path / "sinks.json").read_text())
    assert list(result["summary"]) == ["disk", *(arm.name for arm in ARMS)]
    assert done.stdout == tables(result) + "\n"
    files = {name: row["files"] for name, row in result["summary"].items()}
    assert (files["per_file, npz"], files["packed, npz"], files["sharded, npz"]) == (7, 5, 3)


def test_the_documented_table_is_that_of_the_file() -> None:
    result = json.loads((ROOT / "docs/benchmarks/cpu/sinks.json").read_text())
    assert tables(result) in (ROOT / "docs/sinks.md").read_text()
