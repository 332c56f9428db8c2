"""What a command says of an error: the client's words, and what to type, not what to call."""

from __future__ import annotations

from rheostat import _errors
from rheostat._errors import RheostatError

START_ONE = "start one with rheostat serve MODEL, or name one with --target"
"""What to do if no server answers."""

_NOT_STORED = ("REASON_NAME_NOT_FOUND", "REASON_VECTOR_NOT_FOUND")
_TYPED = {
    _errors.START_ONE: START_ONE,
    "(engine.wait_until_ready() waits for it)": "(--wait waits for it)",
    "once engine.wait_until_ready() has returned": "with --wait, which waits for the server",
    "with .at(points=, layers=)": "with --points and --layers",
    "; if the server still runs, engine.resume(subscription.acknowledged) goes on": "",
}
"""What errors advise to call, and what to type instead."""


def error_text(error: RheostatError) -> str:
    """The error in one line."""
    message = str(error)
    for call, typed in _TYPED.items():
        message = message.replace(call, typed)
    return message + _hint(error)


def _hint(error: RheostatError) -> str:
    """What to type, behind an error about something that can be typed."""
    if error.reason in _NOT_STORED:
        return "; rheostat vectors list shows what is stored"
    if error.path == "layers" and "control vectors" in error.message:
        return "; --layers 1-5, say, takes the rows of those layers"
    return ""
