"""A call of the asyncio client that the server ends while the client writes to it."""

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import grpc.aio
import pytest

import rheostat
from rheostat._connection.aio_status import ServerStatus

from ..client.test_sessions import ABORTED, FIRST, JOY, RECEIPT, SECOND, STARTED, THIRD

FAILED_WRITE = (grpc.StatusCode.INTERNAL, "Internal error from Core")
REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the buffer is full")
ENDED = (grpc.StatusCode.OK, "")


class Call:
    """A call whose statuses a test sets, as gRPC sets them: the last one is the call's."""

    def __init__(self) -> None:
        self.status = ENDED
        self.callbacks: list[Callable[[object], None]] = []

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self.callbacks.append(callback)

    def end(self, status: tuple[grpc.StatusCode, str]) -> None:
        self.status = status
        for callback in self.callbacks:
            callback(self)

    async def code(self) -> grpc.StatusCode:
        return self.status[0]

    async def details(self) -> str:
        return self.status[1]

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(("status", self.status[1]))


def error(status: tuple[grpc.StatusCode, str]) -> grpc.aio.AioRpcError:
    code, details = status
    return grpc.aio.AioRpcError(code, None, None, details)


@pytest.mark.parametrize("statuses", [(FAILED_WRITE, REFUSED), (REFUSED, FAILED_WRITE)])
async def test_a_failed_write_hides_no_error_of_the_server(statuses):
    call = Call()
    status = ServerStatus(call)
    for arriving in statuses:
        call.end(arriving)
    failure = await status.behind(error(FAILED_WRITE))
    assert (failure.code(), failure.details()) == REFUSED
    assert list(failure.trailing_metadata()) == [("status", "the buffer is full")]


@pytest.mark.parametrize("statuses", [(FAILED_WRITE, ENDED), (ENDED, FAILED_WRITE)])
async def test_a_failed_write_hides_no_good_end(statuses):
    call = Call()
    status = ServerStatus(call)
    for arriving in statuses:
        call.end(arriving)
    assert await status.behind(error(FAILED_WRITE)) is None


async def test_the_server_s_status_may_follow_the_failed_write():
    call = Call()
    status = ServerStatus(call)
    call.end(FAILED_WRITE)
    waiting = asyncio.create_task(status.behind(error(FAILED_WRITE)))
    await asyncio.sleep(0)
    assert not waiting.done()
    call.end(REFUSED)
    assert (await waiting).details() == "the buffer is full"


async def test_a_status_that_never_follows_leaves_the_failed_write(monkeypatch):
    monkeypatch.setattr("rheostat._connection.aio_status._STATUS_TIMEOUT", 0.01)
    failed = error(FAILED_WRITE)
    assert await ServerStatus(Call()).behind(failed) is failed


async def test_other_errors_stay_as_they_are():
    refused = error(REFUSED)
    assert await ServerStatus(Call()).behind(refused) is refused


async def steered_to_its_end(engine: rheostat.aio.Engine) -> list:
    """The events of a session that is steered at each of them, and its result or its error."""
    events: list[object] = []
    async with engine.session("x") as session:
        try:
            async for event in session:
                events.append(event)
                with contextlib.suppress(rheostat.Refused):  # it has ended already
                    session.steer(JOY)
            return [*events, await session.result()]
        except rheostat.RheostatError as failure:
            return [*events, failure]


@pytest.mark.parametrize("refused", [False, True])
async def test_a_session_that_is_steered_as_it_ends_gives_all_that_the_server_sent(
    server, refusal, refused
):
    """gRPC fails some of these writes, about one session in five."""

    def serve(requests, _context):
        next(requests)
        yield from (STARTED, FIRST, SECOND, THIRD)
        if refused:
            yield refusal.of(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "REASON_BUFFER_FULL")
        yield from (ABORTED, RECEIPT)

    server.on("Session", serve)
    async with rheostat.aio.connect(server.target) as engine:
        for _ in range(40):
            *events, last = await steered_to_its_end(engine)
            texts = [event.text for event in events if isinstance(event, rheostat.Tokens)]
            assert texts == ["a", "b", "c"]
            if refused:
                assert isinstance(last, rheostat.ResourceExhausted), last
                assert last.reason == "REASON_BUFFER_FULL"
            else:
                assert isinstance(last, rheostat.Generation), last
                assert last.receipt.request_id == "r1"
