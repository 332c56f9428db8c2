"""The queue of a response: order, merging, and memory that is counted exactly."""

import asyncio
import gc
import weakref
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rheostat_engine import Installed, Plan
from rheostat_server.delivery.byte_budget import Budget
from rheostat_server.engine.backend import Delta, Ending, Job
from rheostat_server.engine.pace import Pace
from rheostat_server.engine.sampling import SamplingSettings
from rheostat_server.errors import Defect, ResponseOverflow
from rheostat_server.requests.response_queue import (
    ResponseItem,
    ResponseQueue,
    Sign,
    WaitingDeltas,
)
from rheostat_server.requests.sequence import EngineSequence, SequenceKind
from rheostat_server.tasks.turns import Turns
from rheostat_wire.v1 import generation_pb2


def sequence(sample: int) -> EngineSequence:
    return EngineSequence(
        Job(Plan(f"r#{sample}"), (1,), SamplingSettings(max_tokens=9), sample),
        SequenceKind.OWN,
        sample,
    )


def reading(token_id: int, alternatives: int) -> generation_pb2.TokenLogprobs:
    entry = generation_pb2.TokenLogprob(token_id=token_id)
    return generation_pb2.TokenLogprobs(token=entry, alternatives=[entry] * alternatives)


def delta(first: int, count: int, alternatives: int | None, ending: Ending | None = None) -> Delta:
    ids = tuple(range(first, first + count))
    return Delta(
        token_ids=ids,
        text="x" * count,
        logprobs=[] if alternatives is None else [reading(one, alternatives) for one in ids],
        ending=ending,
    )


@dataclass
class Sent:
    """What was put in for a sample, and what has come out."""

    put: list[object] = field(default_factory=list)
    got: list[object] = field(default_factory=list)


Step = st.one_of(
    st.tuples(
        st.just("tokens"), st.integers(0, 2), st.integers(0, 4), st.sampled_from([None, 0, 3])
    ),
    st.tuples(st.just("event"), st.integers(0, 2)),
    st.tuples(st.just("rows")),
    st.tuples(st.just("get"), st.integers(1, 3)),
    st.tuples(st.just("hold"), st.integers(1, 3)),
)


def parts(what: object) -> list[object]:
    return [*what.token_ids, *what.text] if isinstance(what, Delta) else [what]


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(Step, max_size=60), limit=st.integers(2_000, 60_000))
def test_order_is_kept_and_memory_counted_whatever_happens(steps: list, limit: int) -> None:
    asyncio.run(play(steps, limit))


async def play(steps: list, limit: int) -> None:
    budget = Budget(1 << 30, limit, slack=0)
    share = budget.share()
    errors: list[ResponseOverflow] = []

    def overflow(error: ResponseOverflow) -> None:
        errors.append(error)
        queue.close()

    queue = ResponseQueue(share, overflow, Pace(), Turns(8))
    sequences = [sequence(sample) for sample in range(3)]
    sent = {one: Sent() for one in sequences}
    held = {one: WaitingDeltas(queue.byte_counter) for one in sequences}
    made = 0
    for kind, *values in steps:
        if errors:
            break
        if kind == "tokens":
            sample, count, alternatives = values
            new = delta(made, count, alternatives)
            made += count
            sent[sequences[sample]].put.append(new)
            queue.put(ResponseItem(sequences[sample], new))
        elif kind == "event":
            event = Installed("r", "")
            sent[sequences[values[0]]].put.append(event)
            queue.put(ResponseItem(sequences[values[0]], event))
        elif kind == "rows":
            queue.put(Sign.ROWS)
        else:
            for _ in range(min(values[0], len(queue))):
                item = await queue.get()
                if isinstance(item, ResponseItem):
                    if kind == "hold" and isinstance(item.what, Delta):
                        held[item.sequence].add(item.what)
                        item = item._replace(what=held[item.sequence].take())
                    sent[item.sequence].got.append(item.what)
        assert 0 <= share.used <= limit
        assert (
            share.byte_counter.token_bytes
            == queue.byte_counter.token_bytes
            == budget.byte_counter.token_bytes
        )
    if not errors:
        while len(queue):
            item = await queue.get()
            if isinstance(item, ResponseItem):
                sent[item.sequence].got.append(item.what)
        for one in sent.values():
            for way in (str, int, Installed):
                put, got = (
                    [part for what in some for part in parts(what) if isinstance(part, way)]
                    for some in (one.put, one.got)
                )
                assert put == got
        assert share.byte_counter.token_bytes == 0
    queue.close()
    queue.close()
    assert share.byte_counter.token_bytes == budget.byte_counter.token_bytes == 0


