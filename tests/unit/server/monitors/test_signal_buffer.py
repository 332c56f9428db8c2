"""The memory of a watch: what counts, and what is dropped."""

import numpy as np
import pytest

from rheostat_server.monitors.signal_buffer import SignalBuffer, Step, WatchedRequest
from rheostat_wire.v1 import monitor_service_pb2


def step(watched: WatchedRequest, first: int, rows: int = 1, columns: int = 1000) -> Step:
    values = np.zeros((rows, columns), np.float32)
    return Step([watched], [0], [first], [rows], values, np.zeros((0, 2), np.int64))


def notice(number: int, summaries: int = 0) -> monitor_service_pb2.WatchResponse:
    response = monitor_service_pb2.WatchResponse()
    response.ended.number = number
    for column in range(summaries):
        response.ended.summaries.add(column=column, position_count=3, max=1.0, mean=0.5)
    return response


def left(buffer: SignalBuffer) -> list[str]:
    """Takes all events; their kinds."""
    kinds = []
    while (message := buffer.encoded()) is not None:
        kinds.append(message.response.WhichOneof("event"))
        buffer.take()
    return kinds


@pytest.fixture
def full() -> list[Exception]:
    return []


def test_events_leave_in_the_order_in_which_they_came(full) -> None:
    buffer = SignalBuffer(1 << 20, full.append)
    watched = WatchedRequest(1, "a", (0,))
    buffer.add_step(step(watched, 0))
    buffer.add_notice(notice(1))
    buffer.add_notice(notice(2))
    buffer.add_step(step(watched, 1))
    assert len(buffer) == 4
    assert left(buffer) == ["signals", "ended", "ended", "signals"]
    assert (buffer.waiting, watched.position_count) == (0, 2)


def test_steps_between_notices_are_dropped_oldest_first(full) -> None:
    buffer = SignalBuffer(20_000, full.append)
    watched = WatchedRequest(1, "a", (0,))
    for position in range(10):
        buffer.add_notice(notice(position))
        buffer.add_step(step(watched, position))
    messages = []
    while (message := buffer.encoded()) is not None:
        messages.append(message.response)
        buffer.take()
    assert [one.ended.number for one in messages if one.HasField("ended")] == list(range(10))
    (dropped,) = [one.dropped for one in messages if one.HasField("dropped")]
    (positions,) = dropped.positions
    sent = [one.signals.first_positions[0] for one in messages if one.HasField("signals")]
    assert positions.start == 0
    assert sent == list(range(positions.count, 10))
    assert not full
    assert watched.dropped_position_count == positions.count


def test_dropped_signals_of_a_request_are_reported_after_its_beginning(full) -> None:
    buffer = SignalBuffer(20_000, full.append)
    first, second = WatchedRequest(1, "a", (0,)), WatchedRequest(2, "b", (1,))
    for watched in (first, second):
        begun = monitor_service_pb2.WatchResponse()
        begun.begun.number = watched.number
        buffer.add_notice(begun, begins=watched)
        for position in range(10):
            buffer.add_step(step(watched, position))
        buffer.add_notice(notice(watched.number))
    events = []
    while (message := buffer.encoded()) is not None:
        kind = message.response.WhichOneof("event")
        if kind != "signals":
            events.append((kind, getattr(message.response, kind).number))
        buffer.take()
    assert events == [
        ("begun", 1),
        ("dropped", 1),
        ("ended", 1),
        ("begun", 2),
        ("dropped", 2),
        ("ended", 2),
    ]
    assert len(buffer) == 0


def test_summaries_take_the_memory_of_the_watch(full) -> None:
    buffer = SignalBuffer(1 << 20, full.append)
    for number in range(100):
        buffer.add_notice(notice(number, summaries=2000))
        if full:
            break
    assert number < 20


def test_a_sent_end_is_kept_with_its_memory(full) -> None:
    buffer = SignalBuffer(1 << 20, full.append)
    buffer.add_notice(notice(1, summaries=2000))
    waiting = buffer.waiting
    message = buffer.encoded()
    assert message is not None
    assert message.weight == waiting > message.response.ByteSize()
