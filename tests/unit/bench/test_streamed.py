"""The benchmark of streamed rows: what is timed, what its figures are, and how they are shown."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import rheostat
from rheostat_bench import plot
from rheostat_bench.bars import Bar, read_bars
from rheostat_bench.served import prompts
from rheostat_bench.streamed import (
    ARMS,
    INLINE,
    PLAIN,
    STOCK,
    SUBSCRIBED,
    Asked,
    Workload,
    ask,
    ask_stock,
    milliseconds,
    summary,
)
from rheostat_bench.tables import tables
from rheostat_bench.watching import Watched, Watcher

from ..server.conftest import Running
from .pages import DOCS, PAGES

CAPTURE = rheostat.Capture("resid_post", layers=1)
WANTED = [[1, 2, 3], [4, 5]]
BATCH = Workload("batch of 3", 3, 32, 5, 1)
LONG = Workload("512 tokens", 1, 512, 1, 1)
ASKED = [
    Asked(began=10.0, first_at_client=10.3, ended=11.0, first=0.25, last=0.65, rows=0),
    Asked(began=10.1, first_at_client=10.3, ended=12.0, first=0.125, last=1.0, rows=0),
    Asked(began=10.2, first_at_client=10.3, ended=11.5, first=0.5, last=1.0, rows=0),
]


def test_a_turn_is_the_median_request_and_the_whole_batch() -> None:
    assert milliseconds(BATCH, ASKED, 0.0) == {
        "per_token": pytest.approx(125.0),
        "first_token": pytest.approx(250.0),
        "first_token_at_client": pytest.approx(200.0),
        "whole": pytest.approx(2000.0),
    }


def test_a_batch_lasts_until_a_subscriber_has_its_last_row() -> None:
    assert milliseconds(BATCH, ASKED, 12.5)["whole"] == pytest.approx(2500.0)
    assert milliseconds(BATCH, ASKED, 11.5)["whole"] == pytest.approx(2000.0)


def test_one_token_has_no_time_per_token() -> None:
    assert list(milliseconds(LONG, ASKED[:1], 0.0)) == [
        "first_token",
        "first_token_at_client",
        "whole",
    ]


def times(stock: float, plain: float, inline: float, subscribed: float) -> dict[str, object]:
    medians = dict(zip(ARMS, (stock, plain, inline, subscribed), strict=True))
    return {
        arm: {"batch of 3": [[median - 1.0, median + 1.0, median, median, median]]}
        for arm, median in medians.items()
    }


def test_arms_are_set_beside_stock_and_beside_those_without_capture() -> None:
    tables = summary({"per_token": times(4.0, 5.0, 6.0, 7.0)})
    assert list(tables["per_token"]) == [STOCK, PLAIN, INLINE, SUBSCRIBED]
    assert tables["per_token"][INLINE]["batch of 3"] == {
        "median_ms": 6.0,
        "low_ms": 6.0,
        "high_ms": 6.0,
        "to_stock": 1.5,
        "to_plain": 1.2,
        "over_plain_ms": 1.0,
    }


def test_the_file_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables = summary(
        {"per_token": times(4.0, 5.0, 6.0, 7.0), "first_token": times(40.0, 50.0, 60.0, 70.0)}
    )
    path = tmp_path / "streamed.json"
    path.write_text(json.dumps({"benchmark": "streamed", "device": "CPU", "summary": tables}))
    found = read_bars(path)
    assert found is not None
    per_token, first_token = found.panels
    assert per_token.bars[SUBSCRIBED] == {"batch of 3": Bar(7.0, 7.0, 7.0)}
    drawn = [patch.get_width() for patch in plot.draw(found).axes[1].patches]
    assert drawn == [row["batch of 3"].value for row in first_token.bars.values()]


def test_captures_are_shown_beside_stock_and_beside_those_without(tmp_path: Path) -> None:
    long = {arm: {"512 tokens": [[30.0, 40.0, 50.0]]} for arm in ARMS}
    measured = {"per_token": times(4.0, 5.0, 6.0, 7.0), "first_token": long}
    measured |= {"first_token_at_client": long}
    measured["whole"] = {arm: {"batch of 3": [[400.0]], **long[arm]} for arm in ARMS}
    path = tmp_path / "streamed.json"
    path.write_text(json.dumps({"benchmark": "streamed", "summary": summary(measured)}))
    per_token, prompt, whole = (one.splitlines() for one in tables(path))
    assert per_token[2] == f"| {STOCK}, ms per token |  | 4.000 |"
    assert f"| {INLINE} | {STOCK} | +50.00 % (+50.00 to +50.00) |" in per_token
    assert f"| {INLINE} | {PLAIN} | +20.00 % (+20.00 to +20.00) |" in per_token
    spread = "40.0 (35.0 to 45.0)"
    assert prompt[-1] == f"| {SUBSCRIBED} | {spread} | {spread} | {spread} |"
    assert whole[-1] == f"| {SUBSCRIBED} | 400.0 (400.0 to 400.0) |"


@pytest.mark.parametrize(
    "path", sorted(DOCS.glob("*/streamed.json")), ids=lambda path: path.parent.name
)
def test_the_page_shows_the_file(path: Path) -> None:
    result = json.loads(path.read_text())
    assert summary(result["times_ms"]) == result["summary"]
    shown = tables(path)
    assert len(shown) == 3
    for one in shown:
        assert one in PAGES


async def test_requests_over_grpc_bring_every_row_and_the_servers_times(running: Running) -> None:
    async with rheostat.aio.connect(f"127.0.0.1:{running.server.port}") as engine:
        captured = await ask(engine, WANTED, 4, CAPTURE)
        plain = await ask(engine, WANTED, 4, None)
    workload = Workload("", 1, 3, 4, 1)
    assert [one.rows for one in captured] == [workload.rows, workload.rows - 1]
    assert [one.rows for one in plain] == [0, 0]
    for one in (*captured, *plain):
        assert one.began < one.first_at_client <= one.ended
        assert 0 < one.first <= one.last <= one.ended - one.began


class FakeStock:
    """Says first that nothing has been sampled."""

    def stream(self, prompt: list[int], tokens: int) -> AsyncIterator[object]:
        async def outputs() -> AsyncIterator[object]:
            for token_ids in ([], *([7] for _ in range(tokens))):
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=token_ids)])
                await asyncio.sleep(0.02)

        return outputs()


async def test_stocks_first_token_is_the_first_that_was_sampled() -> None:
    first, second = await ask_stock(FakeStock(), WANTED, 3)  # type: ignore[arg-type]  # stands for it
    for one in (first, second):
        assert 0 < one.first < one.last
        assert one.first_at_client - one.began == pytest.approx(one.first)
        assert one.ended - one.began == pytest.approx(one.last)


async def beside(running: Running, requests: int | None) -> Watched:
    """What a subscriber has once two requests have run."""
    target = f"127.0.0.1:{running.server.port}"

    async def watched() -> Watched:
        with rheostat.connect(target) as engine:
            watcher = Watcher(engine)
            options = rheostat.SubscribeOptions(every=True, capture=CAPTURE)
            await watcher.open(options, requests)
            async with rheostat.aio.connect(target) as asker:
                await ask(asker, WANTED, 4, None)
            return await (watcher.close() if requests is None else watcher.finish())

    return await asyncio.to_thread(asyncio.run, watched())


async def test_a_subscriber_reads_every_row_of_so_many_requests(running: Running) -> None:
    assert (await beside(running, 2)).rows == 6 + 5


async def test_one_that_stands_still_reads_none(running: Running) -> None:
    assert await beside(running, None) == Watched(0, 0.0)


def test_no_two_prompts_are_alike() -> None:
    made = prompts(50, 32) + prompts(50, 32)
    assert len({tuple(prompt) for prompt in made}) == 100
    assert {len(prompt) for prompt in made} == {32}
