"""Benchmarks whose results are a number or two per arm: what their pictures show of each file."""

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Bar(NamedTuple):
    """One number, and how far single measurements lay from it."""

    value: float
    low: float
    high: float


class Panel(NamedTuple):
    """Bars beside each other."""

    label: str
    """What they measure, with the unit."""
    bars: Mapping[str, Mapping[str, Bar]]
    """By arm, then series; an arm may lack some."""
    stacked: bool = False
    """Whether the bars of an arm are parts of one bar, in the alphabetical order of the series."""


class Bars(NamedTuple):
    """A picture."""

    title: str
    panels: tuple[Panel, ...]


_Rows = Mapping[str, Mapping[str, float]]


def read_bars(path: Path) -> Bars | None:
    """What the picture of a file shows; None: it is none of these, or has no bars.

    Raises:
        ValueError: it is no JSON.
        KeyError: it is one of these, and something of it is missing.
    """
    content = json.loads(path.read_text())
    about = content.get("benchmark") if isinstance(content, dict) else None
    panels = _PANELS.get(about) if isinstance(about, str) else None
    if panels is None:
        return None
    shown = panels(content)
    if not any(row for panel in shown for row in panel.bars.values()):
        return None
    return Bars(f"{about} ({content['device']})", shown)


def _series(label: str, rows: _Rows, names: Mapping[str, str]) -> Panel:
    """A panel of the numbers with these keys, without spread."""
    return Panel(
        label,
        {
            arm: {name: _exact(row[key]) for key, name in names.items() if row.get(key)}
            for arm, row in rows.items()
        },
    )


def _exact(value: float) -> Bar:
    return Bar(value, value, value)


def _stream(content: Mapping[str, Any]) -> tuple[Panel, ...]:
    rows = content["summary"]
    cpu = {"client_cpu_us_per_row": "client", "server_cpu_us_per_row": "server"}
    return (
        _series("GiB/s", rows, {"gib_per_s": "median"}),
        _series("CPU time per row, µs", rows, cpu),
    )


def _stalled(content: Mapping[str, Any]) -> tuple[Panel, ...]:
    bars = {
        arm: {"median": Bar(row["tokens_per_s"], row["lowest"], row["highest"])}
        for arm, row in content["summary"].items()
    }
    return (Panel("tokens/s of all clients; whiskers: least and most", bars),)


def _streamed(content: Mapping[str, Any]) -> tuple[Panel, ...]:
    labels = {"per_token": "ms per token", "first_token": "ms to the first token"}
    return tuple(
        Panel(
            f"{label}; whiskers: quartiles",
            {
                arm: {
                    workload: Bar(row["median_ms"], row["low_ms"], row["high_ms"])
                    for workload, row in by_workload.items()
                }
                for arm, by_workload in content["summary"][measure].items()
            },
        )
        for measure, label in labels.items()
    )


def _sinks(content: Mapping[str, Any]) -> tuple[Panel, ...]:
    names = {"write_gib_s": "write", "read_gib_s": "read", "verify_gib_s": "read and verify"}
    bars = {
        arm: {
            name: Bar(row[key], row[key], row[key.replace("_gib", "_fastest_gib")])
            for key, name in names.items()
            if key in row
        }
        for arm, row in content["summary"].items()
        if arm != "memory"  # ten times as fast as all others
    }
    return (Panel("GiB/s; whiskers: fastest", bars),)


def _channel(content: Mapping[str, Any]) -> tuple[Panel, ...]:
    bars = {
        arm: {"median": Bar(row["gb_per_s"], row["gb_per_s"], row["best_gb_per_s"])}
        for arm, row in content["summary"].items()
    }
    return (Panel("GB/s; whiskers: best", bars),)


