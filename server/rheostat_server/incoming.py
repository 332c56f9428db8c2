"""How requests come in: counted, read and decoded before a handler gets them.

Why not as gRPC does it: gRPC reads and decodes a request before any code of ours runs. A thousand
requests of 16 MiB would be in memory before the first could be refused, and several large ones
would be decoded in one iteration of the event loop, for which every stream waits.

The rules:

* A call counts from its beginning. One call too many is refused unread.
* A large request takes room in `REQUESTS_BYTES` before it is decoded, until its call ends. So do
  the later messages of a stream, each until the next one comes.
* A message has a limit of fields, which are counted before it is decoded.
* Large messages, and those of many fields, are walked and decoded by turns. All turns together take
  at most half of the event loop's time.
* The first messages of at most `FIRST_READS` calls are on their way at a time, because gRPC keeps
  what has come of each. The call that came last goes first: it is the least likely to be stuck.
* The first message comes soon, or the call ends: a call that says nothing would hold its place for
  ever. While others wait to be read, "soon" is `FIRST_READ_SECONDS`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Generic, Protocol, TypeVar, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from rheostat_server.errors import (
    DeadlinePassed,
    InvalidValue,
    MessageTooLarge,
    MissingField,
    QueueFull,
    UnknownField,
)
from rheostat_server.limits import (
    CONTROL_RPCS,
    FIELD_BYTES,
    FIRST_MESSAGE_SECONDS,
    FIRST_READ_SECONDS,
    FIRST_READS,
    LARGE_MESSAGE_BYTES,
    MESSAGE_FIELDS,
    OFFLOAD_BYTES,
    REQUESTS_BYTES,
)
from rheostat_server.unknown_fields import Walk, unknown_field

_RETRY = 1.0

_WALKED_BYTES = 2 << 10
"""Larger messages are walked before they are decoded. A smaller one has so few fields that
protobuf takes less than a millisecond for it."""

_FEW_FIELDS = 256
"""A message of at most so many fields is walked at once, in less than a millisecond."""

_TURN_FIELDS = 2048
"""Fields that are walked in a turn, which takes 1 to 2 ms."""

Request = TypeVar("Request")


class _Reads:
    """Calls whose first message is on its way, and calls that wait for theirs to be read."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._reading: dict[asyncio.Timeout, float] = {}
        """Those that have all the time yet, oldest first, and when they began."""
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Lasts while a first message is read.

        Raises:
            DeadlinePassed: it did not come soon.
            QueueFull: it did not come at once, and others wait to be read.
        """
        begun = hurried = False
        try:
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS) as limit:
                await self._begin()
                begun = True
                try:
                    self._time(limit)
                    yield
                finally:
                    hurried = self._reading.pop(limit, None) is None
                    self._end()
        except TimeoutError as error:
            if not limit.expired():
                raise
            if not begun:
                raise QueueFull(
                    f"the request waited {FIRST_MESSAGE_SECONDS:g} s to be read, behind others",
                    retry_after=_RETRY,
                ) from error
            if hurried:
                raise QueueFull(
                    f"the request did not come whole within {FIRST_READ_SECONDS:g} s, and other "
                    "calls wait to be read",
                    retry_after=_RETRY,
                ) from error
            raise DeadlinePassed(
                f"no request came within {FIRST_MESSAGE_SECONDS:g} s of the call's beginning"
            ) from error

    def _time(self, limit: asyncio.Timeout) -> None:
        """Gives a call that begins to read its time."""
        now = asyncio.get_running_loop().time()
        if self._waiting:
            limit.reschedule(now + FIRST_READ_SECONDS)
        else:
            self._reading[limit] = now

    async def _begin(self) -> None:
        if self._free:
            self._free -= 1
            return
        # A limit that has expired cannot be changed, and its call is about to end.
        oldest = next((limit for limit in self._reading if not limit.expired()), None)
        if oldest is not None:
            oldest.reschedule(self._reading.pop(oldest) + FIRST_READ_SECONDS)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn.done() and not turn.cancelled():
                self._end()
            raise

    def _end(self) -> None:
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class Reads(Protocol):
    """The part of gRPC's context that brings messages, as bytes."""

    async def read(self) -> object:
        """The next message, or `grpc.aio.EOF`."""


