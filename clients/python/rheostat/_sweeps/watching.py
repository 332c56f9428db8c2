"""Shows a sweep while it runs: in a notebook as a heatmap, elsewhere as the caller chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from rheostat._notebook import Picture, Watcher, notebook_output
from rheostat._sweeps.result import SweepResult

OnUpdate: TypeAlias = Callable[[SweepResult], None]
"""Is called with the cells so far: a result in which all other cells are NaN."""

WatchLike: TypeAlias = OnUpdate | Literal[False] | None
"""None: a heatmap in a notebook, and nothing elsewhere. False: nothing."""


def watcher_of(watch: WatchLike) -> Watcher[SweepResult] | None:
    """The watcher of the argument of `Engine.sweep`, if there is anything to call."""
    update = notebook_output(_picture) if watch is None else watch
    return Watcher(update) if update else None


def _picture(result: SweepResult) -> Picture:
    return Picture(str(result), result.heatmap)
