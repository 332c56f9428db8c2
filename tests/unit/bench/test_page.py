"""Tables of the page on benchmarks that hold more than one file, or a part of one."""

import json
from pathlib import Path
from typing import Any

import pytest

from rheostat_bench import sidebyside
from rheostat_bench.tables import statement, tables
from rheostat_engine.settings import EngineSettings

from .pages import DOCS, PAGES

RELIABILITY = (DOCS.parent / "reliability.md").read_text()
TRACING = (DOCS.parent / "causal-tracing.md").read_text()
DYNAMIC = (DOCS.parent / "dynamic-steering.md").read_text()


def content(name: str) -> Any:
    return json.loads((DOCS / name).read_text())


def milliseconds(value: float) -> str:
    return f"{value:.1f} ms" if value < 100 else f"{value:,.0f} ms"


def test_the_way_to_the_server_is_that_of_both_files() -> None:
    here, there = content("cpu/channel.json")["summary"], content("h200/channel.json")["summary"]
    assert list(here) == list(there)
    for arm in here:
        (line,) = (line for line in PAGES.splitlines() if line.startswith(f"| {arm} |"))
        figures = [
            f"{rows['gb_per_s']:.2f} | {rows['server_cpu_s_per_gb']:.2f} s/GB"
            for rows in (here[arm], there[arm])
        ]
        assert line.endswith(f" | {' | '.join(figures)} |")


ARMS = ["stock, {}", "idle, {}", "one layer, {}", "all layers, {}"]


@pytest.mark.parametrize(
    ("prompts", "arms"),
    [
        ("512 tokens alone", ARMS),
        ("8 of 1,024 tokens", [*ARMS, "all layers, {}, all pieces at once"]),
    ],
)
def test_captured_prompts_are_those_of_the_file(prompts: str, arms: list[str]) -> None:
    shown = []
    for arm in arms:
        row = content("h200/capture.json")["summary"][arm.format(prompts)]
        times = [milliseconds(row[name]) for name in ("first_token_ms", "batch_ms")]
        last = milliseconds(row["until_last_row_ms"]) if row["bytes"] else ""
        shown.append(" | ".join([*times, last]).strip())
    lines = [line.removesuffix("|").strip() for line in PAGES.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.endswith(shown[0]))
    for line, wanted in zip(lines[first:], shown, strict=False):
        assert line.endswith(wanted)


def test_copies_off_the_device_are_those_of_the_file() -> None:
    for by_size in content("h200/capture.json")["copies_gb_per_s"].values():
        assert f" | {' | '.join(f'{speed:.1f}' for speed in by_size.values())} |" in PAGES


def test_waits_of_tokens_beside_rows_are_those_of_the_file() -> None:
    own = str(EngineSettings("").copies_in_flight)
    names = {"0": "all", own: f"{own}, as in the engine"}
    waits = content("h200/capture.json")["tokens_beside_rows"]
    assert waits.keys() >= names.keys()
    for in_flight, row in waits.items():
        median, most = (f"{row[name]:.2f} ms" for name in ("median_ms", "most_ms"))
        name = names.get(in_flight, in_flight)
        assert f"| {name} | {median} | {most} | {row['gb_per_s']:.1f} |" in PAGES


def test_the_bounds_of_sweeps_follow_from_the_file() -> None:
    sweeps = content("h200/sweeps-qwen3-8b.json")
    prefill, cells, single = (
        sweeps["summary"][arm]["200"]
        for arm in (
            "stock, whole prompts",
            "sweep, 256 cells at a time",
            "single requests, one at a time",
        )
    )
    tokens, each = prefill["tokens_per_s"], cells["computed_tokens_per_cell"]
    most, alone = tokens / each, single["cells_per_s"]
    assert f"{tokens:,.0f} tokens/s, and a cell computes {each:.1f} of its tokens" in PAGES
    assert f"at most {most:.0f} cells/s are possible, which is {most / alone:.1f} " in PAGES
    assert f"{alone:.1f} single requests in a second" in PAGES
    host = sweeps["cpu_us_per_cell"]["sweep, 256 cells at a time, 40 tokens"]
    busy = host["VLLM::EngineCor, main thread"] / 1e3
    assert f"works {busy:.2f} ms for a cell. So at most {1000 / busy:.0f} cells/s" in PAGES


