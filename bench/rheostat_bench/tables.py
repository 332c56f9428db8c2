"""Tables of the benchmarks' files in Markdown, as the documentation holds them.

rheostat bench tables results
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rheostat_bench.results import Comparison, PrefixCache, read
from rheostat_bench.scenarios import SCENARIOS
from rheostat_bench.summaries import Figures, Table

SHARE_BARS = {
    "idle": 0.98,
    "one layer steered": 0.97,
    "all layers steered": 0.94,
    "one layer captured, in the answer": 0.90,
    "one layer captured, to a subscriber": 0.90,
    "all layers captured, last prompt token": 0.94,
}
"""The least share of stock vLLM's tokens per second, by arm of `sidebyside`."""
_LISTED_FUNCTIONS = 14
"""Functions of a table of costs."""

_PER_TOKEN_BAR = 1.01
"""The most time per token of idle requests, as a share of stock's."""
_PER_TOKEN = {
    "per_token_to_stock": "ms per token",
    "second_half_per_token_to_stock": "ms per token, second half",
}
"""The labels of the measures to which `_PER_TOKEN_BAR` applies."""
_FIRST_TOKEN_BARS = {"32": 10.0, "256": 30.0}
"""The most milliseconds that the first token may come later than stock's, by streams."""


def tables(path: Path) -> list[str]:
    """The tables of one file; none: it is no benchmark of those that have any here.

    Raises:
        ValueError: it is no JSON.
        KeyError: it is one of these, and something of it is missing.
    """
    found = read(path)
    if found is not None:
        return [table(found)]
    content = json.loads(path.read_text())
    about = content.get("benchmark") if isinstance(content, dict) else None
    if about == "isolation":
        before = path.with_name("isolation-before.json")
        earlier = json.loads(before.read_text())["summary"] if before.is_file() else {}
        return [] if path == before else [_isolation(content["summary"], earlier)]
    if about == "soak":
        control = path.with_name(f"{path.stem}-control.json")
        return [_soak(content, json.loads(control.read_text()) if control.is_file() else None)]
    if about == "costs":
        return [_costs(content["arms"], unit) for unit in ("token", "request")]
    if about == "bursts":
        return [_bursts(content["bursts"])]
    if about == "sidebyside":
        return [*_side_by_side(content["summary"]), *_gates(content["turns"])]
    if about == "sweeps":
        return _sweeps(content["summary"], content["neighbours"])
    if about == "watched":
        return _watched(content["summary"])
    return _streamed(content["summary"]) if about == "streamed" else []


def statement(path: Path) -> str:
    """The sentence of one file with which the pages say whether promises were kept; may be empty.

    Raises:
        ValueError: it is no JSON.
        KeyError: it is a benchmark of isolation or a soak, and something of it is missing.
    """
    content = json.loads(path.read_text())
    about = content.get("benchmark", "") if isinstance(content, dict) else ""
    if about.startswith("isolation") and path.stem != "isolation-before":
        played = sum(scenario.name in content["summary"] for scenario in SCENARIOS)
        missed = [" (".join(miss.split(": ", 1)) + ")" for miss in content["misses"]]
        return f"Promises missed in {played} scenarios: {'; '.join(missed) or 'none'}."
    if about == "soak":
        waits, bar = content["streaming"], content["bar_ms"]
        return (
            f"Of {waits['tokens']:,} tokens, {waits['over_bar']:,} came more than {bar:.0f} ms "
            f"after the one before ({waits['own_over_bar']:,} also without the time that the host "
            "took). "
            f"The longest wait was {waits['longest_ms']:.0f} ms; 99.9 % of the waits were below "
            f"{waits['p99_9_ms']:.0f} ms."
        )
    if about == "replay":
        sums = content["sums"]
        return (
            f"{sums['compared']:,} rows of {sums['samples']:,} samples in {sums['requests']:,} "
            f"requests: {sums['wrong']:,} wrong, {sums['missing']:,} missing, {sums['doubled']:,} "
            f"doubled, beside {sums['updates']:,} updates and {sums['preemptions']:,} preemptions; "
            f"{sums['replaced']:,} samples had rows replaced, {sums['gated']:,} were gated."
        )
    return ""


