"""RowFeed and DeliveryBuffer: waiting rows are bounded, losses are reported, no memory stays."""

import asyncio
import random
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rheostat_engine import OPEN_END, Point, Released, Rows, Site
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.delivery_buffer import Deliveries, DeliveryBuffer
from rheostat_server.delivery.items import Chunk, DeliveryItem, End, Loss, SequenceKey
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.errors import CaptureOverflow
from rheostat_server.selectors.selection import EVERYTHING
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_server.tensors import FloatType

from ..row_feeds import CAPTURE, FAIL, KEY, NEWEST, OLDEST, ROW, SITE, rows
from ..subscribers import received


def unexpected(feed: RowFeed, error: CaptureOverflow) -> None:
    raise AssertionError(error)


def room(limit: int = 1 << 30) -> DeliveryBuffer:
    return DeliveryBuffer(limit, unexpected)


def feed_of(buffer: DeliveryBuffer, policy: int, prompt: int = 3, captures: int = 1) -> RowFeed:
    wanted = dict.fromkeys(range(captures), CAPTURE)
    return RowFeed("r", [1] * prompt, wanted, FloatType.FLOAT32, policy, buffer)


def everything(buffer: DeliveryBuffer) -> Iterator[DeliveryItem]:
    """All that can leave."""
    while (item := buffer.take()) is not None:
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
    buffer = room()
    feed = feed_of(buffer, FAIL)
    feed.add(KEY, rows(0, 3))
    feed.extend(KEY, [7])
    feed.add(KEY, rows(3, 4))
    feed.close()
    *_, last = everything(buffer)
    assert isinstance(last, End)
    assert (buffer.byte_counter.bytes, buffer.byte_counter.rows) == (0, 0)


def test_prompt_rows_leave_before_there_is_a_token() -> None:
    buffer = room()
    feed_of(buffer, FAIL, prompt=100).add(KEY, rows(0, 50))
    assert buffer.news.is_set()
    assert positions(everything(buffer)) == (list(range(50)), [])


def test_rows_that_came_together_leave_together_after_their_last_token() -> None:
    """Otherwise each token of a busy server would make two messages."""
    buffer = room()
    feed = feed_of(buffer, FAIL)
    feed.add(KEY, rows(0, 3))
    feed.extend(KEY, [7])
    assert positions(everything(buffer)) == ([0, 1, 2], [])
    feed.add(KEY, rows(3, 15))
    left = []
    for token in range(20):
        if token == 4:
            feed.add(KEY, rows(15, 20))
        feed.extend(KEY, [7])
        if buffer.news.is_set():
            left.append((token, positions(everything(buffer))[0]))
    assert left == [(11, list(range(3, 15))), (16, list(range(15, 20)))]


@pytest.mark.parametrize("policy", [NEWEST, OLDEST])
def test_lost_rows_take_no_memory_while_a_reader_stands_still(policy: int) -> None:
    feed = feed_of(room(1 << 20), policy)
    tracemalloc.start()
    for position in range(5000):
        feed.add(KEY, rows(position, position + 1))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 4 << 20


def test_rows_that_have_left_are_forgotten_while_another_request_stands_still() -> None:
    buffer = room(1 << 20)
    feed_of(buffer, OLDEST).add(KEY, rows(0, 3))
    other = feed_of(buffer, OLDEST)
    tracemalloc.start()
    for position in range(3000):
        other.extend(KEY, [5])
        other.add(KEY, rows(position, position + 1))
        for _ in everything(buffer):
            pass
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2 << 20


@pytest.mark.parametrize("policy", [NEWEST, OLDEST])
def test_lost_rows_are_counted_before_anybody_reads_and_once(policy: int) -> None:
    deliveries = Deliveries()
    buffer = DeliveryBuffer(3 * ROW, unexpected, deliveries)
    feed = feed_of(buffer, policy, captures=2)
    feed.add(KEY, rows(0, 3))
    for position in range(3, 9):
        feed.extend(KEY, [7])
        feed.add(KEY, rows(position, position + 1))
    at_once = deliveries.lost_rows
    assert at_once > 0
    feed.release(KEY, Released("r", (), True, {}, 0, 0, (0, 8)))
    feed.close()
    told = sum(item.rows for item in everything(buffer) if isinstance(item, Loss))
    assert deliveries.lost_rows == told >= at_once - 2
    assert sum(lost for _, lost in feed.counts().values()) == told


def test_a_row_is_either_handed_over_or_lost() -> None:
    buffer = room(3 * ROW)
    feed = feed_of(buffer, NEWEST, captures=2)
    feed.refuse({0})
    items = []
    feed.add(KEY, rows(0, 3))
    for position in (3, 4):
        feed.extend(KEY, [7])
        items += everything(buffer)
        feed.add(KEY, rows(position, position + 1))
    feed.release(KEY, Released("r", (), True, {}, 0, 0, (0, 4)))
    feed.close()
    items += everything(buffer)
    given, lost = positions(items)
    assert (given, sorted(lost)) == ([], [0, 1, 2, 3])
    assert feed.counts() == {0: (0, 4), 1: (4, 0)}


