"""A sweep's grid as text: shaded cells that fit a terminal, or a table of numbers.

The last layer is at the top, as in `SweepResult.heatmap`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rheostat._notebook import text_table
from rheostat._sweeps.result import Grid, SweepResult

_SHADES = " ░▒▓█"
"""From no effect to the largest effect of the grid."""
_PENDING, _SKIPPED, _WITHIN_NOISE = "·", "-", "~"
_BLUE, _RED, _PLAIN = "\x1b[34m", "\x1b[31m", "\x1b[0m"
"""Above and below the unchanged prompts, as in the heatmap."""
_TICK = 5
_WIDEST = 14
"""Most characters of a column's head in a table."""


def shaded(result: SweepResult, width: int, height: int, grade: str | None = None) -> list[str]:
    """At most ``height`` lines of at most ``width`` characters, with colours.

    If the grid is larger, a character stands for the largest effect of several cells.
    """
    names = result.site_labels
    margin = max(map(len, names), default=0) + 1
    effects = result.array(grade) - result.base(grade)
    skipped = np.zeros(effects.shape, np.bool_)
    skipped.flat[list(result.skipped)] = True
    rows, columns = effects.shape
    room = max(width - margin, 1)
    cell_width = 2 if 0 < 2 * columns <= room else 1
    cell_rows = max(-(-rows // max(height - 1, 1)), 1)
    cell_columns = max(-(-columns // room), 1)
    largest = float(np.nanmax(np.abs(effects), initial=0.0)) or 1.0
    lines = []
    for top in range(rows - 1, -1, -cell_rows):
        bottom = max(top - cell_rows + 1, 0)
        blocks = (
            np.s_[bottom : top + 1, left : left + cell_columns]
            for left in range(0, columns, cell_columns)
        )
        line = "".join(
            _cell(effects[block], skipped[block], largest, cell_width) for block in blocks
        )
        lines.append(f"{names[bottom]:>{margin - 1}} {line}")
    return [*lines, " " * margin + _axis(columns, cell_columns, cell_width)[:room].rstrip()]


def _cell(effects: Grid, skipped: npt.NDArray[np.bool_], largest: float, width: int) -> str:
    """A block of cells as one character, ``width`` times."""
    if np.isnan(effects).all():
        return (_SKIPPED if skipped.all() else _PENDING) * width
    effect = float(effects.flat[np.nanargmax(np.abs(effects))])
    shade = _SHADES[round((len(_SHADES) - 1) * abs(effect) / largest)]
    colour = _BLUE if effect > 0 else _RED
    return f"{colour}{shade * width}{_PLAIN}" if shade != " " else " " * width


def _axis(columns: int, cell_columns: int, cell_width: int) -> str:
    """The line below the grid: numbers of columns, each from the left edge of its column."""
    line = ""
    for number in range(0, columns, _TICK * cell_columns):
        at = number // cell_columns * cell_width
        if len(line) <= at:
            line = line.ljust(at) + str(number)
    return line


def table(result: SweepResult, grade: str | None = None) -> list[str]:
    """A line for each site and a number for each column.

    "~" stands for a value within the noise, "-" for a skipped cell. A cell that zoom left out is
    blank.
    """
    values = result.array(grade)
    head = ["", *map(_short, result.labels)]
    rows = [
        [name, *(_number(result, row, column, value) for column, value in enumerate(numbers))]
        for row, (name, numbers) in enumerate(zip(result.site_labels, values.tolist(), strict=True))
    ]
    return text_table([head, *reversed(rows)], right=range(len(head))).split("\n")


def _number(result: SweepResult, row: int, column: int, value: float) -> str:
    if np.isnan(value):
        return _SKIPPED if row * len(result.columns) + column in result.skipped else ""
    return _WITHIN_NOISE if result.below_noise[row, column] else f"{round(value, 2) + 0.0:.2f}"


def _short(label: str) -> str:
    return label if len(label) <= _WIDEST else f"{label[: _WIDEST - 3]}..."