def table(found: Comparison | PrefixCache) -> str:
    """The table of one file."""
    return _prefix_cache(found) if isinstance(found, PrefixCache) else _comparison(found)


def _comparison(found: Comparison) -> str:
    reference, *arms = found.cells
    batches = list(found.stock_ms)
    unit = "ms per token" if found.per_token else "ms of the whole batch"
    rows = [[f"{reference}, {unit}", *(f"{found.stock_ms[batch]:.3f}" for batch in batches)]]
    for arm in (reference, *arms):
        cells = [found.cells[arm][batch] for batch in batches]
        label = f"{reference}'s quartiles" if arm == reference else arm
        rows.append(
            [
                label,
                *(
                    f"{_signed(cell.low)} to {_signed(cell.high)} %"
                    if arm == reference
                    else f"{_signed(cell.median)} % ({_signed(cell.low)} to {_signed(cell.high)})"
                    for cell in cells
                ),
            ]
        )
    return _markdown(["", *(f"bs {batch}" for batch in batches)], rows)


def _prefix_cache(found: PrefixCache) -> str:
    heads = [
        "",
        "hits cold",
        "hits warm",
        "most",
        "TTFT unread",
        "cold",
        "warm",
        "gain",
        "to stock",
    ]
    rows = [
        [
            arm,
            f"{row['hit_rate_cold']:.1%}",
            f"{row['hit_rate_warm']:.1%}",
            f"{found.most_hits[arm]:.1%}",
            *(f"{row[f'ttft_{state}_ms']:.1f} ms" for state in ("unread", "cold", "warm")),
            f"{row['gain_over_unread']:.2f}",
            f"{_signed((row['warm_to_stock'] - 1) * 100)} %" if "warm_to_stock" in row else "",
        ]
        for arm, row in found.figures.items()
    ]
    return _markdown(heads, rows)


_REST = "first_token_rest_longest_ms"


def _isolation(summary: Figures, before: Figures) -> str:
    """Waits and memory by scenario, with those of an earlier version where they are known."""
    columns = {
        "longest wait between tokens, ms": ("longest_gap_ms", ".0f"),
        "p99, ms": ("p99_ms", ".0f"),
        "for a first token, ms": ("first_token_longest_ms", ".0f"),
        "without earlier prompts, ms": (_REST, ".0f"),
        "tokens/s": ("tokens_per_s", ".0f"),
        "MiB more": ("memory_growth_mib", ".0f"),
    }
    columns = {
        head: column
        for head, column in columns.items()
        if all(column[0] in row for row in summary.values())
    }
    new = ("p99_ms", _REST)
    heads = [""]
    for head, (key, _) in columns.items():
        heads += [f"{head}, before", "now"] if before and key not in new else [head]
    rows = []
    for name, row in summary.items():
        cells = [name]
        for key, form in columns.values():
            if before and key not in new:
                cells.append(_waited(before[name], key, form) if name in before else "")
            cells.append(_waited(row, key, form))
        rows.append(cells)
    return _markdown(heads, rows)


def _waited(row: Mapping[str, float], key: str, form: str) -> str:
    dead = row["died"] and key == "longest_gap_ms"
    return "the server died" if dead else format(row[key], form)


def _soak(hostile: Mapping[str, Any], control: Mapping[str, Any] | None) -> str:
    """Waits and answers of both clients, beside hostile calls and beside the control."""
    runs = {"hostile calls": hostile, "control": control}
    heads, clients = [""], []
    for label, run in runs.items():
        if run is not None:
            for client in ("streaming", "capturing"):
                heads.append(f"{client} client, {label}")
                clients.append(run[client])
    rows = []
    for label, key, form in (
        ("longest wait between tokens, ms", "longest_ms", ".0f"),
        ("p99.9, ms", "p99_9_ms", ".0f"),
        ("p99, ms", "p99_ms", ".0f"),
        ("median, ms", "median_ms", ".0f"),
        ("longest wait for a first token, ms", "first_token_longest_ms", ".0f"),
        ("its p99, ms", "first_token_p99_ms", ".0f"),
        ("tokens", "tokens", ","),
        ("generations", "generations", ","),
    ):
        rows.append([label, *(format(client[key], form) for client in clients)])
    late = [f"{client['over_bar']:,}, {client['first_tokens_over_bar']:,}" for client in clients]
    rows.append(
        [f"waits above {hostile['bar_ms']:.0f} ms between tokens, for a first token", *late]
    )
    own = [f"{client['own_over_bar']:,}" for client in clients]
    rows.append(["of those between tokens, also without the time that the host took", *own])
    wrong = [
        f"{client['different_texts'] + client['different_rows'] + client['failed']:,}"
        for client in clients
    ]
    rows.append(["answers that differ or failed", *wrong])
    return _markdown(heads, rows)