def test_what_comes_after_a_reader_has_gone_counts_as_lost() -> None:
    feed = feed_of(room(), FAIL)
    feed.add(KEY, rows(0, 3))
    feed.extend(KEY, [7])
    feed.discard()
    for position in range(3, 8):
        feed.add(KEY, rows(position, position + 1))
        feed.extend(KEY, [7])
    feed.release(KEY, Released("r", (), True, {}, 0, 0, (0, 8)))
    assert feed.counts() == {0: (0, 8)}


def fed(deliveries: Deliveries, limit: int = 1 << 30) -> tuple[DeliveryBuffer, RowFeed]:
    """A request's feed with two rows, the first of which may leave."""
    buffer = DeliveryBuffer(limit, unexpected, deliveries)
    feed = feed_of(buffer, NEWEST, prompt=1)
    feed.add(KEY, rows(0, 1))
    feed.extend(KEY, [7])
    return buffer, feed


def one_by_one(buffer: DeliveryBuffer) -> list[int]:
    """Rows of each chunk that can leave."""
    return [len(item.token_ids) for item in everything(buffer) if isinstance(item, Chunk)]


def test_a_row_leaves_with_the_token_after_it() -> None:
    buffer, feed = fed(Deliveries())
    assert one_by_one(buffer) == [1]
    feed.add(KEY, rows(1, 2))
    assert one_by_one(buffer) == []
    feed.extend(KEY, [7])
    assert one_by_one(buffer) == [1]


def test_rows_of_which_the_last_needs_the_next_token_leave_with_it_together() -> None:
    buffer, feed = fed(Deliveries())
    assert one_by_one(buffer) == [1]
    feed.add(KEY, rows(1, 5))
    assert one_by_one(buffer) == []
    feed.extend(KEY, [7, 7, 7, 7])
    assert one_by_one(buffer) == [4]


def test_a_token_wakes_no_reader_while_no_row_waits() -> None:
    buffer, feed = fed(Deliveries())
    assert one_by_one(buffer) == [1]
    buffer.news.clear()
    feed.extend(KEY, [7])
    assert not buffer.news.is_set()


def test_losses_are_reported_once_in_order() -> None:
    buffer = room(2 * ROW)
    feed = feed_of(buffer, NEWEST, prompt=1)
    items = []
    for position in range(12):
        feed.add(KEY, rows(position, position + 1))
        feed.extend(KEY, [7])
        if position % 5 == 4:
            items += everything(buffer)
    feed.release(KEY, Released("r", (), True, {}, 0, 0, (0, 12)))
    feed.close()
    items += everything(buffer)
    given, lost = positions(items)
    assert sorted(given + lost) == list(range(12))
    assert lost == sorted(lost)
    assert lost


async def test_a_closed_subscription_is_sent_to_its_end_though_nothing_is_acknowledged() -> None:
    subscription = Subscription(
        "s", None, (), FAIL, buffer_bytes=1 << 10, heartbeat=9.0, on_failed=lambda _: None
    )
    for number in range(1500):
        feed = subscription.feed(f"r{number}", [1], {0: CAPTURE}, FloatType.FLOAT32, None)
        feed.close()
    call = object()
    messages = subscription.messages(call, 0)
    assert (await anext(messages)).HasField("opened")
    subscription.close()
    async with asyncio.timeout(10):
        ends = [received(message).end_of_request.request_id async for message in messages]
    assert ends == [f"r{number}" for number in range(1500)]
    assert subscription.ended


def test_what_is_cut_before_the_first_call_goes_through_its_credit() -> None:
    subscription = Subscription(
        "s", None, (), FAIL, buffer_bytes=1 << 20, heartbeat=9.0, on_failed=lambda _: None
    )
    subscription.expect(8 * ROW)
    feed = subscription.feed("r", [1], {0: CAPTURE}, FloatType.FLOAT32, None)
    feed.add(KEY, rows(0, 20))
    feed.extend(KEY, [7] * 20)
    feed.close()
    chunks = [item for item in everything(subscription.buffer) if isinstance(item, Chunk)]
    assert [len(chunk.block.positions) for chunk in chunks] == [4, 4, 4, 4, 4]


def test_a_feed_that_joins_takes_nothing_of_tracks_that_had_ended() -> None:
    buffer = room()
    feed, other = feed_of(buffer, FAIL), SequenceKey(1, False)
    feed.attach(KEY, [7])
    feed.add(other, rows(0, 3))
    feed.release(other, Released("r", (), True, {}, 0, 0, (0, 5)))
    feed.begin(KEY, 3)
    feed.add(KEY, rows(3, 4))
    feed.extend(KEY, [8])
    feed.release(KEY, Released("r", (), True, {}, 0, 0, (0, 4)))
    feed.close()
    assert positions(everything(buffer)) == ([3], [])


def test_captures_refused_after_an_attachment_are_lost_though_their_rows_come() -> None:
    buffer = room()
    feed = feed_of(buffer, NEWEST)
    feed.attach(KEY, [7])
    feed.refuse({0})
    feed.begin(KEY, 3)
    feed.add(KEY, rows(3, 5))
    feed.extend(KEY, [8, 9])
    feed.close()
    assert positions(everything(buffer)) == ([], [3, 4])
    assert buffer.byte_counter.bytes == 0


