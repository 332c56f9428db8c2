"""Subscriptions of both clients to a server that says wrong things, or nothing any more."""

import logging
import re
import struct
import time
from collections.abc import Callable, Iterator

import google_crc32c
import grpc
import numpy as np
import pytest

import rheostat
from rheostat._event_streams import state
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, tensor_pb2, types_pb2

from ..rows_server import AioSubscriber, SyncSubscriber

Response = capture_service_pb2.SubscribeResponse
OPENED = Response(opened={"subscription_id": "s1", "next_sequence": 1})
ROWS = np.arange(8, dtype="<f4").reshape(1, 2, 4)


@pytest.fixture(params=[SyncSubscriber, AioSubscriber], ids=["sync", "aio"])
def subscriber(request, server) -> Iterator[SyncSubscriber | AioSubscriber]:
    one = request.param(server.target)
    yield one
    one.end()


def captured(sequence: int, name: str = "a", values: np.ndarray = ROWS, **tensor: object):
    """Two rows of resid_post 3, [1, 2, 4], unless ``values`` say otherwise."""
    data = values.tobytes()
    fields = {
        "dtype": tensor_pb2.DTYPE_FLOAT32,
        "shape": values.shape,
        "encoding": tensor_pb2.ENCODING_RAW,
        "inline": data,
        "crc32c": google_crc32c.value(data),
    } | tensor
    return Response(
        sequence=sequence,
        captured=capture_pb2.Captured(
            request_id=name,
            sites=[types_pb2.Site(point=types_pb2.POINT_RESID_POST, layer=3)],
            positions=[types_pb2.PositionRun(start=5, count=2)],
            token_ids=[7, 8],
            tensor=tensor_pb2.Tensor(**fields),
        ),
    )


def end(sequence: int, *chunks: Response, name: str = "a", **fields: object) -> Response:
    """The end of a request of which these chunks were sent."""
    checksums = b"".join(struct.pack("<I", one.captured.tensor.crc32c) for one in chunks)
    told = {
        "request_id": name,
        "chunk_count": len(chunks),
        "row_count": 2 * len(chunks),
        "crc32c": google_crc32c.value(checksums),
        "finish_reasons": [types_pb2.FINISH_REASON_STOP],
    } | fields
    return Response(sequence=sequence, end_of_request=told)


FIRST, SECOND = captured(1), captured(2, values=ROWS + 1)


class Calls:
    """Answers each call with the next of some scripts, and keeps what each said first."""

    def __init__(self, *scripts: list[object]) -> None:
        self.scripts = list(scripts)
        self.openings: list[capture_service_pb2.SubscribeOpen] = []

    def __call__(self, requests: Iterator, context: grpc.ServicerContext) -> Iterator[object]:
        self.openings.append(next(requests).open)
        yield from self.scripts.pop(0)
        if not self.scripts:
            for _ in requests:  # until the client has closed its side
                pass


def read(subscriber, **options: object) -> tuple[list, rheostat.RheostatError | None]:
    """The events, and what came after them."""
    events = []
    try:
        with subscriber.subscribe(**options) as subscription:
            for event in subscription:
                events.append(event)
                if isinstance(event, rheostat.EndOfRequest):
                    return events, None
    except rheostat.RheostatError as error:
        return events, error
    return events, None


def test_what_comes_right_is_read(subscriber, server):
    server.on("Subscribe", Calls([OPENED, FIRST, SECOND, end(3, FIRST, SECOND)]))
    (one, two, last), error = read(subscriber)
    assert error is None
    assert (one.request_id, one.sites, one.sequence) == ("a", (("resid_post", 3),), 1)
    assert (one.positions.tolist(), one.token_ids.tolist()) == ([5, 6], [7, 8])
    assert np.array_equal(two.values, ROWS + 1)
    assert repr(one) == "CapturedRows(1, 'a', sample=0, resid_post[3], shape=[1, 2, 4])"
    assert last == rheostat.EndOfRequest(3, "a", 2, 4, 0, ("stop",))
    assert [repr(rows) for rows in one.rows] == ["Rows(sample=0, resid_post[3], shape=[2, 4])"]


