"""Incoming requests: counts, reads and decodes them before a handler gets them.

Why gRPC does not do it
    gRPC reads and decodes a request before any code of ours runs. A thousand requests of 16 MiB
    would be in memory before the server could refuse the first. Several large requests would be
    decoded in one iteration of the event loop, and every stream would wait.

The rules:

* A call counts from its start. A call above the limit is refused before its message is read.
* A large request reserves memory in `REQUESTS_BYTES` before it is decoded, until its call ends. A
  later message of a stream reserves memory until the next message arrives, and for longer if its
  handler keeps it (`ClientMessages.keep`).
* The fields and the packed numbers of a message are counted before it is decoded. Both numbers are
  limited.
* Large messages, and messages of many fields or numbers, are walked and decoded in turns. All turns
  together take at most half of the event loop's time.
* At most `FIRST_READS` first messages are read at a time, because gRPC keeps the received part of
  each message. At most `CONNECTION_READS` of them belong to one connection. So a client with
  hundreds of large messages delays no other client.
* The next call comes from the connection with the fewest reads. Its newest call is read first,
  because that call is the least likely to be stuck.
* A call ends if its first message does not arrive within `FIRST_MESSAGE_SECONDS`, because a silent
  call would count for ever. While other calls wait to be read, the limit is `FIRST_READ_SECONDS`.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from typing import Generic, TypeVar, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from rheostat_server.api.unknown_fields import Walk, unknown_field
from rheostat_server.errors import (
    DeadlinePassed,
    InvalidValue,
    MessageTooLarge,
    MissingField,
    QueueFull,
    UnknownField,
)
from rheostat_server.front_ends.call import Call
from rheostat_server.limits import (
    CONNECTION_READS,
    CONTROL_RPCS,
    FIELD_BYTES,
    FIRST_MESSAGE_SECONDS,
    FIRST_READ_SECONDS,
    FIRST_READS,
    LARGE_MESSAGE_BYTES,
    MESSAGE_FIELDS,
    MESSAGE_NUMBERS,
    NUMBER_BYTES,
    OFFLOAD_BYTES,
    REQUESTS_BYTES,
    RETRY_SECONDS,
)
from rheostat_server.tasks.client_messages import ClientMessages

_WALKED_BYTES = 2 << 10
"""Messages of more bytes are walked before they are decoded. A smaller message has so few fields
that protobuf decodes it in less than a millisecond."""

_FEW_FIELDS = 256
"""Fields that are walked outside of a turn, because they take less than a millisecond."""

_FEW_NUMBERS = 1 << 16
"""Packed numbers that are decoded outside of a turn, because they take about a millisecond."""

_TURN_FIELDS = 2048
"""Fields that are walked in one turn, which takes 1 to 2 ms."""

Request = TypeVar("Request")


class _Reads:
    """Calls whose first message is being read, and calls that wait to be read."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._reading: dict[asyncio.Timeout, tuple[str | None, float]] = {}
        """Connection and start time of reads that still have `FIRST_MESSAGE_SECONDS`, oldest
        first."""
        self._reads_of: Counter[str | None] = Counter()
        """Reads by connection."""
        self._waiting: dict[str | None, list[asyncio.Future[None]]] = {}
        """Calls that wait, by connection. The connection of the newest call is last."""

    @asynccontextmanager
    async def turn(self, connection: str | None) -> AsyncIterator[None]:
        """Enters when a call may be read; the body reads its first message.

        Args:
            connection: the client's connection; None: unknown, without a limit of its own.

        Raises:
            DeadlinePassed: the message did not arrive within `FIRST_MESSAGE_SECONDS`.
            QueueFull: the call waited too long for its turn. This is also raised if its message did
                not arrive within `FIRST_READ_SECONDS` while other calls waited to be read.
        """
        begun = hurried = False
        try:
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS) as limit:
                await self._begin(connection)
                begun = True
                try:
                    self._time(limit, connection)
                    yield
                finally:
                    hurried = self._reading.pop(limit, None) is None
                    self._end(connection)
        except TimeoutError as error:
            if not limit.expired():
                raise
            if not begun:
                raise QueueFull(
                    f"the request waited {FIRST_MESSAGE_SECONDS:g} s to be read, behind others",
                    retry_after=RETRY_SECONDS,
                ) from error
            if hurried:
                raise QueueFull(
                    f"the request did not come whole within {FIRST_READ_SECONDS:g} s, and other "
                    "calls wait to be read",
                    retry_after=RETRY_SECONDS,
                ) from error
            raise DeadlinePassed(
                f"no request came within {FIRST_MESSAGE_SECONDS:g} s of the call's beginning"
            ) from error

    def _time(self, limit: asyncio.Timeout, connection: str | None) -> None:
        """Sets the time limit of a read that begins."""
        now = asyncio.get_running_loop().time()
        if connection in self._waiting or (self._waiting and not self._free):
            limit.reschedule(now + FIRST_READ_SECONDS)
        else:
            self._reading[limit] = connection, now

    def _may_read(self, connection: str | None) -> bool:
        """Whether a connection has fewer reads than it may have."""
        return connection is None or self._reads_of[connection] < CONNECTION_READS

    async def _begin(self, connection: str | None) -> None:
        if self._free and self._may_read(connection):
            self._free -= 1
            self._reads_of[connection] += 1
            return
        full = not self._free
        for limit, (its_connection, begun) in self._reading.items():
            # An expired limit cannot be rescheduled, and its call is about to end.
            if (full or its_connection == connection) and not limit.expired():
                del self._reading[limit]
                limit.reschedule(begun + FIRST_READ_SECONDS)
                break
        turn = asyncio.get_running_loop().create_future()
        waiting = self._waiting.pop(connection, [])
        waiting.append(turn)
        self._waiting[connection] = waiting
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._stop_waiting(connection, turn)
            else:
                self._end(connection)
            raise

    def _end(self, connection: str | None) -> None:
        """Ends a read; the next call may be read."""
        self._reads_of[connection] -= 1
        if not self._reads_of[connection]:
            del self._reads_of[connection]
        while allowed := [other for other in reversed(self._waiting) if self._may_read(other)]:
            next_connection = min(allowed, key=self._reads_of.__getitem__)
            turn = self._waiting[next_connection][-1]
            self._stop_waiting(next_connection, turn)
            if not turn.done():
                self._reads_of[next_connection] += 1
                turn.set_result(None)
                return
        self._free += 1

    def _stop_waiting(self, connection: str | None, turn: asyncio.Future[None]) -> None:
        """Removes a call from the calls that wait to be read."""
        waiting = self._waiting.get(connection, [])
        if turn in waiting:
            waiting.remove(turn)
            if not waiting:
                del self._waiting[connection]


