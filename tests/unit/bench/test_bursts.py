"""The model of a front end, and the tables of bursts."""

from rheostat_bench.bursts import Clock, FrontEnd, record
from rheostat_bench.tables import tables
from rheostat_server.front_ends.record_connection import RecordConnection
from rheostat_server.front_ends.records import Kind, read_count_body
from rheostat_wire.v1 import generation_service_pb2

from .pages import DOCS, PAGES

Response = generation_service_pb2.GenerateResponse


def received(data: bytes) -> list[tuple[Kind, int, bytes]]:
    records: list[tuple[Kind, int, bytes]] = []
    connection = RecordConnection(lambda *one: records.append(one), lambda: None)
    connection.data_received(data)
    return records


def test_a_record_is_read_as_it_was_made() -> None:
    data = record(Kind.DONE, 1 << 20, b"") + record(Kind.MESSAGE, 3, b"rows")
    assert received(data) == [(Kind.DONE, 1 << 20, b""), (Kind.MESSAGE, 3, b"rows")]


def test_a_front_end_answers_and_notes_the_first_tokens() -> None:
    started, tokens = Response(), Response()
    started.started.request_id = "r"
    tokens.tokens.token_ids.append(7)
    front_end = FrontEnd(Clock())
    front_end.write(record(Kind.MESSAGE, 1, started.SerializeToString()))
    assert front_end.first == {}
    for call in (1, 2):
        front_end.write(record(Kind.MESSAGE, call, tokens.SerializeToString()))
    front_end.write(record(Kind.END, 2, b""))
    assert list(front_end.first) == [1, 2]
    assert front_end.ended == {2: b""}
    written, other, done = received(front_end.records())
    assert written[:2] == (Kind.WRITTEN, 1)
    assert read_count_body(written[2]) == 2
    assert other[:2] == (Kind.WRITTEN, 2)
    assert done == (Kind.DONE, 2, b"")
    assert front_end.records() == b""


def test_the_page_shows_the_bursts() -> None:
    (table,) = tables(DOCS / "cpu" / "bursts.json")
    assert table in PAGES
