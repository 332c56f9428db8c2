"""The entry point of the command ``rheostat``, which handles Ctrl-C from the first moment.

It is a package of its own, because importing any module of ``rheostat`` imports the whole client,
which takes half a second.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_INTERRUPTED = 130


def main() -> int:
    """Run the command line and give its exit code."""
    # A shell starts background jobs with SIGINT ignored; that must stay so.
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        signal.signal(signal.SIGINT, _end)
    from rheostat._cli import main as command

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command()


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)  # only imports have run, so there is nothing to clean up
