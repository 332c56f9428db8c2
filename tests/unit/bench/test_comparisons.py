"""What the benchmarks ask of the engine, what their times come to, and how they are shown."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rheostat_bench import inline, plot, prefix_cache
from rheostat_bench.arms import SUITES
from rheostat_bench.bars import read_bars
from rheostat_bench.results import (
    Cell,
    Comparison,
    PrefixCache,
    configurations,
    read,
)
from rheostat_bench.shapes import SHAPES, write_shape
from rheostat_bench.summaries import empty, spread, summary
from rheostat_bench.tables import table
from rheostat_engine import OPEN_END, Band, Kind, ModelSites, Plan, Point, Site

from ..server.fakes import SITES
from .pages import DOCS, PAGES

TIMES = {
    "stock": {"1": [[4.0, 2.0], [6.0, 8.0]]},
    "steered": {"1": [[6.0, 6.0], [5.0, 7.0]]},
}
POSTS = [Site(Point.RESID_POST, layer).index for layer in range(3)]


def written(folder: Path, content: object) -> Path:
    path = folder / "result.json"
    path.write_text(json.dumps(content))
    return path


def compared(about: str) -> dict[str, object]:
    return {
        "benchmark": about,
        "shape": "tiny",
        "device": "CPU",
        "summary": summary(TIMES),
        "times_ms": TIMES,
    }


def test_a_summary_pools_the_starts_and_compares_with_the_first_arm() -> None:
    assert summary(TIMES) == {
        "stock": {
            "1": {
                "median_ms": 5.0,
                "min_ms": 2.0,
                "max_ms": 8.0,
                "to_stock": 1.0,
                "between_starts": 7 / 3,
            }
        },
        "steered": {
            "1": {
                "median_ms": 6.0,
                "min_ms": 5.0,
                "max_ms": 7.0,
                "to_stock": 1.2,
                "between_starts": 1.0,
            }
        },
    }


def test_there_is_a_list_of_its_own_for_every_arm_batch_and_start() -> None:
    times = empty(["a", "b"], [1, 8], 2)
    times["a"]["8"][1].append(1.0)
    assert times == {"a": {"1": [[], []], "8": [[], [1.0]]}, "b": {"1": [[], []], "8": [[], []]}}


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0], (3.0, 3.0)), ([1.0, 3.0], (1.5, 2.5)), ([5.0, 1.0, 3.0, 2.0, 4.0], (2.0, 4.0))],
)
def test_the_spread_is_that_of_the_middle_half(
    values: list[float], expected: tuple[float, float]
) -> None:
    assert spread(values) == expected


def test_the_time_per_token_of_a_suite_is_read_as_percent_over_stock(tmp_path: Path) -> None:
    assert read(written(tmp_path, compared("tpot, serving"))) == Comparison(
        about="tpot, serving",
        place="tiny, CPU",
        per_token=True,
        stock_ms={"1": 5.0},
        cells={
            "stock": {"1": Cell(0.0, pytest.approx(-30.0), pytest.approx(30.0))},
            "steered": {"1": Cell(pytest.approx(20.0), pytest.approx(15.0), pytest.approx(25.0))},
        },
    )


def test_inline_vectors_are_measured_by_the_batch(tmp_path: Path) -> None:
    found = read(written(tmp_path, compared("inline")))
    assert isinstance(found, Comparison)
    assert not found.per_token
    assert table(found) == (
        "|  | bs 1 |\n"
        "| --- | --- |\n"
        "| stock, ms of the whole batch | 5.000 |\n"
        "| stock's quartiles | −30.00 to +30.00 % |\n"  # noqa: RUF001
        "| steered | +20.00 % (+15.00 to +25.00) |"
    )


@pytest.mark.parametrize("content", [{"kernels": {}}, {"benchmark": "another"}, [], {}])
def test_other_files_are_passed_over(tmp_path: Path, content: object) -> None:
    assert read(written(tmp_path, content)) is None


def test_configurations_are_lines_over_their_number(tmp_path: Path) -> None:
    arms = ["stock", *(arm.name for arm in SUITES["configurations"][1:])]
    times = {arm: {"4": [[1.0 + i]]} for i, arm in enumerate(arms)}
    content = {**compared("tpot, configurations"), "summary": summary(times), "times_ms": times}
    found = read(written(tmp_path, content))
    assert isinstance(found, Comparison)
    lines = configurations(found)
    assert lines is not None
    assert {
        where: {k: cell.median for k, cell in line.items()} for where, line in lines.items()
    } == {
        "at one layer": {1: 100.0, 16: 200.0, 64: 300.0, 256: 400.0},
        "at all layers": {1: 500.0, 16: 600.0, 64: 700.0, 256: 800.0},
    }


def test_other_suites_are_no_lines(tmp_path: Path) -> None:
    found = read(written(tmp_path, compared("tpot, ops")))
    assert isinstance(found, Comparison)
    assert configurations(found) is None


def cached(warm: float) -> prefix_cache.Samples:
    whole = prefix_cache.REQUESTS * prefix_cache.SHARED
    rates = {"unread": 0.0, "cold": 0.5, "warm": warm}
    return {
        arm: {state: [whole * rate, whole * rate] for state, rate in rates.items()}
        for arm in ("stock", "steered")
    }


WAITS = {
    "stock": {"unread": [80.0, 90.0, 82.0], "cold": [20.0, 30.0, 28.0], "warm": [10.0, 9.0, 12.0]},
    "steered": {"unread": [60.0], "cold": [40.0], "warm": [20.0]},
}


def test_hit_rates_count_shared_tokens_and_gains_compare_waits() -> None:
    figures = prefix_cache.figures(cached(1.0), WAITS)
    assert figures["stock"] == {
        "hit_rate_unread": 0.0,
        "ttft_unread_ms": 82.0,
        "ttft_unread_min_ms": 80.0,
        "ttft_unread_max_ms": 90.0,
        "hit_rate_cold": 0.5,
        "ttft_cold_ms": 28.0,
        "ttft_cold_min_ms": 20.0,
        "ttft_cold_max_ms": 30.0,
        "hit_rate_warm": 1.0,
        "ttft_warm_ms": 10.0,
        "ttft_warm_min_ms": 9.0,
        "ttft_warm_max_ms": 12.0,
        "gain_over_cold": 2.8,
        "gain_over_unread": 8.2,
        "warm_to_stock": 1.0,
    }
    steered = figures["steered"]
    assert [steered[key] for key in ("gain_over_cold", "gain_over_unread", "warm_to_stock")] == [
        2.0,
        3.0,
        2.0,
    ]


def test_without_stock_nothing_is_compared_with_it() -> None:
    alone = {"steered": WAITS["steered"]}
    figures = prefix_cache.figures({"steered": cached(1.0)["steered"]}, alone)
    assert figures["steered"]["hit_rate_warm"] == 1.0
    assert "warm_to_stock" not in figures["steered"]


@pytest.mark.parametrize(("keys", "stock"), [(["unfired-gate"], False), (["stock", "alike"], True)])
def test_only_the_arms_that_are_asked_for_are_measured(
    monkeypatch, tmp_path: Path, keys: list[str], stock: bool
) -> None:
    started: list[bool] = []
    measured: list[str] = []

    class Stop(Exception):
        pass

    def start(*_args: object, stock: bool) -> object:
        started.append(stock)
        return object()

    def measure(_engines: object, arms: Sequence[prefix_cache.Arm], _repeats: int) -> None:
        measured.extend(arm.key for arm in arms)
        raise Stop

    monkeypatch.setattr(prefix_cache, "Engines", start)
    monkeypatch.setattr(prefix_cache, "measure", measure)
    command = ["prefix_cache", "--shape", "tiny", "--out", str(tmp_path), "--arms", *keys]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(Stop):
        prefix_cache.main()
    assert (started, measured) == ([stock], keys)


@pytest.mark.parametrize(
    ("shared", "block", "expected"), [(1500, 32, 1472), (1500, 16, 1488), (750, 32, 736)]
)
def test_only_whole_blocks_can_be_hit(shared: int, block: int, expected: int) -> None:
    assert prefix_cache.most(shared, block) == expected / 1500


def plans_of(name: str) -> list[Plan | None]:
    (arm,) = (arm for arm in prefix_cache.ARMS if arm.name == name)
    return [arm.plan(SITES, i) for i in range(prefix_cache.REQUESTS)]


def test_steering_alike_adds_and_ablates_at_every_layer_and_token() -> None:
    first, *others = plans_of("steered alike")
    assert first is not None
    assert [(act.kind, [site for site, _ in act.rows], act.spans) for act in first.acts] == [
        (Kind.ADD, POSTS, ((0, OPEN_END),)),
        (Kind.PULL, POSTS, ((0, OPEN_END),)),
    ]
    assert first.acts[1].bands == (Band(0.0, 0.0, 1.0),)
    assert others == [first] * (prefix_cache.REQUESTS - 1)


@pytest.mark.parametrize(
    ("name", "start"), [("decode-only, each another", 1520), ("from the middle, each another", 750)]
)
def test_each_request_is_steered_in_another_way_from_a_position_on(name: str, start: int) -> None:
    plans = plans_of(name)
    rows = {act.rows for plan in plans if plan for act in plan.acts}
    spans = {act.spans for plan in plans if plan for act in plan.acts}
    assert len(rows) == 2 * prefix_cache.REQUESTS
    assert spans == {((start, OPEN_END),)}


def test_an_inline_vector_has_a_row_for_each_site_and_is_never_the_same() -> None:
    rng = np.random.default_rng(0)
    made = [inline.brought(POSTS, SITES.width, rng) for _ in range(3)]
    assert len({digest for vectors, _ in made for digest in vectors}) == 3
    for vectors, plan in made:
        ((digest, values),) = vectors.items()
        assert values.shape == (3, SITES.width)
        (act,) = plan.acts
        assert (act.kind, act.vectors) == (Kind.ADD, (digest,))
        assert act.rows == tuple((site, (row,)) for row, site in enumerate(POSTS))


def test_new_vectors_are_loaded_in_calls_of_so_many_bytes() -> None:
    rng = np.random.default_rng(0)
    made = [inline.brought(POSTS, SITES.width, rng)[0] for _ in range(5)]
    size = sum(one.nbytes for one in made[0].values())
    for most, counts in [(size - 1, [1] * 5), (2 * size, [2, 2, 1]), (1 << 30, [5])]:
        calls = inline.in_calls(made, most)
        assert [len(call) for call in calls] == counts
        assert [digest for call in calls for digest in call] == [next(iter(one)) for one in made]


class Batches:
    """Notes what a benchmark's engines are asked to run."""

    sites = SITES

    def __init__(self) -> None:
        self.ran: tuple[set[Plan], int] = (set(), 0)
        self.dropped: list[bytes] = []

    def prompts(self, batch: int, length: int) -> list[list[int]]:
        return [[1] * length] * batch

    def run(self, start: int, prompts, plans, *, tokens: int, loads=()) -> None:
        assert plans is None or len(plans) == len(prompts)
        self.ran = (set(plans or ()), sum(map(len, loads)))

    def drop(self, start: int, digests: list[bytes]) -> None:
        self.dropped = digests