def test_bfloat16_is_widened(subscriber, server):
    bits = np.array([[[0x3F80, 0xC000]]], "<u2")
    chunk = captured(1, values=bits, dtype=tensor_pb2.DTYPE_BFLOAT16)
    chunk.captured.token_ids.pop()
    chunk.captured.positions[0].count = 1
    server.on("Subscribe", Calls([OPENED, chunk, end(2, chunk, row_count=1)]))
    (one, _), error = read(subscriber)
    assert error is None
    assert one.values.dtype == np.float32
    assert one.values.tolist() == [[[1.0, -2.0]]]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ([captured(1, crc32c=7)], "its CRC-32C differs"),
        ([FIRST, captured(3)], "event 3 came after event 1"),
        ([captured(2)], "event 2 came after event 0"),
        ([FIRST, end(2, FIRST, SECOND)], "of a arrived 2 rows in 1 chunks"),
        ([FIRST, SECOND, end(3, FIRST)], "of a arrived 4 rows in 2 chunks"),
        ([FIRST, end(2, FIRST, row_count=3)], "of 3 rows in 1 chunks"),
        ([FIRST, end(2, FIRST, crc32c=1)], "CRC-32C 00000001"),
        ([FIRST, end(2, FIRST, dropped_row_count=1)], "with 1 dropped"),
        ([end(1, FIRST, name="b")], "of b arrived 0 rows"),
    ],
)
def test_rows_that_are_damaged_or_missing_are_data_loss(subscriber, server, script, told):
    server.on("Subscribe", Calls([OPENED, *script]))
    _, error = read(subscriber)
    assert isinstance(error, rheostat.DataLoss)
    assert told in error.message


def test_data_loss_is_not_acknowledged(subscriber, server):
    server.on("Subscribe", Calls([OPENED, FIRST, captured(2, crc32c=7)]))
    subscription = subscriber.subscribe()
    next(subscription)
    for _ in range(2):
        with pytest.raises(rheostat.DataLoss):
            next(subscription)
    assert subscription.acknowledged == ("s1", 1)


def test_a_tensor_without_a_checksum_is_a_defect(subscriber, server):
    chunk = captured(1)
    chunk.captured.tensor.ClearField("crc32c")
    server.on("Subscribe", Calls([OPENED, chunk]))
    _, error = read(subscriber)
    assert isinstance(error, rheostat.ServerError)


def test_an_end_that_nobody_asked_for_is_a_defect(subscriber, server):
    server.on("Subscribe", lambda _requests, _context: [OPENED, FIRST])
    events, error = read(subscriber)
    assert len(events) == 1
    assert isinstance(error, rheostat.ServerError)


def lost(refusal: Callable) -> Exception:
    """The end of a connection, as gRPC has it."""
    return refusal(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def test_a_broken_connection_goes_on_where_it_was_and_repeats_nothing(subscriber, server, refusal):
    calls = Calls(
        [OPENED, FIRST, SECOND, lost(refusal)],
        [lost(refusal)],
        [OPENED, FIRST, SECOND, captured(3), lost(refusal)],
        [OPENED, FIRST, SECOND, captured(3), end(4, FIRST, SECOND, captured(3))],
    )
    server.on("Subscribe", calls)
    events, error = read(subscriber, ack="manual", credit=1000)
    assert error is None
    assert [event.sequence for event in events] == [1, 2, 3, 4]
    assert len(calls.openings) == 4
    assert calls.openings[0].filter.HasField("requests")
    for again in calls.openings[1:]:
        assert again.resume == capture_service_pb2.ResumePoint(subscription_id="s1")
        assert not again.HasField("filter")
        assert 1000 - 96 <= again.credit_bytes <= 1000


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, "REASON_SUBSCRIPTION_NOT_FOUND", rheostat.NotFound),
        (grpc.StatusCode.OUT_OF_RANGE, "REASON_CURSOR_EXPIRED", rheostat.OutOfRange),
        (grpc.StatusCode.ABORTED, "REASON_SUPERSEDED", rheostat.Aborted),
        (grpc.StatusCode.UNAVAILABLE, "REASON_DRAINING", rheostat.Unavailable),
    ],
)
def test_a_refusal_is_not_tried_again(subscriber, server, refusal, code, reason, kind):
    calls = Calls([OPENED, FIRST, lost(refusal)], [refusal.of(code, "no", reason)])
    server.on("Subscribe", calls)
    _, error = read(subscriber)
    assert isinstance(error, kind)
    assert error.reason == reason
    assert len(calls.openings) == 2


