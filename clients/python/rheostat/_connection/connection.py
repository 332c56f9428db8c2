"""The connection of the synchronous client; `aio_connection` is its asyncio twin."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Generic, Protocol, Self, TypeVar

import grpc
from google.protobuf.message import Message

from rheostat import _errors
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

sleep = time.sleep  # the generated client calls it; `rheostat.aio` calls `aio_connection.sleep`

_Message = TypeVar("_Message", covariant=True)


class _RunningCall(Protocol[_Message]):
    """The object that gRPC returns for a call with many answers."""

    def __iter__(self) -> Iterator[_Message]: ...
    def __next__(self) -> _Message: ...
    def cancel(self) -> bool: ...
    def add_callback(self, callback: Callable[[], None]) -> bool: ...


class Responses(Generic[Answer]):
    """The answers of a running call."""

    def __init__(self, call: _RunningCall[Answer], target: str, timeout: float | None) -> None:
        self._call = call
        self.target = target
        self._timeout = timeout
        self._begun = False
        """Whether an answer has arrived."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Answer:
        try:
            answer = next(self._call)
        except grpc.RpcError as error:
            raise _errors.from_rpc(error, self.target, self._timeout, begun=self._begun) from None
        self._begun = True
        return answer

    def cancel(self) -> None:
        """End the call. Does nothing if it has ended."""
        self._call.cancel()


class BidiResponses(Responses[Answer]):
    """The answers of a call that sends further requests while it runs."""

    def __init__(
        self,
        call: _RunningCall[Answer],
        requests: SimpleQueue[Message | None],
        target: str,
        timeout: float | None,
    ) -> None:
        super().__init__(call, target, timeout)
        self._requests = requests

    def send(self, request: Message | None) -> None:
        """Send a request; None ends the stream of requests. Thread-safe."""
        self._requests.put(request)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the call has ended."""
        if not self._call.add_callback(callback):  # the call has ended already
            callback()


class Connection(ConnectionBase):
    """Carries out calls over a channel. All its errors are `RheostatError`."""

    def __init__(self, target: str, timeout: float | None) -> None:
        super().__init__(target, timeout)
        self._channel = grpc.insecure_channel(target, options=OPTIONS)

    @property
    def channel(self) -> grpc.Channel:
        """Raises Refused if the connection is closed."""
        self.check_open()
        return self._channel

    def unary(self, call: UnaryCall[Answer, Result], timeout: float | None = None) -> Result:
        """One request, one answer."""
        timeout = self.limit(timeout)
        rpc = self.channel.unary_unary(call.path, serialize, call.answer.FromString)
        try:
            answer = rpc(call.request, timeout=timeout)
        except grpc.RpcError as error:
            raise _errors.from_rpc(error, self.target, timeout) from None
        return call.read(answer)

    def upload(self, call: UploadCall[Answer, Result], timeout: float | None) -> Result:
        """Many requests, one answer."""
        timeout = self.limit(timeout)
        rpc = self.channel.stream_unary(call.path, serialize, call.answer.FromString)
        try:
            answer = rpc(iter(call.requests), timeout=timeout)
        except grpc.RpcError as error:
            failure = call.requests.failure or _errors.from_rpc(error, self.target, timeout)
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
        requests: SimpleQueue[Message | None] = SimpleQueue()
        timeout = checked_timeout(timeout)
        rpc = self.channel.stream_stream(call.path, serialize, call.answer.FromString)
        running = rpc(_until_none(requests, call.join_requests), timeout=timeout)
        return BidiResponses(running, requests, self.target, timeout)

    def close(self) -> None:
        """Close the channel and end every call on it."""
        self.closed = True
        self._channel.close()


def _until_none(
    requests: SimpleQueue[Message | None], join_requests: JoinRequests
) -> Iterator[Message]:
    """Yields the requests up to None. Requests that wait at the same time are joined."""
    request = requests.get()
    while request is not None:
        waiting = [request]
        while not requests.empty() and (request := requests.get()) is not None:
            waiting.append(request)
        yield from join_requests(waiting)
        if request is not None:
            request = requests.get()
