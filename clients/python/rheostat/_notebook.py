"""HTML of results in a notebook. All texts are escaped, because they may come from a model."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


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
