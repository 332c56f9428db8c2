"""The asyncio client: `rheostat.connect`, awaited. `_calls` defines what its calls mean.

A client belongs to the event loop in which it makes its first call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Self, Unpack

import grpc
import numpy.typing as npt

from rheostat import _errors
from rheostat._arrays import ArrayLike, Element
from rheostat._capture.artifacts import Artifact, SinkInfo
from rheostat._capture.runs import RunInfo
from rheostat._client import calls, run_calls, vector_calls
from rheostat._client.requests import GenerateOptions, check_options
from rheostat._client.sessions import SessionCall, SessionEvent, Updates
from rheostat._connection import readiness
from rheostat._connection.aio_connection import Connection, Reader, until_none
from rheostat._connection.channel import UNARY_TIMEOUT
from rheostat._errors import RheostatError
from rheostat._points import LayersLike, PointsLike
from rheostat._prompts import Prompt
from rheostat._responses.explanations import Explanation, Tokenized
from rheostat._responses.model import ModelInfo, Stats
from rheostat._responses.results import Event, Generation
from rheostat._selectors import SelectorLike
from rheostat._steering.derivations import Derivation, DeriveMethod
from rheostat._steering.global_steering import GlobalSteering
from rheostat._steering.steering import SteeringLike
from rheostat._steering.transfers import Progress
from rheostat._steering.vectors import Vector, VectorInfo
from rheostat._subscriptions import requests as subscribe_requests
from rheostat._subscriptions.aio_subscription import Subscription
from rheostat._subscriptions.events import Cursor
from rheostat._subscriptions.requests import ResumeOptions, SubscribeOptions
from rheostat_wire.v1 import generation_service_pb2

__all__ = ["Engine", "Session", "Steering", "Stream", "Subscription", "Vectors", "connect"]


class Stream(Reader[generation_service_pb2.GenerateResponse, Event, Generation]):
    """A generation while it runs: an iterator of events; ``result()`` gives the `Generation`."""


class Session(Reader[generation_service_pb2.SessionResponse, SessionEvent, Generation]):
    """A `Stream` whose steering can be replaced while it runs, as `rheostat.Session`.

    `steer`, `stop` and `cancel` are not awaited: they queue an update, and events answer it. Other
    threads may call `steer` and `stop`. Open a session while its event loop runs.
    """

    def __init__(
        self,
        connection: Connection,
        call: SessionCall[generation_service_pb2.SessionResponse, SessionEvent, Generation],
        timeout: float | None,
    ) -> None:
        """Made by `Engine`; starts the call."""
        requests: asyncio.Queue[generation_service_pb2.SessionRequest | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def send(request: generation_service_pb2.SessionRequest | None) -> None:
            loop.call_soon_threadsafe(requests.put_nowait, request)

        self._updates = Updates(call.start, send)
        responses = connection.bidi(call, until_none(requests), timeout)
        responses.add_done_callback(lambda _: self._updates.close())
        super().__init__(connection, responses, call.accumulator(self._updates), timeout)

    def steer(self, steering: SteeringLike) -> int:
        """Replace the request's steering, as `rheostat.Session.steer`."""
        return self._updates.steer(steering)

    def stop(self) -> None:
        """End the request, as `rheostat.Session.stop`."""
        self._updates.stop()

    def cancel(self) -> None:
        """End the call; the server frees its resources. Does nothing if it has ended already."""
        self._updates.close()
        super().cancel()

    def _failure(self, error: grpc.RpcError) -> RheostatError:
        self._updates.close()
        return super()._failure(error)


