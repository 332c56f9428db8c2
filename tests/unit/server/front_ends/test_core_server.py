"""The lock of a front end's two threads, and calls of the core."""

import asyncio
import logging
import statistics
import threading
import time

import pytest

from rheostat_server.front_ends import core_server
from rheostat_server.front_ends.call import Call
from rheostat_server.front_ends.core_server import FairLock
from rheostat_server.front_ends.grpc_server import GrpcServer

from ..streams import until


def test_a_thread_that_waits_for_the_lock_gets_it_next() -> None:
    lock, stop, turns = FairLock(lambda: None), threading.Event(), 0

    def work() -> None:
        nonlocal turns
        while not stop.is_set():
            with lock:
                turns += 1
                time.sleep(0.001)

    thread = threading.Thread(target=work)
    thread.start()
    waited = []
    try:
        for _ in range(30):
            time.sleep(0.002)
            before = turns
            with lock:
                waited.append(turns - before)
    finally:
        stop.set()
        thread.join()
    assert statistics.median(waited) <= 2  # the turn that ran, and one that began meanwhile


def test_the_lock_is_released_if_what_comes_before_fails() -> None:
    def fail() -> None:
        raise KeyError("defect")

    lock = FairLock(fail)
    for _ in range(2):
        with pytest.raises(KeyError), lock:
            pass


def header(name: bytes, value: bytes) -> bytes:
    """A header as HTTP/2 sends it, without compression."""
    return b"".join((b"\0", bytes([len(name)]), name, bytes([len(value)]), value))


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def call_with(value: bytes, stream: int) -> bytes:
    """The frames of a call whose metadata has a value that gRPC's clients refuse to send."""
    headers = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/rheostat.v1.GenerationService/Session",
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
        b"x-note": value,
    }
    block = b"".join(header(name, value) for name, value in headers.items())
    return frame(1, 4, stream, block) + frame(0, 1, stream, b"\0\0\0\0\0")


async def test_metadata_that_is_not_utf8_is_logged_once_and_its_calls_are_answered(
    caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_server._UNDECODABLE, "_passed", False)
    answered = 0

    async def answer(path: str, call: Call) -> None:
        nonlocal answered
        message = await call.read()
        answered += message == b""

    server = GrpcServer(answer)
    _, writer = await asyncio.open_connection("127.0.0.1", await server.start("127.0.0.1", 0))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
    for stream in (1, 3, 5):
        writer.write(call_with(b"\xff\xfe", stream))
    await until(lambda: answered == 3)
    writer.close()
    await server.stop(0)
    (record,) = [record for record in caplog.records if record.name.startswith("grpc")]
    assert record.levelno == logging.WARNING
    assert "not UTF-8" in record.getMessage()
    assert not record.exc_info


async def test_no_call_of_a_burst_is_dropped_while_the_thread_of_events_waits() -> None:
    burst, held, answered = 4000, threading.Event(), 0

    async def answer(path: str, call: Call) -> None:
        nonlocal answered
        message = await call.read()
        answered += message == b""

    server = GrpcServer(answer)
    port = await server.start("127.0.0.1", 0)

    def hold() -> None:
        with server._lock:
            held.set()
            time.sleep(1.0)  # meanwhile gRPC receives all calls

    threading.Thread(target=hold).start()
    await asyncio.to_thread(held.wait)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
    await reader.readexactly(9)  # the server's settings, without which few calls may begin
    writer.write(frame(4, 1, 0, b""))
    received = asyncio.create_task(reader.read(-1))  # until the connection ends
    for stream in range(1, 2 * burst, 2):
        writer.write(call_with(b"x", stream))
    await until(lambda: answered == burst)
    writer.close()
    received.cancel()
    await server.stop(0)
