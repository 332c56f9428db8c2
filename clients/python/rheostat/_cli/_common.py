"""What several commands share: their target, points and layers as typed, and their own error."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from rheostat._points import LayersLike

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a command registers itself."""

DEFAULT_TARGET = "localhost:50051"
"""Where ``rheostat serve`` listens unless told otherwise."""


class CommandError(Exception):
    """A command cannot go on; its message is one line for people."""

    def __init__(self, message: str, code: int = 1) -> None:
        """The exit code is 1 for a failure, 2 for a wrong command line."""
        super().__init__(message)
        self.code = code


def add_target(parser: argparse.ArgumentParser) -> None:
    """Give a command ``--target``."""
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="HOST:PORT",
        help=f"server to talk to (default: {DEFAULT_TARGET})",
    )


def points(text: str) -> list[str]:
    """Points as typed: "resid_post" or "resid_pre,resid_mid"."""
    return [name.strip() for name in text.split(",")]


def layers(text: str) -> LayersLike:
    """Layers as typed: "all", "3", "2-5" (5 included) or "0,4,7-9"."""
    if text == "all":
        return "all"
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f'layers are "all", 3, 2-5 or 0,4,7-9, not {text!r}')
        found.extend(range(int(first), int(last if dash else first) + 1))
    return found