_BURST = ("first_token", "last_first_token", "last_added")
"""The figures of a burst that the table shows."""


def _bursts(bursts: Mapping[str, Any]) -> str:
    """Medians of the largest bursts, in milliseconds."""
    rows = [
        [
            limits,
            arm,
            *(f"{statistics.median(turn[name] for turn in turns):.0f}" for name in _BURST),
        ]
        for limits, arms in bursts[max(bursts, key=int)].items()
        for arm, turns in arms.items()
    ]
    return _markdown(
        ["in an iteration", "", "first token, median", "last", "last in the engine"], rows
    )


def _streamed(summary: Mapping[str, Table]) -> list[str]:
    """Time per token; what one long prompt takes; how long batches last."""
    per_token, whole = summary["per_token"], summary["whole"]
    reference, plain, *arms = per_token
    batches = list(per_token[reference])
    medians = (f"{per_token[reference][batch]['median_ms']:.3f}" for batch in batches)
    rows = [[f"{reference}, ms per token", "", *medians]]
    beside = [(reference, reference), (plain, reference)]
    beside += [(arm, base) for arm in arms for base in (reference, plain)]
    for arm, base in beside:
        cells = []
        for batch in batches:
            stands, row = per_token[base][batch]["median_ms"], per_token[arm][batch]
            median, low, high = (
                _signed((row[name] / stands - 1) * 100)
                for name in ("median_ms", "low_ms", "high_ms")
            )
            spread = f"{low} to {high}"
            cells.append(f"{spread} %" if arm == base else f"{median} % ({spread})")
        own = arm == base
        rows.append(["its quartiles" if own else arm, "" if own else base, *cells])
    shown = [_markdown(["", "beside", *batches], rows)]
    alone = {"first token": "first_token", "at the client": "first_token_at_client"}
    for prompt in (name for name in whole[reference] if name not in batches):
        columns = [summary[measure] for measure in (*alone.values(), "whole")]
        times = [[arm, *(_spread(column[arm][prompt]) for column in columns)] for arm in whole]
        shown.append(_markdown([f"{prompt}, ms", *alone, "whole"], times))
    lasts = [[arm, *(_spread(whole[arm][batch]) for batch in batches)] for arm in whole]
    shown.append(_markdown(["whole, ms", *batches], lasts))
    return shown


def _costs(arms: Mapping[str, Any], unit: str) -> str:
    """Microseconds of the server's main thread for a token or a request, by function and arm.

    The functions are those that take the most time of the first arm, with all that they call,
    without those that take more than half: they only call others.
    """
    totals = [by_unit[unit]["us"]["server, main thread"] for by_unit in arms.values()]
    functions = [by_unit[unit]["functions_us"] for by_unit in arms.values()]
    listed = [name for name, us in functions[0].items() if us < totals[0] / 2][:_LISTED_FUNCTIONS]
    rows = [["all", *(f"{total:.0f}" for total in totals)]]
    for name in listed:
        rows.append([f"`{name}`", *(f"{by_name.get(name, 0.0):.0f}" for by_name in functions)])
    return _markdown([f"µs for a {unit}", *arms], rows)


