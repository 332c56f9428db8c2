"""Reads the messages of an upload: none may keep memory by being slow."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TypeVar

from rheostat_server.errors import RheostatError, TruncatedUpload
from rheostat_server.limits import UPLOAD_BYTES_PER_SECOND, UPLOAD_GRACE_SECONDS, VECTOR_BYTES

_DRAIN_SECONDS = 1.0
"""Seconds for which a refused upload is still read."""

Message = TypeVar("Message")


async def next_message(
    messages: AsyncIterator[Message], begun: float, received: int, total: int, path: str
) -> Message | None:
    """The next message of an upload, None at its end.

    Args:
        messages: the upload.
        begun: when it began, in seconds of the event loop.
        received: bytes that have come.
        total: bytes that were announced, for the error.
        path: the field that the error names.

    Raises:
        TruncatedUpload: it did not arrive in time. Without the limit, a silent upload would occupy
            memory for ever.
    """
    due = begun + UPLOAD_GRACE_SECONDS + received / UPLOAD_BYTES_PER_SECOND
    try:
        async with asyncio.timeout_at(due) as limit:
            return await anext(messages, None)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TruncatedUpload(
            f"{received} of {total} bytes came in {due - begun:.0f} s; after "
            f"{UPLOAD_GRACE_SECONDS:g} s an upload must have brought at least "
            f"{UPLOAD_BYTES_PER_SECOND} bytes for each further second",
            field=path,
        ) from error


async def drain(messages: AsyncIterator[Message], size: Callable[[Message], int]) -> None:
    """Reads a refused upload for a moment more; `size` is the bytes of a message.

    Otherwise the client's write fails, and Python's asyncio gRPC then reports INTERNAL instead of
    the status.
    """
    remaining = VECTOR_BYTES
    with suppress(TimeoutError, RheostatError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for message in messages:
                remaining -= max(size(message), 1)
                if remaining < 0:
                    return