class Vectors:
    """The server's store of vectors."""

    def __init__(self, connection: Connection) -> None:
        """Made by `Engine`."""
        self._connection = connection

    async def put(
        self,
        array: ArrayLike | npt.ArrayLike | Vector,
        *,
        points: PointsLike | None = None,
        layers: LayersLike | None = None,
        name: str | None = None,
        description: str | None = None,
        dtype: Element | None = None,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> Vector:
        """As `rheostat.Vectors.put`; ``progress`` is called on the event loop."""
        call = vector_calls.put_vector(
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
        """Fetch a vector with its numbers (``vector.values``), by name or by digest."""
        call, timeout = vector_calls.get_vector(name, digest), self._connection.limit(timeout)
        responses = self._connection.download(call, timeout)
        return await Reader(self._connection, responses, call.accumulator(), timeout).result()

    async def derive(
        self,
        positive: Iterable[Prompt],
        negative: Iterable[Prompt],
        *,
        points: PointsLike,
        layers: LayersLike,
        where: SelectorLike = None,
        method: DeriveMethod = "difference_of_means",
        name: str | None = None,
        description: str = "",
        lora: str | None = None,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> Derivation:
        """As `rheostat.Vectors.derive`; ``progress`` is called on the event loop."""
        call = vector_calls.derive_vectors(
            positive,
            negative,
            points=points,
            layers=layers,
            where=where,
            method=method,
            name=name,
            description=description,
            lora=lora,
            progress=progress,
        )
        responses = self._connection.download(call, timeout)
        async with Reader(self._connection, responses, call.accumulator(), timeout) as reader:
            return await reader.result()

    async def set_name(
        self,
        name: str,
        vector: Vector | str,
        *,
        expected: Vector | str | None = None,
        points: PointsLike | None = None,
        layers: LayersLike | None = None,
        description: str | None = None,
    ) -> str:
        """As `rheostat.Vectors.set_name`."""
        call = vector_calls.set_name(
            name,
            vector,
            expected=expected,
            points=points,
            layers=layers,
            description=description,
        )
        return await self._connection.unary(call)

    async def list(self, prefix: str = "") -> list[VectorInfo]:
        """Stored vectors whose name begins with ``prefix``, by name; "" lists unnamed ones too."""
        return await self._connection.paged(vector_calls.list_vectors(prefix))

    async def delete(self, name: str) -> str:
        """Delete a name and return its vector's digest. Running requests keep the vector."""
        return await self._connection.unary(vector_calls.delete_name(name))


class Steering:
    """The server-wide steering, which acts on every request. To set it takes role steer_global."""

    def __init__(self, connection: Connection) -> None:
        """Made by `Engine`."""
        self._connection = connection

    async def set_global(self, steering: SteeringLike, expected_version: int | None = None) -> int:
        """Replace it as a whole and return its new version, as `rheostat.Steering.set_global`."""
        return await self._connection.unary(calls.set_global(steering, expected_version))

    async def get_global(self) -> GlobalSteering:
        """The steering in force. Its interventions can be set again, changed or not."""
        return await self._connection.unary(calls.get_global())


class Engine:
    """A connection to a Rheostat server. All its errors are `RheostatError`.

    Use it with ``async with`` or close it. It connects with the first call.
    """

    vectors: Vectors
    """The server's store of vectors."""
    steering: Steering
    """The server-wide steering."""

    def __init__(self, target: str, *, timeout: float | None = UNARY_TIMEOUT) -> None:
        """See `connect`."""
        self._connection = Connection(target, timeout)
        self.vectors = Vectors(self._connection)
        self.steering = Steering(self._connection)

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
        call = calls.generate(prompt, **options)
        responses = self._connection.download(call, timeout)
        return Stream(self._connection, responses, call.accumulator(), timeout)

    def session(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Session:
        """Run a request whose steering can be replaced while it runs. Options as for `generate`."""
        check_options("session", options)
        return Session(self._connection, calls.session(prompt, **options), timeout)

    def subscribe(self, **options: Unpack[SubscribeOptions]) -> Subscription:
        """Subscribe to rows of other clients' requests, as `rheostat.Engine.subscribe`.

        Call it while the event loop runs. The subscription is open once ``async with`` has entered.
        """
        check_options("subscribe", options, SubscribeOptions)
        return Subscription(self._connection, subscribe_requests.opening(**options))

    def resume(self, cursor: Cursor, **options: Unpack[ResumeOptions]) -> Subscription:
        """Continue a subscription after ``cursor``, as `rheostat.Engine.resume`."""
        check_options("resume", options, ResumeOptions)
        return Subscription(self._connection, subscribe_requests.resuming(cursor, **options))

    async def explain(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Explanation:
        """What `generate` would do: sites, positions and doses. Runs no model."""
        check_options("explain", options)
        return await self._connection.unary(calls.explain(prompt, **options), timeout)

    async def tokenize(self, prompt: Prompt) -> Tokenized:
        """The tokens of a text or of messages, or the text of token ids."""
        return await self._connection.unary(calls.tokenize(prompt))

    async def wait_until_ready(self, timeout: float | None = readiness.READY_TIMEOUT) -> None:
        """Wait until the server's health is SERVING, as `rheostat.Engine.wait_until_ready`."""
        wait = readiness.Wait(self._connection.target, timeout)
        while True:
            try:
                health = await self._connection.unary(calls.health(), wait.patience())
            except (_errors.Unavailable, _errors.DeadlineExceeded) as error:
                wait.unanswered(error)
            else:
                if wait.ready(health):
                    return
            await asyncio.sleep(readiness.POLL)

    async def model(self) -> ModelInfo:
        """The model, its sites and what can be done there."""
        return await self._connection.unary(calls.model())

    async def sinks(self) -> list[SinkInfo]:
        """The server's sinks, by name."""
        return await self._connection.paged(calls.sinks())

    async def artifacts(self, request_id: str, *, sink_name: str = "") -> list[Artifact]:
        """What the sinks, or one of them, wrote for a request. Raises NotFound if nothing."""
        return await self._connection.paged(calls.artifacts(request_id, sink_name))

    async def runs(self) -> list[RunInfo]:
        """The runs that the server has stored, oldest first; `Capture(to=Run())` makes one."""
        return await self._connection.paged(run_calls.list_runs())

    async def delete_run(self, run_id: str) -> int:
        """Delete a run, leased or not, and return its bytes. Raises Refused if it is in use."""
        return await self._connection.unary(run_calls.delete_run(run_id))

    async def renew_lease(self, run_id: str, seconds: float) -> RunInfo:
        """Keep a run for ``seconds`` from now on, 1 to 86400. A lease never becomes shorter."""
        return await self._connection.unary(run_calls.renew_lease(run_id, seconds))

    async def stats(self) -> Stats:
        """The server's counters."""
        return await self._connection.unary(calls.stats())

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
