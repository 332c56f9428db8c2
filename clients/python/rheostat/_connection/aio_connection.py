"""How the asyncio client carries calls: as `connection` does, awaited.

A connection belongs to the event loop in which it makes its first call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, Self

import grpc
import grpc.aio
from google.protobuf.message import Message

from rheostat import _errors
from rheostat._connection.aio_status import ServerStatus
from rheostat._connection.calls import (
    Answer,
    BidiCall,
    DownloadCall,
    PagedCall,
    Result,
    Step,
    UnaryCall,
    UploadCall,
    serialize,
)
from rheostat._connection.channel import OPTIONS, ConnectionBase, checked_timeout

sleep = asyncio.sleep
"""Waits for some seconds, as `connection.sleep` does."""


class Responses(Generic[Answer]):
    """The answers of a running call."""

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[Message, Answer]
        | grpc.aio.StreamStreamCall[Message, Answer],
        target: str,
        timeout: float | None,
    ) -> None:
        self._call = call
        self._answers = aiter(call)
        self.target = target
        self._timeout = timeout
        self._begun = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Answer:
        """The next answer; waits for it."""
        try:
            answer = await anext(self._answers)
        except grpc.aio.AioRpcError as error:
            failure = await self._failure(error)
        except asyncio.CancelledError:
            if _task_is_cancelled():
                raise
            raise cancelled_here() from None
        else:
            self._begun = True
            return answer
        if failure is None:
            raise StopAsyncIteration
        raise _errors.from_rpc(failure, self.target, self._timeout, begun=self._begun)

    async def _failure(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError | None:
        """The error with which the server ended the call; None if it ended the call with OK."""
        return error

    def cancel(self) -> None:
        """End the call. Does nothing if it has ended."""
        self._call.cancel()


class BidiResponses(Responses[Answer]):
    """The answers of a call that takes further requests while it runs."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[Message, Answer],
        requests: asyncio.Queue[Message | None],
        target: str,
        timeout: float | None,
    ) -> None:
        super().__init__(call, target, timeout)
        self._loop = asyncio.get_running_loop()
        self._requests = requests
        self._status = ServerStatus(call)

    async def _failure(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError | None:
        return await self._status.behind(error)

    def send(self, request: Message | None) -> None:
        """Send a request; None: no further one follows. Any thread may call this."""
        self._loop.call_soon_threadsafe(self._requests.put_nowait, request)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the call has ended."""
        self._call.add_done_callback(lambda _: callback())


class Connection(ConnectionBase):
    """A channel, and how each kind of call is carried by it. Raises `RheostatError` alone."""

    def __init__(self, target: str, timeout: float | None) -> None:
        super().__init__(target, timeout)
        self._channel: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """Made at its first use, when the event loop that it belongs to runs.

        Raises Refused once it has been closed.
        """
        self.check_open()
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.target, options=OPTIONS)
        return self._channel

    async def unary(self, call: UnaryCall[Answer, Result], timeout: float | None = None) -> Result:
        """One request, one answer."""
        timeout = self.limit(timeout)
        rpc = self.channel.unary_unary(call.path, serialize, call.answer.FromString)
        try:
            answer = await rpc(call.request, timeout=timeout)
        except grpc.RpcError as error:
            raise _errors.from_rpc(error, self.target, timeout) from None
        except asyncio.CancelledError:
            if _task_is_cancelled():
                raise
            raise cancelled_here() from None
        return call.read(answer)

    async def paged(self, calls: PagedCall[Answer, Result]) -> Result:
        """The calls of a listing, one after the other."""
        try:
            call = next(calls)
            while True:
                call = calls.send(await self.unary(call))
        except StopIteration as end:
            result: Result = end.value
            return result

    async def upload(self, call: UploadCall[Answer, Result], timeout: float | None) -> Result:
        """Many requests, one answer."""
        timeout = self.limit(timeout)
        rpc = self.channel.stream_unary(call.path, serialize, call.answer.FromString)
        running = rpc(call.requests, timeout=timeout)
        status = ServerStatus(running)
        try:
            answer = await running
        except grpc.aio.AioRpcError as error:
            ended = await status.behind(error) or error
            failure = call.requests.failure or _errors.from_rpc(ended, self.target, timeout)
        except asyncio.CancelledError:
            if _task_is_cancelled():
                raise
            failure = call.requests.failure or cancelled_here()
        else:
            return call.read(answer)
        raise failure

    def download(
        self, call: DownloadCall[Answer, Step, Result], timeout: float | None
    ) -> Responses[Answer]:
        """Start a call with many answers. It ends after ``timeout`` seconds; None: never."""
        timeout = checked_timeout(timeout)
        rpc = self.channel.unary_stream(call.path, serialize, call.answer.FromString)
        return Responses(rpc(call.request, timeout=timeout), self.target, timeout)

    def bidi(self, call: BidiCall[Answer], timeout: float | None) -> BidiResponses[Answer]:
        """As `download`, for a call that takes further requests while it runs."""
        requests: asyncio.Queue[Message | None] = asyncio.Queue()
        timeout = checked_timeout(timeout)
        rpc = self.channel.stream_stream(call.path, serialize, call.answer.FromString)
        running = rpc(_until_none(requests), timeout=timeout)
        return BidiResponses(running, requests, self.target, timeout)

    async def close(self) -> None:
        """End the channel and every call on it."""
        self.closed = True
        if self._channel is not None:
            await self._channel.close()


async def _until_none(requests: asyncio.Queue[Message | None]) -> AsyncIterator[Message]:
    """The requests of a queue up to the first None."""
    while (request := await requests.get()) is not None:
        yield request


def _task_is_cancelled() -> bool:
    """Whether a CancelledError is meant for this task; else a call of it was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def cancelled_here() -> _errors.Cancelled:
    """The error of a call that was cancelled although its task was not."""
    return _errors.Cancelled(_errors.CANCELLED_HERE)
