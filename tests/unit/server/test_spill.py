"""Rows that wait on disk: every one comes, in order, or somebody hears why not."""

import asyncio
import errno
import os
import random
import threading
from collections import defaultdict
from pathlib import Path

import grpc
import numpy as np
import pytest

from rheostat._proto.v1 import capture_pb2, types_pb2
from rheostat_engine import Point, Released, Rows, Site
from rheostat_server import spool as disk
from rheostat_server.capture_specs import ResolvedCapture
from rheostat_server.errors import CaptureOverflow
from rheostat_server.selection import EVERYTHING
from rheostat_server.spillway import Spillway
from rheostat_server.spool import Spool
from rheostat_server.taps import Chunk, End, Item, Loss, Reservoir, Sealed, Tap, Track
from rheostat_server.tensors import FloatType

from .conftest import rest
from .fakes import WIDTH, ScriptedBackend
from .messages import request, site_set
from .streams import settled, until
from .subscribers import (
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
TRACK = Track(0, False)
SITES = tuple(Site(Point.RESID_POST, layer) for layer in range(2))


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
    assert {end.dropped_rows for end in ends.values()} == {0}
    assert [event.sequence for event in one.numbered] == list(range(1, len(one.numbered) + 1))
    assert files(tmp_path) == []


async def test_what_is_on_disk_counts_as_waiting(starter, tmp_path) -> None:
    running = await starter(spool=str(tmp_path), heartbeat=0.05)
    one = await Subscriber.open(running, stalled())
    for number in range(6):
        await generate(running, f"r{number}", tokens=9)
    await one.until("heartbeat", 2)
    assert one.events[-1].heartbeat.buffered_bytes == 6 * 2 * 11 * ROW
    assert running.host.spillway.rows > 0


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
    assert files(tmp_path)
    one.call.cancel()
    await until(lambda: not len(running.host.subscriptions))
    await until(lambda: not files(tmp_path))
    assert running.host.spillway.spool.used == 0


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
    spec = capture_pb2.CaptureSpec(sites=site_set(POST, layers=[0, 1]), subscription=one.name)
    refusal = await running.client.refusal(
        request(request_id="a", sampling=sampled(50), captures=[spec])
    )
    assert refusal.reason == "REASON_CAPTURE_OVERFLOW"
    await settled(running)
    await one.credit(PLENTY)
    await one.until("end_of_request")
    end = ends_of(one.events)["a"]
    assert list(end.finish_reasons) == [types_pb2.FINISH_REASON_ERROR]
    assert (end.rows > 0, end.dropped_rows > 0) == (True, True)


def failing(monkeypatch, call: str, number: int = errno.EIO) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk.os, call, fail)


async def test_a_disk_that_takes_nothing_ends_the_subscription(spooling, monkeypatch) -> None:
    failing(monkeypatch, "pwrite")
    one = await Subscriber.open(spooling, stalled())
    for number in range(6):
        assert (await generate(spooling, f"r{number}", tokens=9))[-1].HasField("receipt")
    refusal = await failure(one)
    assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "REASON_CAPTURE_OVERFLOW")
    assert "cannot be written: Input/output error" in refusal.message


async def test_rows_that_cannot_be_read_back_end_the_subscription_and_who_sends(
    starter, tmp_path, monkeypatch
) -> None:
    backend = ScriptedBackend(hold=asyncio.Event(), hold_from=9)
    running = await starter(backend, spool=str(tmp_path))
    one = await Subscriber.open(running, stalled(by_id("nobody"), layers=()))
    spec = capture_pb2.CaptureSpec(sites=site_set(POST, layers=[0, 1]), subscription=one.name)
    call = running.client.generation.Generate(
        request(request_id="a", sampling=sampled(30, 4), captures=[spec])
    )
    await until(lambda: running.host.spillway.rows > 50)
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
        spool=str(folder), sinks=(f"disk=filesystem:root={kept}",), inline_capture_bytes=3 * ROW
    )
    sink = capture_pb2.SinkTarget(sink="disk")
    spec = capture_pb2.CaptureSpec(sites=site_set(POST, layers=[0, 1]), sink=sink, overload=SPILL)
    events = await generate(running, "a", tokens=20, captures=[spec])
    (receipt,) = events[-1].receipt.captures
    assert [(part.rows, part.dropped_rows) for part in receipt.sites] == [(22, 0)] * 2
    assert files(folder) == []


async def test_without_a_spool_spilling_is_refused(running) -> None:
    one = Subscriber(running)
    await one.call.write(Message(open=stalled()))
    refusal = await failure(one)
    assert (refusal.reason, refusal.field) == ("REASON_NOT_SUPPORTED", "open.overload")
    assert "--spool FOLDER" in refusal.message


def unexpected(*args: object) -> None:
    raise AssertionError(args)