def _encodings(content: Mapping[str, Any]) -> tuple[Panel, ...]:
    rows = {
        f"{name}, {kind}": row
        for kind, by_encoding in content["encodings"].items()
        for name, row in by_encoding.items()
    }
    speeds = {"encode_mb_s": "encode", "decode_mb_s": "decode"}
    return (
        _series("times fewer bytes", rows, {"ratio": "fewer"}),
        _series("MB/s of rows, one thread", rows, speeds),
    )


def _capture(content: Mapping[str, Any]) -> tuple[Panel, ...]:
    ways = {
        way: {f"{int(size) >> 20} MiB": _exact(gb) for size, gb in by_size.items()}
        for way, by_size in content["copies_gb_per_s"].items()
    }
    waits = {"first_token_ms": "first token", "until_last_row_ms": "last row"}
    return (
        Panel("off the device, GB/s", ways),
        _series("ms, medians", content["summary"], waits),
    )


def _isolation(content: Mapping[str, Any]) -> tuple[Panel, ...]:
    waits = {
        name: {
            "longest": Bar(row["longest_gap_ms"], row["p99_ms"], row["longest_gap_ms"]),
        }
        for name, row in content["summary"].items()
    }
    return (
        Panel("ms, longest wait between tokens; whiskers: from p99 on", waits),
        _series("tokens/s", content["summary"], {"tokens_per_s": "neighbour"}),
    )


def _latency(content: Mapping[str, Any]) -> tuple[Panel, ...]:
    bars = {}
    for arm, by_streams in content["summary"].items():
        for streams, row in by_streams.items():
            shares = dict.fromkeys((*map(str, range(_LATE)), f"{_LATE} and more"), 0.0)
            for position, count in row["positions"].items():
                name = position if int(position) < _LATE else f"{_LATE} and more"
                shares[name] += 100 * count / row["changes"]
            name = f"{arm}, {streams} stream{'s' * (streams != '1')}"
            bars[name] = {late: _exact(share) for late, share in shares.items() if share}
    label = "changes that act so many positions after their reading, %"
    return (Panel(label, bars, stacked=True),)


def _side_by_side(content: Mapping[str, Any]) -> tuple[Panel, ...]:
    summary = content["summary"]
    measures = {
        "share": "share of stock vLLM's tokens/s",
        "first_token_ms": "ms to the first token",
    }
    return tuple(
        Panel(
            label,
            {
                arm.removeprefix("this server, ").replace(", ", "\n"): {
                    f"streams: {name}": _exact(row[key])
                    for name, row in by_workload.items()
                    if name.isdecimal()
                }
                for arm, by_workload in summary.items()
            },
        )
        for key, label in measures.items()
    )


def _sweeps(content: Mapping[str, Any]) -> tuple[Panel, ...]:
    shares = {
        arm: {
            f"{length} tokens": _exact(row["share_of_prefill"])
            for length, row in by_length.items()
            if "share_of_prefill" in row
        }
        for arm, by_length in content["summary"].items()
        if not arm.startswith("stock")
    }
    felt = {}
    for name, turns in content["neighbours"].items():
        medians, p99s = ([turn[key] for turn in turns] for key in ("median_ms", "p99_ms"))
        felt[name.replace(", ", "\n", 1)] = {
            label: Bar(statistics.median(some), min(some), max(some))
            for label, some in (("median", medians), ("p99", p99s))
        }
    panels = (
        Panel("cells' tokens/s, share of stock vLLM's prefill", shares),
        Panel("ms between tokens; whiskers: range", felt),
    )
    return tuple(panel for panel in panels if panel.bars)


_LATE = 5
"""Positions from which on a picture of latencies counts changes together."""

_PANELS: Mapping[str, Callable[[Mapping[str, Any]], tuple[Panel, ...]]] = {
    "isolation": _isolation,
    "latency": _latency,
    "sidebyside": _side_by_side,
    "stream": _stream,
    "sweeps": _sweeps,
    "stalled": _stalled,
    "streamed": _streamed,
    "sinks": _sinks,
    "channel": _channel,
    "encodings": _encodings,
    "capture": _capture,
}
