"""Sites and ranges of positions: read from the wire, and shown in words."""

from __future__ import annotations

from collections.abc import Iterable

from rheostat._points import Point, Site
from rheostat_wire.v1 import types_pb2


def show_sites(sites: Iterable[Site]) -> str:
    """As "resid_post 2-5, resid_pre 0"; "no sites" for none."""
    return ", ".join(show_points(sites)) or "no sites"


def show_points(sites: Iterable[Site]) -> list[str]:
    layers: dict[Point, list[int]] = {}
    for site in sites:
        layers.setdefault(site.point, []).append(site.layer)
    return [f"{point} {show_runs(_runs(numbers))}" for point, numbers in layers.items()]


def _runs(numbers: list[int]) -> list[range]:
    runs: list[range] = []
    for number in sorted(numbers):
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def show_runs(runs: Iterable[range]) -> str:
    """As "0-4, 7"; "none" for no run."""
    shown = (str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return ", ".join(shown) or "none"


def unknown_places(count: int) -> list[str]:
    """What is said of ``count`` sites that this client cannot name, behind those that it can."""
    sites = "site" if count == 1 else "sites"
    return [f"{count} {sites} unknown to this client"] if count else []


def read_runs(runs: Iterable[types_pb2.PositionRun]) -> tuple[range, ...]:
    """Runs of positions as ranges."""
    return tuple(range(run.start, run.start + run.count) for run in runs)
