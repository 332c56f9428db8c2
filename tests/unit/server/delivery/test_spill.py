"""Rows that wait on disk: every one comes, in order, or somebody hears why not."""

import asyncio
import errno
import itertools
import os
import random
import threading
from pathlib import Path

import grpc
import pytest

from rheostat_server.delivery import spill_directory as disk
from rheostat_server.delivery import spill_manager
from rheostat_server.delivery.items import Chunk
from rheostat_server.errors import SpoolFailed
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, types_pb2

from ..conftest import rest
from ..fakes import ScriptedBackend
from ..messages import request, site_set
from ..streams import settled, until
from ..subscribers import (
    EVERY,
    PLENTY,
    POST,
    ROW,
    Message,
    Subscriber,
    by_id,
    ends_of,
    expected,
    failure,
    generate,
    opening,
    resuming,
    rows_of,
    sampled,
    wanted,
)

Code = grpc.StatusCode
SPILL = capture_pb2.OVERLOAD_SPILL


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.spool"))


@pytest.fixture
async def spooling(starter, tmp_path: Path):
    """A server with a spool."""
    return await starter(spool=str(tmp_path), heartbeat=60.0)


def stalled(filter=EVERY, layers=(0, 1), **fields):
    """A subscription that may send nothing and keeps little in memory."""
    fields = {"credit": 0, "buffer_bytes": 3 * ROW, "overload": SPILL, **fields}
    return opening(filter, [wanted(*layers)] if layers else [], **fields)


async def test_a_client_that_ends_its_subscription_is_sent_nothing_more(spooling, tmp_path) -> None:
    one = await Subscriber.open(spooling, stalled())
    await generate(spooling, "a", tokens=9)
    await until(lambda: files(tmp_path))
    read = len(one.events)
    await one.call.write(Message(leave=capture_service_pb2.SubscribeLeave(end=True)))
    assert await asyncio.wait_for(one.call.read(), 10) is grpc.aio.EOF
    assert (len(one.events), await one.call.code()) == (read, Code.OK)
    assert len(spooling.manager.subscriptions) == 0
    assert (await settled(spooling)).spooled_row_count == 0
    await until(lambda: not files(tmp_path))
    two = Subscriber(spooling)
    await two.call.write(Message(open=resuming(one.name, after=0)))
    assert (await failure(two)).code == Code.NOT_FOUND


async def test_a_reader_that_stands_still_gets_every_row_in_order(spooling, tmp_path) -> None:
    one = await Subscriber.open(spooling, stalled())
    for number in range(6):
        assert (await generate(spooling, f"r{number}", tokens=9))[-1].HasField("receipt")
    assert files(tmp_path)
    await one.credit(PLENTY)
    await one.until("end_of_request", 6)
    assert rows_of(one.events) == {
        key: value
        for number in range(6)
        for key, value in expected(f"r{number}", 0, 1, tokens=9).items()
    }
    ends = ends_of(one.events)
    assert {end.dropped_row_count for end in ends.values()} == {0}
    assert [event.sequence for event in one.numbered] == list(range(1, len(one.numbered) + 1))
    assert files(tmp_path) == []


async def test_what_is_on_disk_counts_as_waiting(starter, tmp_path) -> None:
    running = await starter(spool=str(tmp_path), heartbeat=0.05)
    one = await Subscriber.open(running, stalled())
    for number in range(6):
        await generate(running, f"r{number}", tokens=9)
    async with asyncio.timeout(10):  # heartbeats that are older come first
        while one.events[-1].heartbeat.buffered_bytes != 6 * 2 * 11 * ROW:
            await one.hear()
    assert running.manager.spill_manager.rows > 0


