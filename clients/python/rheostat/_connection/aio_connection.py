"""How the asyncio client carries calls: as `_connection` does, awaited.

A connection belongs to the event loop in which it makes its first call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from rheostat import _errors
from rheostat._connection.aio_status import ServerStatus
from rheostat._connection.calls import (
    Accumulator,
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
from rheostat._connection.channel import CLOSED, OPTIONS, checked_target

_Message = TypeVar("_Message", covariant=True)


class Responses(Protocol[_Message]):
    """A running call: its messages, and its end."""

    def __aiter__(self) -> AsyncIterator[_Message]: ...
    def cancel(self) -> bool: ...
    def add_done_callback(self, callback: Callable[[object], None]) -> None: ...


class Connection:
    """A channel, and how each shape of call goes over it. Raises `RheostatError` alone."""

    def __init__(self, target: str, timeout: float | None) -> None:
        self.target = checked_target(target)
        self.timeout = timeout
        self._channel: grpc.aio.Channel | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def channel(self) -> grpc.aio.Channel:
        """Made at its first use, when the event loop that it belongs to runs.

        Raises Refused once it has been closed.
        """
        if self._closed:
            raise _errors.Refused(CLOSED)
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.target, options=OPTIONS)
        return self._channel

    def limit(self, timeout: float | None) -> float | None:
        """Seconds for a call that runs no prompt: ``timeout``, or the connection's own."""
        return self.timeout if timeout is None else timeout

    async def unary(self, call: UnaryCall[Answer, Result], timeout: float | None = None) -> Result:
        """One request, one answer."""
        timeout = self.limit(timeout)
        rpc = self.channel.unary_unary(
            call.path,
            request_serializer=serialize,
            response_deserializer=call.answer.FromString,
        )
        try:
            answer = await rpc(call.request, timeout=timeout)
        except grpc.RpcError as error:
            raise _errors.from_rpc(error, self.target, timeout) from None
        except asyncio.CancelledError:
            if task_is_cancelled():
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
        rpc = self.channel.stream_unary(
            call.path,
            request_serializer=serialize,
            response_deserializer=call.answer.FromString,
        )
        running = rpc(call.requests, timeout=timeout)
        status = ServerStatus(running)
        try:
            answer = await running
        except grpc.aio.AioRpcError as error:
            ended = await status.behind(error) or error
            failure = call.requests.failure or _errors.from_rpc(ended, self.target, timeout)
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            failure = call.requests.failure or cancelled_here()
        else:
            return call.read(answer)
        raise failure

    def download(
        self, call: DownloadCall[Answer, Step, Result], timeout: float | None
    ) -> Responses[Answer]:
        """Start a call with many answers. It ends after ``timeout`` seconds; None: never."""
        rpc = self.channel.unary_stream(
            call.path,
            request_serializer=serialize,
            response_deserializer=call.answer.FromString,
        )
        responses: Responses[Answer] = rpc(call.request, timeout=timeout)
        return responses

    def bidi(
        self,
        call: BidiCall[Answer],
        requests: AsyncIterator[Message],
        timeout: float | None,
    ) -> Responses[Answer]:
        """As `download`, of a call that takes further requests while it runs."""
        rpc = self.channel.stream_stream(
            call.path,
            request_serializer=serialize,
            response_deserializer=call.answer.FromString,
        )
        return _Answers(rpc(requests, timeout=timeout))

    async def close(self) -> None:
        """End the channel and every call on it."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()


class _Answers(Generic[Answer]):
    """The answers of a call that takes further requests, up to the status that the server sent."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Message, Answer]) -> None:
        self._call = call
        self._answers = aiter(call)
        self._status = ServerStatus(call)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Answer:
        try:
            return await anext(self._answers)
        except grpc.aio.AioRpcError as error:
            failure = await self._status.behind(error)
        if failure is None:
            raise StopAsyncIteration
        raise failure

    def cancel(self) -> bool:
        return self._call.cancel()

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self._call.add_done_callback(callback)


class _Queue(Protocol):
    """Messages to come."""

    async def get(self) -> Message | None: ...


async def until_none(requests: _Queue) -> AsyncIterator[Message]:
    """What is put into a queue, until None is."""
    while (request := await requests.get()) is not None:
        yield request


def task_is_cancelled() -> bool:
    """Whether a CancelledError is meant for this task; else a call of it was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def cancelled_here() -> _errors.Cancelled:
    """The error of a call that was cancelled and no task."""
    return _errors.Cancelled("the call was cancelled here")


class Reader(Generic[Answer, Step, Result]):
    """A response stream while it is read: events as they come, then the whole."""

    def __init__(
        self,
        connection: Connection,
        responses: Responses[Answer],
        accumulator: Accumulator[Answer, Step, Result],
        timeout: float | None,
    ) -> None:
        """Made by `Engine`, of a call that has been started."""
        self._call = responses
        self._responses: AsyncIterator[Answer] = aiter(responses)
        self._accumulator = accumulator
        self._waiting: deque[Step] = deque()
        self._target, self._timeout = connection.target, timeout
        self._begun = False

    def __aiter__(self) -> Self:
        """The events that have not been read yet."""
        return self

    async def __anext__(self) -> Step:
        """The next event; waits for it."""
        while not self._waiting:
            try:
                message = await anext(self._responses)
            except grpc.RpcError as error:
                raise self._failure(error) from None
            except asyncio.CancelledError:
                if task_is_cancelled():
                    raise
                raise cancelled_here() from None
            self._begun = True
            self._waiting.extend(self._accumulator.add(message))
        return self._waiting.popleft()

    async def result(self) -> Result:
        """Read to the end and give the whole, events already read included."""
        async for _ in self:
            pass
        return self._accumulator.result()

    def cancel(self) -> None:
        """End the call; the server frees what it held. Does nothing if it has ended."""
        self._call.cancel()

    def _failure(self, error: grpc.RpcError) -> _errors.RheostatError:
        return _errors.from_rpc(error, self._target, self._timeout, begun=self._begun)

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel what has not ended."""
        self.cancel()
