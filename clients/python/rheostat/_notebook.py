"""Results as text tables; in notebooks as HTML or pictures, updated while they grow.

All texts in HTML are escaped, because they may come from a model.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from rheostat._errors import Refused

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")

_INTERVAL = 0.4
"""Least pause between two calls, in seconds."""
_PAUSE = 4
"""A pause lasts at least so many times as long as the call before it."""


def text_table(lines: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """Lines of cells as text, in columns of equal width.

    The cells of the columns ``right``, counted from 0, end at the right of their column.
    """
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(size) if column in right else cell.ljust(size)
            for column, (cell, size) in enumerate(zip(line, sizes, strict=True))
        ).rstrip()
        for line in lines
    )


def table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    """A table of two columns."""
    body = "".join(_row("td", row) for row in rows)
    return f"<table><thead>{_row('th', head)}</thead><tbody>{body}</tbody></table>"


def _row(tag: str, cells: tuple[str, str]) -> str:
    style = 'style="text-align:left"'
    return "<tr>" + "".join(f"<{tag} {style}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def passage(text: str) -> str:
    """Text with its line breaks."""
    return f'<pre style="white-space:pre-wrap">{escape(text)}</pre>'


class Watcher(Generic[T]):
    """Calls a function with the result so far, a few times a second at most.

    The function may draw a large picture. No further result arrives while it draws, so a slow
    function is called less often.
    """

    def __init__(self, update: Callable[[T], None]) -> None:
        self._update = update
        self._next = 0.0

    def offer(self, result: Callable[[], T]) -> None:
        """Call the function, unless the pause since the last call is not over."""
        if time.monotonic() >= self._next:
            self.show(result())

    def show(self, result: T) -> None:
        """Call the function."""
        began = time.monotonic()
        self._update(result)
        ended = time.monotonic()
        self._next = ended + max(_INTERVAL, _PAUSE * (ended - began))


class Picture:
    """An output of a notebook: a figure, or text if matplotlib is missing."""

    def __init__(self, text: str, draw: Callable[[], Figure]) -> None:
        self._text = text
        try:
            self._png: bytes | None = png(draw())
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


def notebook_output(picture: Callable[[T], object]) -> Callable[[T], None] | None:
    """A function that shows a result in one output of the notebook; None outside of notebooks.

    A notebook has loaded IPython already, so no other program pays for importing it.
    """
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython
    from IPython.display import display

    if getattr(get_ipython(), "kernel", None) is None:  # IPython in a terminal, or as a library
        return None
    handle: _Handle | None = None

    def update(result: T) -> None:
        nonlocal handle
        if handle is None:
            handle = display(picture(result), display_id=True)
        else:
            handle.update(picture(result))

    return update


def show_in_notebook(figure: Figure) -> Figure:
    """Make notebooks show a figure; matplotlib.pyplot does so too, but is slow to import."""
    vars(figure)["_repr_png_"] = partial(png, figure)
    return figure


def png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