def test_what_zoom_finds_is_that_of_the_file() -> None:
    points = content("cpu/zoom.json")["points"]
    for point, found in points.items():
        (line,) = (line for line in TRACING.splitlines() if line.startswith(f"| `{point}` |"))
        assert all(f"`{name}` {value}" in line for name, value in found["zoom"].items())
        share = found["ran"] / found["cells"]
        assert line.endswith(f" | {found['found']} of {found['facts']} | {share:.1%} |")
    for found in content("cpu/zoom-engine.json")["points"].values():
        assert found["found"] == found["facts"]
        assert f"ran {found['facts']} of the" in TRACING
    for point in points:
        assert points[point]["found"] >= 0.95 * points[point]["facts"]
        assert points[point]["ran"] <= 0.25 * points[point]["cells"]


def test_how_soon_a_cancelled_sweep_holds_nothing_is_that_of_the_file() -> None:
    measured = content("cpu/cancel.json")
    ((at_once, table),) = measured["summary"].items()
    lines = [
        f"| {row['median']:.0f} ms | {row['p90']:.0f} ms | {row['max']:.0f} ms |"
        for row in table.values()
    ]
    at_h200 = content("h200/cancel.json")
    lines += [
        f"| {row['median']:.0f} ms | {row['p90']:.0f} ms | {row['max']:.0f} ms |"
        for of_cells in at_h200["summary"].values()
        for row in of_cells.values()
    ]
    section = PAGES.partition("## A cancelled sweep")[2].partition("\n##")[0]
    shown = [line for line in section.splitlines() if line.endswith(" ms |")]
    assert all(line.endswith(want) for line, want in zip(shown, lines, strict=True))
    kept = int(table["blocks_ms"]["within_bar"])
    assert f"{kept} of {measured['trials']} sweeps kept it" in section
    assert f"{measured['trials']} sweeps of the demo model, {at_once} cells at a time" in section
    few, many = (of["blocks_ms"]["within_bar"] for of in at_h200["summary"].values())
    assert few == at_h200["trials"] == 50
    assert f"With 64 cells all 50 sweeps kept the bar, with 512 cells {many:.0f} of 50." in section


def test_the_guarded_texts_are_those_of_the_file() -> None:
    found = content("cpu/tone-guard.json")
    assert f"{found['unchanged']} of {found['of']} cheerful texts and facts keep every" in DYNAMIC
    for name, row in found["arms"].items():
        pairs = [("gloomy", "tonal"), ("gloomy_later", "tonal_later")]
        pairs += [("cued_gloomy", "cued_tonal")]
        cells = " | ".join(f"{row[part]} of {row[whole]}" for part, whole in pairs)
        rest = f"{row['facts']} of {found['facts']} | {row['stopped']} of {row['texts']}"
        assert f"| {name} | {cells} | {rest} |" in DYNAMIC


def test_the_set_points_are_those_of_the_file() -> None:
    for name, row in content("cpu/set-point.json").items():
        assert f"| {name} | {row['mean']:+.2f} | {row['joyful']} | " in DYNAMIC


def test_latencies_of_dynamic_steering_are_those_of_the_file() -> None:
    for place in ("h200", "cpu"):
        found = content(f"{place}/latency.json")
        for arm, by_streams in found["summary"].items():
            cells = []
            for row in by_streams.values():
                assert row["changes"] == sum(row["positions"].values())
                cells.append(f"{row['p50']}, {row['p99']}, {row['max']}")
            assert f"| {arm} | {' | '.join(cells)} |" in PAGES
        assert set(found["summary"]) == {"gate", "controller", "session", "watch"}
    watch, session = (found["summary"][arm]["32"] for arm in ("watch", "session"))
    assert f"sets {32_000 / watch['token_ms']:,.0f} gains in a second" in PAGES
    for arm in ("session", "watch"):  # with 32 streams, both miss the bar
        by_streams = found["summary"][arm]
        assert [number for number, row in by_streams.items() if row["p99"] > 4] == ["32"]
    late = sum(count for position, count in session["positions"].items() if int(position) >= 5)
    share = (
        f"{100 * late / session['changes']:.0f} % of their gains act five positions late or more"
    )
    assert f"{share}, at most {session['max']}." in PAGES


def test_random_calls_of_causal_tracing_found_what_the_page_says() -> None:
    found = content("cpu/tracing-fuzz.json")
    assert found["problems"] == []
    assert found["calls"] == sum(found["ends"].values()) == 20_000
    assert f"on a busy machine: {found['cells']:,} cells, and no problem" in RELIABILITY


