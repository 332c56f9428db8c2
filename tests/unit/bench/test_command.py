"""`rheostat bench` lists benchmarks, runs them, and reports unknown or missing ones."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from rheostat._cli import main
from rheostat_bench.__main__ import benchmarks


def rheostat(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rheostat", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_lists_every_benchmark_with_what_it_measures() -> None:
    done = rheostat()
    assert done.returncode == 0, done.stderr
    for name, summary in benchmarks().items():
        assert summary
        assert f"  {name:14}{summary}\n" in done.stdout
    assert {"tpot", "isolation", "soak"} <= benchmarks().keys()


def test_it_hands_a_benchmark_its_arguments(tmp_path: Path) -> None:
    done = rheostat("tables", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    done = rheostat("isolation", "--seconds", "no")
    assert done.returncode == 2
    assert "--seconds: invalid float value: 'no'" in done.stderr


def test_a_name_that_there_is_not_is_answered_with_those_that_there_are() -> None:
    done = rheostat("tpto")
    assert done.returncode == 2
    assert "no benchmark 'tpto'; there are " in done.stderr
    assert "tpot" in done.stderr


def test_without_the_benchmarks_it_says_how_to_install_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rheostat._cli.bench.find_spec", lambda name: None)
    assert importlib.util.find_spec("rheostat_bench") is not None
    assert main(["bench"]) == 1
    assert "pip install ./bench" in capsys.readouterr().err
