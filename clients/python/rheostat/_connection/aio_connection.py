"""The connection of the asyncio client; `connection` is its synchronous twin.

A connection belongs to the event loop in which it makes its first call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
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
    JoinRequests,
    Result,
    Step,
    UnaryCall,
    UploadCall,
    serialize,
)
from rheostat._connection.channel import OPTIONS, ConnectionBase, checked_timeout
from rheostat_wire.wakeups import all_wakeups_read, running_loop

sleep = asyncio.sleep  # `rheostat.aio` calls it; its generated synchronous twin `connection.sleep`


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
        """Whether an answer has arrived."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Answer:
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
        """The error with which the server ended the call; None if it ended with OK."""
        return error

    def cancel(self) -> None:
        """End the call. Does nothing if it has ended."""
        self._call.cancel()


class Requests:
    """Queue of the requests that a running call has not sent yet."""

    def __init__(self, join_requests: JoinRequests) -> None:
        self._join = join_requests
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Message | None] = deque()
        self._added = asyncio.Event()

    def add(self, request: Message | None) -> None:
        """Add a request; None is the last. Thread-safe.

        Does nothing once the event loop is closed, because its calls have ended with it.
        """
        self._waiting.append(request)
        if running_loop() is self._loop:
            # `call_soon_threadsafe` would add an iteration of the loop, and a write to its socket.
            self._added.set()
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._added.set)

    async def until_none(self) -> AsyncIterator[Message]:
        """Yields the requests up to None. Requests that wait at the same time are joined."""
        last = False
        while not last:
            await self._added.wait()
            self._added.clear()
            waiting: list[Message] = []
            while self._waiting and not last:
                request = self._waiting.popleft()
                if request is None:
                    last = True
                else:
                    waiting.append(request)
            for message in self._join(waiting):
                yield message


class BidiResponses(Responses[Answer]):
    """The answers of a call that sends further requests while it runs."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[Message, Answer],
        requests: Requests,
        target: str,
        timeout: float | None,
    ) -> None:
        super().__init__(call, target, timeout)
        self._requests = requests
        self._status = ServerStatus(call)

    async def _failure(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError | None:
        return await self._status.behind(error)

    def send(self, request: Message | None) -> None:
        """Send a request; None ends the stream of requests. Thread-safe."""
        self._requests.add(request)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the call has ended."""
        self._call.add_done_callback(lambda _: callback())


class Connection(ConnectionBase):
    """Carries out calls over a channel. All its errors are `RheostatError`."""

    def __init__(self, target: str, timeout: float | None) -> None:
        super().__init__(target, timeout)
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """Created at the first use, because it belongs to the event loop that runs then.

        Raises Refused if the connection is closed, or if another event loop runs now.
        """
        self.check_open()
        if self._channel is None:
            self._loop = running_loop()
            with all_wakeups_read():  # else gRPC's thread may block; see `wakeups`
                self._channel = grpc.aio.insecure_channel(self.target, options=OPTIONS)
        elif self._loop is None:
            self._loop = running_loop()
        elif running_loop() not in (self._loop, None):
            raise _errors.Refused(
                "this client made its first call in another event loop: each asyncio.run starts a "
                "new loop, so connect and make all calls inside one asyncio.run"
            )
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

    async def upload(self, call: UploadCall[Answer, Result], timeout: float | None) -> Result:
        """Many requests, one answer."""
        timeout = self.limit(timeout)
        rpc = self.channel.stream_unary(call.path, serialize, call.answer.FromString)
        running = rpc(iter(call.requests), timeout=timeout)
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
        raise failure  # here, so that gRPC's error does not become its context

    def download(
        self, call: DownloadCall[Answer, Step, Result], timeout: float | None
    ) -> Responses[Answer]:
        """Start a call with many answers. ``timeout`` None: no limit."""
        timeout = checked_timeout(timeout)
        rpc = self.channel.unary_stream(call.path, serialize, call.answer.FromString)
        return Responses(rpc(call.request, timeout=timeout), self.target, timeout)

    def bidi(self, call: BidiCall[Answer], timeout: float | None) -> BidiResponses[Answer]:
        """As `download`, for a call that sends further requests while it runs."""
        requests = Requests(call.join_requests)
        timeout = checked_timeout(timeout)
        rpc = self.channel.stream_stream(call.path, serialize, call.answer.FromString)
        running = rpc(requests.until_none(), timeout=timeout)
        return BidiResponses(running, requests, self.target, timeout)

    async def close(self) -> None:
        """Close the channel and end every call on it."""
        self.closed = True
        if self._channel is not None:
            await self._channel.close()


def _task_is_cancelled() -> bool:
    """Whether a CancelledError cancels this task; otherwise one of its calls was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def cancelled_here() -> _errors.Cancelled:
    """The error of a call that was cancelled although its task was not."""
    return _errors.Cancelled(_errors.CANCELLED_HERE)
