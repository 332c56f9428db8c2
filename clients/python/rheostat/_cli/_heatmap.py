"""The heatmap of a trace: positions on the x axis, layers on the y axis."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rheostat._cli._common import CommandError
from rheostat._cli._trace import Trace
from rheostat._points import Point, Site

_DOTS_PER_INCH = 150
_DARK = 0.6
"""Above this value a cell is so dark that its number is white."""


def draw(trace: Trace, model: str, path: Path) -> None:
    """Write the heatmap of a trace of ``model``. The suffix of the file chooses the format."""
    from matplotlib.figure import Figure

    rows, columns = trace.recovered.shape
    figure = Figure(figsize=(2.9 + 0.68 * columns, 2.8 + 0.36 * rows), layout="constrained")
    axes = figure.add_subplot()
    # Most cells are near 0, so 0 is white.
    image = axes.imshow(
        trace.recovered, origin="lower", aspect="auto", cmap="Blues", vmin=0.0, vmax=1.0
    )
    for (row, column), value in np.ndenumerate(trace.recovered):
        colour = "white" if value > _DARK else "black"
        label = f"{round(float(value), 2) + 0.0:g}"  # never "-0"
        axes.text(column, row, label, ha="center", va="center", color=colour, fontsize=7)
    axes.set_xticks(range(columns), trace.pair.pieces, rotation=45, ha="right")
    axes.set_yticks(range(rows), [_row(site) for site in trace.sites])
    axes.set_xlabel("token whose row is replaced (clean/corrupted)")
    axes.set_ylabel("residual stream after layer")
    clean, corrupt = trace.pair.answers
    figure.suptitle(f'Which row makes {model} say "{clean}"?', fontsize=12, fontweight="bold")
    axes.set_title(
        f'Prompts: "{trace.pair.clean}" ({clean}) and\n"{trace.pair.corrupt}" ({corrupt}). '
        f"Each cell: the second prompt,\nwith one row of the first. 1: {clean} is as likely as "
        f"there; 0: nothing changes.",
        fontsize=9,
    )
    bar = figure.colorbar(image, ax=axes, extend="both")
    bar.set_label(f"recovered part of ln p({clean}) - ln p({corrupt})")
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot write {path}: {error}") from error


def _row(site: Site) -> str:
    return "embedding" if site.point is Point.RESID_PRE else str(site.layer)
