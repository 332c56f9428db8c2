"""Sites and ranges of positions: read from messages, and shown as text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rheostat._fields import counted
from rheostat._points import Point, Site
from rheostat_wire.v1 import types_pb2


def show_sites(sites: Iterable[Site]) -> str:
    """As "resid_post 2-5, resid_pre 0", or "no sites"."""
    return ", ".join(show_points(sites)) or "no sites"


def show_points(sites: Iterable[Site]) -> list[str]:
    layers: dict[Point, list[int]] = {}
    for site in sites:
        layers.setdefault(site.point, []).append(site.layer)
    return [
        f"{point} {show_ranges(ranges_of(sorted(numbers)))}" for point, numbers in layers.items()
    ]


def ranges_of(numbers: Iterable[int]) -> list[range]:
    """The runs of consecutive numbers, of ascending numbers."""
    ranges: list[range] = []
    for number in numbers:
        if ranges and ranges[-1].stop == number:
            ranges[-1] = range(ranges[-1].start, number + 1)
        else:
            ranges.append(range(number, number + 1))
    return ranges


def show_ranges(ranges: Iterable[range]) -> str:
    """As "0-4, 7", or "none"."""
    shown = (
        str(extent[0]) if len(extent) == 1 else f"{extent[0]}-{extent[-1]}" for extent in ranges
    )
    return ", ".join(shown) or "none"


def show_positions(positions: npt.NDArray[np.int64]) -> str:
    """As "0-4, 7", or "none"."""
    return show_ranges(ranges_of(np.unique(positions).tolist()))


def unknown_sites_text(count: int) -> list[str]:
    """Text that follows a list of sites, for ``count`` further sites that this client lacks."""
    return [f"{counted(count, 'site')} unknown to this client"] if count else []


def read_ranges(ranges: Iterable[types_pb2.PositionRun]) -> tuple[range, ...]:
    return tuple(range(extent.start, extent.start + extent.count) for extent in ranges)