class Watched:
    """A reservoir that spills, in which several requests' rows wait."""

    def __init__(self, folder: Path, limit: int = 40 * ROW, spool_bytes: int = 1 << 20) -> None:
        self.spool = Spool(folder, spool_bytes)
        self.errors: list[CaptureOverflow] = []
        self.reservoir = Reservoir(limit, lambda _, error: self.errors.append(error))
        Spillway(self.spool, 1 << 30).open(self.reservoir, unexpected)
        self.given: dict[str, list[int]] = defaultdict(list)
        self.lost: dict[str, int] = defaultdict(int)
        self.ended: list[str] = []

    def tap(self, name: str) -> Tap:
        captures = {0: ResolvedCapture(SITES, EVERYTHING, FloatType.FLOAT32)}
        return Tap(name, [1], captures, FloatType.FLOAT32, SPILL, self.reservoir)

    def feed(self, tap: Tap, start: int, end: int) -> None:
        at = np.arange(start, end, dtype=np.int32)
        for site in SITES:
            tap.feed(
                TRACK,
                Rows(
                    tap.request_id,
                    site.index,
                    at,
                    np.repeat(at[:, None], WIDTH, 1).astype(np.float32),
                ),
            )
        tap.extend(TRACK, [7] * (end - start))

    def end(self, tap: Tap, count: int) -> None:
        tap.release(TRACK, Released(tap.request_id, (), True, {}, 0, 0, (0, count)))
        tap.close()

    def read(self, most: int) -> bool:
        """Takes up to so many items; whether there was one."""
        found = False
        for _ in range(most):
            item = self.reservoir.take()
            if item is None:
                break
            found = True
            self._note(item)
        return found

    def _note(self, item: Item) -> None:
        name = item.tap.request_id
        assert name not in self.ended
        if isinstance(item, End):
            self.ended.append(name)
        elif isinstance(item, Chunk):
            for rows in item.block.rows:
                assert rows[:, 0].tolist() == item.block.positions.tolist()
            self.given[name] += item.block.positions.tolist()
        elif isinstance(item, Loss):
            self.lost[name] += item.rows
        else:
            assert isinstance(item, Sealed)
            positions = [
                p for r in item.message.positions for p in range(r.start, r.start + r.count)
            ]
            values = np.frombuffer(item.message.tensor.inline, "<f4").reshape(2, -1, WIDTH)
            assert values[0, :, 0].tolist() == values[1, :, 0].tolist() == positions
            self.given[name] += positions

    async def drain(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.ended) < count:
                if not self.read(1):
                    await self.reservoir.news.wait()


@pytest.mark.parametrize("seed", range(8))
async def test_however_rows_come_and_go_their_order_stays(tmp_path: Path, seed: int) -> None:
    rng, watched = random.Random(seed), Watched(tmp_path)
    taps = [watched.tap(f"r{number}") for number in range(5)]
    counts = dict.fromkeys(taps, 0)
    while open_taps := [tap for tap in taps if not tap.closed]:
        tap = rng.choice(open_taps)
        count = rng.randrange(1, 12)
        watched.feed(tap, counts[tap], counts[tap] + count)
        counts[tap] += count
        if counts[tap] > 120:
            watched.end(tap, counts[tap])
        if rng.random() < 0.3:
            await asyncio.sleep(rng.choice([0, 0, 0.002]))
        if rng.random() < 0.5:
            watched.read(rng.randrange(6))
    await watched.drain(5)
    assert watched.given == {tap.request_id: list(range(counts[tap])) for tap in taps}
    assert watched.errors == []
    assert (watched.reservoir.used, watched.reservoir.waiting) == (0, 0)
    assert files(tmp_path) == []
    watched.spool.close()


@pytest.mark.parametrize("broken", ["the disk is full", "the spool is full"])
async def test_what_the_disk_did_not_take_still_comes_in_its_place(
    tmp_path: Path, monkeypatch, broken: str
) -> None:
    watched = Watched(tmp_path, spool_bytes=2500)
    tap, other = watched.tap("a"), watched.tap("b")
    watched.feed(tap, 0, 30)
    await until(lambda: watched.reservoir.spill.rows > 0)
    if broken == "the disk is full":
        failing(monkeypatch, "pwrite", errno.ENOSPC)
    at = 30
    while not watched.errors:
        watched.feed(tap, at, at + 5)
        at += 5
        await asyncio.sleep(0.002)
    watched.feed(other, 0, 3)
    watched.end(tap, at)
    watched.end(other, 3)
    await watched.drain(2)
    counts = tap.counts()[0]
    assert counts == (len(watched.given["a"]), at - len(watched.given["a"]))
    assert watched.given["a"] == list(range(counts[0]))
    assert (watched.reservoir.used, watched.reservoir.waiting) == (0, 0)
    watched.feed(third := watched.tap("c"), 0, 3)
    watched.end(third, 3)
    await watched.drain(3)
    assert watched.given["c"] == [0, 1, 2]
    watched.spool.close()


async def test_little_memory_is_used_while_rows_wait_on_disk(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    tap = watched.tap("a")
    for position in range(0, 3000, 3):
        watched.feed(tap, position, position + 3)
        if position % 30 == 0:
            await until(lambda: watched.reservoir.used <= watched.reservoir.limit)
    assert watched.reservoir.spill.rows > 5000
    watched.end(tap, 3000)
    await watched.drain(1)
    assert watched.given["a"] == list(range(3000))
    watched.spool.close()
