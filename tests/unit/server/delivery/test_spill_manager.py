"""Rows on disk leave in order, whatever is added or discarded meanwhile."""

import asyncio
import errno
import gc
import random
import weakref
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from rheostat_engine import Point, Released, Rows, Site
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.delivery_buffer import DeliveryBuffer
from rheostat_server.delivery.items import Chunk, DeliveryItem, EncodedChunk, End, Loss, SequenceKey
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.delivery.spill_directory import SpillDirectory
from rheostat_server.delivery.spill_manager import SpillManager
from rheostat_server.errors import CaptureOverflow
from rheostat_server.selectors.selection import EVERYTHING
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import types_pb2

from ..fakes import WIDTH
from ..streams import until
from ..subscribers import ROW
from .test_spill import SPILL, failing, files

KEY = SequenceKey(0, False)
SITES = tuple(Site(Point.RESID_POST, layer) for layer in range(2))


def unexpected(*args: object) -> None:
    raise AssertionError(args)


class Watched:
    """A buffer that spills, with the waiting rows of several requests."""

    def __init__(self, folder: Path, limit: int = 40 * ROW, spool_bytes: int = 1 << 20) -> None:
        self.spool = SpillDirectory(folder, spool_bytes)
        self.errors: list[CaptureOverflow] = []
        self.buffer = DeliveryBuffer(limit, lambda _, error: self.errors.append(error))
        SpillManager(self.spool, 1 << 30).open(self.buffer, unexpected)
        self.given: dict[str, list[int]] = defaultdict(list)
        self.lost: dict[str, int] = defaultdict(int)
        self.ended: list[str] = []

    def feed(self, name: str) -> RowFeed:
        captures = {0: ResolvedCapture(SITES, EVERYTHING, FloatType.FLOAT32)}
        return RowFeed(name, [1], captures, FloatType.FLOAT32, SPILL, self.buffer)

    def add_rows(self, feed: RowFeed, start: int, end: int) -> None:
        at = np.arange(start, end, dtype=np.int32)
        data = np.broadcast_to(at[:, None].astype(np.float32), (len(SITES), len(at), WIDTH))
        sites = tuple(site.index for site in SITES)
        feed.add(KEY, Rows(feed.request_id, sites, at, data.copy()))
        feed.extend(KEY, [7] * (end - start))

    def end(self, feed: RowFeed, count: int) -> None:
        feed.release(KEY, Released(feed.request_id, (), True, {}, 0, 0, (0, count)))
        feed.close([types_pb2.FINISH_REASON_LENGTH])

    def read(self, most: int) -> bool:
        """Takes up to so many items; whether there was one."""
        found = False
        for _ in range(most):
            item = self.buffer.take()
            if item is None:
                break
            found = True
            self._note(item)
        return found

    def _note(self, item: DeliveryItem) -> None:
        name = item.feed.request_id
        assert name not in self.ended
        if isinstance(item, End):
            self.ended.append(name)
        elif isinstance(item, Chunk):
            for _, rows, _ in item.block.parts:
                assert rows[:, 0].tolist() == item.block.positions.tolist()
            self.given[name] += item.block.positions.tolist()
        elif isinstance(item, Loss):
            self.lost[name] += item.rows
        else:
            assert isinstance(item, EncodedChunk)
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
                    await self.buffer.news.wait()


@pytest.mark.parametrize("seed", range(8))
async def test_however_rows_come_and_go_their_order_stays(tmp_path: Path, seed: int) -> None:
    rng, watched = random.Random(seed), Watched(tmp_path)
    feeds = [watched.feed(f"r{number}") for number in range(5)]
    counts = dict.fromkeys(feeds, 0)
    while open_feeds := [feed for feed in feeds if not feed.closed]:
        feed = rng.choice(open_feeds)
        count = rng.randrange(1, 12)
        watched.add_rows(feed, counts[feed], counts[feed] + count)
        counts[feed] += count
        if counts[feed] > 120:
            watched.end(feed, counts[feed])
        if rng.random() < 0.3:
            await asyncio.sleep(rng.choice([0, 0, 0.002]))
        if rng.random() < 0.5:
            watched.read(rng.randrange(6))
    await watched.drain(5)
    assert watched.given == {feed.request_id: list(range(counts[feed])) for feed in feeds}
    assert watched.errors == []
    assert (watched.buffer.used, watched.buffer.waiting) == (0, 0)
    assert files(tmp_path) == []
    watched.spool.close()


@pytest.mark.parametrize("broken", ["the disk is full", "the spool is full"])
async def test_what_the_disk_did_not_take_still_comes_in_its_place(
    tmp_path: Path, monkeypatch, broken: str
) -> None:
    watched = Watched(tmp_path, spool_bytes=2500)
    feed, other = watched.feed("a"), watched.feed("b")
    watched.add_rows(feed, 0, 30)
    await until(lambda: watched.buffer.spill.rows > 0)
    if broken == "the disk is full":
        failing(monkeypatch, "pwrite", errno.ENOSPC)
    at = 30
    while not watched.errors:
        watched.add_rows(feed, at, at + 5)
        at += 5
        await asyncio.sleep(0.002)
    watched.add_rows(other, 0, 3)
    watched.end(feed, at)
    watched.end(other, 3)
    await watched.drain(2)
    counts = feed.counts()[0]
    assert counts == (len(watched.given["a"]), at - len(watched.given["a"]))
    assert watched.given["a"] == list(range(counts[0]))
    assert (watched.buffer.used, watched.buffer.waiting) == (0, 0)
    watched.add_rows(third := watched.feed("c"), 0, 3)
    watched.end(third, 3)
    await watched.drain(3)
    assert watched.given["c"] == [0, 1, 2]
    watched.spool.close()


async def test_a_request_that_has_left_is_forgotten_while_others_wait(tmp_path: Path) -> None:
    """The reader is always behind, so the disk is never empty."""
    watched = Watched(tmp_path)
    left: list[weakref.ref[RowFeed]] = []
    for number in range(40):
        feed = watched.feed(f"r{number}")
        left.append(weakref.ref(feed))
        watched.add_rows(feed, 0, 12)
        watched.end(feed, 12)
        del feed
        await until(lambda: watched.buffer.used <= watched.buffer.limit)
        while len(watched.ended) < number - 10:
            if not watched.read(1):
                await asyncio.wait_for(watched.buffer.news.wait(), 10)
    assert watched.buffer.spill.holds
    gc.collect()
    ended = len(watched.ended) - 1  # the last one may be at hand
    assert ended >= 25
    assert [ref() for ref in left[:ended]] == [None] * ended
    watched.buffer.close()
    await until(lambda: files(tmp_path) == [])
    watched.spool.close()


async def test_little_memory_is_used_while_rows_wait_on_disk(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    feed = watched.feed("a")
    for position in range(0, 3000, 3):
        watched.add_rows(feed, position, position + 3)
        if position % 30 == 0:
            await until(lambda: watched.buffer.used <= watched.buffer.limit)
    assert watched.buffer.spill.rows > 5000
    watched.end(feed, 3000)
    await watched.drain(1)
    assert watched.given["a"] == list(range(3000))
    watched.spool.close()
