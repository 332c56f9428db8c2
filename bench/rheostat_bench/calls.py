"""Calls as bytes: what a benchmark's hostile client sends, and how the server answered.

Why bytes: the client shares two cores with the server that it attacks. It serializes each message
once, before the measurement, and parses no answer, so that nearly all CPU time is the server's.
"""

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from rheostat_wire.v1 import (
    capture_service_pb2,
    engine_service_pb2,
    generation_service_pb2,
    lens_service_pb2,
    monitor_service_pb2,
    run_service_pb2,
    steering_service_pb2,
    sweep_service_pb2,
)
from rheostat_wire.wakeups import all_wakeups_read

PACKAGE = "rheostat.v1"

_METHODS = {
    f"{service.name}/{method.name}": method
    for file in (
        capture_service_pb2,
        engine_service_pb2,
        generation_service_pb2,
        lens_service_pb2,
        monitor_service_pb2,
        run_service_pb2,
        steering_service_pb2,
        sweep_service_pb2,
    )
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""The rpcs, by what a `Call` calls them."""
METHODS = tuple(name for name in _METHODS if name != "EngineService/Drain")
"""The names of all rpcs except the rpc that shuts the server down."""
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
_FAILED_HERE = "Internal error from Core"
"""The text of gRPC's own error if a call ends while its client writes. No server sends it."""
_NICE = 10
"""The niceness of a hostile client. On a busy core it gets a tenth of the server's time."""
_LAST_ANSWERS = 10.0
"""Seconds that calls get to end once the time is over and they are cancelled."""


@dataclass(frozen=True)
class Call:
    """One call, and how its client behaves."""

    method: str
    """As `GenerationService/Generate`."""
    messages: tuple[bytes, ...]
    """The messages to send."""
    pause: float = 0.0
    """Seconds before each message but the first."""
    reads: int | None = None
    """How many answers are read before the client stops reading; None: all."""
    holds: float = 0.0
    """Seconds that the client then waits before it cancels the call."""
    half_closes: bool = True
    """Whether the client says that no further message comes."""
    own_connection: bool = False
    """Whether the call opens a connection for itself."""
    timeout: float = 300.0
    """The call's deadline, in seconds."""
    name: str = ""
    """What a report calls it."""

    @property
    def streams(self) -> tuple[bool, bool]:
        """Whether the client streams, and whether the server does."""
        method = _METHODS[self.method]
        return method.client_streaming, method.server_streaming

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum(map(len, self.messages))


class Ending(NamedTuple):
    """How a call ended."""

    code: str
    """The status code's name, or `cancelled by the client`."""
    reason: str
    """The name of the contract's reason; empty: the status had none."""
    details: str
    """The server's sentence."""

    @property
    def label(self) -> str:
        """Code and reason, for counting."""
        return f"{self.code} {self.reason}".rstrip()


_EXPECTED = (
    "OK",
    "cancelled by the client",
    "open at the end",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "ALREADY_EXISTS",
)


def expected(label: str) -> bool:
    """Whether a hostile call may end so: not with INTERNAL, UNKNOWN, UNAVAILABLE or DATA_LOSS."""
    return label.startswith(_EXPECTED)


HUNG_UP = Ending("cancelled by the client", "", "")
"""A call that its own client cancelled."""


class Outcome(NamedTuple):
    """What came of a batch of calls."""

    calls: int
    nbytes: int
    """Bytes sent."""
    endings: dict[str, int]
    """Calls by `Ending.label`."""
    sentences: dict[str, str]
    """One of the server's sentences per label, behind the name of its call."""
    seconds: float
    cpu: float
    """Seconds of CPU that the client's process took."""


def connect(target: str) -> grpc.aio.Channel:
    """A connection of its own, without gRPC's delay in a busy event loop."""
    with all_wakeups_read():
        return grpc.aio.insecure_channel(target, options=_OPTIONS)


async def make(channel: grpc.aio.Channel, target: str, call: Call) -> Ending:
    """Makes one call, to its end."""
    if not call.own_connection:
        return await _make(channel, call)
    async with connect(target) as own:
        return await _make(own, call)


_Open: TypeAlias = Any  # gRPC's four kinds of calls have no common type with write and read


async def _make(channel: grpc.aio.Channel, call: Call) -> Ending:
    path = f"/{PACKAGE}.{call.method}"
    client_streams, server_streams = call.streams
    kind = f"{_arity(client_streams)}_{_arity(server_streams)}"
    multicallable = getattr(channel, kind)(path)
    opened: _Open
    writing: asyncio.Task[None] | None = None
    if client_streams:
        opened = multicallable(timeout=call.timeout)
        writing = asyncio.create_task(_write(opened, call))
    else:
        opened = multicallable(call.messages[0], timeout=call.timeout)
    try:
        if await _read(opened, call, server_streams):
            await asyncio.sleep(call.holds)
            return HUNG_UP if opened.cancel() else await _ending(opened)
        return await _ending(opened)
    finally:
        opened.cancel()
        if writing is not None:
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing


def _arity(streams: bool) -> str:
    return "stream" if streams else "unary"


async def _write(opened: _Open, call: Call) -> None:
    # InternalError: gRPC raises it if the call ends between its check and the write.
    with contextlib.suppress(
        grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError
    ):
        for number, message in enumerate(call.messages):
            if number:
                await asyncio.sleep(call.pause)
            await opened.write(message)
        if call.half_closes:
            await opened.done_writing()


async def _read(opened: _Open, call: Call, server_streams: bool) -> bool:
    """Reads as much as the client wants; returns whether the call may still be open then."""
    if call.reads == 0:
        return True
    with contextlib.suppress(grpc.aio.AioRpcError):
        if not server_streams:
            await opened
            return False
        count = 0
        while await opened.read() is not grpc.aio.EOF:
            count += 1
            if count == call.reads:
                return True
    return False


async def _ending(opened: _Open) -> Ending:
    code: grpc.StatusCode = await opened.code()
    if code is grpc.StatusCode.OK:
        return Ending("OK", "", "")
    if await opened.details() == _FAILED_HERE:
        return HUNG_UP
    # A tuple, because the keys of `Metadata` in grpcio 1.76 are pairs, which `dict` would look up.
    metadata = tuple(await opened.trailing_metadata() or ())
    packed = dict(metadata).get("grpc-status-details-bin", b"")
    return Ending(code.name, _reason(packed), str(await opened.details() or ""))


def _reason(packed: bytes) -> str:
    info = error_details_pb2.ErrorInfo()
    try:
        details = status_pb2.Status.FromString(packed).details
        found = any(detail.Unpack(info) for detail in details)
    except DecodeError:
        return ""
    return str(info.reason) if found else ""


class Caller:
    """A client that makes many calls at once. Its methods are orders of a `Worker`."""

    def __init__(self, target: str) -> None:
        """Is not connected yet."""
        self._target = target
        self._calls: tuple[Call, ...] = ()

    async def prepare(self, calls: Callable[[], Sequence[Call]]) -> int:
        """Builds and serializes the calls that `run` makes; returns their number."""
        self._calls = tuple(calls())
        return len(self._calls)

    async def run(
        self, at_once: int, seconds: float | None, *, pause: float = 0.0, shuffle: int | None = None
    ) -> Outcome:
        """Makes the prepared calls.

        Args:
            at_once: how many are open at a time.
            seconds: makes them over and over for so long, then cancels those that are open. None:
                makes each of them once.
            pause: seconds between two calls of one of the `at_once` loops.
            shuffle: a seed; the calls are made in a random order.
        """
        calls = list(self._calls)
        if shuffle is not None:
            random.Random(shuffle).shuffle(calls)
        counts = _CallCounts()
        began, used = time.monotonic(), time.process_time()
        remaining = iter(calls)

        def following() -> Call | None:
            nonlocal remaining
            call = next(remaining, None)
            if call is None and seconds is not None:
                remaining = iter(calls)
                call = next(remaining)
            return call

        async def loop(channel: grpc.aio.Channel) -> None:
            while (call := following()) is not None:
                counts.began(call)
                counts.ended(call, await make(channel, self._target, call))
                await asyncio.sleep(pause)

        async with connect(self._target) as channel:
            loops = [asyncio.create_task(loop(channel)) for _ in range(at_once)]
            done, running = await asyncio.wait(loops, timeout=seconds)
            took, cpu = time.monotonic() - began, time.process_time() - used
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=_LAST_ANSWERS)
            for task in done:
                task.result()
        return counts.outcome(took, cpu)

    async def burn(self, seconds: float) -> Outcome:
        """Makes no calls; uses all the CPU time that one thread can get."""
        began, used = time.monotonic(), time.process_time()
        await asyncio.to_thread(_burn, seconds)
        took = time.monotonic() - began
        return Outcome(0, 0, {}, {}, took, time.process_time() - used)


def _burn(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


class _CallCounts:
    """Counts calls and how they ended."""

    def __init__(self) -> None:
        self._calls = self._bytes = 0
        self._endings: Counter[str] = Counter()
        self._sentences: dict[str, str] = {}

    def began(self, call: Call) -> None:
        self._calls += 1
        self._bytes += call.nbytes

    def ended(self, call: Call, ending: Ending) -> None:
        self._endings[ending.label] += 1
        sentence = f"{call.name}: {ending.details}" if call.name else ending.details
        self._sentences.setdefault(ending.label, sentence)

    def outcome(self, seconds: float, cpu: float) -> Outcome:
        open_still = self._calls - self._endings.total()
        if open_still:
            self._endings["open at the end"] = open_still
        endings = dict(self._endings.most_common())
        return Outcome(self._calls, self._bytes, endings, self._sentences, seconds, cpu)


@asynccontextmanager
async def calling(target: str) -> AsyncIterator[Caller]:
    """A client in a process of its own, which gives way to the server where both want a core."""
    os.nice(_NICE)
    yield Caller(target)
