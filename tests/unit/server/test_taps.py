"""Rows on their way to a reader: what waits is bounded, what is lost is told, nothing is kept."""

import asyncio
import random
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from rheostat_engine import OPEN_END, Point, Released, Rows, Site
from rheostat_server.capture.deliveries import Deliveries
from rheostat_server.capture.leaving import Chunk, End, Item, Loss, Track
from rheostat_server.capture.reservoir import Reservoir
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.capture.taps import Tap
from rheostat_server.errors import CaptureOverflow
from rheostat_server.selection import EVERYTHING
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import capture_pb2

SITE = Site(Point.RESID_POST, 0)
CAPTURE = ResolvedCapture((SITE,), EVERYTHING, FloatType.FLOAT32)
TRACK = Track(0, False)
WIDTH = 1024
ROW = 4 * WIDTH
FAIL, NEWEST, OLDEST = (
    capture_pb2.OVERLOAD_FAIL,
    capture_pb2.OVERLOAD_DROP_NEWEST,
    capture_pb2.OVERLOAD_DROP_OLDEST,
)


def rows(start: int, end: int) -> Rows:
    positions = np.arange(start, end, dtype=np.int32)
    return Rows("r", (SITE.index,), positions, np.ones((1, end - start, WIDTH), np.float32))


def unexpected(tap: Tap, error: CaptureOverflow) -> None:
    raise AssertionError(error)


def room(limit: int = 1 << 30) -> Reservoir:
    return Reservoir(limit, unexpected)


def tap_of(reservoir: Reservoir, policy: int, prompt: int = 3, captures: int = 1) -> Tap:
    wanted = dict.fromkeys(range(captures), CAPTURE)
    return Tap("r", [1] * prompt, wanted, FloatType.FLOAT32, policy, reservoir)


def everything(reservoir: Reservoir) -> Iterator[Item]:
    """All that can leave."""
    while (item := reservoir.take()) is not None:
        yield item


def positions(items) -> tuple[list[int], list[int]]:
    """Of the first capture: those that were handed over, and those that are lost."""
    given: list[int] = []
    lost: list[int] = []
    for item in items:
        if isinstance(item, Chunk) and item.block.capture_index == 0:
            given += item.block.positions.tolist()
        elif isinstance(item, Loss) and item.capture_index == 0:
            lost += [p for start, end in item.positions for p in range(start, end)]
    return given, lost


def test_rows_of_steps_that_ran_on_are_not_kept() -> None:
    reservoir = room()
    tap = tap_of(reservoir, FAIL)
    tap.feed(TRACK, rows(0, 3))
    tap.extend(TRACK, [7])
    tap.feed(TRACK, rows(3, 4))
    tap.close()
    *_, last = everything(reservoir)
    assert isinstance(last, End)
    assert (reservoir.meter.bytes, reservoir.meter.rows) == (0, 0)


def test_prompt_rows_leave_before_there_is_a_token() -> None:
    reservoir = room()
    tap_of(reservoir, FAIL, prompt=100).feed(TRACK, rows(0, 50))
    assert reservoir.news.is_set()
    assert positions(everything(reservoir)) == (list(range(50)), [])


@pytest.mark.parametrize("policy", [NEWEST, OLDEST])
def test_lost_rows_take_no_memory_while_a_reader_stands_still(policy: int) -> None:
    tap = tap_of(room(1 << 20), policy)
    tracemalloc.start()
    for position in range(5000):
        tap.feed(TRACK, rows(position, position + 1))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 4 << 20


def test_rows_that_have_left_are_forgotten_while_another_request_stands_still() -> None:
    reservoir = room(1 << 20)
    tap_of(reservoir, OLDEST).feed(TRACK, rows(0, 3))
    other = tap_of(reservoir, OLDEST)
    tracemalloc.start()
    for position in range(3000):
        other.extend(TRACK, [5])
        other.feed(TRACK, rows(position, position + 1))
        for _ in everything(reservoir):
            pass
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2 << 20


