"""Where the command ``rheostat`` begins, so that an interrupt ends it quietly from then on.

A package of its own: to import anything of ``rheostat`` imports the whole client, which takes half
a second.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_INTERRUPTED = 130


def main() -> int:
    """Run the command line and give its exit code."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored
    if raises:
        signal.signal(signal.SIGINT, _end)
    from rheostat._cli import main as command

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command()


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)  # nothing has begun that would have to be ended
