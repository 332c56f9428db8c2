"""The benchmark of sweeps: which cells it runs, and its figures."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rheostat_bench.bars import read_bars
from rheostat_bench.sweep_arms import (
    PREFILL,
    SINGLES,
    SWEEP,
    Amounts,
    Bench,
    Beside,
    Measured,
    Neighbours,
    Result,
    cells_of,
    measure,
    measure_neighbours,
    positions_of,
    quarters,
    time_streams,
    worst,
)
from rheostat_bench.sweep_clients import (
    Client,
    Gaps,
    LateError,
    Load,
    Single,
    SweptPairs,
    new_prompts,
    singles_grid,
)
from rheostat_bench.sweep_references import Cell
from rheostat_bench.sweeps import arguments_of, save, show, summary
from rheostat_bench.tables import tables


@pytest.mark.parametrize(
    ("length", "layers", "cells", "count"), [(40, 36, 1440, 40), (200, 36, 1440, 40), (9, 28, 1, 2)]
)
def test_positions_are_spread_evenly(length: int, layers: int, cells: int, count: int) -> None:
    positions = positions_of(length, layers, cells)
    assert (len(positions), positions[0], positions[-1]) == (count, 0, length - 1)
    steps = np.diff(positions)
    assert steps.max() - steps.min() <= 1


def test_cells_are_of_these_positions_and_the_same_every_time() -> None:
    every = cells_of(3, [0, 5], 100)
    assert sorted(every) == [Cell(layer, at) for layer in range(3) for at in (0, 5)]
    assert cells_of(3, [0, 5], 4) == cells_of(3, [0, 5], 4)
    assert len(set(cells_of(3, [0, 5], 4))) == 4


def test_prompts_are_new_and_of_a_length() -> None:
    one, other = new_prompts(40), new_prompts(40)
    assert {len(one.clean), len(one.corrupt)} == {40}
    assert one.clean != one.corrupt
    assert one.corrupt != other.corrupt


def test_only_cells_of_both_are_compared() -> None:
    grid = singles_grid(1.0, (2, 3), [Single(Cell(1, 2), -1.0), Single(Cell(0, 0), -2.0)]).largest
    wanted = np.full((2, 3), np.nan)
    assert worst(grid, wanted) is None
    wanted[1, 2], wanted[0, 1] = -1.5, 7.0
    assert worst(grid, wanted) == 0.5


@pytest.mark.parametrize("length", [4, 7, 40])
def test_quarters_are_all_positions_once(length: int) -> None:
    groups = quarters(length)
    assert [position for group in groups for position in group] == list(range(length))
    assert len(groups) == 4
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


@pytest.mark.parametrize(("same", "error"), [(True, 0.5), (False, None)])
def test_a_sweep_of_many_pairs_is_one_call_and_some_pairs_are_checked(
    same: bool, error: float | None
) -> None:
    asked: list[partial] = []

    def ask_one(worker: object, call: partial, seconds: float) -> object:
        asked.append(call)
        if worker == "sweeper":
            return SweptPairs(2.0, np.full((5, 2, 4), -3.0), 600, 0.5)
        return np.full((2, 4), -3.5)

    bench = Bench(
        layers=2,
        server=SimpleNamespace(),
        clients=[],
        sweeper="sweeper",
        stock=None,
        hugging_face="reference",
        transformer_lens=None,
        same_weights=same,
        limits=SimpleNamespace(ask_one=ask_one),
        save=lambda _: None,
    )
    assert bench.pairs(12, 5, 64) == Result(2.0, 40, 480, 600, error, 0.5)
    sweep, *checks = asked
    assert [len(sweep.keywords[name]) for name in ("pairs", "groups")] == [5, 4]
    pairs = sweep.keywords["pairs"]
    assert [check.keywords["prompts"] for check in checks] == (pairs[::2] if same else [])


@pytest.fixture
def measured() -> Measured:
    """Two turns of a sweep beside stock vLLM."""
    sweep = [Result(seconds, 10, 400, 200, error) for seconds, error in ((1.0, 0.1), (2.0, 0.3))]
    turns = {PREFILL: {"40": [Result(1.0, 20, 800, 800, None)]}, SWEEP.format(16): {"40": sweep}}
    turns[SINGLES] = {"40": [Result(5.0, 10, 400, None, None)]}
    felt = {
        "alone": [Neighbours(32, 5.0, 6.0, 5.0, 6400.0, 0.0)],
        "beside a sweep": [Neighbours(32, 5.5, 5.4, 5.5, 6400.0, 9.0)],
    }
    return Measured(turns, felt, {"sweep": {"server, main thread": 900.0}})


def test_a_sweep_stands_beside_the_prefill(
    measured: Measured, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    row = summary(measured.turns)[SWEEP.format(16)]["40"]
    assert row == {
        "cells": 10.0,
        "cells_per_s": 7.5,
        "tokens_per_s": 300.0,
        "computed_tokens_per_cell": 20.0,
        "answer_error": 0.3,
        "share_of_prefill": 0.375,
        "times_singles": 3.75,
    }
    show(measured)
    out = capsys.readouterr().out
    for said in (
        "37.5% of prefill,   3.8 x single error 0.3000",
        "p99   6.00 ms",
        "server, main thread 900",
        "3.8 x single",
    ):
        assert said in out
    save(tmp_path / "sweeps.json", {"benchmark": "sweeps", "device": "CPU"}, measured)
    picture = read_bars(tmp_path / "sweeps.json")
    assert picture is not None
    shares, waits = picture.panels
    assert shares.bars[SWEEP.format(16)]["40 tokens"].value == 0.375
    assert waits.bars["beside a sweep"]["p99"].value == 5.4
    cells, felt = tables(tmp_path / "sweeps.json")
    assert "| sweep, 16 cells at a time | 7.5 | 37.5% | 3.8 |" in cells
    assert "| beside a sweep | 5.50 (+10.0%) | 5.40 (\N{MINUS SIGN}10.0%) | 6400 | 9.0 |" in felt
    content = json.loads((tmp_path / "sweeps.json").read_text())
    assert content["turns"][PREFILL]["40"][0]["tokens"] == 800
    assert content["neighbours"]["alone"][0]["streams"] == 32


def test_a_run_without_shares_and_streams_has_no_picture(tmp_path: Path) -> None:
    pairs = Measured({"pairs": {"40": [Result(2.0, 40, 480, 600, None, 0.5)]}})
    save(tmp_path / "sweeps.json", {"benchmark": "sweeps", "device": "CPU"}, pairs)
    assert read_bars(tmp_path / "sweeps.json") is None
    (cells,) = tables(tmp_path / "sweeps.json")
    assert "| pairs | 20.0 |  |  |" in cells


def test_a_run_that_is_cut_short_can_be_written(tmp_path: Path) -> None:
    write = partial(save, tmp_path / "sweeps.json", {})
    write(Measured())
    assert json.loads((tmp_path / "sweeps.json").read_text())["summary"] == {}


def test_the_issues_lengths_are_the_default() -> None:
    arguments = arguments_of(["--out", "results"])
    assert (arguments.shape, arguments.lengths) == ("qwen3-8b", [40, 200])


def test_only_the_arms_that_were_asked_for_run() -> None:
    steps: list[str] = []
    bench: Any = SimpleNamespace(layers=2, attempt=lambda step, run: steps.append(step))
    amounts = Amounts(8, 8, 8, 8, [16], 1)
    measure(bench, [40, 200], amounts, lambda: None, ["neighbours"])
    assert steps == ["neighbours"]
    measure(bench, [40, 200], amounts, lambda: None, ["pairs", "references", "sweeps"])
    assert steps.pop() == "many pairs"
    assert steps[1:] == [
        f"{arm}, {length} tokens" for arm in ("sweeps", "references") for length in (40, 200)
    ]


class Machine:
    """Fakes the processes of a run: streams get a token every 5 ms, and now and then after 20 ms.

    One in 50 gaps is long beside a load.
    """

    def __init__(self) -> None:
        self.beside = ""
        self.loads: list[tuple[str, object]] = []
        self.stream_limits: dict[int, float] = {}
        """The seconds that a call may take, by the number of tokens of each of its streams."""

    def ask(self, workers: list[object], calls: list[partial], seconds: float) -> list[Gaps]:
        for call in calls:
            assert call.func is Client.stream
            self.stream_limits[call.keywords["tokens"]] = seconds
        gaps = [20.0 if self.beside and at % 50 == 0 else 5.0 for at in range(1000)]
        return [Gaps(10.0, 1001, gaps, [5.0], 100.0, 110.0) for _ in calls]

    def ask_one(self, worker: object, call: object, seconds: float) -> object:
        if call is Client.end_load:
            self.beside = ""
            return [90.0, *(100.0 + number / 10 for number in range(100)), 111.0]
        assert isinstance(call, partial)
        self.beside = call.func.__name__
        self.loads.append((self.beside, call.keywords.get("load")))
        return None


def test_streams_beside_a_sweep_stand_beside_as_many_prompts() -> None:
    machine, measured = Machine(), Measured()
    bench: Any = SimpleNamespace(
        clients=[object()],
        sweeper=object(),
        limits=machine,
        measured=measured,
        save=lambda _: None,
    )
    measure_neighbours(bench, Beside(32, 100, 2, 40, 64), normal=False)
    alone, background, one_by_one, short, bursts = measured.neighbours.values()
    assert [(one.p99_ms, one.longer_share, one.cells_per_s) for one in alone] == [(5, 0, 0)] * 2
    assert [(one.p99_ms, one.longer_share) for one in background] == [(20, 0.02)] * 2
    assert {one.longer_ms for one in background} == {20.0}
    assert {one.cells_per_s for one in (*background, *one_by_one, *short, *bursts)} == {10.0}
    assert machine.loads[1:4] == [
        ("begin_prompts", Load(40, 10.0, 1)),
        ("begin_prompts", Load(2, 10.0, 1)),
        ("begin_prompts", Load(40, 10.0, 64)),
    ]


@pytest.mark.parametrize("tokens", [64, 500, 10_000])
def test_streams_may_take_a_quarter_of_a_second_for_a_token(tokens: int) -> None:
    """A token takes up to 0.19 s beside a normal sweep on a CPU of two cores."""
    machine = Machine()
    bench: Any = SimpleNamespace(clients=[object()], limits=machine)
    time_streams(bench, 8, tokens)
    assert machine.stream_limits[tokens] >= 60 + tokens / 4


async def test_prompts_are_sent_in_bursts_until_the_load_ends() -> None:
    lengths: list[int] = []

    async def generate(prompt: list[int], **options: object) -> None:
        assert options == {"max_tokens": 1, "temperature": 0}
        lengths.append(len(prompt))

    engine: Any = SimpleNamespace(generate=generate)
    client = Client(engine)
    await client.begin_prompts(Load(7, 1000.0, 4))
    while len(lengths) < 8:
        await asyncio.sleep(0.001)
    arrivals = await client.end_load()
    assert set(lengths) == {7}
    assert len(arrivals) % 4 == 0
    assert arrivals == sorted(arrivals)


async def test_a_load_that_fails_is_reported() -> None:
    async def sweep(*_: object, **options: object) -> None:
        raise ValueError("no sweep")

    engine: Any = SimpleNamespace(sweep=sweep)
    with pytest.raises(ValueError, match="no sweep"):
        await Client(engine).begin_sweeps(40, 64, "background")


async def test_a_sweep_of_many_pairs_that_ends_too_late_says_how_far_it_got() -> None:
    async def sweep(*_: object, progress: Callable[[int, int], None], **options: object) -> None:
        for done in range(4):
            progress(done, 8)
        await asyncio.Event().wait()

    engine: Any = SimpleNamespace(sweep=sweep)
    pairs = [new_prompts(8) for _ in range(5)]
    with pytest.raises(LateError, match="3 cells of 5 pairs each had come"):
        async with asyncio.timeout(0.01):
            await Client(engine).sweep_pairs(pairs, quarters(8), 64)


async def test_streams_beside_a_sweep_begin_after_its_first_cell() -> None:
    cell = asyncio.Event()

    async def sweep(*_: object, progress: Callable[[int, int], None], **options: object) -> None:
        progress(0, 8)
        await cell.wait()
        progress(1, 8)
        await asyncio.Event().wait()

    engine: Any = SimpleNamespace(sweep=sweep)
    client = Client(engine)
    begun = asyncio.create_task(client.begin_sweeps(40, 64, "background"))
    await asyncio.sleep(0.01)
    assert not begun.done()
    cell.set()
    await begun
    assert len(await client.end_load()) == 1
