"""How the synchronous client carries calls: a channel, and readers of the streams that answer.

Whatever fails here is raised as a `RheostatError`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import grpc
from google.protobuf.message import Message

from rheostat import _errors
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

    def __iter__(self) -> Iterator[_Message]: ...
    def __next__(self) -> _Message: ...
    def cancel(self) -> bool: ...
    def add_callback(self, callback: Callable[[], None]) -> bool: ...


class Connection:
    """A channel, and how each shape of call goes over it."""

    def __init__(self, target: str, timeout: float | None) -> None:
        self.target = checked_target(target)
        self.timeout = timeout
        self._channel = grpc.insecure_channel(target, options=OPTIONS)
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def channel(self) -> grpc.Channel:
        """Raises Refused once it has been closed."""
        if self._closed:
            raise _errors.Refused(CLOSED)
        return self._channel

    def limit(self, timeout: float | None) -> float | None:
        """Seconds for a call that runs no prompt: ``timeout``, or the connection's own."""
        return self.timeout if timeout is None else timeout

    def unary(self, call: UnaryCall[Answer, Result], timeout: float | None = None) -> Result:
        """One request, one answer."""
        timeout = self.limit(timeout)
        rpc = self.channel.unary_unary(
            call.path,
            request_serializer=serialize,
            response_deserializer=call.answer.FromString,
        )
        try:
            answer = rpc(call.request, timeout=timeout)
        except grpc.RpcError as error:
            raise _errors.from_rpc(error, self.target, timeout) from None
        return call.read(answer)

    def paged(self, calls: PagedCall[Answer, Result]) -> Result:
        """The calls of a listing, one after the other."""
        try:
            call = next(calls)
            while True:
                call = calls.send(self.unary(call))
        except StopIteration as end:
            result: Result = end.value
            return result

    def upload(self, call: UploadCall[Answer, Result], timeout: float | None) -> Result:
        """Many requests, one answer."""
        timeout = self.limit(timeout)
        rpc = self.channel.stream_unary(
            call.path,
            request_serializer=serialize,
            response_deserializer=call.answer.FromString,
        )
        try:
            answer = rpc(call.requests, timeout=timeout)
        except grpc.RpcError as error:
            failure = call.requests.failure or _errors.from_rpc(error, self.target, timeout)
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
        requests: Iterator[Message],
        timeout: float | None,
    ) -> Responses[Answer]:
        """As `download`, of a call that takes further requests while it runs."""
        rpc = self.channel.stream_stream(
            call.path,
            request_serializer=serialize,
            response_deserializer=call.answer.FromString,
        )
        responses: Responses[Answer] = rpc(requests, timeout=timeout)
        return responses

    def close(self) -> None:
        """End the channel and every call on it."""
        self._closed = True
        self._channel.close()


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
        self._responses = responses
        self._accumulator = accumulator
        self._waiting: deque[Step] = deque()
        self._target, self._timeout = connection.target, timeout
        self._begun = False

    def __iter__(self) -> Self:
        """The events that have not been read yet."""
        return self

    def __next__(self) -> Step:
        """The next event; waits for it."""
        while not self._waiting:
            try:
                message = next(self._responses)
            except grpc.RpcError as error:
                raise self._failure(error) from None
            self._begun = True
            self._waiting.extend(self._accumulator.add(message))
        return self._waiting.popleft()

    def result(self) -> Result:
        """Read to the end and give the whole, events already read included."""
        for _ in self:
            pass
        return self._accumulator.result()

    def cancel(self) -> None:
        """End the call; the server frees what it held. Does nothing if it has ended."""
        self._responses.cancel()

    def _failure(self, error: grpc.RpcError) -> _errors.RheostatError:
        return _errors.from_rpc(error, self._target, self._timeout, begun=self._begun)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel what has not ended."""
        self.cancel()