@pytest.mark.parametrize("policy", [NEWEST, OLDEST])
def test_lost_rows_are_counted_before_anybody_reads_and_once(policy: int) -> None:
    deliveries = Deliveries()
    reservoir = Reservoir(3 * ROW, unexpected, deliveries)
    tap = tap_of(reservoir, policy, captures=2)
    tap.feed(TRACK, rows(0, 3))
    for position in range(3, 9):
        tap.extend(TRACK, [7])
        tap.feed(TRACK, rows(position, position + 1))
    at_once = deliveries.lost_rows
    assert at_once > 0
    tap.release(TRACK, Released("r", (), True, {}, 0, 0, (0, 8)))
    tap.close()
    told = sum(item.rows for item in everything(reservoir) if isinstance(item, Loss))
    assert deliveries.lost_rows == told >= at_once - 2
    assert sum(lost for _, lost in tap.counts().values()) == told


def test_a_row_is_either_handed_over_or_lost() -> None:
    reservoir = room(3 * ROW)
    tap = tap_of(reservoir, NEWEST, captures=2)
    tap.refuse({0})
    items = []
    tap.feed(TRACK, rows(0, 3))
    for position in (3, 4):
        tap.extend(TRACK, [7])
        items += everything(reservoir)
        tap.feed(TRACK, rows(position, position + 1))
    tap.release(TRACK, Released("r", (), True, {}, 0, 0, (0, 4)))
    tap.close()
    items += everything(reservoir)
    given, lost = positions(items)
    assert (given, sorted(lost)) == ([], [0, 1, 2, 3])
    assert tap.counts() == {0: (0, 4), 1: (4, 0)}


def test_what_comes_after_a_reader_has_gone_counts_as_lost() -> None:
    tap = tap_of(room(), FAIL)
    tap.feed(TRACK, rows(0, 3))
    tap.extend(TRACK, [7])
    tap.discard()
    for position in range(3, 8):
        tap.feed(TRACK, rows(position, position + 1))
        tap.extend(TRACK, [7])
    tap.release(TRACK, Released("r", (), True, {}, 0, 0, (0, 8)))
    assert tap.counts() == {0: (0, 8)}


def fed(deliveries: Deliveries, limit: int = 1 << 30) -> tuple[Reservoir, Tap]:
    """A request's feed with two rows, the first of which may leave."""
    reservoir = Reservoir(limit, unexpected, deliveries)
    tap = tap_of(reservoir, NEWEST, prompt=1)
    tap.feed(TRACK, rows(0, 1))
    tap.extend(TRACK, [7])
    return reservoir, tap


def one_by_one(reservoir: Reservoir) -> list[int]:
    """Rows of each chunk that can leave."""
    return [len(item.token_ids) for item in everything(reservoir) if isinstance(item, Chunk)]


async def test_with_few_requests_each_row_leaves_at_once() -> None:
    reservoir, tap = fed(Deliveries())
    assert one_by_one(reservoir) == [1]
    tap.feed(TRACK, rows(1, 2))
    tap.extend(TRACK, [7])
    assert one_by_one(reservoir) == [1]


async def test_with_many_requests_rows_wait_for_later_rows_of_the_same_request() -> None:
    deliveries = Deliveries()
    deliveries.feeds = 256
    assert 0.05 < deliveries.delay < 0.5
    reservoir, tap = fed(deliveries)
    assert one_by_one(reservoir) == []
    assert not reservoir.news.is_set()
    for position in range(1, 5):
        tap.feed(TRACK, rows(position, position + 1))
        tap.extend(TRACK, [7])
    assert one_by_one(reservoir) == []
    async with asyncio.timeout(10):
        await reservoir.news.wait()
    assert one_by_one(reservoir) == [5]


async def test_no_row_waits_for_later_rows_once_its_request_has_ended() -> None:
    deliveries = Deliveries()
    deliveries.feeds = 256
    reservoir, tap = fed(deliveries)
    tap.close([])
    assert one_by_one(reservoir) == [1]
    assert deliveries.feeds == 256


async def test_no_row_waits_for_later_rows_where_memory_is_short() -> None:
    deliveries = Deliveries()
    deliveries.feeds = 256
    reservoir, tap = fed(deliveries, limit=16 * ROW)
    assert one_by_one(reservoir) == []
    tap.feed(TRACK, rows(1, 6))
    assert one_by_one(reservoir) == [1]