def _side_by_side(summary: Mapping[str, Figures]) -> list[str]:
    """Tokens per second, time per token and time to the first token, each beside stock vLLM's."""
    stock, *others = summary
    shown = []
    measures = {
        "tokens/s": ("tokens_per_s", ".0f", True),
        "ms per token": ("per_token_ms", ".2f", True),
        "ms per token, second half": ("second_half_per_token_ms", ".2f", True),
        "ms per token, while all streams run": ("together_per_token_ms", ".2f", True),
        "ms to the first token": ("first_token_ms", ".0f", False),
        "ms from the first stream's call to the first token": (
            "first_token_of_burst_ms",
            ".0f",
            False,
        ),
        "ms from the first stream's call to a stream's last token": (
            "last_token_of_burst_ms",
            ".0f",
            True,
        ),
    }
    for label, (key, form, relative) in measures.items():
        workloads = [name for name, row in summary[stock].items() if row.get(key)]
        if not workloads:  # an older file lacks this measure
            continue
        rows = [[stock, *(format(summary[stock][name][key], form) for name in workloads)]]
        for arm in others:
            cells = []
            for name in workloads:
                value, beside = summary[arm][name][key], summary[stock][name][key]
                difference = f"{value / beside:.1%}" if relative else f"{value - beside:+.0f}"
                cells.append(f"{value:{form}} ({difference})".replace("-", "\N{MINUS SIGN}"))
            rows.append([arm, *cells])
        heads = (_streams(name) if name.isdecimal() else name for name in workloads)
        shown.append(_markdown([label, *heads], rows))
    lost = [
        [arm, name, f"{row['lost_rows']:.0f}"]
        for arm, by_workload in summary.items()
        for name, row in by_workload.items()
        if row["lost_rows"]
    ]
    if lost:
        shown.append(_markdown(["lost rows", "streams", "all turns"], lost))
    judged = _judged(summary, stock)
    return [*shown, judged] if judged else shown


def _judged(summary: Mapping[str, Figures], stock: str) -> str:
    """Every bar at every number of streams: "met", or what was measured. Empty: no bar fits."""
    counts = [name for name in summary[stock] if name.isdecimal()]
    first = [count for count in counts if count in _FIRST_TOKEN_BARS]
    rows = []

    def cell(value: float, met: bool, form: str) -> str:
        return "met" if met else f"**{value:{form}}**"

    for arm, by_workload in summary.items():
        least = next((bar for kind, bar in SHARE_BARS.items() if arm.endswith(f", {kind}")), None)
        if least is None:
            continue
        shares = {count: by_workload[count]["share"] for count in counts}
        later = {count: by_workload[count]["first_token_later_ms"] for count in first}
        rows.append(
            [
                arm,
                f"{least:.0%}",
                *(cell(share, share >= least, ".1%") for share in shares.values()),
                *(cell(ms, ms <= _FIRST_TOKEN_BARS[count], "+.0f") for count, ms in later.items()),
            ]
        )
        if arm.endswith(", idle"):
            for measure, label in _PER_TOKEN.items():
                if measure not in by_workload[counts[0]]:  # an older file lacks it
                    continue
                times = [by_workload[count][measure] for count in counts]
                cells = [cell(time - 1, time <= _PER_TOKEN_BAR, "+.1%") for time in times]
                bar = f"{_PER_TOKEN_BAR - 1:+.0%}"
                rows.append([f"{arm}, {label}", bar, *cells, *("" for _ in first)])
    heads = [f"first token at {count}: {_FIRST_TOKEN_BARS[count]:+.0f} ms" for count in first]
    return _markdown(["", "bar", *map(_streams, counts), *heads], rows) if rows else ""


_UNGATED = ", one layer steered"
_GATED = (", one layer, one gate", ", one layer, a gate per request")
"""How the names of arms end whose steering is the same, without and with a gate."""
_GATE_TIMES = {"per_token_ms": "", "together_per_token_ms": ", while all streams run"}


def _gates(turns: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]) -> list[str]:
    """What a gate costs per token, in percent of the same steering without one; may be none.

    Each turn is compared with the turn of the steered arm in the same repeat. The figures are the
    median of the turns, their quartiles, and the same while all streams run.
    """
    rows: dict[str, list[str]] = {}
    counts: dict[str, None] = {}
    servers = [arm.removesuffix(_UNGATED) for arm in turns if arm.endswith(_UNGATED)]
    arms = [(server, kind) for server in servers for kind in _GATED if server + kind in turns]
    for server, kind in arms:
        name = kind.removeprefix(", one layer, ") + (f" ({server})" if len(servers) > 1 else "")
        for count in filter(str.isdecimal, turns[server + kind]):
            counts[count] = None
            pairs = [
                *zip(turns[server + kind][count], turns[server + _UNGATED][count], strict=True)
            ]
            for key, when in _GATE_TIMES.items():
                more = [(gated[key] / plain[key] - 1) * 100 for gated, plain in pairs]
                cell = f"{_signed(statistics.median(more))} %"
                if len(more) > 1:
                    low, _, high = statistics.quantiles(more, n=4, method="inclusive")
                    cell += f" ({_signed(low)} to {_signed(high)})"
                rows.setdefault(name + when, []).append(cell)
    if not rows:
        return []
    heads = ["a gate's cost per token", *map(_streams, counts)]
    return [_markdown(heads, [[name, *cells] for name, cells in rows.items()])]