async def test_connections_that_break_lose_and_repeat_nothing_that_was_spilled(
    starter, tmp_path
) -> None:
    spooling, rng = await starter(spool=str(tmp_path), heartbeat=0.05), random.Random(4)
    one = await Subscriber.open(spooling, stalled(credit=4 * ROW))
    name, have, seen = one.name, 0, []
    asking = asyncio.create_task(_keep_asking(spooling, 15))
    while len(ends_of(seen)) < 15:
        for _ in range(rng.randrange(1, 5)):
            event = await one.hear()
            if event.sequence:
                assert event.sequence == have + 1
                have = event.sequence
                seen.append(event)
            if rng.random() < 0.4:
                await one.ack(have)
            if rng.random() < 0.7:
                await one.credit(5 * ROW)
        one.call.cancel()
        one = await Subscriber.open(spooling, resuming(name, after=have, credit=2 * ROW))
    await asking
    assert rows_of(seen) == {
        key: value for i in range(15) for key, value in expected(f"r{i}", 0, 1).items()
    }


async def _keep_asking(running, count: int) -> None:
    for i in range(count):
        await generate(running, f"r{i}")


async def test_closing_ones_side_brings_what_is_on_disk(spooling, tmp_path) -> None:
    one = await Subscriber.open(spooling, stalled())
    await generate(spooling, "a", tokens=9)
    await one.rest()
    assert rows_of(one.events) == expected("a", 0, 1, tokens=9)
    assert files(tmp_path) == []


async def test_a_reader_that_stays_away_leaves_no_file(starter, tmp_path) -> None:
    running = await starter(spool=str(tmp_path), resume_window=0.2)
    one = await Subscriber.open(running, stalled())
    for number in range(6):
        await generate(running, f"r{number}", tokens=9)
    await until(lambda: files(tmp_path))
    one.call.cancel()
    await until(lambda: not len(running.manager.subscriptions))
    await until(lambda: not files(tmp_path))
    assert running.manager.spill_manager.spool.used == 0


async def test_a_full_spool_ends_the_subscription_and_no_request(starter, tmp_path) -> None:
    running = await starter(spool=str(tmp_path), spool_bytes=1200)
    one = await Subscriber.open(running, stalled())
    for number in range(6):
        assert (await generate(running, f"r{number}", tokens=9))[-1].HasField("receipt")
    refusal = await failure(one)
    assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "REASON_CAPTURE_OVERFLOW")
    assert "--spool-mib" in refusal.message
    await until(lambda: not files(tmp_path))


async def test_a_full_spool_ends_the_request_that_sends_to_it(starter, tmp_path) -> None:
    running = await starter(spool=str(tmp_path), spool_bytes=1200)
    one = await Subscriber.open(running, stalled(by_id("nobody"), layers=()))
    spec = capture_pb2.CaptureSpec(sites=site_set(POST, layers=[0, 1]), subscription_id=one.name)
    refusal = await running.client.refusal(
        request(request_id="a", sampling=sampled(50), captures=[spec])
    )
    assert refusal.reason == "REASON_CAPTURE_OVERFLOW"
    await settled(running)
    await one.credit(PLENTY)
    await one.until("end_of_request")
    end = ends_of(one.events)["a"]
    assert list(end.finish_reasons) == [types_pb2.FINISH_REASON_ERROR]
    assert (end.row_count > 0, end.dropped_row_count > 0) == (True, True)


def failing(monkeypatch, call: str, number: int = errno.EIO) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk.os, call, fail)


async def test_a_disk_that_takes_nothing_ends_the_subscription(spooling, monkeypatch) -> None:
    failing(monkeypatch, "pwrite")
    one = await Subscriber.open(spooling, stalled())
    refused = asyncio.ensure_future(failure(one))
    names = (f"r{number}" for number in itertools.count())
    while not refused.done():  # rows that the disk did not take wait, and the next find no room
        assert (await generate(spooling, next(names), tokens=9))[-1].HasField("receipt")
    refusal = await refused
    assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "REASON_CAPTURE_OVERFLOW")
    assert "cannot be written: Input/output error" in refusal.message


