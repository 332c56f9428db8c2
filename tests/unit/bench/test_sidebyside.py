"""The benchmark of everything side by side: its figures, and what it asks of whom."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from rheostat import _cli
from rheostat_bench import sidebyside
from rheostat_bench.bars import Bar, read_bars
from rheostat_bench.served_process import copy_tokenizer
from rheostat_bench.shapes import write_shape
from rheostat_bench.sidebyside import (
    ARMS,
    IDLE,
    ONE_GATE,
    OWN_GATES,
    STEERED_ONE,
    STOCK,
    Options,
    measure,
    server_flags,
    spread,
    summary,
)
from rheostat_bench.tables import tables
from rheostat_bench.turns import Streamed, Turn, streamed, turn
from rheostat_server.config import ServerConfig

from .pages import DOCS, PAGES


def test_gates_differ_from_request_to_request_only_if_each_has_its_own() -> None:
    options = Options(layer=4)

    def gates(arm: str) -> set[str]:
        (one,), (other,) = (options.of(arm)["steering"] for _ in range(2))
        return {str(one.gate), str(other.gate)}

    assert len(gates(ONE_GATE)) == 1
    assert len(gates(OWN_GATES)) == 2


def test_a_turn_counts_from_the_first_call_to_the_last_token() -> None:
    streams = [
        Streamed(10.0, 10.5, 11.0, 12.5, 5, 2, 3),
        Streamed(11.0, 12.0, 12.0, 14.0, 3, 2, 4),
    ]
    assert turn(streams, 20, 9) == Turn(
        tokens_per_s=2.0,
        requests_per_s=0.5,
        per_token_ms=750.0,
        second_half_per_token_ms=875.0,
        together_per_token_ms=0.0,
        first_token_ms=750.0,
        first_token_of_burst_ms=1250.0,
        last_token_of_burst_ms=3250.0,
        lost_rows=4,
    )


def test_requests_of_one_token_have_no_time_per_token() -> None:
    found = turn([streamed(0.0, [0.5], 1)], 0, 0)
    assert (found.per_token_ms, found.second_half_per_token_ms) == (0.0, 0.0)


def test_the_later_time_per_token_leaves_out_waits_for_the_prompts_of_others() -> None:
    waited = streamed(0.0, [1.0, 5.0, 5.5, 6.0], tokens=4)
    assert waited == Streamed(0.0, 1.0, 5.0, 6.0, 4, 2, 0, (1.0, 5.0, 5.5, 6.0))
    found = turn([waited], 0, 0)
    assert found.per_token_ms == pytest.approx(5000 / 3)
    assert found.second_half_per_token_ms == 500.0
    chunks = streamed(0.0, [1.0, 5.0, 5.5, 6.0], tokens=8)
    assert turn([chunks], 0, 0).second_half_per_token_ms == 250.0
    merged = streamed(0.0, [1.0, *[4.0] * 4, *[7.0] * 3], tokens=8)
    assert turn([merged], 0, 0).second_half_per_token_ms == 1000.0


def test_the_time_while_all_streams_run_leaves_out_admissions_and_ends() -> None:
    one = streamed(0.0, [1.0, 4.0, 4.5, 5.0, 9.0], tokens=5)  # 0.5 s from 4 to 5
    other = streamed(0.0, [3.5, 4.25, 5.25], tokens=6)  # chunks of two tokens
    assert turn([one, other], 0, 0).together_per_token_ms == pytest.approx(
        1e3 * (0.5 + 1.75 / 4) / 2
    )
    apart = [streamed(0.0, [1.0, 2.0], tokens=2), streamed(0.0, [3.0, 4.0], tokens=2)]
    assert turn(apart, 0, 0).together_per_token_ms == 0.0


def test_every_token_of_a_shape_has_a_text(tmp_path) -> None:
    path = write_shape("qwen3-0.6b", tmp_path)
    copy_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokens = int(json.loads((path / "config.json").read_text())["vocab_size"])
    assert tokenizer.get_vocab_size() == tokens
    assert all(tokenizer.decode([token]) for token in range(3, tokens, 97))
    assert tokenizer.decode([tokens - 2, tokens - 1]) == f" w{tokens - 2} w{tokens - 1}"


def test_shares_are_those_of_stock() -> None:
    quick = [Turn(100.0, 1.0, 10.0, 10.0, 10.0, 50.0, 60.0, 99.0, 0)] * 3
    slow = [
        Turn(tokens, 1.0, 12.0, 12.0, 12.0, 80.0, 85.0, 99.0, 2) for tokens in (90.0, 70.0, 80.0)
    ]
    table = summary({STOCK: {"8": quick}, IDLE: {"8": slow}})
    row = table[IDLE]["8"]
    assert (row["tokens_per_s"], row["share"], row["lost_rows"]) == (80.0, 0.8, 6.0)
    assert row["per_token_to_stock"] == pytest.approx(1.2)
    assert row["first_token_later_ms"] == pytest.approx(30.0)


def test_arms_take_turns_after_a_warm_up(capsys) -> None:
    asked: list[tuple[str, int, int]] = []

    def arm(name: str):
        def run(wanted: list[list[int]], tokens: int) -> Turn:
            asked.append((name, len(wanted), tokens))
            return Turn(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0)

        return run

    saved: list[dict[str, list[str]]] = []

    def save(turns) -> None:
        saved.append({name: list(by) for name, by in turns.items()})
        assert {len(some) for by in turns.values() for some in by.values()} == {2}

    runs = {STOCK: arm("a"), IDLE: arm("b")}
    turns: dict[str, dict[str, list[Turn]]] = {}
    measure(runs, [2], 7, 2, turns, save)
    names = [name for name, _, _ in asked]
    assert names == ["a", "b", "a", "b", "b", "a"] * 2
    assert {(count, tokens) for _, count, tokens in asked} == {(2, 7), (8, 1)}
    workloads = ["2", "requests of one token"]
    assert saved == [
        {STOCK: workloads[:1], IDLE: workloads[:1]},
        {STOCK: workloads, IDLE: workloads},
    ]
    assert "requests/s" in capsys.readouterr().out
    measure(runs, [2], 7, 3, turns, save=lambda _: None)
    assert {len(some) for by in turns.values() for some in by.values()} == {5}, "a second start's"


def test_arms_of_a_repeat_get_the_same_prompts_if_they_shall(capsys) -> None:
    given: dict[str, list[list[list[int]]]] = {STOCK: [], IDLE: []}

    def arm(name: str):
        def run(wanted: list[list[int]], tokens: int) -> Turn:
            given[name].append(wanted)
            return Turn(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0)

        return run

    runs = {name: arm(name) for name in given}
    for same in (False, True):
        for prompts in given.values():
            prompts.clear()
        measure(runs, [2], 7, 2, {}, lambda _: None, same_prompts=same)
        _, first, second, *_ = given[STOCK]
        assert first != second
        assert (given[IDLE][1:3] == [first, second]) is same
    assert "requests/s" in capsys.readouterr().out


def test_the_same_prompts_are_refused_for_arms_that_share_kv(monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        "sys.argv", ["sidebyside", "--out", ".", "--same-prompts", "--arms", IDLE, ONE_GATE]
    )
    with pytest.raises(SystemExit):
        sidebyside.main()
    assert f"find each other's KV: {IDLE}\n" in capsys.readouterr().err


def test_options_that_the_benchmark_itself_sets_are_refused(monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        "sys.argv", ["sidebyside", "--out", ".", "--options", "seed=1", "port=1", "front-ends=4"]
    )
    with pytest.raises(SystemExit):
        sidebyside.main()
    assert "the benchmark itself sets front-ends, port\n" in capsys.readouterr().err


def test_every_process_gets_a_share_of_the_prompts() -> None:
    prompts = [[number] for number in range(5)]
    workers = [object(), object(), object()]
    assert spread(prompts, workers) == [[[0], [3]], [[1], [4]], [[2]]]
    assert spread(prompts[:2], workers) == [[[0]], [[1]]]


def test_the_server_knows_every_flag() -> None:
    config = ServerConfig(
        model=str(Path.cwd()),
        load_format="dummy",
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=8 << 30,
        enforce_eager=True,
    )
    given = _cli._parser().parse_args(["serve", config.model, *server_flags(config, 3)])
    assert (given.front_ends, given.kv_cache_memory_mib, given.enforce_eager) == (3, 8192, True)
    assert given.max_num_batched_tokens == 8192


def _as_saved(turns) -> dict[str, object]:
    return {
        arm: {count: [one._asdict() for one in some] for count, some in by.items()}
        for arm, by in turns.items()
    }


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """A file of two arms at 8 streams and with requests of one token, in which rows were lost."""
    stock = {
        "8": [Turn(100.0, 1.0, 10.0, 10.0, 10.0, 50.0, 60.0, 100.0, 0)],
        "one": [Turn(20.0, 20.0, 0.0, 0.0, 0.0, 40.0, 40.0, 99.0, 0)],
    }
    ours = {
        "8": [Turn(90.0, 0.9, 12.0, 12.0, 12.0, 45.0, 45.0, 110.0, 3)],
        "one": [Turn(10.0, 10.0, 0.0, 0.0, 0.0, 80.0, 80.0, 99.0, 0)],
    }
    path = tmp_path / "sidebyside.json"
    content = {"benchmark": "sidebyside", "device": "CPU"}
    turns = _as_saved({STOCK: stock, IDLE: ours})
    path.write_text(
        json.dumps({**content, "summary": summary({STOCK: stock, IDLE: ours}), "turns": turns})
    )
    return path


def test_every_measure_is_shown_beside_that_of_stock(result: Path) -> None:
    rates, per_token, later, together, first, of_burst, last, lost = (
        one.splitlines() for one in tables(result)
    )
    assert rates[0] == "| tokens/s | 8 streams | one |"
    assert rates[2:] == [f"| {STOCK} | 100 | 20 |", f"| {IDLE} | 90 (90.0%) | 10 (50.0%) |"]
    assert per_token[0] == "| ms per token | 8 streams |"
    assert per_token[3] == f"| {IDLE} | 12.00 (120.0%) |"
    assert later[3] == together[3] == f"| {IDLE} | 12.00 (120.0%) |"
    assert first[3] == f"| {IDLE} | 45 (\N{MINUS SIGN}5) | 80 (+40) |"
    assert of_burst[0] == "| ms from the first stream's call to the first token | 8 streams | one |"
    assert of_burst[3] == f"| {IDLE} | 45 (\N{MINUS SIGN}15) | 80 (+40) |"
    assert lost[2:] == [f"| {IDLE} | 8 | 3 |"]
    assert last[3].split("|")[2].strip() == "110 (110.0%)"


def test_every_bar_is_judged_at_every_number_of_streams(tmp_path: Path) -> None:
    stock = {
        "32": [Turn(100.0, 1.0, 10.0, 10.0, 10.0, 50.0, 60.0, 99.0, 0)],
        "256": [Turn(200.0, 1.0, 10.0, 10.0, 10.0, 50.0, 50.0, 99.0, 0)],
    }
    ours = {
        "32": [Turn(98.5, 0.9, 10.1, 10.1, 10.1, 61.0, 61.0, 99.0, 0)],
        "256": [Turn(194.0, 0.9, 10.2, 10.1, 10.1, 80.0, 80.0, 99.0, 0)],
    }
    arms = {STOCK: stock, **{f"this server, 1 front end, {arm}": ours for arm in ARMS}}
    path = tmp_path / "sidebyside.json"
    content = {"benchmark": "sidebyside", "device": "CPU"}
    saved = {**content, "summary": summary(arms), "turns": _as_saved(arms)}
    path.write_text(json.dumps(saved))
    head, _, idle, per_token, later, *others = tables(path)[-1].splitlines()
    assert head == (
        "|  | bar | 32 streams | 256 streams "
        "| first token at 32: +10 ms | first token at 256: +30 ms |"
    )
    assert idle == "| this server, 1 front end, idle | 98% | met | **97.0%** | **+11** | met |"
    assert per_token.endswith(", idle, ms per token | +1% | met | **+2.0%** |  |  |")
    assert later.endswith(", idle, ms per token, second half | +1% | met | met |  |  |")
    assert [line.split(" | ")[0].partition("end, ")[2] for line in others] == [*ARMS[1:]]


def test_a_gate_is_compared_with_the_same_steering_turn_by_turn(tmp_path: Path) -> None:
    def some(*per_token: float) -> dict[str, list[Turn]]:
        turns = [Turn(1.0, 1.0, ms, ms, ms / 2 + 1, 1.0, 1.0, 1.0, 0) for ms in per_token]
        return {"8": turns, "requests of one token": turns}

    arms = {
        STOCK: some(10.0, 10.0, 10.0),
        f"ours, {STEERED_ONE}": some(10.0, 20.0, 40.0),
        f"ours, {ONE_GATE}": some(10.1, 20.4, 40.0),
        f"ours, {OWN_GATES}": some(11.0, 20.0, 40.0),
    }
    path = tmp_path / "sidebyside.json"
    content = {"benchmark": "sidebyside", "summary": summary(arms), "turns": _as_saved(arms)}
    path.write_text(json.dumps(content))
    assert tables(path)[-1].splitlines() == [
        "| a gate's cost per token | 8 streams |",
        "| --- | --- |",
        "| one gate | +1.00 % (+0.50 to +1.50) |",
        "| one gate, while all streams run | +0.83 % (+0.42 to +1.33) |",
        "| a gate per request | +0.00 % (+0.00 to +5.00) |",
        "| a gate per request, while all streams run | +0.00 % (+0.00 to +4.17) |",
    ]


def test_the_picture_shows_shares_and_first_tokens(result: Path) -> None:
    drawn = read_bars(result)
    assert drawn is not None
    share, first = drawn.panels
    assert share.bars[IDLE] == {"streams: 8": Bar(0.9, 0.9, 0.9)}
    assert first.bars[STOCK] == {"streams: 8": Bar(50.0, 50.0, 50.0)}


@pytest.mark.parametrize(
    "path", sorted(DOCS.glob("*/sidebyside*.json")), ids=lambda path: path.stem
)
def test_the_page_shows_every_file(path: Path) -> None:
    for one in tables(path):
        assert one in PAGES
