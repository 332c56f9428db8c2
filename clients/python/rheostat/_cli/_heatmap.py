"""The picture of a trace: positions to the right, layers upwards."""

from __future__ import annotations

from pathlib import Path

from rheostat._cli._common import CommandError
from rheostat._cli._trace import Trace
from rheostat._points import Point, Site

_DOTS_PER_INCH = 150


def check() -> None:
    """Raise CommandError where the picture cannot be drawn, before anything long is begun."""
    try:
        import matplotlib.figure  # noqa: F401  # whether it is there is the question
    except ModuleNotFoundError as error:
        raise CommandError(
            "drawing the heatmap needs matplotlib: pip install matplotlib"
        ) from error


def draw(trace: Trace, path: Path) -> None:
    """Write the heatmap. The file's ending chooses its format."""
    from matplotlib.figure import Figure

    rows, columns = trace.recovered.shape
    figure = Figure(figsize=(2.6 + 0.62 * columns, 2.2 + 0.36 * rows), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        trace.recovered, origin="lower", aspect="auto", cmap="viridis", vmin=0.0, vmax=1.0
    )
    axes.set_xticks(range(columns), trace.pair.pieces, rotation=45, ha="right")
    axes.set_yticks(range(rows), [_row(site) for site in trace.sites])
    axes.set_xlabel("token whose row is made the clean one")
    axes.set_ylabel("residual stream after layer")
    clean, corrupt = trace.pair.answers
    axes.set_title(f'"{trace.pair.clean}": {corrupt} back to {clean}', fontsize=11)
    bar = figure.colorbar(image, ax=axes, extend="both")
    bar.set_label(f"recovered part of ln p({clean}) - ln p({corrupt})")
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot write {path}: {error}") from error


def _row(site: Site) -> str:
    return "embedding" if site.point is Point.RESID_PRE else str(site.layer)