def test_the_sweep_of_many_pairs_is_that_of_the_file() -> None:
    sweeps = content("cpu/sweeps-tiny-36.json")
    assert sweeps["failures"] == {}
    (pairs,) = (arm for arm in sweeps["turns"] if arm.startswith("sweep of 64 pairs"))
    (turn,) = sweeps["turns"][pairs]["40"]
    assert turn["cells"] == 64 * sweeps["layers"] * 4 == 9216
    assert f"so {turn['cells']:,} prompts in {turn['seconds']:.0f} s" in PAGES
    errors = [
        turn["answer_error"]
        for by_length in sweeps["turns"].values()
        for turns in by_length.values()
        for turn in turns
        if turn["answer_error"] is not None
    ]
    assert f"They agree within {max(errors):.6f}." in PAGES


def test_the_later_sweep_of_many_pairs_is_that_of_the_file() -> None:
    sweeps = content("cpu/sweeps-tiny-36-pairs.json")
    assert sweeps["failures"] == {}
    assert not sweeps["commit"].endswith("-dirty")
    ((arm, by_length),) = sweeps["turns"].items()
    (turn,) = by_length["40"]
    assert turn["cells"] == 64 * sweeps["layers"] * 4 == 9216
    assert turn["answer_error"] < 1e-6
    (before,) = content("cpu/sweeps-tiny-36.json")["turns"][arm]["40"]
    tokens = [found["computed_tokens"] / found["cells"] for found in (turn, before)]
    assert "a cell computes {:.1f} tokens instead of {:.1f}:".format(*tokens) in PAGES
    assert f"It took {turn['seconds']:.0f} s. The first cell came after" in PAGES
    assert f"came after {turn['first_cell_s']:.0f} s, once" in PAGES


def test_rows_that_cells_copy_are_those_of_the_file() -> None:
    for row in content("cpu/sweep-rows.json")["sweeps"]:
        if row["cells_at_a_time"] != 64:
            continue
        now, earlier, other = (
            row[name] / row["prompts"]
            for name in ("rows_copied", "rows_copied_earlier", "rows_copied_by_pair")
        )
        places = f"| {row['pairs']} | {row['columns']} | {row['positions_of_a_column']} | 64 |"
        assert f"{places} {now:.1f} | {earlier:.1f} | {other:.1f} |" in PAGES
        assert row["positions_of_a_column"] <= now < 1.2 * row["positions_of_a_column"]


def test_what_the_layers_below_cost_follows_from_the_file() -> None:
    sweeps = content("h200/sweeps-qwen3-8b-copied-blocks.json")
    most = {}
    for length in ("40", "200"):
        prefill, cells = (
            sweeps["summary"][arm][length]
            for arm in ("stock, whole prompts", "sweep, 256 cells at a time")
        )
        most[length] = prefill["tokens_per_s"] / cells["computed_tokens_per_cell"]
    above = sum(range(sweeps["layers"])) / sweeps["layers"]
    each = cells["computed_tokens_per_cell"]
    assert f"{above} of {sweeps['layers']} layers on average" in PAGES.replace("\n  ", " ")
    assert f"cells compute {each:.1f} tokens of 200" in PAGES
    faster = most["200"] * sweeps["layers"] / above
    assert f"allows {most['200']:.0f} cells/s at 200 tokens, and {faster:.0f} without" in PAGES
    assert f"At 40 tokens it allows {most['40']:,.0f} already" in PAGES


def test_random_calls_of_monitoring_found_what_the_page_says() -> None:
    found = content("cpu/monitoring-fuzz.json")
    assert found["problems"] == []
    made = sorted(found["pieces"])
    assert [first for first, _ in made] == [2000 * piece for piece in range(len(made))]
    assert found["calls"] == sum(count for _, count in made)
    assert f"{found['calls']:,} calls ran in pieces of 2,000" in RELIABILITY
    assert f"in all of its {found['neighbour_streams']} streams" in RELIABILITY


def test_rows_that_a_capture_lost_are_on_the_page() -> None:
    repeated = content("h200/capture.json")["repeated"]
    lost = [turn["lost_rows"] for turns in repeated.values() for turn in turns]
    assert [count for count in lost if count] == [36864, 36864]
    assert "In two of the five repeats with 2.4 GB, 36,864 of 294,912 rows" in PAGES


def test_the_lines_that_held_on_a_gpu_are_those_of_the_files() -> None:
    held = []
    for path in (DOCS / "h200").glob("check-*.json"):
        (lines,) = json.loads(path.read_text()).values()
        held.append(f"{sum(line['ok'] for line in lines.values())} of {len(lines)}")
    _, _, below = PAGES.partition("| | lines that held | date, version |\n|---|---|---|\n")
    table, _, _ = below.partition("\n\n")
    assert sorted(line.split(" | ")[1] for line in table.splitlines()) == sorted(held)