async def test_events_come_between_the_tokens_between_which_they_went_in() -> None:
    queue = ResponseQueue(
        Budget(1 << 20, 1 << 20, slack=0).share(), lambda _: None, Pace(), Turns(8)
    )
    one, event = sequence(0), Installed("r", "")
    for what in (delta(1, 1, None), delta(2, 1, None), event, delta(3, 1, None)):
        queue.put(ResponseItem(one, what))
    queue.put(ResponseItem(one, delta(4, 1, None, Ending.LENGTH)))
    first, second, third = [(await queue.get()).what for _ in range(3)]
    assert (first.token_ids, second, third.token_ids) == ((1, 2), event, (3, 4))
    assert (first.ending, third.ending) == (None, Ending.LENGTH)


async def test_what_is_taken_after_the_end_counts_nowhere() -> None:
    """The reader may be in the middle of messages that it holds back when the request fails."""
    budget = Budget(1 << 20, 1 << 20, slack=0)
    share = budget.share()
    queue = ResponseQueue(share, lambda _: None, Pace(), Turns(8))
    held = WaitingDeltas(queue.byte_counter)
    held.add(delta(1, 5, 3))
    assert budget.byte_counter.token_bytes > 0
    queue.close()
    assert budget.byte_counter.token_bytes == 0
    held.take()
    held.add(delta(1, 5, 3))
    assert (budget.byte_counter.token_bytes, share.byte_counter.token_bytes) == (0, 0)


async def test_a_reader_that_waits_gets_a_token_at_once() -> None:
    budget = Budget(1 << 20, 1 << 20, slack=0)
    queue = ResponseQueue(budget.share(), lambda _: None, Pace(), Turns(8))
    one, (first, second, third) = sequence(0), (delta(count, 1, None) for count in range(3))
    reading = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    queue.put(ResponseItem(one, first))
    assert (len(queue), budget.byte_counter.token_bytes) == (0, 0)
    for later in (second, third):
        queue.put(ResponseItem(one, later))
    assert len(queue) == 1, "tokens that come before the reader runs merge"
    assert budget.byte_counter.token_bytes > 0
    assert await reading == ResponseItem(one, first)
    assert (await queue.get()).what.token_ids == (1, 2)
    assert budget.byte_counter.token_bytes == 0


async def test_a_reader_that_stops_waiting_when_an_entry_comes_loses_nothing() -> None:
    queue = ResponseQueue(
        Budget(1 << 20, 1 << 20, slack=0).share(), lambda _: None, Pace(), Turns(8)
    )
    one, (first, second) = sequence(0), (delta(count, 1, None) for count in range(2))
    reading = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    queue.put(ResponseItem(one, first))
    queue.put(ResponseItem(one, second))
    reading.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled()
    assert [await queue.get() for _ in range(2)] == [
        ResponseItem(one, first),
        ResponseItem(one, second),
    ]