def test_an_arm_brings_as_many_vectors_as_its_name_says() -> None:
    found = {}
    for arm in inline.ARMS:
        engines = Batches()
        inline.run(engines, arm, 0, 20, 4, np.random.default_rng(0))  # type: ignore[arg-type]  # stands for engines
        plans, loaded = engines.ran
        assert len(set(engines.dropped)) == loaded
        (sites, *_) = {len(act.rows) for plan in plans for act in plan.acts} or {0}
        found[arm.name] = (len(plans), loaded, sites)
    assert found == {
        "stock": (0, 0, 0),
        "one resident vector, one layer": (1, 0, 1),
        "one resident vector, all layers": (1, 0, 3),
        "16 new vectors, one layer": (16, 16, 1),
        "16 new vectors, all layers": (16, 16, 3),
        "a new vector each, one layer": (20, 20, 1),
        "a new vector each, all layers": (20, 20, 3),
    }


def plan_counts(sites: ModelSites, suite: str) -> dict[str, int]:
    made = {arm.name: arm.plans(sites, 256) for arm in SUITES[suite]}
    return {name: len({plan for plan in plans or () if plan}) for name, plans in made.items()}


def test_an_arm_has_as_many_configurations_as_its_name_says() -> None:
    assert plan_counts(SITES, "configurations") == {
        "stock": 0,
        **{f"{k} at one layer": k for k in (1, 16, 64, 256)},
        **{f"{k} at all layers": k for k in (1, 16, 64, 256)},
    }


