"""What sweeps find in all facts of the demo model: the figures and the picture of the docs.

    python -m tests.soak.facts --out build/facts
    python -m tests.soak.facts --traced 4 --zoomed 8 --out build/facts

Writes `zoom.json`: for each fact and point, the top cell of the whole grid and the one that zoom
finds; and `causal-trace.json` and `.png`: Meng et al.'s causal trace, averaged over facts.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import rheostat
from rheostat_bench.machine import circumstances
from tests.integration.server.conftest import ONE_PROCESS, serving
from tests.integration.server.facts import (
    GROUPS,
    POINTS,
    ZOOMS,
    Zoomed,
    by_point,
    facts,
    swapped,
    trace,
    traced,
    zoomed,
)

NOISES = 10


def of_point(found: Sequence[Zoomed]) -> dict[str, object]:
    """The figures of a point."""
    return {
        "zoom": ZOOMS[found[0].point],
        "facts": len(found),
        "found": sum(one.right for one in found),
        "cells": sum(one.cells for one in found),
        "ran": sum(one.ran for one in found),
        "largest_part": max(one.ran / one.cells for one in found),
        "missed": [one._asdict() for one in found if not one.right],
    }


def zoom(engine: rheostat.Engine, count: int | None) -> dict[str, object]:
    """Zooms on facts, at every point."""
    pairs = [pair for fact in facts() if (pair := swapped(fact)) is not None]
    if count is not None:
        pairs = [pairs[number * len(pairs) // count] for number in range(count)]
    return {
        "benchmark": "zoom",
        "measures": "facts whose top cell zoom finds, and the cells that it runs",
        **circumstances(),
        "points": {
            point: of_point([zoomed(engine, pair, point) for pair in pairs]) for point in POINTS
        },
    }


def causal_trace(engine: rheostat.Engine, count: int, picture: Path) -> dict[str, object]:
    """Traces facts with windows of 1 and 3 layers; draws the first."""
    chosen = traced()
    chosen = chosen[:: max(1, len(chosen) // count)][:count]
    windows = {}
    for window in (1, 3):
        result = trace(engine, chosen, window, NOISES)
        windows[str(window)] = {
            "clean": result.clean[0],
            "noisy": result.corrupt[0],
            "rise": {point: rises.tolist() for point, rises in by_point(result).items()},
            "standard_errors": result.standard_errors[0].tolist(),
        }
        if window == 1:
            result.heatmap(picture)
    return {
        "benchmark": "causal trace",
        "measures": "p(answer) beyond that of the noisy prompt, [layers, groups] by point",
        **circumstances(),
        "facts": [fact.prompt for fact in chosen],
        "noises": NOISES,
        "groups": GROUPS,
        "windows": windows,
    }


def main() -> None:
    """Runs the sweeps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--zoomed", type=int, help="facts that are zoomed on (default: all)")
    parser.add_argument("--traced", type=int, default=24, help="facts that are traced")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    def write(name: str, content: dict[str, object]) -> None:
        text = json.dumps(content, indent=1)
        (arguments.out / name).write_text(f"{text}\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        options = ["--front-ends", "0", "--distributed-executor-backend", ONE_PROCESS]
        with serving(Path(folder), *options) as server, rheostat.connect(server.target) as engine:
            picture = arguments.out / "causal-trace.png"
            write("causal-trace.json", causal_trace(engine, arguments.traced, picture))
            write("zoom.json", zoom(engine, arguments.zoomed))


if __name__ == "__main__":
    main()