async def test_the_last_tokens_are_sent_before_the_reader_wakes_for_the_end() -> None:
    """However many samples end at once, their last tokens leave first."""
    turns, sent, ends = Turns(1), [], []

    def queue_of(sample: int) -> ResponseQueue:
        share = Budget(1 << 20, 1 << 20, slack=0).share()
        queue = ResponseQueue(share, lambda _: None, Pace(), turns)

        def direct(of: EngineSequence, tokens: Delta) -> bool:
            if not tokens.token_ids:
                return False
            assert tokens.ending is None, "only the reader knows how to end a sample"
            sent.append((sample, tokens.token_ids))
            return True

        queue.direct = direct
        return queue

    async def read(queue: ResponseQueue, sample: int) -> None:
        item = await queue.get()
        assert len(sent) == 3, "an end was read before the last tokens of all samples were sent"
        assert isinstance(item, ResponseItem)
        assert item.what == Delta(ending=Ending.LENGTH, stop=7)
        ends.append(sample)

    queues = [queue_of(sample) for sample in range(3)]
    readers = [asyncio.create_task(read(queue, i)) for i, queue in enumerate(queues)]
    await asyncio.sleep(0)
    for i, queue in enumerate(queues):
        queue.put_delta(sequence(i), delta(10 * i, 2, None, Ending.LENGTH)._replace(stop=7))
    await asyncio.gather(*readers)
    assert sent == [(0, (0, 1)), (1, (10, 11)), (2, (20, 21))]
    assert ends == [0, 1, 2]
    for queue in queues:
        queue.close()


async def test_few_readers_wake_in_an_iteration_and_get_their_entries_in_order() -> None:
    share, turns = Budget(1 << 20, 1 << 20, slack=0).share(), Turns(3)
    queues = [ResponseQueue(share, lambda _: None, Pace(), turns) for _ in range(8)]
    samples = [sequence(number) for number in range(8)]
    readers = [asyncio.ensure_future(queue.get()) for queue in queues]
    await asyncio.sleep(0)
    for queue, sample in zip(queues, samples, strict=True):
        queue.put_delta(sample, delta(1, 1, None))
        queue.put_delta(sample, delta(2, 1, None))
        queue.put(Sign.SIGNALS)
    woken = []
    while not all(reader.done() for reader in readers):
        await asyncio.sleep(0)
        woken.append(sum(reader.done() for reader in readers))
    steps = [after - before for before, after in zip([0, *woken], woken, strict=False)]
    assert max(steps) == 3
    for queue, sample, reader in zip(queues, samples, readers, strict=True):
        tokens: list[int] = []
        item = reader.result()
        while isinstance(item, ResponseItem):
            assert item.sequence is sample
            tokens += item.what.token_ids
            item = await queue.get()
        assert (tokens, item) == ([1, 2], Sign.SIGNALS)
    assert share.byte_counter.token_bytes == 0


async def test_an_error_waits_for_no_turn() -> None:
    turns = Turns(1)
    turns.call(lambda: None)
    share = Budget(1 << 20, 1 << 20, slack=0).share()
    queue = ResponseQueue(share, lambda _: None, Pace(), turns)
    reader = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    turns.call(lambda: None)
    queue.put_delta(sequence(0), delta(1, 1, None))
    queue.close()
    queue.put(error := Defect("failed"))
    async with asyncio.timeout(10):
        assert await reader is error


@pytest.fixture
def pace() -> Pace:
    """The pace of so many streams that tokens wait for minutes."""
    pace = Pace()
    pace.add(1_000_000)
    return pace


def paced(pace: Pace) -> ResponseQueue:
    queue = ResponseQueue(Budget(1 << 20, 1 << 20, slack=0).share(), lambda _: None, pace, Turns(8))
    queue.paced = True
    return queue


async def next_of(queue: ResponseQueue) -> "asyncio.Task[object]":
    """A reader that waits for the next entry."""
    reader = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    return reader


def taken(reader: "asyncio.Task[object]") -> Delta:
    item = reader.result()
    assert isinstance(item, ResponseItem)
    assert isinstance(item.what, Delta)
    return item.what


async def test_tokens_of_few_streams_never_wait() -> None:
    queue = paced(Pace())
    for number in range(3):
        reader = await next_of(queue)
        queue.put_delta(sequence(0), delta(number, 1, None))
        assert taken(await settled(reader)).token_ids == (number,)


async def test_tokens_of_many_streams_wait_for_those_that_follow() -> None:
    pace = Pace()
    pace.add(664)
    await check_waiting(paced(pace))


