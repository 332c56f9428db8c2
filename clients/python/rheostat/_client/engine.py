"""The synchronous client. It carries calls; `_calls` defines what they send and mean.

It runs on gRPC's own threads, so it works inside a running event loop, as in a notebook, and may be
shared between threads.
"""

from __future__ import annotations

import time
from queue import SimpleQueue
from types import TracebackType
from typing import Self, Unpack

import grpc

from rheostat import _errors
from rheostat._capture.artifacts import Artifact, SinkInfo
from rheostat._capture.runs import RunInfo
from rheostat._client import calls, run_calls
from rheostat._client.requests import GenerateOptions, check_options
from rheostat._client.sessions import SessionCall, SessionEvent, Updates
from rheostat._client.vector_store import Vectors
from rheostat._connection import readiness
from rheostat._connection.channel import UNARY_TIMEOUT
from rheostat._connection.connection import Connection, Reader
from rheostat._errors import RheostatError
from rheostat._prompts import Prompt
from rheostat._responses.explanations import Explanation, Tokenized
from rheostat._responses.model import ModelInfo, Stats
from rheostat._responses.results import Event, Generation
from rheostat._steering.global_steering import GlobalSteering
from rheostat._steering.steering import SteeringLike
from rheostat._subscriptions import requests as subscribe_requests
from rheostat._subscriptions.events import Cursor
from rheostat._subscriptions.requests import ResumeOptions, SubscribeOptions
from rheostat._subscriptions.subscription import Subscription
from rheostat_wire.v1 import generation_service_pb2


class Stream(Reader[generation_service_pb2.GenerateResponse, Event, Generation]):
    """A generation while it runs: an iterator of events; ``result()`` gives the `Generation`."""


class Session(Reader[generation_service_pb2.SessionResponse, SessionEvent, Generation]):
    """A `Stream` whose steering can be replaced while it runs, also by other threads.

    One event, `UpdateApplied` or `UpdateRefused`, answers each call of `steer`, before the
    `Receipt`.
    """

    def __init__(
        self,
        connection: Connection,
        call: SessionCall[generation_service_pb2.SessionResponse, SessionEvent, Generation],
        timeout: float | None,
    ) -> None:
        """Made by `Engine`; starts the call."""
        requests: SimpleQueue[generation_service_pb2.SessionRequest | None] = SimpleQueue()
        self._updates = Updates(call.start, requests.put)
        responses = connection.bidi(call, iter(requests.get, None), timeout)
        if not responses.add_callback(self._updates.close):  # it has ended already
            self._updates.close()
        super().__init__(connection, responses, call.accumulator(self._updates), timeout)

    def steer(self, steering: SteeringLike) -> int:
        """Replace the request's own steering, and return the update's id at once.

        The update acts from the server's next step on, never before the first generated token.
        ``None`` or ``[]`` leaves only the server-wide steering. An event answers the update. Raises
        InvalidRequest for errors that the client can see, and Refused if the request has ended.
        """
        return self._updates.steer(steering)

    def stop(self) -> None:
        """End the request with the finish reason "aborted". The receipt still comes.

        Does nothing if the request has ended already.
        """
        self._updates.stop()

    def cancel(self) -> None:
        """End the call; the server frees its resources. Does nothing if it has ended already."""
        self._updates.close()
        super().cancel()

    def _failure(self, error: grpc.RpcError) -> RheostatError:
        self._updates.close()
        return super()._failure(error)


class Steering:
    """The server-wide steering, which acts on every request. To set it takes role steer_global."""

    def __init__(self, connection: Connection) -> None:
        """Made by `Engine`."""
        self._connection = connection

    def set_global(self, steering: SteeringLike, expected_version: int | None = None) -> int:
        """Replace it as a whole, for requests admitted from now on, and return its new version.

        ``None`` or ``[]`` clears it. If ``expected_version`` is given and another version is in
        force, Refused is raised with reason "REASON_VERSION_CONFLICT"; ``metadata["version"]`` is
        the version in force.
        """
        return self._connection.unary(calls.set_global(steering, expected_version))

    def get_global(self) -> GlobalSteering:
        """The steering in force. Its interventions can be set again, changed or not."""
        return self._connection.unary(calls.get_global())


