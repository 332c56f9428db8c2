from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import OPEN_END, Condition, Point, Rows, Site
from rheostat_server.capture.encodings import Form
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.row_assembler import Block, RowAssembler, to_captured
from rheostat_server.limits import CHUNK_BYTES
from rheostat_server.selectors.selection import Selection
from rheostat_server.selectors.spans import runs
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import tensor_pb2, types_pb2

PRE1, POST0, POST1 = (
    Site(Point.RESID_PRE, 1),
    Site(Point.RESID_POST, 0),
    Site(Point.RESID_POST, 1),
)
F32 = FloatType.FLOAT32
TOPK8 = tensor_pb2.ENCODING_TOPK8
PROMPT_LEN = 2
TOKENS = list(range(50, 60))
"""Generated tokens: position p holds 48 + p."""


def rows(site: Site, *positions: int, width: int = 2) -> Rows:
    at = np.array(positions, dtype=np.int32)
    data = np.repeat(at[:, None], width, axis=1).astype(np.float32) + 50 * site.index
    return Rows("r#0", (site.index,), at, data[None])


def stream(*captures: ResolvedCapture) -> RowAssembler:
    return RowAssembler(dict(enumerate(captures)), F32, PROMPT_LEN)


def spec(*sites: Site, spans=((0, OPEN_END),), conditions=()) -> ResolvedCapture:
    return ResolvedCapture(sites, Selection(spans, conditions), F32)


def labels(blocks: list[Block]) -> list[tuple[int, tuple[Site, ...], list[int]]]:
    return [(block.capture_index, block.sites, block.positions.tolist()) for block in blocks]


def both(*positions: int) -> Rows:
    """Rows of two sites in one event."""
    first, second = rows(POST0, *positions), rows(POST1, *positions)
    return replace(
        first, sites=first.sites + second.sites, data=np.concatenate([first.data, second.data])
    )


def test_rows_of_several_sites_come_together_and_each_once() -> None:
    joined = stream(spec(POST0, POST1))
    joined.add(rows(POST1, 0, 1))
    assert sorted(len(batch) for batch in joined.add(both(0, 1, 2))) == [1, 3]
    assert joined.add(both(1, 2)) == []
    (block,) = joined.ready(TOKENS, 3)
    assert block.positions.tolist() == [0, 1, 2]
    for site, data in zip(block.sites, block.rows, strict=True):
        assert np.array_equal(data, rows(site, 0, 1, 2).data[0])


def test_whoever_wants_some_of_the_sites_keeps_none_of_the_others_in_memory() -> None:
    event = both(0, 1)
    (batch,) = stream(spec(POST1)).add(event)
    assert not np.shares_memory(batch.data, event.data)
    assert np.array_equal(batch.data, event.data[1:])
    (partly,) = stream(spec(POST1, spans=((1, 2),))).add(event)
    assert not np.shares_memory(partly.data, event.data)
    (whole,) = stream(spec(POST0, POST1)).add(event)
    assert np.shares_memory(whole.data, event.data)


def test_rows_leave_once_all_sites_have_them() -> None:
    joined = stream(spec(POST0, POST1))
    joined.add(rows(POST0, 0, 1, 2))
    assert list(joined.ready(TOKENS, 10)) == []
    joined.add(rows(POST1, 0, 1))
    (block,) = list(joined.ready(TOKENS, 10))
    assert labels([block]) == [(0, (POST0, POST1), [0, 1])]
    assert [part.tolist() for part in block.rows] == [
        [[200.0, 200.0], [201.0, 201.0]],
        [[400.0, 400.0], [401.0, 401.0]],
    ]
    joined.add(rows(POST1, 2))
    assert labels(list(joined.ready(TOKENS, 10))) == [(0, (POST0, POST1), [2])]
    assert joined.lost(0, ((0, 4),)) == ((3, 4),)


def test_rows_wait_until_their_position_is_known_to_have_one() -> None:
    joined = stream(spec(POST0))
    joined.add(rows(POST0, 0, 1, 2))
    assert labels(list(joined.ready(TOKENS, 2))) == [(0, (POST0,), [0, 1])]
    assert list(joined.ready(TOKENS, 2)) == []
    assert labels(list(joined.ready(TOKENS, 3))) == [(0, (POST0,), [2])]


def test_recomputed_rows_come_once() -> None:
    joined = stream(spec(POST0))
    for positions in ((0, 1), (0, 1, 2), (1, 2, 3)):
        joined.add(rows(POST0, *positions))
    assert [p for _, _, part in labels(list(joined.ready(TOKENS, 9))) for p in part] == [0, 1, 2, 3]


def test_each_capture_gets_its_own_positions_of_a_shared_site() -> None:
    joined = stream(spec(POST0, spans=((0, 2),)), spec(PRE1, spans=((1, 2), (3, 4))))
    joined.add(rows(POST0, 0, 1, 3))
    assert labels(list(joined.ready(TOKENS, 9))) == [(0, (POST0,), [0, 1]), (1, (PRE1,), [1, 3])]


