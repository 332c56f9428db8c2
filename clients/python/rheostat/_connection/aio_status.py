"""The status with which a server ended an asyncio call that sends requests while it runs.

If gRPC writes a request just after the end of a call, the write fails. gRPC then replaces the
server's status by INTERNAL (`_StreamRequestMixin._write` in grpc.aio._call). That happens before or
after the server's status arrives, so `ServerStatus` observes every status and keeps the server's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

_FAILED_WRITE = "Internal error from Core"
"""The details of gRPC's status after a failed write."""
_STATUS_TIMEOUT = 5.0
"""Seconds to wait for the server's status after a failed write."""

_Result = TypeVar("_Result")


class ServerStatus:
    """The status of one call. Create it in the same step of the event loop as the call."""

    def __init__(self, call: grpc.aio.Call) -> None:
        self._arrived = asyncio.Event()
        self._status: grpc.aio.AioRpcError | None = None
        call.add_done_callback(lambda _: self._store(call))  # gRPC calls it for every status

    def _store(self, call: grpc.aio.Call) -> None:
        status = grpc.aio.AioRpcError(
            _result(call.code()),
            _result(call.initial_metadata()),
            _result(call.trailing_metadata()),
            _result(call.details()),
        )
        if not _is_failed_write(status):
            self._status = status
            self._arrived.set()

    async def behind(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError | None:
        """The error with which the server ended the call; None if it ended with OK.

        ``error`` is gRPC's. It is returned itself if it does not report a failed write, or if the
        server's status does not arrive in time.
        """
        if not _is_failed_write(error):
            return error
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT):
                await self._arrived.wait()
        except TimeoutError:
            return error
        if self._status is None or self._status.code() is grpc.StatusCode.OK:
            return None
        return self._status


def _is_failed_write(status: grpc.aio.AioRpcError) -> bool:
    return status.code() is grpc.StatusCode.INTERNAL and status.details() == _FAILED_WRITE


def _result(ready: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of a coroutine that does not wait, because its call has a status."""
    try:
        ready.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    raise RuntimeError("a call that has ended has no status")
