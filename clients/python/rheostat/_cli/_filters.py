"""The flags of subscribe and watch that select other clients' requests and their tokens."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import TypedDict, TypeVar, get_args

from rheostat._cli._common import add_label
from rheostat._selectors import PhaseName, Selector, positions

_Event = TypeVar("_Event")


class Selected(TypedDict):
    """The arguments of subscribe and watch that select requests."""

    requests: Iterable[str] | None
    labels: Mapping[str, str] | None
    every: bool


def add_filter(parser: argparse.ArgumentParser) -> None:
    """Add ``--request``, ``--label`` and ``--every``, of which one is required."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--request", action="append", metavar="ID", help="select this request; may be repeated"
    )
    add_label(which, "select requests with this label; if repeated, requests with all of them")
    which.add_argument("--every", action="store_true", help="select every request")


def selected(args: argparse.Namespace) -> Selected:
    """The requests that the flags of `add_filter` select."""
    labels = None if args.label is None else dict(args.label)
    return {"requests": args.request, "labels": labels, "every": args.every}


def add_where(
    parser: argparse.ArgumentParser, default: str | None = "all", default_text: str = "all"
) -> None:
    """Add ``--where``, the tokens that are read. ``default_text`` describes the default."""
    parser.add_argument(
        "--where",
        type=_where,
        default=default,
        help="prompt, generated, all, or positions: -1 is the last prompt token; write several "
        f"as --where=0,-1 (default: {default_text})",
    )


def add_limit(parser: argparse.ArgumentParser) -> None:
    """Add ``--limit``, the number of requests after which the command ends."""
    parser.add_argument(
        "--limit", type=_count, metavar="N", help="end after N requests (default: never)"
    )


def until_limit(events: Iterable[_Event], end: type, limit: int | None) -> Iterator[_Event]:
    """The events up to the ``limit``-th of type ``end``, which ends a request; None: all."""
    ended = 0
    for event in events:
        yield event
        ended += isinstance(event, end)
        if ended == limit:
            return


def _where(text: str) -> Selector | str:
    if text in get_args(PhaseName):
        return text
    try:
        return positions(*(int(number) for number in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither prompt, generated, all nor positions such as -1 or 0,5"
        ) from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests")
    return int(text)
