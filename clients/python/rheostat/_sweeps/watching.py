"""Shows a sweep while it runs: in a notebook as a heatmap, elsewhere as the caller chooses."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

from rheostat._errors import Refused
from rheostat._notebook import passage
from rheostat._sweeps.result import SweepResult, png

OnUpdate: TypeAlias = Callable[[SweepResult], None]
"""Is called with the cells so far: a result in which all other cells are NaN."""

WatchLike: TypeAlias = OnUpdate | Literal[False] | None
"""None: a heatmap in a notebook, and nothing elsewhere. False: nothing."""

_INTERVAL = 0.4
"""Least pause between two calls, in seconds."""
_PAUSE = 4
"""A pause is at least this many times as long as the call before it."""


class Watcher:
    """Calls a function with the cells so far, a few times a second.

    The function may draw a large picture. No cell is read while it draws, so a slow function is
    called less often.
    """

    def __init__(self, update: OnUpdate) -> None:
        self._update = update
        self._next = 0.0

    def offer(self, result: Callable[[], SweepResult]) -> None:
        """Call the function, unless the pause since the last call is not over."""
        began = time.monotonic()
        if began < self._next:
            return
        self._update(result())
        ended = time.monotonic()
        self._next = ended + max(_INTERVAL, _PAUSE * (ended - began))

    def show(self, result: SweepResult) -> None:
        """Call the function with the whole result."""
        self._update(result)


def watcher_of(watch: WatchLike) -> Watcher | None:
    """The watcher of the argument of `Engine.sweep`, if there is anything to call."""
    update = _notebook() if watch is None else watch
    return Watcher(update) if update else None


class Picture:
    """What a notebook shows of a result: a heatmap, or text if matplotlib is missing."""

    def __init__(self, result: SweepResult) -> None:
        self._text = str(result)
        try:
            self._png: bytes | None = png(result.heatmap())
        except Refused:  # no matplotlib
            self._png = None

    def __repr__(self) -> str:
        return self._text

    def _repr_png_(self) -> bytes | None:
        return self._png

    def _repr_html_(self) -> str | None:
        return passage(self._text) if self._png is None else None


class _Handle(Protocol):
    """IPython's handle of an output."""

    def update(self, shown: object) -> object:
        """Replace the output."""


def _notebook() -> OnUpdate | None:
    """A function that draws into an output of the notebook, if a notebook runs this program.

    A notebook has loaded IPython already, so no other program pays for importing it.
    """
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython
    from IPython.display import display

    if getattr(get_ipython(), "kernel", None) is None:  # IPython in a terminal, or as a library
        return None
    handle: _Handle | None = None

    def update(result: SweepResult) -> None:
        nonlocal handle
        if handle is None:
            handle = display(Picture(result), display_id=True)
        else:
            handle.update(Picture(result))

    return update
