"""The text of an error on the command line, where flags replace the Python calls of its advice."""

from __future__ import annotations

import re

from rheostat import _errors
from rheostat._errors import RheostatError
from rheostat._subscriptions.state import RESUME_ADVICE
from rheostat._watches.state import WatchState

START_ONE = "start one with rheostat serve MODEL, or name one with --target"
"""What to do if no server answers."""

_NOT_STORED = {"REASON_NAME_NOT_FOUND": "", "REASON_VECTOR_NOT_FOUND": " --all"}
"""Errors of vectors that are not stored, and the flag that lists those that could be meant."""
_FLAGS = {
    _errors.START_ONE: START_ONE,
    "(engine.wait_until_ready() waits for it)": "(--wait waits for it)",
    "once engine.wait_until_ready() has returned": "with --wait, which waits for the server",
    "with .at(points=, layers=)": "with --points and --layers",
    "with .at(points=)": "with --points",
    "with .at(layers=)": "with --layers",
    "with points=, layers=": "with --points and --layers",
    "with points=": "with --points",
    "with layers=": "with --layers",
    _errors.LIST_VECTORS: "",
    RESUME_ADVICE: "",
    WatchState.when_lost: "",
}
"""Python calls that errors advise, and the words to type instead."""
_LAYER = re.compile(r"with layers=(?=\d)")


def error_text(error: RheostatError) -> str:
    """The error in one line."""
    message = _LAYER.sub("with --layers ", str(error))
    for call, flags in _FLAGS.items():
        message = message.replace(call, flags)
    return message + _hint(error)


def _hint(error: RheostatError) -> str:
    """Advice that only the command line has."""
    if error.reason in _NOT_STORED:
        return f"; rheostat vectors list{_NOT_STORED[error.reason]} shows what is stored"
    if error.reason == "REASON_RUN_NOT_FOUND":
        return "; rheostat runs list shows what is stored"
    if error.path == "layers" and "control vectors" in error.message:
        return "; --layers 1-5, say, takes the rows of those layers"
    return ""
