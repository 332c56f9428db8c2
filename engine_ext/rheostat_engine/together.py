"""Marks requests that may share a message to the engine's core.

The requests of a sweep's cells do; see `adapters.request_batches`. For other requests the first
token matters more, so each has a message of its own. Importable without vLLM.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_TOGETHER: ContextVar[bool] = ContextVar("rheostat_requests_together", default=False)


@contextmanager
def requests_together() -> Iterator[None]:
    """Lets requests of one iteration of the event loop share a message.

    Applies to requests that are added within it, and in tasks that begin within it.
    """
    token = _TOGETHER.set(True)
    try:
        yield
    finally:
        _TOGETHER.reset(token)


def may_share_message() -> bool:
    """Whether a request that is added now may share a message."""
    return _TOGETHER.get()