def test_as_many_requests_have_a_controller_as_an_arm_says() -> None:
    found = {
        arm.name: sum(plan is not None and plan.control is not None for plan in plans)
        for arm in SUITES["controllers"]
        if (plans := arm.plans(SITES, 8)) is not None
    }
    assert found == {
        "idle": 0,
        "one layer, one reading": 0,
        "controller, gains of 1": 8,
        "controller, new gains": 8,
        "controller of one request": 1,
    }


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_written_as_it_is(tmp_path: Path, name: str) -> None:
    path = write_shape(name, tmp_path)
    assert json.loads((path / "config.json").read_text()) == SHAPES[name]


def shown() -> list[Path]:
    return [path for path in sorted(DOCS.glob("*/*.json")) if read(path) is not None]


def test_there_are_results_to_show() -> None:
    assert {type(read(path)) for path in shown()} == {Comparison, PrefixCache}


@pytest.mark.parametrize("path", shown(), ids=lambda path: path.stem)
def test_the_documented_tables_are_those_of_the_files(path: Path) -> None:
    found = read(path)
    assert found is not None
    assert table(found) in PAGES


@pytest.mark.parametrize("path", shown(), ids=lambda path: path.stem)
def test_every_result_can_be_drawn_and_has_its_picture(path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = read(path)
    assert found is not None
    labels = {axes.get_xlabel() for axes in plot.draw(found).axes}
    assert labels
    assert all(labels)
    assert path.with_suffix(".png").is_file()


def barred() -> list[Path]:
    return [path for path in sorted(DOCS.glob("*/*.json")) if read_bars(path) is not None]


@pytest.mark.parametrize("path", barred(), ids=lambda path: path.stem)
def test_every_file_of_single_numbers_has_its_picture_on_the_page(path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = read_bars(path)
    assert found is not None
    for panel, axes in zip(found.panels, plot.draw(found).axes, strict=True):
        bars = [bar for row in panel.bars.values() for bar in row.values()]
        drawn = sorted(patch.get_width() for patch in axes.patches)
        assert drawn == pytest.approx(sorted(bar.value for bar in bars))
        assert all(0 < bar.low <= bar.value <= bar.high for bar in bars)
    assert path.with_suffix(".png").is_file()
    assert f"]({path.parent.name}/{path.stem}.png)" in PAGES


def test_there_are_pictures_of_single_numbers() -> None:
    assert {path.stem for path in barred()} == {
        "capture",
        "channel",
        "encodings",
        "isolation",
        "isolation-front-ends",
        "latency",
        "sidebyside-qwen3-0.6b",
        "sidebyside-qwen3-8b",
        "sidebyside-qwen3-8b-16-cores-4-front-ends",
        "sidebyside-qwen3-8b-2048",
        "sidebyside-qwen3-8b-gates",
        "sidebyside-qwen3-8b-gates-again",
        "sidebyside-qwen3-8b-gates-later",
        "sidebyside-qwen3-8b-other-host",
        "sidebyside-qwen3-8b-32-cores",
        "sidebyside-qwen3-8b-with-pauses",
        "sidebyside-qwen3-8b-4096-token-graphs",
        "sidebyside-qwen3-8b-defaults",
        "sidebyside-qwen3-8b-1024-streams",
        "sidebyside-qwen3-0.6b-defaults",
        "sidebyside-qwen3-8b-256-streams-8192-tokens",
        "sidebyside-qwen3-8b-256-streams-6144-tokens",
        "sidebyside-qwen3-8b-4096-tokens",
        "sidebyside-qwen3-8b-128-streams",
        "sidebyside-qwen3-8b-128-streams-8192-tokens",
        "sidebyside-qwen3-8b-long-prompts",
        "sidebyside-qwen3-8b-long-prompts-8192-tokens",
        "sidebyside-qwen3-8b-without-pauses",
        "sinks",
        "stalled",
        "stream",
        "streamed",
        "sweeps-qwen3-0.6b",
        "sweeps-qwen3-0.6b-neighbours",
        "sweeps-qwen3-0.6b-eight-together",
        "sweeps-qwen3-0.6b-1024-cells",
        "sweeps-qwen3-0.6b-4096-tokens",
        "sweeps-qwen3-8b-4096-tokens",
        "sweeps-qwen3-0.6b-one-run-1024-cells",
        "sweeps-qwen3-8b-one-run-1024-cells",
        "sweeps-qwen3-8b",
        "sweeps-qwen3-8b-copied-blocks",
        "sweeps-qwen3-8b-one-run",
        "sweeps-qwen3-8b-one-run-512-cells",
        "sweeps-qwen3-8b-fewer-cells",
        "sweeps-qwen3-8b-512-cells",
        "sweeps-qwen3-0.6b-512-cells",
        "sweeps-qwen3-8b-paced",
        "sweeps-tiny-36",
    }


def test_the_page_on_the_engine_gives_the_figures_of_the_serving_suite() -> None:
    found = read(DOCS / "h200" / "tpot-qwen3-8b-serving.json")
    assert isinstance(found, Comparison)
    page = (DOCS.parent / "engine.md").read_text()
    _, *arms = found.cells
    for arm in arms:
        medians = [
            f"{cell.median:+.2f} %".replace("-", "\N{MINUS SIGN}")
            for cell in found.cells[arm].values()
        ]
        assert f"| {' | '.join(medians)} |" in page


def test_benchmarks_of_the_engine_run_where_there_is_no_grpc() -> None:
    blocked = """
import importlib, sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("grpc") or name.startswith("google.rpc"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nowhere())
for name in ("tpot", "inline", "prefix_cache"):
    importlib.import_module("rheostat_bench." + name)
"""
    subprocess.run([sys.executable, "-c", blocked], check=True, env=dict(os.environ))
