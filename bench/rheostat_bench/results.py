"""The benchmarks' files, read back: what kind each is, and what a figure or a table needs of it.

Invariant: nothing here is measured or pooled anew but the quartiles, which come from the same
times as the file's own summary.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rheostat_bench.summaries import Figures, Table, Times, pooled, spread


class Cell(NamedTuple):
    """An arm beside stock vLLM. Percent of stock's median, less 100."""

    median: float
    """The arm's median."""
    low: float
    """Its lower quartile."""
    high: float
    """Its upper quartile."""


@dataclass(frozen=True)
class Comparison:
    """Arms beside stock vLLM, at some batch sizes."""

    about: str
    """What the file calls itself."""
    place: str
    """The model and the device."""
    per_token: bool
    """Whether the times are those of a token; else of a whole batch."""
    stock_ms: dict[str, float]
    """Stock's median by batch size."""
    cells: dict[str, dict[str, Cell]]
    """By arm, stock among them, and batch size."""


@dataclass(frozen=True)
class PrefixCache:
    """Hit rates and times to the first token."""

    place: str
    """The model and the device."""
    shared: int
    """Tokens that the prompts have in common."""
    requests: int
    """Requests that arrive together."""
    most_hits: dict[str, float]
    """The best hit rate there can be, by arm."""
    figures: Figures
    """By arm; `prefix_cache.figures` says what."""


def read(path: Path) -> Comparison | PrefixCache | None:
    """What a file holds; None: it is no benchmark of these.

    Raises:
        ValueError: it is no JSON.
        KeyError: it is one of these, and something of it is missing.
    """
    content = json.loads(path.read_text())
    about = content.get("benchmark") if isinstance(content, dict) else None
    if not isinstance(about, str):
        return None
    if about == "prefix cache":
        return PrefixCache(
            _place(content),
            content["shared_tokens"],
            content["requests"],
            content["most_hits"],
            content["summary"],
        )
    if about == "inline" or about.split(",")[0] == "tpot":
        return _comparison(about, _place(content), content["summary"], content["times_ms"])
    return None


def configurations(found: Comparison) -> dict[str, dict[int, Cell]] | None:
    """By where they are steered, and the number of configurations; None: it is not about them."""
    if not found.about.endswith("configurations"):
        return None
    lines: dict[str, dict[int, Cell]] = {}
    for arm, cells in found.cells.items():
        number, _, where = arm.partition(" ")
        if number.isdecimal():
            (cell,) = cells.values()
            lines.setdefault(where, {})[int(number)] = cell
    return lines


def _place(content: Mapping[str, object]) -> str:
    return f"{content['shape']}, {content['device']}"


def _comparison(about: str, place: str, summary: Table, times: Times) -> Comparison:
    stock = {batch: figures["median_ms"] for batch, figures in next(iter(summary.values())).items()}
    cells: dict[str, dict[str, Cell]] = {}
    for arm, by_batch in summary.items():
        for batch, figures in by_batch.items():
            low, high = spread(pooled(times[arm][batch]))
            cells.setdefault(arm, {})[batch] = Cell(
                (figures["to_stock"] - 1) * 100,
                (low / stock[batch] - 1) * 100,
                (high / stock[batch] - 1) * 100,
            )
    return Comparison(about, place, about != "inline", stock, cells)
