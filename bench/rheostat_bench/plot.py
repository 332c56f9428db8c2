"""Pictures of the benchmarks' files, one beside each.

rheostat bench plot results
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rheostat_bench.bars import Bars, Panel, read_bars
from rheostat_bench.prefix_cache import STATES
from rheostat_bench.results import Cell, Comparison, PrefixCache, configurations, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 150
_STOCK = "#9a9a9a"
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#66ccee", "#dd8833")
"""Paul Tol's bright scheme, which colour-blind readers can tell apart, and an orange."""
_INK = "#333333"
_LABELLED = 0.04
"""Part of a stacked bar from which on its number fits in."""
_WIDE = 95
"""Letters of the arms' names beyond which a legend takes two lines."""


def draw(found: Comparison | PrefixCache | Bars) -> "Figure":
    """The picture of one file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    if isinstance(found, Bars):
        rows = max(
            len(panel.bars) * (2 if panel.stacked else len(_series(panel)))
            for panel in found.panels
        )
        figure = Figure(figsize=(9.6, 2.2 + 0.2 * rows), layout="constrained")
        _panels(figure, found)
        return figure
    figure = Figure(figsize=(9.6, 4.8), layout="constrained")
    if isinstance(found, PrefixCache):
        _prefix_cache(figure, found)
    elif (lines := configurations(found)) is not None:
        _lines(figure, found, lines)
    else:
        _bars(figure, found)
    return figure


def _bars(figure: "Figure", found: Comparison) -> None:
    axes = figure.add_subplot()
    reference, *arms = found.cells
    batches = list(found.stock_ms)
    width = 0.84 / len(arms)
    cells = [cell for of_arm in found.cells.values() for cell in of_arm.values()]
    low, high = min(0.0, *map(min, cells)), max(0.0, *map(max, cells))
    bottom = low - 0.12 * (high - low)
    for place, batch in enumerate(batches):
        stock = found.cells[reference][batch]
        axes.fill_between(
            (place - 0.44, place + 0.44),
            stock.low,
            stock.high,
            color=_STOCK,
            alpha=0.3,
            linewidth=0,
            label="" if place else f"{reference}'s quartiles",
        )
        for number, arm in enumerate(arms):
            x = place + (number - (len(arms) - 1) / 2) * width
            cell = found.cells[arm][batch]
            label = "" if place else arm
            axes.bar(x, cell.median, width * 0.88, color=_COLOURS[number], label=label)
            axes.vlines(x, cell.low, cell.high, color=_INK, linewidth=1.1)
            value = f"{cell.median:+.1f}".replace("-", "\N{MINUS SIGN}")
            axes.text(x, bottom, value, ha="center", va="bottom", fontsize=8, color=_INK)
    axes.set_ylim(bottom, high + 0.04 * (high - low))
    axes.set_xticks(
        range(len(batches)),
        [f"{batch}\nstock: {_milliseconds(found.stock_ms[batch])}" for batch in batches],
    )
    axes.set_xlabel("requests in the batch")
    _finish(figure, axes, found, "bars and numbers: median; whiskers: quartiles")


def _lines(figure: "Figure", found: Comparison, lines: dict[str, dict[int, Cell]]) -> None:
    axes = figure.add_subplot()
    ((batch, stock),) = next(iter(found.cells.values())).items()
    counts = sorted({count for line in lines.values() for count in line})
    axes.axhspan(
        stock.low, stock.high, color=_STOCK, alpha=0.3, linewidth=0, label="stock's quartiles"
    )
    for number, (where, line) in enumerate(lines.items()):
        offset = (number - (len(lines) - 1) / 2) * 0.08
        x = [counts.index(count) + offset for count in line]
        medians = [cell.median for cell in line.values()]
        axes.plot(x, medians, "o-", color=_COLOURS[number], label=f"steered {where}")
        axes.vlines(
            x,
            [cell.low for cell in line.values()],
            [cell.high for cell in line.values()],
            color=_COLOURS[number],
            linewidth=1.1,
        )
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlabel(
        f"different configurations in a batch of {batch} "
        f"(stock: {_milliseconds(found.stock_ms[batch])})"
    )
    _finish(figure, axes, found, "dots: median; whiskers: quartiles")


def _finish(figure: "Figure", axes: "Axes", found: Comparison, key: str) -> None:
    what = "time per output token" if found.per_token else "time of the whole batch"
    axes.axhline(0, color=_INK, linewidth=0.8)
    axes.set_ylabel(f"{what} over stock's median, %")
    axes.set_title(f"{found.about} ({found.place}); {key}", fontsize=10)
    _plain(axes)
    _legend(figure, wide=sum(len(arm) for arm in found.cells) > _WIDE)


def _prefix_cache(figure: "Figure", found: PrefixCache) -> None:
    hits, waits = figure.subplots(1, 2, sharey=True)
    height = 0.27
    for number, (state, colour) in enumerate(zip(STATES, (_STOCK, *_COLOURS), strict=False)):
        places = [place + (number - 1) * height for place in range(len(found.figures))]
        rows = found.figures.values()
        rates = [row[f"hit_rate_{state}"] * 100 for row in rows]
        times = [row[f"ttft_{state}_ms"] for row in rows]
        below = [row[f"ttft_{state}_ms"] - row[f"ttft_{state}_min_ms"] for row in rows]
        above = [row[f"ttft_{state}_max_ms"] - row[f"ttft_{state}_ms"] for row in rows]
        style = {"ecolor": _INK, "elinewidth": 1.1}
        bars = hits.barh(places, rates, height * 0.88, color=colour)
        hits.bar_label(bars, fmt="%.1f", padding=2, fontsize=8, color=_INK)
        bars = waits.barh(
            places,
            times,
            height * 0.88,
            xerr=(below, above),
            error_kw=style,
            color=colour,
            label=f"{state} cache",
        )
        waits.bar_label(bars, fmt="%.0f", padding=3, fontsize=8, color=_INK)
    hits.set_yticks(range(len(found.figures)), found.figures)
    hits.invert_yaxis()
    hits.set_xlim(0, 112)
    hits.set_xlabel(f"hits, % of the {found.shared:,} shared tokens")
    waits.set_xlabel("time to first token, ms; whiskers: least and most")
    waits.set_xlim(0, 1.1 * waits.get_xlim()[1])
    for axes in (hits, waits):
        _plain(axes)
    figure.suptitle(f"prefix cache, {found.requests} requests at once ({found.place})", fontsize=10)
    _legend(figure, wide=False)


def _series(panel: Panel) -> list[str]:
    names = list(dict.fromkeys(name for row in panel.bars.values() for name in row))
    return sorted(names) if panel.stacked else names


def _panels(figure: "Figure", found: Bars) -> None:
    for axes, panel in zip(
        figure.subplots(1, len(found.panels), squeeze=False)[0], found.panels, strict=True
    ):
        series = _series(panel)
        if panel.stacked:
            _stacked(axes, panel, series)
        else:
            _beside(axes, panel, series)
        axes.set_yticks(range(len(panel.bars)), panel.bars)
        axes.invert_yaxis()
        axes.set_xlabel(panel.label)
        axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
        if len(series) > 1:
            columns = 2 if len(series) == 4 else 3
            axes.legend(
                frameon=False, fontsize=8, ncols=columns, loc="lower left", bbox_to_anchor=(0, 0.99)
            )
        _plain(axes)
    figure.suptitle(found.title, fontsize=10)


def _beside(axes: "Axes", panel: Panel, series: list[str]) -> None:
    height = 0.84 / len(series)
    for number, name in enumerate(series):
        bars = {y: row[name] for y, row in enumerate(panel.bars.values()) if name in row}
        places = [y + (number - (len(series) - 1) / 2) * height for y in bars]
        axes.barh(
            places,
            [bar.value for bar in bars.values()],
            height * 0.88,
            color=_COLOURS[number % len(_COLOURS)],
            label=name,
        )
        for y, bar in zip(places, bars.values(), strict=True):
            axes.hlines(y, bar.low, bar.high, color=_INK, linewidth=1.1)
            axes.annotate(
                _short(bar.value),
                (bar.high, y),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
                color=_INK,
            )


def _stacked(axes: "Axes", panel: Panel, series: list[str]) -> None:
    whole = max(sum(bar.value for bar in row.values()) for row in panel.bars.values())
    ends = [0.0] * len(panel.bars)
    for number, name in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        bars = {y: row[name].value for y, row in enumerate(panel.bars.values()) if name in row}
        begins = [ends[y] for y in bars]
        axes.barh(list(bars), list(bars.values()), 0.6, left=begins, color=colour, label=name)
        for y, value in bars.items():
            if value >= _LABELLED * whole:
                middle = ends[y] + value / 2
                axes.text(middle, y, _short(value), ha="center", va="center", fontsize=8, color="w")
            ends[y] += value


def _legend(figure: "Figure", wide: bool) -> None:
    columns = 3 if wide else 6
    figure.legend(frameon=False, fontsize=8.5, loc="outside lower center", ncols=columns)


def _plain(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, labelsize=8.5)


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _milliseconds(value: float) -> str:
    return f"{value:.2f} ms" if value < 100 else f"{value:.0f} ms"


def main() -> None:
    """Draws a folder's files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    for path in sorted(folder.glob("*.json")):
        found = read(path) or read_bars(path)
        if found is None:
            print(f"{path.name}: nothing to draw")
            continue
        try:
            figure = draw(found)
        except ModuleNotFoundError as error:
            sys.exit(f"drawing needs matplotlib: pip install matplotlib ({error})")
        figure.savefig(path.with_suffix(".png"), dpi=_DOTS_PER_INCH)
        print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