class Calls:
    """The calls that run, and what their requests take."""

    def __init__(self, maximum: int) -> None:
        """No call runs; at most `maximum` may, those of EngineService apart."""
        self._limits = {False: maximum, True: CONTROL_RPCS}
        self._running = {False: 0, True: 0}
        self._held = 0
        """Bytes of large requests."""
        self.reads = _Reads(FIRST_READS)
        """Whose turn it is to be read."""
        self._turns = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def begun(self, *, control: bool) -> Iterator["Incoming"]:
        """Counts a call while the context lasts.

        Args:
            control: whether it is one of EngineService. These have places of their own, so that
                an operator reaches a server that is full.

        Raises:
            QueueFull: too many run.
        """
        limit = self._limits[control]
        if self._running[control] >= limit:
            flag = "" if control else " (--maximum-concurrent-rpcs)"
            raise QueueFull(
                f"{limit} calls run, which is the most at a time{flag}: end some, or come again",
                retry_after=_RETRY,
            )
        self._running[control] += 1
        self._idle.clear()
        incoming = Incoming(self)
        try:
            yield incoming
        finally:
            incoming.release()
            self._running[control] -= 1
            if not any(self._running.values()):
                self._idle.set()

    async def until_none(self) -> None:
        """Returns once no call runs."""
        await self._idle.wait()

    def take(self, size: int) -> None:
        """Takes room for a large request.

        Raises:
            QueueFull: other requests leave too little.
        """
        if self._held + size > REQUESTS_BYTES:
            raise QueueFull(
                f"the request takes {size} bytes of memory; other large requests leave "
                f"{REQUESTS_BYTES - self._held} of {REQUESTS_BYTES}",
                retry_after=_RETRY,
            )
        self._held += size

    def give_back(self, size: int) -> None:
        """Ends one `take`."""
        self._held -= size

    async def walked(self, data: bytes, reader: "Reader[Request]") -> Walk | None:
        """Counts a message's fields before it is decoded; None: it is too small to have many.

        Raises:
            InvalidValue: the bytes cannot be decoded.
            MessageTooLarge: it has too many fields.
        """
        walk = reader.walk(data)
        if walk is None or reader.advance(walk, _FEW_FIELDS):
            return walk
        whole = False
        while not whole:
            async with self._turn():
                whole = reader.advance(walk, _TURN_FIELDS)
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
        """Decodes a message, in a turn if that may take long.

        Raises:
            InvalidValue: the bytes cannot be decoded.
            UnknownField: the message has a field that this server does not know.
        """
        if len(data) <= LARGE_MESSAGE_BYTES and (walk is None or walk.fields <= _FEW_FIELDS):
            return lean(reader.decoded(data, walk), len(data))
        async with self._turn():
            request = reader.decoded(data, walk)
        async with self._turn():
            return lean(request, len(data))

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Lasts while a part of one message is worked on, and as long again.

        A token needs several iterations of the event loop until it is sent. So one iteration
        between two turns is too little. Turns go round: a message of few turns does not wait until
        one of many is done.
        """
        async with self._turns:
            clock = asyncio.get_running_loop().time
            begun = clock()
            yield
            await asyncio.sleep(clock() - begun)


class Incoming:
    """The messages of one call."""

    def __init__(self, calls: Calls) -> None:
        """None has come; see `Calls.begun`."""
        self._calls = calls
        self._first = self._last = 0
        """Memory for which there is room, of the first message and of the one that came last."""

    def release(self) -> None:
        """Gives back what its messages took."""
        self._calls.give_back(self._first + self._last)
        self._first = self._last = 0

    async def first(self, context: Reads, reader: "Reader[Request]", most: int) -> Request | None:
        """The first message; None: its client has closed its side.

        Args:
            context: gRPC's.
            reader: makes a message of the bytes.
            most: bytes of the largest message.

        Raises:
            DeadlinePassed: it did not come soon.
            InvalidArgument: it cannot be decoded, or has a field that this server does not know.
            MessageTooLarge: it is larger than `most`, or has too many fields.
            QueueFull: there is no room for it.
        """
        async with self._calls.reads.turn():
            data = await context.read()
        if not isinstance(data, bytes):
            return None
        self._first = self._taken(data, most)
        walk = await self._calls.walked(data, reader)
        self._first += self._taken_by_fields(walk)
        return await self._calls.decoded(data, reader, walk)

    async def only(self, context: Reads, reader: "Reader[Request]", most: int) -> Request:
        """The message of a call that has one.

        Raises:
            MissingField: there is none.
            RheostatError: as `first`.
        """
        request = await self.first(context, reader, most)
        if request is None:
            raise MissingField("the call ended without a request")
        return request

    async def each(
        self, context: Reads, reader: "Reader[Request]", most: int
    ) -> AsyncGenerator[Request, None]:
        """The messages of a stream. Raises as `first`."""
        message = await self.first(context, reader, most)
        while message is not None:
            yield message
            message = None  # this frame must not keep what the handler has let go
            message = await self._next(context, reader, most)

    async def _next(self, context: Reads, reader: "Reader[Request]", most: int) -> Request | None:
        data = await context.read()
        if not isinstance(data, bytes):
            return None
        self._calls.give_back(self._last)
        self._last = 0
        self._last = self._taken(data, most)
        walk = await self._calls.walked(data, reader)
        self._last += self._taken_by_fields(walk)
        return await self._calls.decoded(data, reader, walk)

    def _taken(self, data: bytes, most: int) -> int:
        """The bytes for which room was taken."""
        size = len(data)
        if size > most:
            raise MessageTooLarge(
                f"the request has {size} bytes; this service takes at most {most}"
            )
        if size <= OFFLOAD_BYTES:
            return 0
        self._calls.take(size)
        return size

    def _taken_by_fields(self, walk: Walk | None) -> int:
        """The memory of a message's fields, for which room was taken."""
        size = 0 if walk is None else walk.fields * FIELD_BYTES
        if size <= OFFLOAD_BYTES:
            return 0
        self._calls.take(size)
        return size


