"""The status with which a server ended an asyncio call that takes requests while it runs.

A request that gRPC writes just after the end of a call fails. gRPC then gives the call a status of
its own, INTERNAL (`_StreamRequestMixin._write` in grpc.aio._call), in place of the server's. That
happens before or after the server's status arrives, so `ServerStatus` looks at every status that a
call gets and keeps the server's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

_FAILED_WRITE = "Internal error from Core"
"""The details of the status that gRPC makes of a write that failed."""
_PATIENCE = 5.0
"""Seconds for which the server's status may follow the error of a write."""

_Result = TypeVar("_Result")


class ServerStatus:
    """The status of one call. It is made in the same step of the event loop as the call."""

    def __init__(self, call: grpc.aio.Call) -> None:
        self._arrived = asyncio.Event()
        self._status: grpc.aio.AioRpcError | None = None
        call.add_done_callback(lambda _: self._store(call))  # gRPC calls it at every status

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
        """The error with which the server ended the call; None if it ended the call with OK.

        Args:
            error: the error that gRPC raised. It is returned unless it is of a failed write.
        """
        if not _is_failed_write(error):
            return error
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._arrived.wait()
        except TimeoutError:
            return error
        if self._status is None or self._status.code() is grpc.StatusCode.OK:
            return None
        return self._status


def _is_failed_write(status: grpc.aio.AioRpcError) -> bool:
    return status.code() is grpc.StatusCode.INTERNAL and status.details() == _FAILED_WRITE


def _result(ready: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of a coroutine that need not wait, because its call has a status."""
    try:
        ready.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    raise RuntimeError("a call that has ended has no status")