async def test_rows_that_cannot_be_read_back_end_the_subscription_and_who_sends(
    starter, tmp_path, monkeypatch
) -> None:
    backend = ScriptedBackend(hold=asyncio.Event(), hold_from=9)
    running = await starter(backend, spool=str(tmp_path))
    one = await Subscriber.open(running, stalled(by_id("nobody"), layers=()))
    spec = capture_pb2.CaptureSpec(sites=site_set(POST, layers=[0, 1]), subscription_id=one.name)
    call = running.client.generation.Generate(
        request(request_id="a", sampling=sampled(30, 4), captures=[spec])
    )
    await until(lambda: running.manager.spill_manager.rows > 50)
    failing(monkeypatch, "pread")
    await one.credit(PLENTY)
    refusal = await failure(one)
    assert (refusal.code, refusal.reason) == (Code.DATA_LOSS, "REASON_ROWS_LOST")
    assert int(dict(refusal.metadata)["rows"]) > 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    assert caught.value.code() is Code.DATA_LOSS
    backend.hold.set()
    await settled(running)
    await until(lambda: not files(tmp_path))


async def test_a_defect_on_the_way_to_the_disk_fails_the_reader(spooling, monkeypatch) -> None:
    def fail(chunk: Chunk) -> capture_pb2.Captured:
        raise ValueError("by the test")

    monkeypatch.setattr(spill_manager, "captured_of", fail)
    one = await Subscriber.open(spooling, stalled())
    for number in range(6):
        assert (await generate(spooling, f"r{number}", tokens=9))[-1].HasField("receipt")
    refusal = await failure(one)
    assert (refusal.code, refusal.reason) == (Code.INTERNAL, "REASON_INTERNAL")
    await settled(spooling)


async def test_the_server_does_not_wait_for_a_disk_that_hangs(spooling, monkeypatch) -> None:
    gate, write = threading.Event(), os.pwrite

    def hang(*args: object) -> int:
        gate.wait(20)
        return write(*args)

    monkeypatch.setattr(disk.os, "pwrite", hang)
    one = await Subscriber.open(spooling, stalled())
    for number in range(4):
        assert (await generate(spooling, f"r{number}", tokens=9))[-1].HasField("receipt")
    gate.set()
    await one.credit(PLENTY)
    await one.until("end_of_request", 4)
    assert len(rows_of(one.events)) == 4 * 2 * 11


async def test_rows_wait_on_disk_for_a_slow_sink(starter, tmp_path) -> None:
    folder, kept = tmp_path / "spool", tmp_path / "kept"
    running = await starter(
        spool=str(folder),
        sinks=(f"disk=filesystem:root={kept}",),
        request_buffer_bytes=3 * ROW,
    )
    sink = capture_pb2.SinkTarget(sink_name="disk")
    spec = capture_pb2.CaptureSpec(sites=site_set(POST, layers=[0, 1]), sink=sink, overload=SPILL)
    events = await generate(running, "a", tokens=20, captures=[spec])
    (receipt,) = events[-1].receipt.captures
    assert [(part.row_count, part.dropped_row_count) for part in receipt.sites] == [(22, 0)] * 2
    assert files(folder) == []


async def test_a_server_whose_spool_another_has_does_not_start(starter, tmp_path) -> None:
    await starter(spool=str(tmp_path))
    with pytest.raises(SpoolFailed, match="another server spools to") as caught:
        await starter(spool=str(tmp_path))
    assert caught.value.exit_code == 8


@pytest.mark.parametrize("target", ["inline", "sink"])
async def test_without_a_spool_a_request_cannot_spill(starter, target) -> None:
    running = await starter(sinks=("mem=memory",))
    to = {"sink": capture_pb2.SinkTarget(sink_name="mem"), "inline": capture_pb2.InlineTarget()}
    spec = capture_pb2.CaptureSpec(
        sites=site_set(POST, layers=[0]), overload=SPILL, **{target: to[target]}
    )
    refusal = await running.client.refusal(request(captures=[spec]))
    assert (refusal.reason, refusal.field) == ("REASON_NOT_SUPPORTED", "captures[0].overload")


async def test_without_a_spool_spilling_is_refused(running) -> None:
    one = Subscriber(running)
    await one.call.write(Message(open=stalled()))
    refusal = await failure(one)
    assert (refusal.reason, refusal.field) == ("REASON_NOT_SUPPORTED", "open.overload")
    assert "--spool FOLDER" in refusal.message