def test_both_names_of_a_site_get_its_rows() -> None:
    joined = stream(spec(POST0, PRE1))
    joined.add(rows(POST0, 0))
    (block,) = list(joined.ready(TOKENS, 9))
    assert block.sites == (POST0, PRE1)
    assert block.rows[0].tolist() == block.rows[1].tolist() == [[200.0, 200.0]]


def test_a_position_that_one_site_lost_is_missing_at_all() -> None:
    joined = stream(spec(POST0, POST1))
    joined.add(rows(POST0, 0, 1, 2))
    joined.add(rows(POST1, 0, 2))
    (block,) = list(joined.ready(TOKENS, 9))
    assert block.positions.tolist() == [0, 2]
    assert block.rows[0].tolist() == [[200.0, 200.0], [202.0, 202.0]]
    assert joined.lost(0, ((0, 3),)) == ((1, 2),)


def test_rows_of_tokens_that_are_not_selected_end_here() -> None:
    joined = stream(
        spec(POST0, POST1, spans=((1, 2),), conditions=(Condition(((2, 9),), (51, 54), True),)),
        spec(POST0, spans=(), conditions=(Condition(((2, 9),), (51, 54), False),)),
    )
    for site in (POST0, POST1):
        joined.add(rows(site, *range(8)))
    first, second = list(joined.ready(TOKENS, 8))
    assert labels([first, second]) == [
        (0, (POST0, POST1), [1, 3, 6]),
        (1, (POST0,), [2, 4, 5, 7]),
    ]
    assert [part[:, 0].tolist() for part in first.rows] == [
        [201.0, 203.0, 206.0],
        [401.0, 403.0, 406.0],
    ]
    assert joined.lost(0, ((0, 8),)) == ((0, 1), (2, 3), (4, 6), (7, 8))
    assert joined.lost(1, ((0, 8),)) == ((0, 2), (3, 4), (6, 7))


def test_a_capture_of_nothing_delivers_nothing() -> None:
    joined = stream(spec(POST0, spans=()))
    joined.add(rows(POST0, 0, 1))
    assert list(joined.ready(TOKENS, 9)) == []


@pytest.mark.parametrize(
    ("sites", "count", "width"),
    [(1, 3000, 128), (2, 1, 200_000), (3, 2, 300_000), (2, 700, 512)],
)
def test_blocks_have_about_a_mebibyte_and_hold_everything_once(sites, count, width) -> None:
    names = tuple(Site(Point.RESID_POST, layer) for layer in range(sites))
    joined = stream(spec(*names))
    for name in names:
        joined.add(rows(name, *range(count), width=width))
    blocks = list(joined.ready(TOKENS, count))
    assert all(block.size <= max(CHUNK_BYTES, width * 4) for block in blocks)
    got = sorted((s, p) for b in blocks for s in b.sites for p in b.positions.tolist())
    assert got == sorted((name, p) for name in names for p in range(count))


def test_a_message_labels_its_rows() -> None:
    joined = stream(spec(POST0, POST1))
    joined.add(rows(POST0, 4, 5, 8))
    joined.add(rows(POST1, 4, 5, 8))
    (block,) = list(joined.ready(TOKENS, 9))
    message = to_captured(block, 1, [7, 8, 9])
    assert (message.capture_index, message.sample, list(message.token_ids)) == (0, 1, [7, 8, 9])
    assert list(message.sites) == [
        types_pb2.Site(point=types_pb2.POINT_RESID_POST, layer=layer) for layer in (0, 1)
    ]
    assert list(message.positions) == [
        types_pb2.PositionRun(start=4, count=2),
        types_pb2.PositionRun(start=8, count=1),
    ]
    assert list(message.tensor.shape) == [2, 3, 2]
    got = np.frombuffer(message.tensor.inline, dtype="<f4").reshape(2, 3, 2)
    assert got[:, :, 0].tolist() == [[204, 205, 208], [404, 405, 408]]


@given(st.sets(st.integers(0, 50)))
def test_runs_are_the_positions(positions: set[int]) -> None:
    spans = runs(np.array(sorted(positions), dtype=np.int32))
    assert [p for start, end in spans for p in range(start, end)] == sorted(positions)
    assert all(left[1] < right[0] for left, right in pairwise(spans))


@pytest.mark.parametrize(
    ("form", "most"), [(Form(), 8 * CHUNK_BYTES), (Form(TOPK8, kept=1024), CHUNK_BYTES)]
)
def test_only_raw_rows_are_cut_larger_than_a_message(form: Form, most: int) -> None:
    """Others may take more bytes than the rows that they stand for."""
    capture = ResolvedCapture((POST0,), Selection(((0, OPEN_END),), ()), F32, form)
    joined = stream(capture)
    joined.add(rows(POST0, *range(8192), width=1024))
    blocks = list(joined.ready(TOKENS, 8192, chunk_bytes=8 * CHUNK_BYTES))
    row = max(4096, form.row_bytes(1024, F32))
    assert {len(block.positions) for block in blocks[:-1]} == {most // row}
    assert len(blocks[-1].positions) <= most // row
    assert [p for block in blocks for p in block.positions.tolist()] == list(range(8192))