_FELT = ("streams", "median_ms", "p99_ms", "tokens_per_s", "cells_per_s")
"""What the table of streams shows."""


def _sweeps(summary: Mapping[str, Table], neighbours: Mapping[str, Any]) -> list[str]:
    """Cells by arm and prompt length; what streams feel beside them."""
    lengths = list(dict.fromkeys(length for by_length in summary.values() for length in by_length))
    heads = [""]
    for length in lengths:
        heads += [f"{length} tokens: cells/s", "of the prefill", "times one at a time"]
    rows = []
    for arm, by_length in summary.items():
        cells = [arm]
        for length in lengths:
            row = by_length.get(length, {})
            for key, form in (
                ("cells_per_s", ".1f"),
                ("share_of_prefill", ".1%"),
                ("times_singles", ".1f"),
            ):
                cells.append(format(row[key], form) if key in row else "")
        rows.append(cells)
    shown = [_markdown(heads, rows)] if rows else []
    felt: dict[str, dict[str, float]] = {
        name: {key: statistics.median(turn[key] for turn in turns) for key in _FELT}
        for name, turns in neighbours.items()
    }
    if not felt:
        return shown
    alone, *_ = felt.values()
    rows = [
        [
            name,
            *(
                f"{row[key]:.2f}{'' if row is alone else _more(row[key], alone[key])}"
                for key in ("median_ms", "p99_ms")
            ),
            f"{row['tokens_per_s']:.0f}",
            f"{row['cells_per_s']:.1f}",
        ]
        for name, row in felt.items()
    ]
    streams = f"{alone['streams']:.0f} streams"
    heads = [streams, "ms between tokens, median", "p99", "tokens/s", "cells/s"]
    return [*shown, _markdown(heads, rows)]


def _watched(summary: Table) -> list[str]:
    """Time per token and CPU time, compared with the arm's reference, and the reader's counts."""
    counts = list(next(iter(summary.values())))
    cells: dict[str, Callable[[Mapping[str, float]], str]] = {
        "ms per token": lambda row: (
            f"{row['per_token_ms']:.2f} ({_signed(100 * (row['per_token_to_reference'] - 1))} %), "
            f"p99 {row['p99_ms']:.2f}"
        ),
        "cores": lambda row: (
            f"server {row['server_cores']:.3f} ({row['server_cores_more']:+.3f}), "
            f"reader {row['reader_cores']:.3f}"
        ).replace("(-", "(\N{MINUS SIGN}"),
        "in a second": lambda row: (
            f"{row['tokens_per_s']:.0f} tokens, {row['readings_per_s']:.0f} numbers, "
            f"{row['gains_per_s']:.0f} gains; {row['lost']:.0f} lost"
        ),
    }
    return [
        _markdown(
            [label, *map(_streams, counts)],
            [[arm, *(cell(rows[count]) for count in counts)] for arm, rows in summary.items()],
        )
        for label, cell in cells.items()
    ]


def _more(value: float, beside: float) -> str:
    return f" ({value / beside - 1:+.1%})".replace("-", "\N{MINUS SIGN}")


def _streams(count: str) -> str:
    return "1 stream" if count == "1" else f"{count} streams"


def _spread(row: Mapping[str, float]) -> str:
    return f"{row['median_ms']:.1f} ({row['low_ms']:.1f} to {row['high_ms']:.1f})"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Prints the tables of a folder's files, and what the pages say of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    for path in sorted(folder.glob("*.json")):
        for one in tables(path):
            print(f"{path.name}\n\n{one}\n")
        if said := statement(path):
            print(f"{path.name}\n\n{said}\n")


if __name__ == "__main__":
    main()
