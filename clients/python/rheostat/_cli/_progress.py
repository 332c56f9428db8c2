"""Progress of long waits, on stderr.

On a terminal, one line counts the seconds, below lines that a phase may show and replace. In a log,
each phase prints one line, and another every 15 seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

_FRAMES = "|/-\\"
_INTERVAL = 0.2
_LOGGED = 15.0
"""Seconds between two lines of a phase in a log."""


class Phase:
    """A context manager around a wait: ``with Phase("loading the model") as phase``.

    ``stream`` defaults to stderr.
    """

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = stream or sys.stderr
        self._note = ""
        self._shown: Sequence[str] = ()
        self._height = 0
        self._done = threading.Event()
        self._began = time.monotonic()
        self.terminal = self._stream.isatty()
        """Whether the stream is a terminal, so that lines can be replaced."""
        repeat = self._paint if self.terminal else self._log
        self._painter = threading.Thread(target=repeat, daemon=True)

    def note(self, text: str) -> None:
        """Show ``text`` after the title."""
        self._note = text

    def show(self, lines: Sequence[str]) -> None:
        """Show lines above the title, on a terminal, until the phase ends. None may wrap."""
        self._shown = lines

    def __enter__(self) -> Self:
        if not self.terminal:
            print(f"{self._title} ...", file=self._stream, flush=True)
        self._painter.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._painter.join()
        if self.terminal:
            state = "done" if error is None else "failed"
            self._shown = ()
            self._write(f"{self._title}: {state} after {self._seconds()} s\n")

    def _paint(self) -> None:
        frame = 0
        while not self._done.wait(_INTERVAL):
            frame = (frame + 1) % len(_FRAMES)
            self._write(f"{_FRAMES[frame]} {self._state()}")

    def _log(self) -> None:
        while not self._done.wait(_LOGGED):
            print(self._state(), file=self._stream, flush=True)

    def _state(self) -> str:
        note = f", {self._note}" if self._note else ""
        return f"{self._title}: {self._seconds()} s{note}"

    def _write(self, line: str) -> None:
        """Replace the lines of the last call."""
        start = f"\x1b[{self._height}F\x1b[J" if self._height else "\r\x1b[K"
        lines = self._shown
        self._stream.write(start + "\n".join([*lines, line]))
        self._stream.flush()
        self._height = len(lines)

    def _seconds(self) -> int:
        return int(time.monotonic() - self._began)