async def test_feeds_that_end_in_any_way_no_longer_delay_others() -> None:
    deliveries = Deliveries()
    closed, discarded = (fed(deliveries)[1] for _ in range(2))
    assert deliveries.feeds == 2
    closed.close([])
    closed.discard()
    discarded.discard()
    discarded.close([])
    assert deliveries.feeds == 0


def test_losses_are_told_once_in_their_place() -> None:
    reservoir = room(2 * ROW)
    tap = tap_of(reservoir, NEWEST, prompt=1)
    items = []
    for position in range(12):
        tap.feed(TRACK, rows(position, position + 1))
        tap.extend(TRACK, [7])
        if position % 5 == 4:
            items += everything(reservoir)
    tap.release(TRACK, Released("r", (), True, {}, 0, 0, (0, 12)))
    tap.close()
    items += everything(reservoir)
    given, lost = positions(items)
    assert sorted(given + lost) == list(range(12))
    assert lost == sorted(lost)
    assert lost


async def test_a_closed_subscription_is_sent_to_its_end_though_nothing_is_acknowledged() -> None:
    subscription = Subscription(
        "s", None, (), FAIL, buffer_bytes=1 << 10, heartbeat=9.0, on_failed=lambda _: None
    )
    for number in range(1500):
        tap = subscription.tap(f"r{number}", [1], {0: CAPTURE}, FloatType.FLOAT32, None)
        tap.close()
    call = object()
    messages = subscription.messages(call, 0)
    assert (await anext(messages)).HasField("opened")
    subscription.close()
    async with asyncio.timeout(10):
        ends = [message.end_of_request.request_id async for message in messages]
    assert ends == [f"r{number}" for number in range(1500)]
    assert subscription.ended


def test_what_is_cut_before_the_first_call_goes_through_its_credit() -> None:
    subscription = Subscription(
        "s", None, (), FAIL, buffer_bytes=1 << 20, heartbeat=9.0, on_failed=lambda _: None
    )
    subscription.expect(8 * ROW)
    tap = subscription.tap("r", [1], {0: CAPTURE}, FloatType.FLOAT32, None)
    tap.feed(TRACK, rows(0, 20))
    tap.extend(TRACK, [7] * 20)
    tap.close()
    chunks = [item for item in everything(subscription.reservoir) if isinstance(item, Chunk)]
    assert [len(chunk.block.positions) for chunk in chunks] == [4, 4, 4, 4, 4]


def test_a_tap_that_joins_takes_nothing_of_tracks_that_had_ended() -> None:
    reservoir = room()
    tap, other = tap_of(reservoir, FAIL), Track(1, False)
    tap.join(TRACK, [7])
    tap.feed(other, rows(0, 3))
    tap.release(other, Released("r", (), True, {}, 0, 0, (0, 5)))
    tap.begin(TRACK, 3)
    tap.feed(TRACK, rows(3, 4))
    tap.extend(TRACK, [8])
    tap.release(TRACK, Released("r", (), True, {}, 0, 0, (0, 4)))
    tap.close()
    assert positions(everything(reservoir)) == ([3], [])


def test_what_is_refused_after_a_track_was_joined_is_lost_though_its_rows_come() -> None:
    reservoir = room()
    tap = tap_of(reservoir, NEWEST)
    tap.join(TRACK, [7])
    tap.refuse({0})
    tap.begin(TRACK, 3)
    tap.feed(TRACK, rows(3, 5))
    tap.extend(TRACK, [8, 9])
    tap.close()
    assert positions(everything(reservoir)) == ([], [3, 4])
    assert reservoir.meter.bytes == 0


def test_a_track_of_which_nothing_is_wanted_any_more_keeps_no_rows() -> None:
    reservoir = room()
    tap = tap_of(reservoir, NEWEST)
    tap.join(TRACK, [7])
    tap.begin(TRACK, OPEN_END)
    came = rows(3, 5)
    held = sys.getrefcount(came)
    tap.feed(TRACK, came)
    assert sys.getrefcount(came) == held
    tap.extend(TRACK, [8, 9])
    tap.close()
    assert positions(everything(reservoir)) == ([], [])


OTHER = Site(Point.RESID_POST, 1)
BOTH = ResolvedCapture((SITE, OTHER), EVERYTHING, FloatType.FLOAT32)