class Calls:
    """The running calls, and the memory of their requests."""

    def __init__(self, maximum: int) -> None:
        """No call runs. At most `maximum` calls may run, without calls of EngineService."""
        self._limits = {False: maximum, True: CONTROL_RPCS}
        self._running = {False: 0, True: 0}
        self._taken_bytes = 0
        """Bytes that large requests have reserved."""
        self.reads = _Reads(FIRST_READS)
        """The reads of first messages."""
        self._turns = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self, *, control: bool) -> "Incoming":
        """Counts a call until `Incoming.end`.

        Args:
            control: whether it is a call of EngineService. These calls have a limit of their own,
                so that an operator can reach a full server.

        Raises:
            QueueFull: too many calls run.
        """
        limit = self._limits[control]
        if self._running[control] >= limit:
            flag = "" if control else " (--maximum-concurrent-rpcs)"
            raise QueueFull(
                f"{limit} calls run, which is the most at a time{flag}: end some, or come again",
                retry_after=RETRY_SECONDS,
            )
        self._running[control] += 1
        self._idle.clear()
        return Incoming(self, control=control)

    def end(self, *, control: bool) -> None:
        """Stops counting a call."""
        self._running[control] -= 1
        if not any(self._running.values()):
            self._idle.set()

    async def until_none(self) -> None:
        """Returns once no call runs."""
        await self._idle.wait()

    def take(self, size: int) -> None:
        """Reserves memory for a large request.

        Raises:
            QueueFull: other requests leave too little memory.
        """
        if self._taken_bytes + size > REQUESTS_BYTES:
            raise QueueFull(
                f"the request takes {size} bytes of memory; other large requests leave "
                f"{REQUESTS_BYTES - self._taken_bytes} of {REQUESTS_BYTES}",
                retry_after=RETRY_SECONDS,
            )
        self._taken_bytes += size

    def give_back(self, size: int) -> None:
        """Releases memory that `take` reserved."""
        self._taken_bytes -= size

    async def walked(self, data: bytes, reader: "Reader[Request]") -> Walk | None:
        """Walks a message before it is decoded, and counts its fields and packed numbers.

        Returns:
            The walk; None if the message is too small to have many fields.

        Raises:
            DecodeError: the bytes cannot be decoded.
            MessageTooLarge: the message has too many fields or packed numbers.
        """
        walk = reader.walk(data)
        if walk is None:
            return None
        whole = False
        if len(data) <= LARGE_MESSAGE_BYTES:
            whole = walk.advance(_FEW_FIELDS)
            reader.check_numbers(walk)
        while not whole:
            async with self._turn():
                whole = walk.advance(_TURN_FIELDS)
            reader.check_numbers(walk)
            if walk.fields > MESSAGE_FIELDS:
                raise MessageTooLarge(
                    f"the message has more than {MESSAGE_FIELDS} fields, the most that it may have "
                    f"at all depths together: its first {walk.at} of {len(data)} bytes hold "
                    f"{walk.fields} (packed numbers are one field)"
                )
        return walk

    async def decoded(
        self, data: bytes, reader: "Reader[Request]", walk: Walk | None = None
    ) -> Request:
        """Decodes a message. A message that may take long is decoded in a turn.

        Raises:
            DecodeError: the bytes cannot be decoded.
            UnknownField: the message has a field that this server does not know.
        """
        if len(data) <= LARGE_MESSAGE_BYTES and (
            walk is None or (walk.fields <= _FEW_FIELDS and walk.numbers <= _FEW_NUMBERS)
        ):
            return lean(reader.decoded(data, walk), len(data))
        async with self._turn():
            request = reader.decoded(data, walk)
        async with self._turn():
            return lean(request, len(data))

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Enters when no other turn runs; then pauses for as long as the body took.

        One iteration of the event loop between two turns would not be enough, because a token needs
        several iterations until it is sent. Messages take turns in order, so a message that needs
        few turns does not wait for the last turn of a large message.
        """
        async with self._turns:
            clock = asyncio.get_running_loop().time
            begun = clock()
            yield
            await asyncio.sleep(clock() - begun)


class Incoming:
    """The messages of one call."""

    def __init__(self, calls: Calls, *, control: bool) -> None:
        """No message has arrived; see `Calls.begin`."""
        self._calls = calls
        self._control = control
        self._first = self._last = 0
        """Bytes reserved for the first message, and for the latest message."""

    def release(self) -> None:
        """Releases the memory of all messages."""
        self._calls.give_back(self._first + self._last)
        self._first = self._last = 0

    def end(self) -> None:
        """Releases the memory of all messages and stops counting the call."""
        self.release()
        self._calls.end(control=self._control)

    async def first(self, call: Call, reader: "Reader[Request]", most: int) -> Request | None:
        """Reads the first message; None if the client has closed its side of the stream.

        Args:
            call: the call.
            reader: decodes the bytes.
            most: bytes of the largest message that is allowed.

        Raises:
            DeadlinePassed: the message did not arrive in time.
            InvalidArgument: it cannot be decoded, or has a field that this server does not know.
            MessageTooLarge: it is larger than `most`, or has too many fields or packed numbers.
            QueueFull: there is too little memory, or other calls wait to be read.
        """
        if call.received():
            data = await call.read()
        else:
            async with self._calls.reads.turn(call.connection()):
                data = await call.read()
        if data is None:
            return None
        request = await self._decoded(data, reader, most)
        self._first, self._last = self._last, 0
        return request

    async def only(self, call: Call, reader: "Reader[Request]", most: int) -> Request:
        """Reads the message of a call that has exactly one.

        Raises:
            MissingField: the client sent none.
            RheostatError: as `first`.
        """
        request = await self.first(call, reader, most)
        if request is None:
            raise MissingField("the call ended without a request")
        return request

    def each(self, call: Call, reader: "Reader[Request]", most: int) -> ClientMessages[Request]:
        """Reads the messages of a stream. Raises as `first`."""
        return ClientMessages(self._each(call, reader, most), self._keep)

    def _keep(self) -> Callable[[], None]:
        """See `ClientMessages.keep`."""
        kept, self._last = self._last, 0
        return partial(self._calls.give_back, kept)

    async def _each(
        self, call: Call, reader: "Reader[Request]", most: int
    ) -> AsyncGenerator[Request, None]:
        message = await self.first(call, reader, most)
        while message is not None:
            yield message
            message = None  # frees the message as soon as the handler has dropped it
            message = await self._next(call, reader, most)

    async def _next(self, call: Call, reader: "Reader[Request]", most: int) -> Request | None:
        data = await call.read()
        if data is None:
            return None
        self._calls.give_back(self._last)
        self._last = 0
        return await self._decoded(data, reader, most)

    async def _decoded(self, data: bytes, reader: "Reader[Request]", most: int) -> Request:
        """Decodes the latest message, and reserves memory for it if it is large."""
        if len(data) > most:
            raise MessageTooLarge(
                f"the request has {len(data)} bytes; this service takes at most {most}"
            )
        self._reserve(len(data))
        try:
            walk = await self._calls.walked(data, reader)
            if walk is not None:
                self._reserve(walk.fields * FIELD_BYTES + walk.numbers * NUMBER_BYTES)
            return await self._calls.decoded(data, reader, walk)
        except DecodeError as error:
            raise InvalidValue("the request cannot be decoded as a message of this rpc") from error

    def _reserve(self, size: int) -> None:
        if size > OFFLOAD_BYTES:
            self._calls.take(size)
            self._last += size


class Reader(Generic[Request]):
    """Decodes bytes to messages of one type."""

    def __init__(self, decode: Callable[[bytes], Request]) -> None:
        """Decodes with `decode`: `FromString` of a message type, or any function."""
        self._decode = decode
        kind = getattr(decode, "__self__", None)
        self._descriptor = (
            cast(Descriptor, kind.DESCRIPTOR)
            if isinstance(kind, type) and issubclass(kind, Message)
            else None
        )

    def walk(self, data: bytes) -> Walk | None:
        """A walk over a message; None if the message is too small to need one."""
        if self._descriptor is None or len(data) <= _WALKED_BYTES:
            return None
        return Walk(data, self._descriptor, MESSAGE_NUMBERS)

    def check_numbers(self, walk: Walk) -> None:
        """Checks the packed numbers of the walked part of a message.

        Raises:
            DecodeError: the bytes cannot be decoded.
            MessageTooLarge: there are too many.
        """
        path = walk.exceeding()
        if path is not None:
            raise MessageTooLarge(
                f"the message has more than {MESSAGE_NUMBERS} packed numbers, the most that it may "
                "have at all depths together: send fewer",
                field=path,
            )

    def decoded(self, data: bytes, walk: Walk | None) -> Request:
        """Decodes a message.

        Args:
            data: its bytes.
            walk: a complete walk over them; None if the message is small.

        Raises:
            DecodeError: the bytes cannot be decoded.
            UnknownField: the message has a field that this server does not know.
        """
        request = self._decode(data)
        if not isinstance(request, Message):
            return request
        path = unknown_field(request, data) if walk is None else walk.unknown()
        if path is not None:
            raise UnknownField(
                f"this server does not know the field {path}; "
                "GetModel lists the features that it serves",
                field=path,
                metadata={"path": path},
            )
        return request


def lean(request: Request, size: int) -> Request:
    """A message of `size` bytes that takes no more memory than its fields.

    A message holds the bytes of fields that were sent more than once.
    """
    if size > OFFLOAD_BYTES and isinstance(request, Message) and request.ByteSize() < size:
        return deepcopy(request)
    return request