def test_a_track_of_which_nothing_is_wanted_any_more_keeps_no_rows() -> None:
    buffer = room()
    feed = feed_of(buffer, NEWEST)
    feed.attach(KEY, [7])
    feed.begin(KEY, OPEN_END)
    came = rows(3, 5)
    held = sys.getrefcount(came)
    feed.add(KEY, came)
    assert sys.getrefcount(came) == held
    feed.extend(KEY, [8, 9])
    feed.close()
    assert positions(everything(buffer)) == ([], [])


OTHER = Site(Point.RESID_POST, 1)
BOTH = ResolvedCapture((SITE, OTHER), EVERYTHING, FloatType.FLOAT32)


def of_site(site: Site, start: int, end: int) -> Rows:
    return replace(rows(start, end), sites=(site.index,))


def ended(feed: RowFeed, count: int) -> None:
    feed.extend(KEY, [7] * (count + 1 - len(feed._prompt)))
    feed.release(KEY, Released("r", (), True, {}, 0, 0, (0, count)))
    feed.close()


@pytest.mark.parametrize(
    ("policy", "kept", "lost"),
    [(NEWEST, [0, 1, 2, 3, 4], [5, 6, 7]), (OLDEST, [3, 4, 5, 6, 7], [0, 1, 2])],
)
def test_of_rows_that_come_at_once_those_stay_that_fit(policy, kept, lost) -> None:
    buffer = room(5 * ROW)
    feed = feed_of(buffer, policy, prompt=8)
    feed.add(KEY, rows(0, 8))
    assert buffer.used <= 5 * ROW
    ended(feed, 8)
    assert positions(everything(buffer)) == (kept, lost)
    assert feed.counts() == {0: (5, 3)}


@pytest.mark.parametrize(
    ("policy", "kept", "lost"),
    [(NEWEST, [0, 1, 2, 3], [4, 5, 6, 7]), (OLDEST, [4, 5, 6, 7], [0, 1, 2, 3])],
)
def test_a_position_that_does_not_fit_at_one_site_takes_no_memory_at_others(
    policy, kept, lost
) -> None:
    deliveries = Deliveries()
    buffer = DeliveryBuffer(8 * ROW, unexpected, deliveries)
    feed = RowFeed("r", [1] * 8, {0: BOTH}, FloatType.FLOAT32, policy, buffer)
    feed.add(KEY, of_site(SITE, 0, 8))
    feed.add(KEY, of_site(OTHER, 0, 8))
    ended(feed, 8)
    assert positions(everything(buffer)) == (kept, lost)
    assert deliveries.lost_rows == 2 * len(lost)


def test_what_stays_of_rows_that_come_at_once_is_all_the_memory_that_is_held() -> None:
    buffer = room(10 * ROW)
    feed = feed_of(buffer, NEWEST, prompt=4000)
    tracemalloc.start()
    feed.add(KEY, rows(0, 4000))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 40 * ROW


@pytest.mark.parametrize("policy", [NEWEST, OLDEST])
@pytest.mark.parametrize("seed", range(12))
def test_however_rows_come_those_that_fit_stay_and_each_is_given_or_lost(seed, policy) -> None:
    rng = random.Random(seed)
    deliveries, limit = Deliveries(), rng.randrange(2, 30) * ROW
    buffer = DeliveryBuffer(limit, unexpected, deliveries)
    sites = tuple(Site(Point.RESID_POST, layer) for layer in range(rng.randrange(1, 4)))
    capture = ResolvedCapture(sites, EVERYTHING, FloatType.FLOAT32)
    feed = RowFeed("r", [1], {0: capture}, FloatType.FLOAT32, policy, buffer)
    items: list[DeliveryItem] = []
    total = 60
    reads = rng.random() < 0.7
    at = dict.fromkeys(sites, 0)
    while any(end < total for end in at.values()):
        behind = [site for site in sites if at[site] < total and at[site] <= min(at.values()) + 20]
        site = rng.choice(behind)
        end = min(total, at[site] + rng.randrange(1, 25))
        feed.add(KEY, of_site(site, at[site], end))
        at[site] = end
        assert buffer.used <= limit
        tokens = min(at.values()) - len(feed._sequence_rows(KEY).tokens)
        feed.extend(KEY, [7] * tokens)
        while reads and rng.random() < 0.5 and (item := buffer.take()) is not None:
            items.append(item)
    ended(feed, total)
    items += everything(buffer)
    given, lost = positions(items)
    assert sorted(given + lost) == list(range(total))
    assert given == sorted(given)
    assert deliveries.lost_rows == len(lost) * len(sites)
    assert (buffer.byte_counter.bytes, buffer.byte_counter.rows) == (0, 0)
    if not reads and policy == NEWEST:
        assert given == list(range(len(given)))
    if not reads:
        assert len(given) * len(sites) * ROW <= limit
