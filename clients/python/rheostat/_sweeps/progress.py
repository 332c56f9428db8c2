"""The progress bar of a sweep: a line on a terminal's stderr, or an output of a notebook."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeAlias

from rheostat._notebook import Watcher, notebook_output

OnProgress: TypeAlias = Callable[[int, int], None]
"""Is called with the number of cells that are done, and of all cells known so far."""

ProgressLike: TypeAlias = OnProgress | Literal[False] | None
"""None: a bar in a terminal and in a notebook, and nothing elsewhere. False: nothing."""

_WIDTH = 24
"""Characters of the bar itself."""
_TERMINAL = threading.Lock()
"""Is held by the sweep whose bar is shown. Of several sweeps at the same time, one shows a bar."""


class Progress(NamedTuple):
    """How far a sweep is. `str` makes a line of it, and a notebook shows a bar."""

    done: int
    """Cells that are done."""
    total: int
    """All cells known so far."""
    rate: float
    """Cells in a second; 0.0 if that is unknown."""
    seconds: float | None = None
    """How long the sweep took; None while it runs."""

    @property
    def counts(self) -> str:
        """Cells, their rate, and the time."""
        text = f"{self.done} of {self.total} cells"
        if self.rate:
            text += f", {self.rate:.1f} cells/s"
        if self.seconds is not None:
            return f"{text}, {_clock(self.seconds)} in all"
        if self.rate and self.done < self.total:
            text += f", {_clock((self.total - self.done) / self.rate)} left"
        return text

    def __str__(self) -> str:
        share = self.done / self.total if self.total else 1.0
        full = int(_WIDTH * share)
        return f"sweep [{'#' * full}{'.' * (_WIDTH - full)}] {share:4.0%}  {self.counts}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        value = f'value="{self.done}" max="{max(1, self.total)}"'
        return f"<progress {value}></progress> {self.counts}"


class _Bar:
    """Draws the progress a few times a second."""

    def __init__(self, draw: Callable[[Progress], None]) -> None:
        self._watcher = Watcher(draw)
        self._began = time.monotonic()
        self._first: int | None = None
        """Cells that were done before: those of a checkpoint."""
        self._counts = 0, 0

    def __call__(self, done: int, total: int) -> None:
        if self._first is None:
            self._first = done
        self._counts = done, total
        self._watcher.offer(lambda: self._progress(ended=False))

    def end(self) -> None:
        """Draw the last state."""
        if self._first is not None:
            self._watcher.show(self._progress(ended=True))

    def _progress(self, *, ended: bool) -> Progress:
        done, total = self._counts
        seconds = time.monotonic() - self._began
        rate = (done - (self._first or 0)) / seconds if seconds else 0.0
        return Progress(done, total, rate, seconds if ended else None)


@contextmanager
def progress_of(progress: ProgressLike) -> Iterator[OnProgress | None]:
    """The function to call with the counts of cells; None: nothing.

    A bar keeps its last state when the context ends.
    """
    if progress is not None:
        yield progress or None
        return
    draw: Callable[[Progress], None] | None = notebook_output(lambda shown: shown)
    in_terminal = draw is None and _is_terminal() and _TERMINAL.acquire(blocking=False)
    if in_terminal:
        draw = _draw_line
    if draw is None:
        yield None
        return
    bar = _Bar(draw)
    try:
        yield bar
    finally:
        bar.end()
        if in_terminal:
            _TERMINAL.release()


def _is_terminal() -> bool:
    return not sys.stderr.closed and sys.stderr.isatty()


def _draw_line(progress: Progress) -> None:
    """Replaces the terminal's last line."""
    columns = shutil.get_terminal_size().columns
    end = "" if progress.seconds is None else "\n"
    sys.stderr.write(f"\r\x1b[K{str(progress)[: columns - 1]}{end}")
    sys.stderr.flush()


def _clock(seconds: float) -> str:
    """A duration, as 7 s, 3:20 or 1:02:03."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