async def check_waiting(queue: ResponseQueue) -> None:
    one = sequence(0)
    reader = await next_of(queue)
    queue.put_delta(one, delta(0, 1, None))
    assert taken(await settled(reader)).token_ids == (0,)  # the first never waits
    reader = await next_of(queue)
    for number in (1, 2):
        queue.put_delta(one, delta(number, 1, None))
        await asyncio.sleep(0)
        assert not reader.done()
    async with asyncio.timeout(10):
        await reader
    assert taken(reader).token_ids == (1, 2)


async def test_the_end_of_a_sample_does_not_wait(pace: Pace) -> None:
    queue = paced(pace)
    one = sequence(0)
    reader = await next_of(queue)
    queue.put_delta(one, delta(0, 1, None))
    await settled(reader)
    reader = await next_of(queue)
    queue.put_delta(one, delta(1, 1, None))
    queue.put_delta(one, delta(2, 1, None, Ending.LENGTH))
    last = taken(await settled(reader))
    assert (last.token_ids, last.ending) == ((1, 2), Ending.LENGTH)


async def test_an_event_brings_the_tokens_before_it(pace: Pace) -> None:
    queue = paced(pace)
    one = sequence(0)
    reader = await next_of(queue)
    queue.put_delta(one, delta(0, 1, None))
    await settled(reader)
    reader = await next_of(queue)
    queue.put_delta(one, delta(1, 1, None))
    event = Installed("r", "")
    queue.put(ResponseItem(one, event))
    assert taken(await settled(reader)).token_ids == (1,)
    assert await queue.get() == ResponseItem(one, event)


async def test_no_timer_refers_to_a_queue_that_has_overflowed(pace: Pace) -> None:
    def overflow(error: ResponseOverflow) -> None:
        ended = queues.pop()
        ended.close()
        ended.put(error)

    share = Budget(1 << 20, 1 << 20, slack=0).share()
    queues = [ResponseQueue(share, overflow, pace, Turns(8))]
    queues[0].paced = True
    queue = weakref.ref(queues[0])
    reader = await next_of(queues[0])
    one = sequence(0)
    queues[0].put_delta(one, delta(0, 1, None))
    await settled(reader)
    reader = await next_of(queues[0])
    queues[0].put_delta(one, delta(1, 100_000, None))
    assert isinstance((await settled(reader)).result(), ResponseOverflow)
    share.close()
    del share, reader
    gc.collect()
    assert queue() is None


async def settled(reader: "asyncio.Task[object]") -> "asyncio.Task[object]":
    """The reader, which has what it waited for."""
    await asyncio.sleep(0)
    assert reader.done()
    return reader


async def test_samples_count_as_streams_between_their_first_and_last_token() -> None:
    pace = Pace()
    pace.add(64)  # one more, and tokens wait
    queue = paced(pace)
    one, two = sequence(0), sequence(1)
    queue.put_delta(one, delta(0, 1, None, Ending.LENGTH))
    assert not pace.interval, "it has no further token"
    queue.put_delta(two, delta(0, 1, None))
    first = pace.interval
    assert first
    queue.put_delta(two, delta(1, 1, None))
    assert pace.interval == first
    queue.put_delta(two, delta(2, 1, None, Ending.LENGTH))
    assert not pace.interval


async def test_a_queue_that_is_closed_counts_no_streams() -> None:
    pace = Pace()
    pace.add(64)
    queue = paced(pace)
    for sample in range(3):
        queue.put_delta(sequence(sample), delta(0, 1, None))
    assert pace.interval
    for _ in range(2):
        queue.close()
        assert not pace.interval


async def test_a_sample_whose_tokens_do_not_wait_here_counts_as_a_stream(pace: Pace) -> None:
    share = Budget(1 << 20, 1 << 20, slack=0).share()
    queue = ResponseQueue(share, lambda _: None, pace, Turns(8))
    before, one = pace.interval, sequence(0)
    for number in range(3):
        reader = await next_of(queue)
        queue.put_delta(one, delta(number, 1, None))
        assert taken(await settled(reader)).token_ids == (number,)
    assert pace.interval > before
