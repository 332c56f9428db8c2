"""The asyncio client: as `rheostat.connect`, awaited. `_calls` says what its calls mean.

A client belongs to the event loop in which it makes its first call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Generic, Self, TypeVar, Unpack

import grpc
import grpc.aio
import numpy.typing as npt

from rheostat import _calls, _errors, _readiness
from rheostat._arrays import ArrayLike, Element
from rheostat._calls import (
    Answer,
    Download,
    Fold,
    Progress,
    Result,
    Script,
    Unary,
    Upload,
    serialize,
)
from rheostat._channel import OPTIONS, UNARY_TIMEOUT, checked_target
from rheostat._explanations import Explanation, Tokenized
from rheostat._model import ModelInfo, Stats
from rheostat._points import LayersLike, PointsLike
from rheostat._proto.v1 import generation_service_pb2
from rheostat._requests import GenerateOptions, Prompt, check_options
from rheostat._results import Event, Generation
from rheostat._vectors import Vector, VectorInfo

Step = TypeVar("Step")

__all__ = ["Engine", "Stream", "Vectors", "connect"]


class _Connection:
    """A channel, and how each shape of call goes over it. Raises `RheostatError` alone."""

    def __init__(self, target: str, timeout: float | None) -> None:
        self.target = checked_target(target)
        self.timeout = timeout
        self._channel: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """Made at its first use, when the event loop that it belongs to runs."""
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.target, options=OPTIONS)
        return self._channel

    async def unary(self, call: Unary[Answer, Result], timeout: float | None = None) -> Result:
        timeout = self.timeout if timeout is None else timeout
        rpc = self.channel.unary_unary(
            call.path,
            request_serializer=serialize,
            response_deserializer=call.answer.FromString,
        )
        try:
            answer = await rpc(call.request, timeout=timeout)
        except grpc.RpcError as error:
            raise _errors.from_rpc(error, self.target, timeout) from None
        return call.read(answer)

    async def script(self, script: Script[Answer, Result]) -> Result:
        try:
            call = next(script)
            while True:
                call = script.send(await self.unary(call))
        except StopIteration as end:
            result: Result = end.value
            return result

    async def upload(self, call: Upload[Answer, Result], timeout: float | None) -> Result:
        rpc = self.channel.stream_unary(
            call.path,
            request_serializer=serialize,
            response_deserializer=call.answer.FromString,
        )
        try:
            answer = await rpc(call.requests, timeout=timeout)
        except grpc.RpcError as error:
            raise _errors.from_rpc(error, self.target, timeout) from None
        return call.read(answer)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


class _Reader(Generic[Answer, Step, Result]):
    """A response stream while it is read: events as they come, then the whole."""

    def __init__(
        self,
        connection: _Connection,
        call: Download[Answer, Step, Result],
        timeout: float | None,
    ) -> None:
        """Start the call. It ends by itself after ``timeout`` seconds; None: never."""
        rpc = connection.channel.unary_stream(
            call.path,
            request_serializer=serialize,
            response_deserializer=call.answer.FromString,
        )
        self._call = rpc(call.request, timeout=timeout)
        self._responses: AsyncIterator[Answer] = aiter(self._call)
        self._fold: Fold[Answer, Step, Result] = call.fold()
        self._waiting: deque[Step] = deque()
        self._target, self._timeout = connection.target, timeout
        self._begun = False
        self._cancelled = False

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
                if self._cancelled:  # by `cancel`, not by the task's own cancellation
                    raise _errors.Cancelled("the call was cancelled here") from None
                raise
            self._begun = True
            self._waiting.extend(self._fold.feed(message))
        return self._waiting.popleft()

    async def result(self) -> Result:
        """Read to the end and give the whole, events already read included."""
        async for _ in self:
            pass
        return self._fold.result()

    def cancel(self) -> None:
        """End the call; the server frees what it held. Nothing happens where it has ended."""
        self._cancelled = self._call.cancel() or self._cancelled

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


class Stream(_Reader[generation_service_pb2.GenerateResponse, Event, Generation]):
    """A generation while it runs: an iterator of events; ``result()`` gives the `Generation`."""


class Vectors:
    """The server's store of vectors."""

    def __init__(self, connection: _Connection) -> None:
        """Made by `Engine`."""
        self._connection = connection

    async def put(
        self,
        array: ArrayLike | npt.ArrayLike,
        *,
        points: PointsLike | None = None,
        layers: LayersLike | None = None,
        name: str | None = None,
        description: str = "",
        dtype: Element | None = None,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> Vector:
        """As `rheostat.Vectors.put`; ``progress`` is called on the event loop."""
        call = _calls.put_vector(
            array,
            points=points,
            layers=layers,
            name=name,
            description=description,
            dtype=dtype,
            progress=progress,
        )
        return await self._connection.upload(call, timeout)

    async def get(
        self, name: str | None = None, *, digest: str | None = None, timeout: float | None = None
    ) -> Vector:
        """Fetch a vector with its numbers (``vector.values``), by name or digest."""
        return await _Reader(self._connection, _calls.get_vector(name, digest), timeout).result()

    async def list(self, prefix: str = "") -> list[VectorInfo]:
        """Stored vectors by name, those whose name begins with ``prefix``; "": unnamed ones too."""
        return await self._connection.script(_calls.list_vectors(prefix))

    async def delete(self, name: str) -> str:
        """Take a name off its vector, and give the vector's digest. Running requests go on."""
        return await self._connection.unary(_calls.delete_name(name))


class Engine:
    """A connection to a Rheostat server. Every method raises `RheostatError` alone.

    Use it with ``async with`` or close it. It connects with the first call.
    """

    vectors: Vectors
    """The server's store of vectors."""

    def __init__(self, target: str, *, timeout: float | None = UNARY_TIMEOUT) -> None:
        """See `connect`."""
        self._connection = _Connection(target, timeout)
        self.vectors = Vectors(self._connection)

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Run a request to its end, as `rheostat.Engine.generate`."""
        check_options("generate", options)
        async with self.stream(prompt, timeout=timeout, **options) as stream:
            return await stream.result()

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Run a request and read its events as they come. Options as for `generate`."""
        check_options("stream", options)
        return Stream(self._connection, _calls.generate(prompt, **options), timeout)

    async def explain(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Explanation:
        """What `generate` would do: sites, positions and doses. Runs nothing."""
        check_options("explain", options)
        return await self._connection.unary(_calls.explain(prompt, **options), timeout)

    async def tokenize(self, prompt: Prompt) -> Tokenized:
        """The tokens of a text or of messages; the text of token ids."""
        return await self._connection.unary(_calls.tokenize(prompt))

    async def wait_until_ready(self, timeout: float | None = _readiness.READY_TIMEOUT) -> None:
        """Wait until the server's health is SERVING, as `rheostat.Engine.wait_until_ready`."""
        wait = _readiness.Wait(self._connection.target, timeout)
        while True:
            try:
                health = await self._connection.unary(_calls.health(), wait.patience())
            except (_errors.Unavailable, _errors.DeadlineExceeded) as error:
                wait.unanswered(error)
            else:
                if wait.ready(health):
                    return
            await asyncio.sleep(_readiness.POLL)

    async def model(self) -> ModelInfo:
        """The model, its sites and what can be done there."""
        return await self._connection.unary(_calls.model())

    async def stats(self) -> Stats:
        """The server's counters."""
        return await self._connection.unary(_calls.stats())

    async def close(self) -> None:
        """End the connection and every call on it."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()

    def __repr__(self) -> str:
        """The target."""
        return f"aio.Engine({self._connection.target!r})"


def connect(target: str, *, timeout: float | None = UNARY_TIMEOUT) -> Engine:
    """An asyncio client of the server at ``target``, "host:port"; see `rheostat.connect`."""
    return Engine(target, timeout=timeout)
