"""Watches of both clients to a server that says wrong things."""

from collections.abc import Iterator

import numpy as np
import pytest

import rheostat
from rheostat_wire.v1 import monitor_service_pb2, tensor_pb2

from ..rows_server import AioSubscriber, SyncSubscriber

Response = monitor_service_pb2.WatchResponse
MOOD = rheostat.probe(
    rheostat.inline(np.ones((1, 4), np.float32)), points="resid_post", layers=0, name="mood"
)
TABLE = {"columns": [{"probe_name": "mood", "site": {"point": "POINT_RESID_POST", "layer": 0}}]}
OPENED = Response(opened={"watch_id": "w1", "next_sequence": 1, "table": TABLE})
BEGUN = Response(sequence=1, begun={"number": 1, "request_id": "a", "sample_count": 1})


@pytest.fixture(params=[SyncSubscriber, AioSubscriber], ids=["sync", "aio"])
def client(request, server) -> Iterator[SyncSubscriber | AioSubscriber]:
    one = request.param(server.target)
    yield one
    one.end()


def signals(sequence: int, number: int = 1, rows: int = 2, **fields: object) -> Response:
    values = np.arange(rows, dtype="<f4").reshape(rows, 1)
    tensor = {
        "dtype": tensor_pb2.DTYPE_FLOAT32,
        "shape": values.shape,
        "encoding": tensor_pb2.ENCODING_RAW,
        "inline": values.tobytes(),
    }
    told = {
        "numbers": [number],
        "samples": [0],
        "first_positions": [0],
        "row_counts": [2],
        "values": tensor,
    }
    return Response(sequence=sequence, signals=told | fields)


def ended(sequence: int, positions: int = 2, dropped: int = 0, **fields: object) -> Response:
    told = {
        "number": 1,
        "request_id": "a",
        "position_count": positions,
        "dropped_position_count": dropped,
    }
    return Response(sequence=sequence, ended=told | fields)


def lost(sequence: int) -> Response:
    return Response(sequence=sequence, dropped={"number": 1, "positions": [{"count": 3}]})


def read(client, server, script: list[Response]) -> tuple[list, rheostat.RheostatError | None]:
    """The events, and what came after them."""

    def answers(requests: Iterator, context: object) -> Iterator[Response]:
        next(requests)
        yield from [OPENED, *script]
        for _ in requests:  # until the client has closed its side
            pass

    server.on("Watch", answers)
    events = []
    try:
        with client.watch(probes=MOOD, every=True) as watch:
            for event in watch:
                events.append(event)
                if isinstance(event, rheostat.WatchedRequestEnded):
                    break
    except rheostat.RheostatError as error:
        return events, error
    return events, None


@pytest.mark.parametrize(
    "script",
    [
        [BEGUN, signals(2), ended(3)],
        [BEGUN, signals(2), lost(3), ended(4, dropped=3)],
        [BEGUN, signals(2), ended(3, dropped=7)],  # the workers lost some, which has no event
        [ended(1, 0, number=0, missed_reason="full")],
    ],
)
def test_what_comes_right_is_read(client, server, script) -> None:
    events, error = read(client, server, script)
    assert error is None
    assert [event.sequence for event in events] == list(range(1, len(script) + 1))
    assert events[-1].missed_reason == script[-1].ended.missed_reason


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ([BEGUN, ended(2)], "of a came the readings of 0 positions"),
        ([BEGUN, signals(2), ended(3, 1)], "of 1 that were sent"),
        ([BEGUN, lost(2), ended(3, 0)], "with 3 dropped"),
        ([BEGUN, signals(3)], "event 3 came after event 1"),
    ],
)
def test_readings_that_are_missing_are_data_loss(client, server, script, told) -> None:
    _, error = read(client, server, script)
    assert isinstance(error, rheostat.DataLoss)
    assert told in error.message


@pytest.mark.parametrize(
    "script",
    [
        [signals(1)],
        [BEGUN, signals(2, number=2)],
        [BEGUN, signals(2, rows=3)],
        [BEGUN, signals(2, samples=[])],
        [BEGUN, signals(2, firings=[{"row": 0, "rule": 0}])],
        [BEGUN, signals(2), ended(3, summaries=[{"column": 1}])],
    ],
)
def test_events_that_cannot_be_read_are_a_defect(client, server, script) -> None:
    _, error = read(client, server, script)
    assert isinstance(error, rheostat.ServerError)