@pytest.mark.parametrize(
    ("pair", "row"),
    [
        ("stock 1 and stock 2", "the first start of stock and the second"),
        ("stock 1 and ours 1", "the first start of stock and the first of ours"),
        ("stock 1 and ours 2", "the first start of stock and the second of ours"),
        ("ours 1 and stock 2", "the second start of stock and the first of ours"),
        ("stock 2 and ours 2", "the second start of stock and the second of ours"),
        ("ours 1 and ours 2", "the first start of ours and the second"),
    ],
)
def test_requests_that_differ_between_starts_are_those_of_the_file(pair: str, row: str) -> None:
    counts = [
        content(f"h200/check-{part}.json")[part][f"{pair}: requests that differ, of 1000"]["value"]
        for part in ("starts-small", "starts-moe")
    ]
    assert f"| {row} | {counts[0]} | {counts[1]} |" in PAGES


def test_no_row_was_lost_as_the_page_says() -> None:
    lost = content("h200/tpot-qwen3-8b-serving.json")["lost_rows"]
    assert set(lost.values()) == {0}
    assert "for such rows on [the host of an earlier visit]" in PAGES
    assert "No row was lost. Some turns waited instead." in PAGES


def test_waits_beside_a_hostile_client_are_those_of_both_files() -> None:
    (shown,) = tables(DOCS / "cpu" / "isolation.json")
    assert shown in PAGES


def unwrapped(page: str) -> str:
    """A page whose lines are joined, because a sentence may be broken anywhere."""
    return " ".join(page.split())


@pytest.mark.parametrize("page", [PAGES, RELIABILITY], ids=["benchmarks", "reliability"])
@pytest.mark.parametrize("name", ["isolation", "isolation-front-ends", "soak"])
def test_the_pages_say_of_a_promise_what_its_file_says(page: str, name: str) -> None:
    said = statement(DOCS / "cpu" / f"{name}.json")
    assert said
    assert said in unwrapped(page)


@pytest.mark.parametrize("name", ["replay", "replay-compiled"])
def test_the_page_says_of_the_replay_what_its_file_says(name: str) -> None:
    said = statement(DOCS / "cpu" / f"{name}.json")
    assert "0 wrong, 0 missing, 0 doubled" in said
    assert said in unwrapped(RELIABILITY)


def test_a_statement_names_each_missed_promise(tmp_path: Path) -> None:
    file = tmp_path / "isolation.json"
    summary = {"labels": {}, "runs": {}, "nobody else": {}}
    misses = ["labels: 300 ms between tokens", "labels: failed 2"]
    file.write_text(json.dumps({"benchmark": "isolation", "summary": summary, "misses": misses}))
    assert statement(file) == (
        "Promises missed in 2 scenarios: labels (300 ms between tokens); labels (failed 2)."
    )
    file.write_text(json.dumps({"benchmark": "isolation", "summary": summary, "misses": []}))
    assert statement(file) == "Promises missed in 2 scenarios: none."


def test_the_waits_of_the_soak_are_those_of_its_files() -> None:
    (shown,) = tables(DOCS / "cpu" / "soak.json")
    assert shown in PAGES


