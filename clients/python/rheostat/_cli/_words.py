"""What a command says of an error: the client's words, and what to type, not what to call."""

from __future__ import annotations

from rheostat._errors import InvalidRequest, RheostatError, Unavailable

START_ONE = "start one with rheostat serve MODEL, or name one with --target"
"""What to do where no server answers."""

_NOT_STORED = ("REASON_NAME_NOT_FOUND", "REASON_VECTOR_NOT_FOUND")
_CALL_THAT_WAITS = "(engine.wait_until_ready() waits for it)"


def told(error: RheostatError) -> str:
    """The error in one line."""
    if isinstance(error, Unavailable) and error.message.startswith("no server answers"):
        return f"{error.message}: {START_ONE}"
    return str(error).replace(_CALL_THAT_WAITS, "(--wait waits for it)") + _hint(error)


def _hint(error: RheostatError) -> str:
    """What to type, behind an error about something that can be typed."""
    if error.reason in _NOT_STORED:
        return "; rheostat vectors list shows what is stored"
    if error.path == "layers" and "control vectors" in error.message:
        return "; --layers 1-5, say, takes the rows of those layers"
    if isinstance(error, InvalidRequest) and error.path.endswith("].sites"):
        return "; here with --points and --layers"
    return ""
