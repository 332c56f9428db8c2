"""The synchronous client. It carries calls; what they say and mean stands in `_calls`.

It runs on gRPC's own threads, so it works inside a running event loop, as in a notebook, and may be
shared between threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar, Unpack

import grpc
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
_Message = TypeVar("_Message", covariant=True)


class _Responses(Protocol[_Message]):
    """A running call: its messages, and its end."""

    def __iter__(self) -> Iterator[_Message]: ...
    def __next__(self) -> _Message: ...
    def cancel(self) -> bool: ...


class _Connection:
    """A channel, and how each shape of call goes over it. Raises `RheostatError` alone."""

    def __init__(self, target: str, timeout: float | None) -> None:
        self.target = checked_target(target)
        self.timeout = timeout
        self.channel = grpc.insecure_channel(target, options=OPTIONS)

    def unary(self, call: Unary[Answer, Result], timeout: float | None = None) -> Result:
        timeout = self.timeout if timeout is None else timeout
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

    def script(self, script: Script[Answer, Result]) -> Result:
        try:
            call = next(script)
            while True:
                call = script.send(self.unary(call))
        except StopIteration as end:
            result: Result = end.value
            return result

    def upload(self, call: Upload[Answer, Result], timeout: float | None) -> Result:
        rpc = self.channel.stream_unary(
            call.path,
            request_serializer=serialize,
            response_deserializer=call.answer.FromString,
        )
        try:
            answer = rpc(call.requests, timeout=timeout)
        except grpc.RpcError as error:
            raise _errors.from_rpc(error, self.target, timeout) from None
        return call.read(answer)


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
        self._responses: _Responses[Answer] = rpc(call.request, timeout=timeout)
        self._fold: Fold[Answer, Step, Result] = call.fold()
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
            self._waiting.extend(self._fold.feed(message))
        return self._waiting.popleft()

    def result(self) -> Result:
        """Read to the end and give the whole, events already read included."""
        for _ in self:
            pass
        return self._fold.result()

    def cancel(self) -> None:
        """End the call; the server frees what it held. Nothing happens where it has ended."""
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


class Stream(_Reader[generation_service_pb2.GenerateResponse, Event, Generation]):
    """A generation while it runs: an iterator of events; ``result()`` gives the `Generation`."""


class Vectors:
    """The server's store of vectors."""

    def __init__(self, connection: _Connection) -> None:
        """Made by `Engine`."""
        self._connection = connection

    def put(
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
        """Store a vector and give a handle on it. Storing the same numbers twice stores them once.

        ``array`` is [width], one row for every layer, or [layers, width], one row per layer: a
        numpy array, a torch tensor or anything with ``__array__``. float32, float16 and bfloat16
        are kept as they are, other numbers rounded to float32; ``dtype`` converts, and
        ``dtype="bfloat16"`` reads uint16 as bits. ``points`` and ``layers`` are where the handle
        acts by default; with a name and both given, the server keeps them for others to see. A name
        that is on another vector moves here. Without a name the server may evict the vector once
        no request uses it. Raises InvalidRequest for another rank and for elements that are not
        finite.
        """
        call = _calls.put_vector(
            array,
            points=points,
            layers=layers,
            name=name,
            description=description,
            dtype=dtype,
            progress=progress,
        )
        return self._connection.upload(call, timeout)

    def get(
        self, name: str | None = None, *, digest: str | None = None, timeout: float | None = None
    ) -> Vector:
        """Fetch a vector with its numbers (``vector.values``), by name or digest."""
        return _Reader(self._connection, _calls.get_vector(name, digest), timeout).result()

    def list(self, prefix: str = "") -> list[VectorInfo]:
        """Stored vectors by name, those whose name begins with ``prefix``; "": unnamed ones too."""
        return self._connection.script(_calls.list_vectors(prefix))

    def delete(self, name: str) -> str:
        """Take a name off its vector, and give the vector's digest. Running requests go on."""
        return self._connection.unary(_calls.delete_name(name))


class Engine:
    """A connection to a Rheostat server. Every method raises `RheostatError` alone.

    Use it as a context manager or close it. It connects with the first call.
    """

    vectors: Vectors
    """The server's store of vectors."""

    def __init__(self, target: str, *, timeout: float | None = UNARY_TIMEOUT) -> None:
        """See `connect`."""
        self._connection = _Connection(target, timeout)
        self.vectors = Vectors(self._connection)

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Run a request to its end. ``options`` are those of `GenerateOptions`.

        Nothing is decided here that is left out: the server samples at temperature 1 until an end
        token or the context's end. For the most likely text, and for what can be repeated, give
        ``temperature=0``; and give ``max_tokens``. ``timeout`` is in seconds; None waits.
        """
        check_options("generate", options)
        with self.stream(prompt, timeout=timeout, **options) as stream:
            return stream.result()

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

    def explain(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Explanation:
        """What `generate` would do: sites, positions and doses. Runs nothing."""
        check_options("explain", options)
        return self._connection.unary(_calls.explain(prompt, **options), timeout)

    def tokenize(self, prompt: Prompt) -> Tokenized:
        """The tokens of a text or of messages; the text of token ids."""
        return self._connection.unary(_calls.tokenize(prompt))

    def wait_until_ready(self, timeout: float | None = _readiness.READY_TIMEOUT) -> None:
        """Wait until the server's health is SERVING, as while it loads its model.

        Raises DeadlineExceeded where it is not after ``timeout`` seconds (None: waits on), and
        Unavailable where for 10 seconds in a row no server answers.
        """
        wait = _readiness.Wait(self._connection.target, timeout)
        while True:
            try:
                health = self._connection.unary(_calls.health(), wait.patience())
            except (_errors.Unavailable, _errors.DeadlineExceeded) as error:
                wait.unanswered(error)
            else:
                if wait.ready(health):
                    return
            time.sleep(_readiness.POLL)

    def model(self) -> ModelInfo:
        """The model, its sites and what can be done there."""
        return self._connection.unary(_calls.model())

    def stats(self) -> Stats:
        """The server's counters."""
        return self._connection.unary(_calls.stats())

    def close(self) -> None:
        """End the connection and every call on it."""
        self._connection.channel.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """The target."""
        return f"Engine({self._connection.target!r})"


def connect(target: str, *, timeout: float | None = UNARY_TIMEOUT) -> Engine:
    """A client of the server at ``target``, "host:port". Raises InvalidRequest for another form.

    ``timeout`` is how many seconds calls may take that do not generate; None: as long as they like.
    A generation takes its own timeout.
    """
    return Engine(target, timeout=timeout)