def test_a_connection_that_stays_broken_is_given_up(subscriber, server, refusal, monkeypatch):
    monkeypatch.setattr(state, "RECONNECT_TIMEOUT", 0.3)
    broken = [[lost(refusal)] for _ in range(50)]
    server.on("Subscribe", Calls([OPENED, FIRST, lost(refusal)], *broken))
    before = time.monotonic()
    events, error = read(subscriber)
    assert isinstance(error, rheostat.Unavailable)
    assert str(error) == (
        f"could not connect to {server.target} within 0.3 s; if the server still runs, "
        "continue with engine.resume(subscription.acknowledged)"
    )
    assert len(events) == 1
    assert 0.3 <= time.monotonic() - before < 5


def test_a_broken_connection_is_logged_when_it_breaks_and_when_it_is_back(
    subscriber, server, refusal, caplog
):
    later = [OPENED, SECOND, end(3, FIRST, SECOND)]
    server.on("Subscribe", Calls([OPENED, FIRST, lost(refusal)], [lost(refusal)], later))
    with caplog.at_level(logging.INFO, "rheostat"), subscriber.subscribe() as subscription:
        assert [type(next(subscription)).__name__ for _ in range(3)][-1] == "EndOfRequest"
    records = [one for one in caplog.records if one.name.startswith("rheostat")]
    broken, back = (one.getMessage() for one in records)
    assert broken == (
        f"the connection to {server.target} was lost; trying for 60 s to resume subscription s1"
    )
    assert re.fullmatch(r"subscription s1 continues after [0-9.]+ s; no event is lost", back)
    assert {one.levelno for one in records} == {logging.WARNING}


@pytest.mark.parametrize(("window", "patience"), [(0.3, 60.0), (1.5, 0.1)])
def test_a_connection_is_tried_again_for_as_long_as_the_server_waits(
    subscriber, server, refusal, monkeypatch, window, patience
):
    monkeypatch.setattr(state, "RECONNECT_TIMEOUT", patience)
    opened = Response(opened={"subscription_id": "s1", "next_sequence": 1})
    opened.opened.resume_window.FromMilliseconds(int(1000 * window))
    broken = [[lost(refusal)] for _ in range(50)]
    server.on("Subscribe", Calls([opened, FIRST, lost(refusal)], *broken))
    before = time.monotonic()
    _, error = read(subscriber)
    assert isinstance(error, rheostat.Unavailable)
    assert window <= time.monotonic() - before < 10


def test_a_server_that_is_not_there_is_said_at_once(subscriber, server):
    server.stop()
    with pytest.raises(rheostat.Unavailable, match="no server answers"):
        subscriber.subscribe()


def test_a_server_that_does_not_answer_is_not_waited_for(subscriber, server):
    server.on("Subscribe", Calls([]))
    subscriber.engine._connection.timeout = 0.2
    with pytest.raises(rheostat.DeadlineExceeded, match=r"within the timeout of 0\.2 s"):
        subscriber.subscribe()


def test_a_request_that_began_before_the_cursor_is_checked_as_far_as_it_came(subscriber, server):
    server.on("Subscribe", Calls([OPENED, SECOND, end(3, FIRST, SECOND), captured(4, "b")]))
    with subscriber.resume(rheostat.Cursor("s1", 1)) as subscription:
        assert next(subscription).sequence == 2
        assert next(subscription).row_count == 4
        assert next(subscription).request_id == "b"


def test_credit_and_acknowledgements_are_sent_as_events_are_taken(subscriber, server):
    chunks = [captured(number) for number in range(1, 5)]
    server.on("Subscribe", Calls([OPENED, *chunks, end(5, *chunks)]))
    with subscriber.subscribe(credit=128) as subscription:
        for _ in range(5):
            next(subscription)
        subscription.finish()
        assert list(subscription) == []
    said = [one for one in server.asked if one.WhichOneof("action") != "open"]
    credit = sum(one.credit.bytes for one in said if one.HasField("credit"))
    acks = [one.ack.sequence for one in said if one.HasField("ack")]
    assert credit == 128
    assert acks == sorted(set(acks))
    assert acks[-1] == 4
