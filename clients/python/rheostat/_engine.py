"""The synchronous client. It carries calls; what they say and mean stands in `_calls`.

It runs on gRPC's own threads, so it works inside a running event loop, as in a notebook, and may be
shared between threads.
"""

from __future__ import annotations

import time
from queue import SimpleQueue
from types import TracebackType
from typing import Self, Unpack

import grpc

from rheostat import _calls, _errors, _readiness, _run_calls, _subscribe_requests
from rheostat._artifacts import Artifact, SinkInfo
from rheostat._calls import Dialogue
from rheostat._channel import UNARY_TIMEOUT
from rheostat._connection import Connection, Reader
from rheostat._errors import RheostatError
from rheostat._explanations import Explanation, Tokenized
from rheostat._global_steering import GlobalSteering
from rheostat._model import ModelInfo, Stats
from rheostat._proto.v1 import generation_service_pb2
from rheostat._requests import GenerateOptions, Prompt, check_options
from rheostat._results import Event, Generation
from rheostat._runs import RunInfo
from rheostat._sessions import SessionEvent, Updates
from rheostat._steering import SteeringLike
from rheostat._subscribe_requests import ResumeOptions, SubscribeOptions
from rheostat._subscribed import Cursor
from rheostat._subscription import Subscription
from rheostat._vector_store import Vectors


class Stream(Reader[generation_service_pb2.GenerateResponse, Event, Generation]):
    """A generation while it runs: an iterator of events; ``result()`` gives the `Generation`."""


class Session(Reader[generation_service_pb2.SessionResponse, SessionEvent, Generation]):
    """A generation that can be changed while it runs: as `Stream`, and threads may change it.

    Every update that `steer` takes is answered by one event, `UpdateApplied` or `UpdateRefused`,
    before the `Receipt`.
    """

    def __init__(
        self,
        connection: Connection,
        call: Dialogue[generation_service_pb2.SessionResponse, SessionEvent, Generation],
        timeout: float | None,
    ) -> None:
        """Made by `Engine`; starts the call."""
        requests: SimpleQueue[generation_service_pb2.SessionRequest | None] = SimpleQueue()
        self._updates = Updates(call.start, requests.put)
        responses = connection.dialogue(call, iter(requests.get, None), timeout)
        if not responses.add_callback(self._updates.close):  # it has ended already
            self._updates.close()
        super().__init__(connection, responses, call.fold(self._updates), timeout)

    def steer(self, steering: SteeringLike) -> int:
        """Replace the request's steering, and give the update's id.

        It acts from the server's next step on, never before the first generated token, and replaces
        what the request had; ``None`` or ``[]`` leaves the server-wide steering alone. Returns at
        once; an event answers it. Raises InvalidRequest for what can be seen to be wrong here, and
        Refused once the request has ended.
        """
        return self._updates.steer(steering)

    def stop(self) -> None:
        """End the request: finish reason "aborted", and the receipt still comes.

        Nothing happens where it has ended.
        """
        self._updates.stop()

    def cancel(self) -> None:
        """End the call; the server frees what it held. Nothing happens where it has ended."""
        self._updates.close()
        super().cancel()

    def _failure(self, error: grpc.RpcError) -> RheostatError:
        self._updates.close()
        return super()._failure(error)


class Steering:
    """The server-wide steering. Every request runs under it; setting it takes role steer_global."""

    def __init__(self, connection: Connection) -> None:
        """Made by `Engine`."""
        self._connection = connection

    def set_global(self, steering: SteeringLike, expected_version: int | None = None) -> int:
        """Replace it as a whole, for requests admitted from then on, and give its new version.

        ``None`` or ``[]`` clears it. With ``expected_version`` it is replaced only where that is
        the version that holds; else Refused is raised, with reason "REASON_VERSION_CONFLICT" and
        the version that does in ``metadata["version"]``.
        """
        return self._connection.unary(_calls.set_global(steering, expected_version))

    def get_global(self) -> GlobalSteering:
        """What holds. Its interventions can be set again, changed or not."""
        return self._connection.unary(_calls.get_global())


class Engine:
    """A connection to a Rheostat server. Every method raises `RheostatError` alone.

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
        call = _calls.generate(prompt, **options)
        responses = self._connection.download(call, timeout)
        return Stream(self._connection, responses, call.fold(), timeout)

    def session(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Session:
        """Run a request whose steering can be replaced while it runs. Options as for `generate`."""
        check_options("session", options)
        return Session(self._connection, _calls.session(prompt, **options), timeout)

    def subscribe(self, **options: Unpack[SubscribeOptions]) -> Subscription:
        """Get rows of requests that others, or other calls, run.

        ``options`` are those of `SubscribeOptions`. Requests that begin from now on
        are selected, and those that run already from their next step on; one that has ended is not,
        and one that never comes is waited for.
        """
        check_options("subscribe", options, SubscribeOptions)
        return Subscription(self._connection, _subscribe_requests.opening(**options))

    def resume(self, cursor: Cursor, **options: Unpack[ResumeOptions]) -> Subscription:
        """Take a subscription up that was left, or whose client is gone, after ``cursor``.

        Iterating goes on with the event after it. Raises NotFound where the server has given it up,
        and OutOfRange where that event was acknowledged; ``metadata["oldest"]`` is then the number
        of the first that can be had.
        """
        check_options("resume", options, ResumeOptions)
        return Subscription(self._connection, _subscribe_requests.resuming(cursor, **options))

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

    def sinks(self) -> list[SinkInfo]:
        """The server's sinks, by name."""
        return self._connection.unary(_calls.sinks())

    def artifacts(self, request_id: str, *, sink_name: str = "") -> list[Artifact]:
        """What sinks, or one of them, wrote for a request. Raises NotFound if nothing."""
        return self._connection.unary(_calls.artifacts(request_id, sink_name))

    def runs(self) -> list[RunInfo]:
        """The runs that the server has stored, oldest first; `Capture(to=Run())` makes one."""
        return self._connection.script(_run_calls.list_runs())

    def delete_run(self, run_id: str) -> int:
        """Delete a run, leased or not, and give its bytes. Raises Refused where it is in use."""
        return self._connection.unary(_run_calls.delete_run(run_id))

    def renew_lease(self, run_id: str, seconds: float) -> RunInfo:
        """Keep a run for so many seconds from now (1 to 86400), if that is longer than so far."""
        return self._connection.unary(_run_calls.renew_lease(run_id, seconds))

    def stats(self) -> Stats:
        """The server's counters."""
        return self._connection.unary(_calls.stats())

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

    ``timeout`` is how many seconds a call may take that is given none and runs no prompt, as those
    that put and get vectors; None: as long as it likes. What runs prompts has its own timeout.
    """
    return Engine(target, timeout=timeout)
