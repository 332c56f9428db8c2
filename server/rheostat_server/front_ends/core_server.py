"""A gRPC server on the core of gRPC, without `grpc.aio`.

Why
    For a call with three messages, `grpc.aio` takes four times as long as gRPC's core with a
    function for each event: it has three tasks for a call, and a future, a wake-up of the event
    loop and a chain of coroutines for each message.
How
    A thread waits for the events of the core, and calls the function that waits for each. The event
    loop's thread starts reads and writes too. Whoever calls a method here holds the lock, and the
    functions are called with the lock held. So they never run at the same time.

The core's interface in Python is private. gRPC's synchronous server (`grpc/_server.py`) is made of
the same calls, so they rarely change.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from google.rpc import status_pb2
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # has no stubs

from rheostat_server.errors import PortInUse
from rheostat_server.limits import LOOKAHEAD_BYTES, TENSOR_MESSAGE_BYTES

_LOG = logging.getLogger(__name__)

_UNBEGUN = 4096
"""Calls that wait in gRPC until this thread begins them. Each has 15 KiB of memory, and up to
`LOOKAHEAD_BYTES` of its message. gRPC cancels any more, without a reason. By default it cancels
some above 1,000 and all above 3,000: of 4,096 calls that began together on two cores, up to a
fifth. The server itself refuses calls with a reason."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.server.max_pending_requests", _UNBEGUN),
    ("grpc.server.max_pending_requests_hard_limit", _UNBEGUN),
    ("grpc.max_receive_message_length", TENSOR_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # By default gRPC receives some MiB of each call ahead of reads, and more on fast networks.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    # Calls may be silent for long, so clients may ping often.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)
"""Options of gRPC servers. The port may be shared or not, so it has no option here."""


_DETAILS_KEY = "grpc-status-details-bin"
"""Key of the trailing metadata that holds a status with its details."""

_EVENTS = 16
"""Events that are handled in a row before the other thread gets the lock, if it waits."""

_REQUESTED = 8
"""Calls that the core may accept before this thread asks for more."""

_NEVER = float(1 << 40)
"""Seconds since 1970. A later deadline means that there is none."""

_NEW_CALL = object()
"""The tag of events that begin calls."""

_NO_FLAGS = 0

_FAILED = 1
"""The exit status if the thread of events fails."""

_TIMEOUT = cygrpc.CompletionType.queue_timeout


class _Undecodable(logging.Filter):
    """Replaces gRPC's tracebacks for metadata that is not UTF-8 by one warning per process.

    gRPC decodes the metadata of each call and logs a traceback if it cannot. So a client could fill
    the log. The server does not use the metadata of calls, so such a call is answered as others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if record.msg != "Invalid encoding on %s":
            return True
        if self._passed:
            return False
        self._passed = True
        record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        record.msg = "a client sent metadata that is not UTF-8; further cases are not logged"
        record.args = record.exc_info = None
        return True


_UNDECODABLE = _Undecodable()


class FairLock:
    """A lock that two threads get in turn.

    A thread that releases a lock and acquires it again would mostly get it before a thread that
    waits.
    """

    def __init__(self, before_release: Callable[[], None]) -> None:
        """Not held. Its holder calls `before_release` before it releases the lock."""
        self._next = threading.Lock()
        self._lock = threading.Lock()
        self._before_release = before_release

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        try:
            self._before_release()
        finally:
            self._lock.release()


class CoreCall:
    """A call. It reads one message at a time, and writes one at a time."""

    __slots__ = ("_call", "_deadline", "_disconnected", "_headers_sent", "path", "ready")

    def __init__(self, call: Any, path: str, deadline: float) -> None:
        """Begins a call of the core.

        Args:
            call: the call.
            path: the full name of the method.
            deadline: in seconds since 1970.
        """
        self.path: Final = path
        self.ready = True
        """Whether `write` may be called: no message is being sent, and all were."""
        self._call = call
        self._deadline = deadline
        self._headers_sent = False
        self._disconnected: Callable[[], object] | None = None

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if it has set none."""
        return None if self._deadline > _NEVER else max(0.0, self._deadline - time.time())

    def connection(self) -> str:
        """The address of the client's connection."""
        return str(self._call.peer())

    def open(self, disconnected: Callable[[], object]) -> None:
        """To be called first. Calls `disconnected` if the client leaves before `end` or `leave`."""
        self._disconnected = disconnected
        self._start(cygrpc.ReceiveCloseOnServerOperation(_NO_FLAGS), then=self._close)

    def leave(self) -> None:
        """Forgets the function that `open` got."""
        self._disconnected = None

    def read(self, take: Callable[[bytes | None], object]) -> None:
        """Calls `take` with the client's next message; with None if there are no more.

        If the client disconnects, `take` may get None just before, or may not be called.
        """

        def received(event: Any) -> None:
            if event.success:
                take(event.batch_operations[0].message())

        self._start(cygrpc.ReceiveMessageOperation(_NO_FLAGS), then=received)

    def write(self, message: bytes, taken: Callable[[bool], object]) -> None:
        """Sends a message. To be called if `ready`.

        Calls `taken` with True once gRPC has taken it, or with False if it cannot, because the
        client has disconnected.
        """
        self.ready = False
        send = cygrpc.SendMessageOperation(message, _NO_FLAGS)
        self._start(*self._headers(), send, then=partial(self._end_write, taken))
        self._headers_sent = True

    def end(self, status: status_pb2.Status | None, sent: Callable[[], object]) -> None:
        """Ends the call with a status; None: with OK. Messages that gRPC has taken come before.

        Calls `sent` once the status is sent, or cannot be sent.
        """
        self._disconnected = None
        if status is None:
            details, code, metadata = b"", int(cygrpc.StatusCode.ok), None
        else:
            details, code = status.message.encode(), status.code
            metadata = ((_DETAILS_KEY, status.SerializeToString()),)
        send = cygrpc.SendStatusFromServerOperation(metadata, code, details, _NO_FLAGS)
        self._start(*self._headers(), send, then=lambda event: sent())

    def cancel(self) -> None:
        """Ends the call without a status of the server. Its client gets an error from gRPC."""
        self._disconnected = None
        self._call.cancel()

    def _headers(self) -> Sequence[Any]:
        """The headers of the response, unless they were sent.

        Sending them with the first message is faster: alone, they take as long as a message.
        """
        return () if self._headers_sent else (cygrpc.SendInitialMetadataOperation(None, _NO_FLAGS),)

    def _start(self, *operations: Any, then: Callable[[Any], object]) -> None:
        """Starts operations. `then` gets the event of their end."""
        error = self._call.start_server_batch(operations, then)
        if error:
            raise RuntimeError(f"gRPC refuses an operation of a call: error {error}")

    def _end_write(self, taken: Callable[[bool], object], event: Any) -> None:
        self.ready = event.success
        taken(event.success)

    def _close(self, event: Any) -> None:
        disconnected, self._disconnected = self._disconnected, None
        if disconnected is not None and event.batch_operations[0].cancelled():
            disconnected()


class CoreServer:
    """A server that passes its calls to a function."""

    def __init__(self, lock: FairLock, begin: Callable[[CoreCall], object]) -> None:
        """Does not listen yet. `begin` gets each call."""
        self._lock = lock
        self._begin = begin
        self._queue: Any = None
        self._server: Any = None
        self._thread = threading.Thread(target=self._serve, name="grpc events", daemon=True)
        self._ended = False

    def start(self, host: str, port: int, *, shared_port: bool) -> int:
        """Listens, and accepts calls; returns the port.

        Args:
            host: the address to listen on.
            port: the port; 0: any.
            shared_port: whether other processes may listen on the port too.

        Raises:
            PortInUse: the address is in use or not allowed.
        """
        logging.getLogger(cygrpc.__name__).addFilter(_UNDECODABLE)
        self._queue = cygrpc.CompletionQueue()
        self._server = cygrpc.Server((*_OPTIONS, ("grpc.so_reuseport", int(shared_port))), False)
        self._server.register_completion_queue(self._queue)
        address = grpc_address(host, port)
        try:
            port = self._server.add_http2_port(address.encode())
        except RuntimeError:
            port = 0
        if not port:
            raise PortInUse(f"cannot listen on {address}: it is in use or not allowed")
        self._server.start()
        for _ in range(_REQUESTED):
            self._request_call()
        self._thread.start()
        return port

    def shut_down(self, done: Callable[[], object]) -> None:
        """Accepts no further calls. Calls `done` once all calls have ended."""
        self._server.shutdown(self._queue, lambda event: done())

    def cancel_all(self) -> None:
        """Cancels the calls that run. To be called after `shut_down`."""
        self._server.cancel_all_calls()

    def close(self) -> None:
        """Ends the thread. To be called without the lock, once all calls have ended."""
        self._ended = True
        self._queue.shutdown()
        self._thread.join()
        self._server.destroy()

    def _request_call(self) -> None:
        self._server.request_call(self._queue, self._queue, _NEW_CALL)

    def _serve(self) -> None:
        """Handles events until `close`. Runs in a thread of its own."""
        try:
            self._handle_events()
        except BaseException:
            _LOG.critical("the thread of gRPC's events has failed", exc_info=True)
            os._exit(_FAILED)  # no call can be answered

    def _handle_events(self) -> None:
        while not self._ended:
            event = self._queue.poll()
            with self._lock:
                for _ in range(_EVENTS):
                    self._handle(event)
                    event = None  # it refers to a call, which could not end before the next event
                    event = self._queue.poll(0)
                    if event.completion_type == _TIMEOUT:
                        break
                else:
                    self._handle(event)
            event = None

    def _handle(self, event: Any) -> None:
        try:
            if event.tag is None:
                return  # the queue was shut down
            if event.tag is not _NEW_CALL:
                event.tag(event)
            elif event.success:
                with suppress(ValueError):  # the server is being shut down
                    self._request_call()
                details = event.call_details
                path = details.method.decode(errors="replace")  # clients may send any bytes
                self._begin(CoreCall(event.call, path, details.deadline))
        except Exception:  # one call must not end the others
            _LOG.exception("an event of a call could not be handled")


def grpc_address(host: str, port: int) -> str:
    """An address in gRPC's notation, with IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
