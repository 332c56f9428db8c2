"""Speaks gRPC, and forwards each call as records to the server's event loop, which answers it.

It works in a front end, and in the process of a server without front ends. Two threads run its
functions, in turn: one handles the events of gRPC, the other those of the event loop, such as
records of the server, and timers. See `core_server`.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from google.rpc import code_pb2, status_pb2

from rheostat_server.front_ends.core_server import CoreCall, CoreServer, FairLock
from rheostat_server.front_ends.large_messages import PIECE_BYTES, ReceivedPieces
from rheostat_server.front_ends.local_calls import PATHS, LocalCalls
from rheostat_server.front_ends.records import CallBegin, First, Kind, call_body, count_body
from rheostat_server.limits import STATUS_SECONDS
from rheostat_wire.message_parts import Payload

_LOG = logging.getLogger(__name__)

_EARLY_READS = 4
"""Calls at a time whose first message is read before the server asks for it. Only a few, because
gRPC keeps the received part of each message. Calls that begin together are read one after another.
"""

_EARLY_SECONDS = 0.005
"""Seconds to wait for the first message of a call, before the call is forwarded without it."""

_DISCONNECT_SECONDS = 0.005
"""Seconds within which gRPC reports that a client has disconnected, after the end of its messages.
"""

_WRITTEN_BATCH = 3
"""Messages that gRPC has taken after which a WRITTEN record is sent while others follow."""

_UNKNOWN = status_pb2.Status(code=12, message="Method not found!")  # UNIMPLEMENTED, as gRPC says it

_BROKEN = status_pb2.Status(
    code=code_pb2.INTERNAL,
    message="the server could not complete this call; see the server's log",
)


class ToServer(Protocol):
    """Where records for the server go. It is used with the lock held."""

    def send(self, kind: Kind, call: int = 0, *body: Payload) -> None:
        """Sends a record, whose body is the concatenated parts."""

    def write_all(self) -> None:
        """Writes the records that were sent. To be called before the lock is released."""


class Backlog(Protocol):
    """Records that wait for the server. It is used with the lock held."""

    @property
    def backlogged(self) -> bool:
        """Whether records wait. A large message that was sent waits."""


class _EarlyReads:
    """The reads of first messages that the server has not asked for.

    None begins while records wait for the server. Otherwise the messages of hundreds of calls would
    wait here when the server is slow.
    """

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._running = 0
        self._waiting: dict[_ForwardedCall, None] = {}
        """Calls that wait to be read, oldest first."""

    def add(self, call: "_ForwardedCall") -> None:
        """Reads the first message of a call, now or after other calls."""
        self._waiting[call] = None
        self.resume()

    def remove(self, call: "_ForwardedCall") -> None:
        """Does not read a call that waits, because the server asks for its message."""
        self._waiting.pop(call, None)

    def end(self) -> None:
        """Notes that a first message was read and sent, and reads the next one."""
        self._running -= 1
        self.resume()

    def resume(self) -> None:
        """Reads calls that wait, if they may be read now."""
        while self._waiting and self._running < _EARLY_READS and not self._backlog.backlogged:
            call = next(iter(self._waiting))
            del self._waiting[call]
            self._running += 1
            call.start_reading()


class Forwarder:
    """A gRPC server, and its calls."""

    def __init__(self, lock: FairLock, to_server: ToServer, *, backlog: Backlog | None) -> None:
        """Does not listen yet.

        Args:
            lock: calls `before_release` before it is released.
            to_server: gets the records of calls.
            backlog: tells whether records wait for the server. None: no message is read before the
                server asks for it.
        """
        self._loop = asyncio.get_running_loop()
        self._lock = lock
        self._to_server = to_server
        self._server = CoreServer(lock, self._begin)
        self._local = LocalCalls(lock)
        self.set_health: Final = self._local.set_health
        """Sets the answer of health checks for the server and all its services."""
        self._calls: dict[int, _ForwardedCall] = {}
        self._begun = 0
        self._early = None if backlog is None else _EarlyReads(backlog)
        self._unforwarded: dict[_ForwardedCall, float] = {}
        """When each call began that is not forwarded yet, oldest first."""
        self._timer_set = False
        """Whether `_forward_late` will be called."""

    @property
    def idle(self) -> bool:
        """Whether no call runs."""
        return not self._calls

    def start(self, host: str, port: int, *, shared_port: bool) -> int:
        """Listens, and begins to accept calls; returns the port.

        Args:
            host: the address to listen on.
            port: the port; 0: any.
            shared_port: whether other processes may listen on the port too.

        Raises:
            PortInUse: the address is in use or not allowed.
        """
        return self._server.start(host, port, shared_port=shared_port)

    async def stop(self, grace: float) -> None:
        """Accepts no further calls, and cancels those that run after `grace` seconds."""
        ended = asyncio.Event()
        with self._lock:
            self._server.shut_down(lambda: self._loop.call_soon_threadsafe(ended.set))
        try:
            async with asyncio.timeout(grace):
                await ended.wait()
        except TimeoutError:
            with self._lock:
                self._server.cancel_all()
            await ended.wait()
        self._server.close()

    def receive(self, kind: Kind, number: int, body: bytes) -> None:
        """Processes a record of a call. To be called with the lock."""
        if (call := self._calls.get(number)) is not None:
            call.receive(kind, body)

    def later(
        self, seconds: float, number: int, action: "Callable[[_ForwardedCall], object]"
    ) -> None:
        """Does something with a call after a time, if it has not ended by then."""

        def act() -> None:
            if number not in self._calls:  # mostly so; the thread of events often holds the lock
                return
            with self._lock:
                if (call := self._calls.get(number)) is not None:
                    action(call)

        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, act)

    def _begin(self, call: CoreCall) -> None:
        """Forwards a call to the server, or answers it here.

        A call is forwarded with its first message, if that is read early and soon.
        """
        if call.path in PATHS:
            number = self._begun = (self._begun + 1) & 0xFFFF_FFFF
            forwarded = self._calls[number] = _ForwardedCall(number, call, self)
            call.open(forwarded.close)
            if self._early is None:
                forwarded.begin_without()
            else:
                self._unforwarded[forwarded] = time.monotonic()
                self._early.add(forwarded)
        elif not self._local.answers(call):
            call.open(lambda: None)
            call.end(_UNKNOWN, lambda: None)

    def begin_call(self, call: "_ForwardedCall", first: First, message: bytes = b"") -> None:
        """Forwards a call to the server."""
        self._forget_unread(call)
        was_read = first in (First.HERE, First.COMING)
        connection = "" if was_read else call.connection()
        begin = CallBegin(call.path, call.time_remaining(), first, message, connection)
        self._to_server.send(Kind.BEGIN, call.number, call_body(begin))

    def send_of(self, call: "_ForwardedCall", kind: Kind, *body: bytes) -> None:
        """Sends a record of a call. To be called with the lock."""
        self._to_server.send(kind, call.number, *body)

    def read_early(self) -> None:
        """Reads first messages, because no record waits any more. To be called with the lock."""
        if self._early is not None:
            self._early.resume()

    def end_first_read(self) -> None:
        """Notes that a first message was read and sent, and reads the next one."""
        assert self._early is not None
        self._early.end()

    def remove(self, call: "_ForwardedCall") -> None:
        """Forgets a call that is over."""
        self._forget_unread(call)
        del self._calls[call.number]

    def _forget_unread(self, call: "_ForwardedCall") -> None:
        if self._early is not None:
            self._unforwarded.pop(call, None)
            self._early.remove(call)

    def before_release(self) -> None:
        """Called before the lock is released."""
        self._to_server.write_all()
        if self._unforwarded and not self._timer_set:
            self._timer_set = True
            first = next(iter(self._unforwarded.values()))
            delay = max(0.0, first + _EARLY_SECONDS - time.monotonic())
            self._loop.call_soon_threadsafe(self._loop.call_later, delay, self._forward_late)

    def _forward_late(self) -> None:
        """Forwards calls whose first message has not arrived in time."""
        with self._lock:
            self._timer_set = False
            late = time.monotonic() - _EARLY_SECONDS
            for call in [call for call, begun in self._unforwarded.items() if begun <= late]:
                call.begin_without()


class _ForwardedCall:
    """A call between its client and the server. It is used with the lock held."""

    def __init__(self, number: int, call: CoreCall, forwarder: Forwarder) -> None:
        self.number: Final = number
        self.path: Final = call.path
        self.time_remaining: Final = call.time_remaining
        self.connection: Final = call.connection
        self._call = call
        self._forwarder = forwarder
        self._begun = False
        """Whether the record BEGIN was sent."""
        self._reads_first = False
        """Whether a read counts as a first read."""
        self._pieces = ReceivedPieces()
        self._messages: deque[bytes] = deque()
        """The server's messages that gRPC has not been given yet."""
        self._written = 0
        """Messages that gRPC has taken since the last WRITTEN record."""
        self._end: bytes | None = None
        """The status with which the server has ended the call."""
        self._ended = False
        """Whether gRPC was given the status."""
        self._closed = False

    def start_reading(self) -> None:
        """Reads the first message; see `_EarlyReads`."""
        self._reads_first = True
        self._call.read(self._take_first)

    def begin_without(self) -> None:
        """Forwards the call without its first message."""
        self._begin(First.READING if self._reads_first else First.UNREAD)

    def receive(self, kind: Kind, body: bytes) -> None:
        """Processes a record of the server. If it cannot, the call ends with INTERNAL."""
        try:
            self._process(kind, body)
        except Exception:  # one call must not end the others
            self._fail()

    def _process(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.MESSAGE:
            body = self._pieces.complete(body)
            if self._call.ready:
                self._call.write(body, self._count_written)
            else:
                self._messages.append(body)
        elif kind is Kind.PIECE:
            self._pieces.add(body)
        elif kind is Kind.READ:
            self._call.read(self._take)
        elif kind is Kind.END:
            self._end = body
            if self._call.ready:
                self._finish()
            else:
                self._forwarder.later(STATUS_SECONDS, self.number, _ForwardedCall.drop_messages)

    def drop_messages(self) -> None:
        """Ends the call without the messages that its client has not read."""
        self._messages.clear()
        self._finish()

    def half_close(self) -> None:
        """Sends that the client has closed its side of the stream."""
        self._forwarder.send_of(self, Kind.HALF_CLOSED)

    def close(self) -> None:
        """Stops reading and writing, and sends the record DONE."""
        if self._closed:
            return
        self._closed = True
        self._pieces.clear()
        self._messages.clear()
        self._call.leave()
        self._forwarder.remove(self)
        self._end_first_read()
        if self._begun:
            self._forwarder.send_of(self, Kind.DONE)

    def _begin(self, first: First, message: bytes = b"") -> None:
        self._begun = True
        self._forwarder.begin_call(self, first, message)

    def _count_written(self, taken: bool) -> None:
        """Called when gRPC has taken a message, or cannot. Writes the next one."""
        if self._closed:
            return
        if not taken:
            self.close()  # the client has disconnected
            return
        try:
            self._write_next()
        except Exception:  # as in `receive`, because the next message is a record of the server
            self._fail()

    def _write_next(self) -> None:
        self._written += 1
        idle = not self._messages
        if not idle:
            self._call.write(self._messages.popleft(), self._count_written)
        if self._written == _WRITTEN_BATCH or idle:
            self._forwarder.send_of(self, Kind.WRITTEN, count_body(self._written))
            self._written = 0
        if idle and self._end is not None:
            self._finish()

    def _fail(self) -> None:
        """Ends the call because a record of the server could not be processed."""
        _LOG.exception("a record of a call could not be processed; the call ends")
        try:
            self._call.end(_BROKEN, lambda: None)
        except Exception:  # gRPC takes no status, or has taken one
            _LOG.exception("the call is cancelled because its status cannot be sent")
            self._call.cancel()
        self.close()

    def _finish(self) -> None:
        """Ends the call with the status of the server."""
        if self._ended or self._end is None:
            return
        self._ended = True
        if not self._end:
            self._call.end(None, lambda: None)
            self.close()
            return
        # Until its client reads the status, the call counts as running.
        self._forwarder.later(STATUS_SECONDS, self.number, _ForwardedCall.close)
        self._call.end(status_pb2.Status.FromString(self._end), self.close)

    def _take_first(self, message: bytes | None) -> None:
        """Sends the first message, inside BEGIN if the call is not forwarded yet.

        A large message follows BEGIN, so that it can be sent in pieces.
        """
        if self._closed:
            return
        if self._begun:
            self._take(message)
        elif message is None:
            self._begin(First.READING)
            self._take(message)
        elif len(message) > PIECE_BYTES:
            self._begin(First.COMING)
            self._take(message)
        else:
            self._begin(First.HERE, message)
        self._end_first_read()

    def _take(self, message: bytes | None) -> None:
        """Sends a message of the client, or that it has closed its side of the stream.

        If a client disconnects, gRPC mostly reports the end of its messages first. Without the
        wait, the server could mistake an incomplete upload for a complete one.
        """
        if self._closed:
            return
        if message is None:
            self._forwarder.later(_DISCONNECT_SECONDS, self.number, _ForwardedCall.half_close)
        else:
            self._forwarder.send_of(self, Kind.MESSAGE, message)

    def _end_first_read(self) -> None:
        if self._reads_first:
            self._reads_first = False
            self._forwarder.end_first_read()