class Reader(Generic[Request]):
    """Makes messages of one type from bytes."""

    def __init__(self, decode: Callable[[bytes], Request]) -> None:
        """A reader of what `decode` makes: `FromString` of a message type, or any function."""
        self._decode = decode
        kind = getattr(decode, "__self__", None)
        self._descriptor = (
            cast(Descriptor, kind.DESCRIPTOR)
            if isinstance(kind, type) and issubclass(kind, Message)
            else None
        )

    def walk(self, data: bytes) -> Walk | None:
        """The walk that comes before decoding; None: the message is too small to need one."""
        if self._descriptor is None or len(data) <= _WALKED_BYTES:
            return None
        return Walk(data, self._descriptor)

    def advance(self, walk: Walk, fields: int) -> bool:
        """Walks over at most so many more fields; returns whether none is left.

        Raises:
            InvalidValue: the bytes cannot be decoded.
        """
        with _undecodable():
            return walk.advance(fields)

    def decoded(self, data: bytes, walk: Walk | None) -> Request:
        """The message.

        Args:
            data: its bytes.
            walk: the walk over all of it, or None.

        Raises:
            InvalidValue: the bytes cannot be decoded.
            UnknownField: it has a field that this server does not know.
        """
        with _undecodable():
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


@contextmanager
def _undecodable() -> Iterator[None]:
    """Raises InvalidValue where protobuf, or a walk, cannot decode a message."""
    try:
        yield
    except DecodeError as error:
        raise InvalidValue("the request cannot be decoded as a message of this rpc") from error


def lean(request: Request, size: int) -> Request:
    """A message of `size` bytes that takes no more memory than its fields.

    A message holds the bytes of fields that were sent more than once.
    """
    if size > OFFLOAD_BYTES and isinstance(request, Message) and request.ByteSize() < size:
        copy = type(request)()
        copy.CopyFrom(request)
        return copy
    return request
