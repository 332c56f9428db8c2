"""The check that runs on GPUs fails when a line of it does."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rheostat_engine.channel.events import Dose

GPU = Path(__file__).parents[2] / "gpu"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", GPU / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


verdicts = _load("verdicts")
chances = _load("chances")
with pytest.MonkeyPatch.context() as patch:  # the check's modules import each other by bare names
    patch.syspath_prepend(GPU)
    starts = _load("starts")
    offline = sys.modules["offline"]
X = np.random.default_rng(0).normal(size=(40, 64))
MOVED = X + 0.3 * np.random.default_rng(1).normal(size=(40, 64))


def doses(rows: int = 40, times: float = 1.0) -> list[Dose]:
    """What a site measures of `MOVED`, times a factor."""
    norms = np.linalg.norm(MOVED - X, axis=1)
    shares = times * norms / np.linalg.norm(X, axis=1)
    return [Dose(0, 4, rows, float(norms.sum()), float(shares.sum()), float(shares.max()))]


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (verdicts.equal("V2", "V2"), verdicts.equal("V1", "V2")),
        (verdicts.equal([3], [3]), verdicts.equal([], [3])),
        (verdicts.at_most(8.1e-7, 1e-2), verdicts.at_most(1.1e-2, 1e-2)),
        (verdicts.at_most(0.0, 0.0), verdicts.at_most(math.nan, 1e-2)),
        (verdicts.at_least(26, 1), verdicts.at_least(0, 1)),
        (verdicts.near(1.009, 1.0, 0.01), verdicts.near(0.98, 1.0, 0.01)),
        (verdicts.near(1.0, 1.0, 0.01), verdicts.near(math.nan, 1.0, 0.01)),
        (verdicts.each([True] * 24), verdicts.each([True] * 23 + [False])),
        (verdicts.each([True]), verdicts.each([])),
    ],
)
def test_a_verdict_is_ok_where_the_value_keeps_to_the_threshold(
    good: tuple[object, str, bool], bad: tuple[object, str, bool]
) -> None:
    assert (good[2], bad[2]) == (True, False)


def test_an_op_that_does_what_it_should_is_ok_in_every_line() -> None:
    lines = verdicts.judge_op("add", X, MOVED * (1 + 2**-8), MOVED, doses())
    assert [one.ok for one in lines.values()] == [True] * 4


@pytest.mark.parametrize(
    ("got", "want", "measured", "failing"),
    [
        (X, MOVED, doses(), "relative difference to numpy"),
        (MOVED * np.nan, MOVED, doses(), "relative difference to numpy"),
        (MOVED, MOVED, doses(times=1.02), "relative dose over numpy's"),
        (MOVED, MOVED, doses(rows=39), "rows measured"),
        (MOVED, MOVED, doses() * 2, "rows measured"),
        (MOVED, MOVED, [], "rows measured"),
        (X * 1.001, X * 1.001, doses(), "relative change in numpy"),
    ],
    ids=["not done", "nan", "dose", "rows", "twice", "not measured", "too little to see"],
)
def test_an_op_that_goes_wrong_fails(
    got: np.ndarray, want: np.ndarray, measured: list[Dose], failing: str
) -> None:
    lines = verdicts.judge_op("add", X, got, want, measured)
    assert not lines[f"add: {failing}"].ok


@pytest.mark.parametrize(("bad", "value", "status"), [(24, "24/24", 0), (7, "23/24, not 7", 1)])
def test_the_check_exits_1_if_a_line_fails_and_writes_every_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: int, value: str, status: int
) -> None:
    lines = {
        "idle requests": verdicts.each([number != bad for number in range(24)]),
        "captured rows": verdicts.at_most(np.float32(0.0), 1e-2),
    }
    out = tmp_path / "check.json"
    assert verdicts.conclude({"kernels": {}, "small": lines}, out) == status
    assert json.loads(out.read_text()) == {
        "kernels": {},
        "small": {
            "idle requests": {
                "value": value,
                "threshold": "all of 24",
                "ok": not status,
            },
            "captured rows": {"value": 0.0, "threshold": "<= 0.01", "ok": True},
        },
    }
    word = "FAILED" if status else "ok    "
    assert f"{word} small      idle requests: {value} (all of 24)\n" in capsys.readouterr().out


def test_a_check_without_lines_has_not_passed(tmp_path: Path) -> None:
    assert verdicts.conclude({}, tmp_path / "check.json") == 1


def test_everything_that_the_check_imports_is_there_before_it_begins() -> None:
    check = Path(__file__).parents[2] / "gpu" / "check.py"
    done = subprocess.run([sys.executable, check, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for choice in ("kernels", "small", "8b", "moe", "points", "fp8", "runners", "tp", "pp"):
        assert choice in done.stdout


def outcome(*log_probabilities: float) -> Any:
    """One that generated tokens 0, 1, ..."""
    numbered = [*enumerate(log_probabilities)]
    return offline.Outcome([i for i, _ in numbered], [{i: value} for i, value in numbered], 0)


def test_eager_starts_have_to_be_equal_in_every_bit() -> None:
    runs = {"stock eager": [outcome(-1.0), outcome(-2.0)]}
    equal = starts.compare_starts({**runs, "ours eager": [outcome(-1.0), outcome(-2.0)]})
    assert [line.ok for line in equal.values()] == [True]
    other = starts.compare_starts({**runs, "ours eager": [outcome(-1.0), outcome(-2.0000001)]})
    assert [line.ok for line in other.values()] == [False]


@pytest.mark.parametrize(
    ("differ", "by", "wrong"),
    [
        (80, 0.03, []),
        (140, 0.03, ["compiled, ours and stock: 95 % sure that a smaller share differs than"]),
        (80, 0.3, ["the same: largest difference of a log-probability"]),
    ],
)
def test_compiled_starts_may_differ_in_few_requests_and_not_far(
    differ: int, by: float, wrong: list[str]
) -> None:
    plain = [outcome(-1.0)] * 1000
    other = [outcome(-1.0 - by)] * differ + plain[differ:]
    runs = {"stock eager": plain, "ours eager": plain, "stock 1": plain, "ours 1": plain}
    lines = starts.compare_starts({**runs, "stock 2": plain, "ours 2": other})
    assert lines["stock 1 and ours 1: requests that differ, of 1000"].value == 0
    assert lines["stock 2 and ours 2: requests that differ, of 1000"].value == differ
    assert [name for name, line in lines.items() if not line.ok] == wrong


@pytest.mark.parametrize(
    ("differ", "by", "wrong"),
    [
        (0, 0.0, []),
        (6, 0.03, []),
        (7, 0.03, ["idle requests bit-identical to stock"]),
        (1, 0.3, ["idle requests and stock: largest difference of a log-probability"]),
    ],
)
def test_an_idle_batch_may_differ_from_stock_in_few_requests_and_not_far(
    differ: int, by: float, wrong: list[str]
) -> None:
    plain = [outcome(-1.0)] * 24
    lines = starts.compare_with_stock(plain, [outcome(-1.0 - by)] * differ + plain[differ:])
    assert [name for name, line in lines.items() if not line.ok] == wrong
    if differ == 1:
        assert lines["idle requests bit-identical to stock"].value == "23/24, not 0"


@pytest.mark.parametrize(
    ("count", "of", "rate"),
    [(0, 1000, 0.002991), (1, 1000, 0.004735), (10, 100, 0.1637), (4, 4, 1.0)],
)
def test_the_largest_share_that_so_few_leave_possible(count: int, of: int, rate: float) -> None:
    assert chances.upper_bound(count, of) == pytest.approx(rate, rel=1e-3)


def test_a_table_of_all_parts_comes_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {"one": verdicts.equal(1, 1), "two": verdicts.equal(1, 2)}
    verdicts.conclude({"small": lines}, tmp_path / "check.json", {"small": 61.25})
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "part         ok    of  seconds",
        "small         1     2     61.2",
        "FAILED small: two: 1 (== 2)",
        "1 of 2 as they have to be",
    ]