@pytest.mark.parametrize(
    "name",
    [
        "h200/sweeps-qwen3-8b",
        "h200/sweeps-qwen3-8b-paced",
        "h200/sweeps-qwen3-8b-copied-blocks",
        "h200/sweeps-qwen3-8b-one-run",
        "h200/sweeps-qwen3-8b-one-run-512-cells",
        "h200/sweeps-qwen3-8b-512-cells",
        "h200/sweeps-qwen3-0.6b",
        "h200/sweeps-qwen3-0.6b-512-cells",
        "h200/sweeps-qwen3-0.6b-eight-together",
        "h200/sweeps-qwen3-0.6b-1024-cells",
        "h200/sweeps-qwen3-0.6b-4096-tokens",
        "h200/sweeps-qwen3-8b-4096-tokens",
        "h200/sweeps-qwen3-0.6b-one-run-1024-cells",
        "h200/sweeps-qwen3-8b-one-run-1024-cells",
        "h200/sweeps-qwen3-0.6b-neighbours",
        "h200/sidebyside-qwen3-8b",
        "h200/sidebyside-qwen3-8b-with-pauses",
        "h200/sidebyside-qwen3-8b-4096-token-graphs",
        "h200/sidebyside-qwen3-8b-defaults",
        "h200/sidebyside-qwen3-8b-1024-streams",
        "h200/sidebyside-qwen3-0.6b-defaults",
        "h200/sidebyside-qwen3-8b-256-streams-8192-tokens",
        "h200/sidebyside-qwen3-8b-256-streams-6144-tokens",
        "h200/sidebyside-qwen3-8b-4096-tokens",
        "h200/sidebyside-qwen3-8b-128-streams",
        "h200/sidebyside-qwen3-8b-128-streams-8192-tokens",
        "h200/sidebyside-qwen3-8b-long-prompts",
        "h200/sidebyside-qwen3-8b-long-prompts-8192-tokens",
        "h200/sidebyside-qwen3-8b-without-pauses",
        "h200/sidebyside-qwen3-0.6b",
        "cpu/sweeps-tiny-36",
        "cpu/sweeps-tiny-36-pairs",
        "h200/watched-qwen3-8b",
        "h200/watched-qwen3-8b-many-streams",
        "h200/watched-qwen3-8b-512-tokens",
    ],
)
def test_tables_are_those_of_the_files(name: str) -> None:
    for shown in tables(DOCS / f"{name}.json"):
        assert shown in PAGES


def test_what_cut_watches_lost_is_that_of_the_files() -> None:
    for name in ("watch-cuts", "watch-cuts-aio"):
        found = content(f"cpu/{name}.json")
        assert found["cuts"] == 1000
        assert found["lost"] == found["repeated"] == found["wrong"] == 0
        for key in ("readings", "requests", "updates"):
            assert f"{found[key]:,}" in RELIABILITY


@pytest.mark.parametrize("name", ["stops", "stops-async"])
def test_what_rules_withheld_is_that_of_the_files(name: str) -> None:
    found = content(f"cpu/{name}.json")
    counts = found["counts"]
    stopped = counts["finish: rule"] + counts["finish: watch"]
    assert not found["problems"]
    assert counts["fires in: nowhere"] == counts["finish: length"] == found["trials"] - stopped
    assert found["async_scheduling"] == ("engine" in found) == (name == "stops-async")
    assert f"{stopped:,} of {found['trials']:,}" in RELIABILITY
    figures = [counts["finish: watch"], found["withheld_tokens"], *found.get("engine", {}).values()]
    for figure in figures:
        assert f"{figure:,}" in RELIABILITY


def test_the_index_gives_the_figures_of_the_default_steps() -> None:
    arms = {name: ("defaults", f"this server, 1 front end, {name}") for name in sidebyside.ARMS[:5]}
    openai = "4096-tokens", "vLLM's OpenAI server, 6 processes"
    arms["vLLM's OpenAI server, six processes*"] = openai
    for name, (file, arm) in arms.items():
        summary = content(f"h200/sidebyside-qwen3-8b-{file}.json")["summary"]
        stock = summary[sidebyside.STOCK]
        cells = []
        for streams in ("1", "32", "128", "256"):
            row, own = summary[arm][streams], stock[streams]
            share = row["tokens_per_s"] / own["tokens_per_s"]
            later = round(row["first_token_ms"] - own["first_token_ms"])
            cells.append(
                f"{share:.1%}, {later:+d} ms".replace("%", " %").replace("-", "\N{MINUS SIGN}")
            )
        assert f"| {name} | {' | '.join(cells)} |" in PAGES


def test_why_a_token_takes_longer_is_told_with_the_figures_of_the_file() -> None:
    summary = content("h200/sidebyside-qwen3-8b-defaults.json")["summary"]
    rows = [summary[arm]["256"] for arm in (sidebyside.STOCK, "this server, 1 front end, idle")]
    first, last = (
        [round(row[name]) for row in rows]
        for name in ("first_token_of_burst_ms", "last_token_of_burst_ms")
    )
    between = [end - begin for begin, end in zip(first, last, strict=True)]
    for name, (stock, ours) in {"first": first, "last": last}.items():
        line = f"| until the {name} token | {stock:,} | {ours:,} | {ours - stock:+d} |"
        assert line.replace("-", "\N{MINUS SIGN}") in PAGES
    longer = between[1] - between[0]
    line = f"| between the two | {between[0]:,} | {between[1]:,} | {longer:+d}, which is "
    assert f"{line}{longer / between[0]:.1%} |".replace("%", " %") in PAGES