def of_site(site: Site, start: int, end: int) -> Rows:
    return replace(rows(start, end), sites=(site.index,))


def ended(tap: Tap, count: int) -> None:
    tap.extend(TRACK, [7] * (count + 1 - len(tap._prompt)))
    tap.release(TRACK, Released("r", (), True, {}, 0, 0, (0, count)))
    tap.close()


@pytest.mark.parametrize(
    ("policy", "kept", "lost"),
    [(NEWEST, [0, 1, 2, 3, 4], [5, 6, 7]), (OLDEST, [3, 4, 5, 6, 7], [0, 1, 2])],
)
def test_of_rows_that_come_at_once_those_stay_that_fit(policy, kept, lost) -> None:
    reservoir = room(5 * ROW)
    tap = tap_of(reservoir, policy, prompt=8)
    tap.feed(TRACK, rows(0, 8))
    assert reservoir.used <= 5 * ROW
    ended(tap, 8)
    assert positions(everything(reservoir)) == (kept, lost)
    assert tap.counts() == {0: (5, 3)}


@pytest.mark.parametrize(
    ("policy", "kept", "lost"),
    [(NEWEST, [0, 1, 2, 3], [4, 5, 6, 7]), (OLDEST, [4, 5, 6, 7], [0, 1, 2, 3])],
)
def test_a_position_that_finds_no_room_at_one_site_takes_none_at_the_others(
    policy, kept, lost
) -> None:
    deliveries = Deliveries()
    reservoir = Reservoir(8 * ROW, unexpected, deliveries)
    tap = Tap("r", [1] * 8, {0: BOTH}, FloatType.FLOAT32, policy, reservoir)
    tap.feed(TRACK, of_site(SITE, 0, 8))
    tap.feed(TRACK, of_site(OTHER, 0, 8))
    ended(tap, 8)
    assert positions(everything(reservoir)) == (kept, lost)
    assert deliveries.lost_rows == 2 * len(lost)


def test_what_stays_of_rows_that_come_at_once_is_all_the_memory_that_is_held() -> None:
    reservoir = room(10 * ROW)
    tap = tap_of(reservoir, NEWEST, prompt=4000)
    tracemalloc.start()
    tap.feed(TRACK, rows(0, 4000))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 40 * ROW


@pytest.mark.parametrize("policy", [NEWEST, OLDEST])
@pytest.mark.parametrize("seed", range(12))
def test_however_rows_come_those_that_fit_stay_and_each_is_given_or_lost(seed, policy) -> None:
    rng = random.Random(seed)
    deliveries, limit = Deliveries(), rng.randrange(2, 30) * ROW
    reservoir = Reservoir(limit, unexpected, deliveries)
    sites = tuple(Site(Point.RESID_POST, layer) for layer in range(rng.randrange(1, 4)))
    capture = ResolvedCapture(sites, EVERYTHING, FloatType.FLOAT32)
    tap = Tap("r", [1], {0: capture}, FloatType.FLOAT32, policy, reservoir)
    items: list[Item] = []
    total = 60
    reads = rng.random() < 0.7
    at = dict.fromkeys(sites, 0)
    while any(end < total for end in at.values()):
        behind = [site for site in sites if at[site] < total and at[site] <= min(at.values()) + 20]
        site = rng.choice(behind)
        end = min(total, at[site] + rng.randrange(1, 25))
        tap.feed(TRACK, of_site(site, at[site], end))
        at[site] = end
        assert reservoir.used <= limit
        tokens = min(at.values()) - len(tap._lane(TRACK).tokens)
        tap.extend(TRACK, [7] * tokens)
        while reads and rng.random() < 0.5 and (item := reservoir.take()) is not None:
            items.append(item)
    ended(tap, total)
    items += everything(reservoir)
    given, lost = positions(items)
    assert sorted(given + lost) == list(range(total))
    assert given == sorted(given)
    assert deliveries.lost_rows == len(lost) * len(sites)
    assert (reservoir.meter.bytes, reservoir.meter.rows) == (0, 0)
    if not reads and policy == NEWEST:
        assert given == list(range(len(given)))
    if not reads:
        assert len(given) * len(sites) * ROW <= limit