class Engine:
    """A connection to a Rheostat server. All its errors are `RheostatError`.

    Use it as a context manager or close it. It connects with the first call.
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

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Run a request to its end. ``options`` are those of `GenerateOptions`.

        The client sets no option that you leave out. By default the server samples at temperature
        1 until an end token or the context's end, so give ``max_tokens``, and ``temperature=0`` for
        the most likely text. ``timeout`` is in seconds; None waits without limit.
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
        """Subscribe to captured rows of other clients' requests, or of other calls of this one.

        ``options`` are those of `SubscribeOptions`. Requests that begin from now on are captured
        whole, requests that run already from their next step on. Requests that have ended are not
        captured; a subscription that names such a request waits for a new one of that id.
        """
        check_options("subscribe", options, SubscribeOptions)
        return Subscription(self._connection, subscribe_requests.opening(**options))

    def resume(self, cursor: Cursor, **options: Unpack[ResumeOptions]) -> Subscription:
        """Continue a subscription after ``cursor``, if its client left it or is gone.

        Iterating continues with the event after the cursor. Raises NotFound if the server has ended
        the subscription, and OutOfRange if that event was acknowledged before;
        ``metadata["oldest"]`` is then the number of the first event that can still be read.
        """
        check_options("resume", options, ResumeOptions)
        return Subscription(self._connection, subscribe_requests.resuming(cursor, **options))

    def explain(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Explanation:
        """What `generate` would do: sites, positions and doses. Runs no model."""
        check_options("explain", options)
        return self._connection.unary(calls.explain(prompt, **options), timeout)

    def tokenize(self, prompt: Prompt) -> Tokenized:
        """The tokens of a text or of messages, or the text of token ids."""
        return self._connection.unary(calls.tokenize(prompt))

    def wait_until_ready(self, timeout: float | None = readiness.READY_TIMEOUT) -> None:
        """Wait until the server takes requests (its health is SERVING), while it loads its model.

        Raises DeadlineExceeded if it does not within ``timeout`` seconds (None waits without
        limit), and Unavailable if no server answers for 10 seconds in a row.
        """
        wait = readiness.Wait(self._connection.target, timeout)
        while True:
            try:
                health = self._connection.unary(calls.health(), wait.patience())
            except (_errors.Unavailable, _errors.DeadlineExceeded) as error:
                wait.unanswered(error)
            else:
                if wait.ready(health):
                    return
            time.sleep(readiness.POLL)

    def model(self) -> ModelInfo:
        """The model, its sites and what can be done there."""
        return self._connection.unary(calls.model())

    def sinks(self) -> list[SinkInfo]:
        """The server's sinks, by name."""
        return self._connection.paged(calls.sinks())

    def artifacts(self, request_id: str, *, sink_name: str = "") -> list[Artifact]:
        """What the sinks, or one of them, wrote for a request. Raises NotFound if nothing."""
        return self._connection.paged(calls.artifacts(request_id, sink_name))

    def runs(self) -> list[RunInfo]:
        """The runs that the server has stored, oldest first; `Capture(to=Run())` makes one."""
        return self._connection.paged(run_calls.list_runs())

    def delete_run(self, run_id: str) -> int:
        """Delete a run, leased or not, and return its bytes. Raises Refused if it is in use."""
        return self._connection.unary(run_calls.delete_run(run_id))

    def renew_lease(self, run_id: str, seconds: float) -> RunInfo:
        """Keep a run for ``seconds`` from now on, 1 to 86400. A lease never becomes shorter."""
        return self._connection.unary(run_calls.renew_lease(run_id, seconds))

    def stats(self) -> Stats:
        """The server's counters."""
        return self._connection.unary(calls.stats())

    def close(self) -> None:
        """End the connection and every call on it."""
        self._connection.close()

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

    ``timeout``, in seconds, limits calls that run no prompt and have no timeout of their own, for
    instance those that put and get vectors. None sets no limit. Calls that run prompts have their
    own ``timeout``.
    """
    return Engine(target, timeout=timeout)
