"""Rows that wait leave once, in order, however their sites came together."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import OPEN_END, Point, Rows, Site, TokenCondition
from rheostat_server.capture.encodings import Form
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.block import Block
from rheostat_server.delivery.byte_budget import ByteCounter
from rheostat_server.delivery.capture_rows import CaptureRows
from rheostat_server.delivery.items import Chunk, SequenceKey
from rheostat_server.delivery.row_messages import captured_of
from rheostat_server.limits import CHUNK_BYTES
from rheostat_server.selectors.selection import Selection
from rheostat_server.selectors.spans import runs
from rheostat_server.tensors import FloatType
from rheostat_wire.dtypes import StoredArray
from rheostat_wire.v1 import tensor_pb2, types_pb2

PRE1, POST0, POST1, POST2 = (
    Site(Point.RESID_PRE, 1),
    Site(Point.RESID_POST, 0),
    Site(Point.RESID_POST, 1),
    Site(Point.RESID_POST, 2),
)
SITES = (POST0.index, POST1.index, POST2.index)
ALL = (0, 1, 2)
WIDTH = 2
F32 = FloatType.FLOAT32
TOPK8 = tensor_pb2.ENCODING_TOPK8
PROMPT_LEN = 2
TOKENS = list(range(50, 60))
"""Generated tokens: position p holds 48 + p."""


def rows(site: Site, *positions: int, width: int = 2) -> Rows:
    at = np.array(positions, dtype=np.int32)
    data = np.repeat(at[:, None], width, axis=1).astype(np.float32) + 50 * site.index
    return Rows("r#0", (site.index,), at, data[None])


def rows_of(capture: ResolvedCapture, number: int = 0) -> CaptureRows:
    return CaptureRows(number, capture, F32, PROMPT_LEN, ByteCounter())


def spec(*sites: Site, spans=((0, OPEN_END),), conditions=()) -> ResolvedCapture:
    return ResolvedCapture(sites, Selection(spans, conditions), F32)


def data_of(block: Block) -> list[StoredArray]:
    """Per site, [positions, width]."""
    return [part.data for part in block.parts]


def labels(blocks: list[Block]) -> list[tuple[int, tuple[Site, ...], list[int]]]:
    return [(block.capture_index, block.sites, block.positions.tolist()) for block in blocks]


def both(*positions: int) -> Rows:
    """Rows of two sites in one event."""
    first, second = rows(POST0, *positions), rows(POST1, *positions)
    return replace(
        first, sites=first.sites + second.sites, data=np.concatenate([first.data, second.data])
    )


def test_rows_of_several_sites_come_together_and_each_once() -> None:
    waiting = rows_of(spec(POST0, POST1))
    waiting.add(rows(POST1, 0, 1))
    assert sorted(batch.count for batch in waiting.add(both(0, 1, 2))) == [1, 3]
    assert waiting.add(both(1, 2)) == []
    (block,) = waiting.ready(TOKENS, 3)
    assert block.positions.tolist() == [0, 1, 2]
    for site, data in zip(block.sites, data_of(block), strict=True):
        assert np.array_equal(data, rows(site, 0, 1, 2).data[0])


def test_whoever_wants_some_of_the_sites_keeps_none_of_the_others_in_memory() -> None:
    event = both(0, 1)
    (batch,) = rows_of(spec(POST1)).add(event)
    assert not np.shares_memory(batch.data, event.data)
    assert np.array_equal(batch.data, event.data[1:])
    (partly,) = rows_of(spec(POST1, spans=((1, 2),))).add(event)
    assert not np.shares_memory(partly.data, event.data)
    (whole,) = rows_of(spec(POST0, POST1)).add(event)
    assert np.shares_memory(whole.data, event.data)


def test_rows_of_all_sites_are_sent_as_they_came() -> None:
    event, capture = both(0, 1, 2), spec(POST0, POST1)
    waiting = rows_of(capture)
    waiting.add(event)
    (block,) = waiting.ready(TOKENS, 9)
    assert (block.sites, block.size) == ((POST0, POST1), event.data.nbytes)
    tensor = tensor_pb2.Tensor()
    payload = block.write_raw(tensor)
    assert np.shares_memory(np.frombuffer(payload, np.uint8), event.data)
    assert bytes(payload) == event.data.tobytes()
    assert list(tensor.shape)[:2] == [2, 3]
    room = np.zeros(len(payload), np.uint8)
    assert bytes(block.write_raw(tensor_pb2.Tensor(), room)) == bytes(payload)


@given(st.sets(st.integers(0, 5), min_size=1), st.permutations([POST0, PRE1, POST1, POST2]))
def test_joined_rows_equal_rows_that_came_site_by_site(left_out, sites) -> None:
    condition = TokenCondition(((PROMPT_LEN, OPEN_END),), (48 + 4,), among=False)
    capture = spec(*sites, spans=((0, PROMPT_LEN),), conditions=(condition,))
    at = [position for position in range(8) if position not in left_out]
    together, apart = rows_of(capture), rows_of(capture)
    parts = [rows(Site(Point.RESID_POST, index // 4 - 1), *at) for index in capture.indices]
    data = np.concatenate([part.data for part in parts])
    together.add(replace(parts[0], sites=capture.indices, data=data))
    for part in parts:
        apart.add(part)
    assert together.frontier == apart.frontier
    sent = [
        [captured_of(Chunk(None, SequenceKey(0, False), block, ())) for block in some]
        for some in (together.ready(TOKENS, 9), apart.ready(TOKENS, 9))
    ]
    assert sent[0] == sent[1]


def test_rows_leave_once_all_sites_have_them() -> None:
    waiting = rows_of(spec(POST0, POST1))
    waiting.add(rows(POST0, 0, 1, 2))
    assert list(waiting.ready(TOKENS, 10)) == []
    waiting.add(rows(POST1, 0, 1))
    (block,) = list(waiting.ready(TOKENS, 10))
    assert labels([block]) == [(0, (POST0, POST1), [0, 1])]
    assert [part.tolist() for part in data_of(block)] == [
        [[200.0, 200.0], [201.0, 201.0]],
        [[400.0, 400.0], [401.0, 401.0]],
    ]
    waiting.add(rows(POST1, 2))
    assert labels(list(waiting.ready(TOKENS, 10))) == [(0, (POST0, POST1), [2])]
    assert waiting.lost(((0, 4),)) == ((3, 4),)


def test_rows_wait_until_their_position_is_known_to_have_one() -> None:
    waiting = rows_of(spec(POST0))
    waiting.add(rows(POST0, 0, 1, 2))
    assert labels(list(waiting.ready(TOKENS, 2))) == [(0, (POST0,), [0, 1])]
    assert list(waiting.ready(TOKENS, 2)) == []
    assert labels(list(waiting.ready(TOKENS, 3))) == [(0, (POST0,), [2])]


def test_recomputed_rows_come_once() -> None:
    waiting = rows_of(spec(POST0))
    for positions in ((0, 1), (0, 1, 2), (1, 2, 3)):
        waiting.add(rows(POST0, *positions))
    assert [p for _, _, part in labels(list(waiting.ready(TOKENS, 9))) for p in part] == [
        0,
        1,
        2,
        3,
    ]


def test_each_capture_gets_its_own_positions_of_a_shared_site() -> None:
    first = rows_of(spec(POST0, spans=((0, 2),)))
    second = rows_of(spec(PRE1, spans=((1, 2), (3, 4))), 1)
    for waiting in (first, second):
        waiting.add(rows(POST0, 0, 1, 3))
    assert labels(list(first.ready(TOKENS, 9))) == [(0, (POST0,), [0, 1])]
    assert labels(list(second.ready(TOKENS, 9))) == [(1, (PRE1,), [1, 3])]


def test_both_names_of_a_site_get_its_rows() -> None:
    waiting = rows_of(spec(POST0, PRE1))
    waiting.add(rows(POST0, 0))
    (block,) = list(waiting.ready(TOKENS, 9))
    assert block.sites == (POST0, PRE1)
    first, second = data_of(block)
    assert first.tolist() == second.tolist() == [[200.0, 200.0]]


def test_a_position_that_one_site_lost_is_missing_at_all() -> None:
    waiting = rows_of(spec(POST0, POST1))
    waiting.add(rows(POST0, 0, 1, 2))
    waiting.add(rows(POST1, 0, 2))
    (block,) = list(waiting.ready(TOKENS, 9))
    assert block.positions.tolist() == [0, 2]
    assert data_of(block)[0].tolist() == [[200.0, 200.0], [202.0, 202.0]]
    assert waiting.lost(((0, 3),)) == ((1, 2),)


def test_rows_of_tokens_that_are_not_selected_end_here() -> None:
    two_sites = spec(
        POST0, POST1, spans=((1, 2),), conditions=(TokenCondition(((2, 9),), (51, 54), True),)
    )
    one_site = spec(POST0, spans=(), conditions=(TokenCondition(((2, 9),), (51, 54), False),))
    waiting, other = rows_of(two_sites), rows_of(one_site, 1)
    for site in (POST0, POST1):
        waiting.add(rows(site, *range(8)))
        other.add(rows(site, *range(8)))
    (first,), (second,) = waiting.ready(TOKENS, 8), other.ready(TOKENS, 8)
    assert labels([first, second]) == [
        (0, (POST0, POST1), [1, 3, 6]),
        (1, (POST0,), [2, 4, 5, 7]),
    ]
    assert [part[:, 0].tolist() for part in data_of(first)] == [
        [201.0, 203.0, 206.0],
        [401.0, 403.0, 406.0],
    ]
    assert waiting.lost(((0, 8),)) == ((0, 1), (2, 3), (4, 6), (7, 8))
    assert other.lost(((0, 8),)) == ((0, 2), (3, 4), (6, 7))


def test_a_capture_of_nothing_delivers_nothing() -> None:
    waiting = rows_of(spec(POST0, spans=()))
    waiting.add(rows(POST0, 0, 1))
    assert list(waiting.ready(TOKENS, 9)) == []


@pytest.mark.parametrize(
    ("sites", "count", "width"),
    [(1, 3000, 128), (2, 1, 200_000), (3, 2, 300_000), (2, 700, 512)],
)
def test_blocks_have_about_a_mebibyte_and_hold_everything_once(sites, count, width) -> None:
    names = tuple(Site(Point.RESID_POST, layer) for layer in range(sites))
    waiting = rows_of(spec(*names))
    for name in names:
        waiting.add(rows(name, *range(count), width=width))
    blocks = list(waiting.ready(TOKENS, count))
    assert all(block.size <= max(CHUNK_BYTES, width * 4) for block in blocks)
    got = sorted((s, p) for b in blocks for s in b.sites for p in b.positions.tolist())
    assert got == sorted((name, p) for name in names for p in range(count))


def test_a_message_labels_its_rows() -> None:
    waiting = rows_of(replace(spec(POST0, POST1), width=2))
    waiting.add(rows(POST0, 4, 5, 8))
    waiting.add(rows(POST1, 4, 5, 8))
    (block,) = list(waiting.ready(TOKENS, 9))
    message = captured_of(Chunk(None, SequenceKey(1, False), block, [7, 8, 9]))
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
    waiting = rows_of(capture)
    waiting.add(rows(POST0, *range(8192), width=1024))
    blocks = list(waiting.ready(TOKENS, 8192, chunk_bytes=8 * CHUNK_BYTES))
    row = max(4096, form.row_bytes(1024, F32))
    assert {len(block.positions) for block in blocks[:-1]} == {most // row}
    assert len(blocks[-1].positions) <= most // row
    assert [p for block in blocks for p in block.positions.tolist()] == list(range(8192))


def pending(byte_counter: ByteCounter, sites: tuple[int, ...] = SITES) -> CaptureRows:
    capture = spec(*(site for site in (POST0, POST1, POST2) if site.index in sites))
    return CaptureRows(0, capture, F32, PROMPT_LEN, byte_counter)


def site_rows(sites: tuple[int, ...], positions: np.ndarray) -> np.ndarray:
    """A row says which site and position it is of."""
    return np.array([[[site, p] for p in positions] for site in sites], np.float32)


@st.composite
def events(draw: st.DrawFn) -> list[tuple[tuple[int, ...], list[int], bool]]:
    """Sites, positions and whether the rows are encoded. A site's positions ascend, with gaps."""
    at = dict.fromkeys(SITES, 0)
    drawn = []
    for _ in range(draw(st.integers(1, 14))):
        sites = tuple(sorted(draw(st.sets(st.sampled_from(SITES), min_size=1))))
        first = max(at[site] for site in sites) - draw(st.integers(0, 2))
        positions = sorted(draw(st.sets(st.integers(0, 5), min_size=1)))
        positions = [max(0, first) + p for p in positions]
        drawn.append((sites, positions, draw(st.booleans())))
        for site in sites:
            at[site] = max(at[site], positions[-1] + 1)
    return drawn


@given(events(), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4)), max_size=20))
def test_each_row_leaves_once_in_order_and_of_one_kind(
    fed: list[tuple[tuple[int, ...], list[int], bool]], reads: list[tuple[int, int]]
) -> None:
    byte_counter = ByteCounter()
    waiting = pending(byte_counter)
    wanted: dict[int, dict[int, bool]] = defaultdict(dict)
    given_out: dict[int, list[int]] = defaultdict(list)

    def read(frontier: int, most: int) -> bool:
        cut = waiting.cut(frontier, most)
        assert cut <= frontier
        taken = waiting.take(cut)
        for site, (positions, data, encoded) in taken.items():
            left = positions.tolist()
            assert data.tolist() == [[site, p] for p in left]
            assert {wanted[site][p] for p in left} <= {encoded}
            assert len(left) <= most
            given_out[site] += left
        return bool(taken)

    for (sites, positions, encoded), (frontier, most) in zip(
        fed, (reads + [(0, 1)] * len(fed))[: len(fed)], strict=True
    ):
        held = byte_counter.rows
        at = np.array(positions, np.int32)
        batches = waiting.put(
            sites, (*range(len(sites)),), at, site_rows(sites, at), encoded=encoded
        )
        new = 0
        for site in sites:
            last = max(wanted[site], default=-1)
            entered = {p: encoded for p in positions if p > last}
            wanted[site] |= entered
            new += len(entered)
            there = {
                p for batch in batches if site in batch.sites for p in batch.positions.tolist()
            }
            assert entered.keys() <= there
        assert byte_counter.rows == held + new == sum(map(len, waiting.positions()))
        assert waiting.frontier == min(max(wanted[site], default=-1) + 1 for site in SITES)
        read(frontier, most)
    waits = [positions.tolist() for positions in waiting.positions()]
    assert waits == [[p for p in wanted[s] if p not in given_out[s]] for s in SITES]
    while read(100, 3):
        pass
    assert {site: of for site, of in given_out.items() if of} == {
        site: [*of] for site, of in wanted.items() if of
    }
    assert (byte_counter.rows, byte_counter.bytes, waiting.row_bytes) == (0, 0, 0)


def test_about_so_many_positions_leave_at_once() -> None:
    waiting = pending(ByteCounter())
    for start in range(0, 12, 4):
        at = np.arange(start, start + 4, dtype=np.int32)
        assert len(waiting.put(SITES, ALL, at, site_rows(SITES, at), encoded=False)) == 1
    assert waiting.cut(100, 5) == 5
    assert waiting.cut(3, 5) == 3
    assert [column.positions.tolist() for column in waiting.take(5).values()] == [[*range(5)]] * 3
    assert waiting.cut(100, 5) == 10


@pytest.mark.parametrize("encoded", [False, True])
def test_dropped_rows_are_not_taken(encoded: bool) -> None:
    byte_counter = ByteCounter()
    waiting = pending(byte_counter)
    batches = []
    for start in (0, 3, 6):
        at = np.arange(start, start + 2, dtype=np.int32)
        batches += waiting.put(SITES, ALL, at, site_rows(SITES, at), encoded=encoded)
    batches[0].give_up()
    assert byte_counter.rows == 2 * 2 * len(SITES)
    taken = waiting.take(waiting.cut(100, 100))
    assert [column.positions.tolist() for column in taken.values()] == [[3, 4, 6, 7]] * 3
    assert {column.encoded for column in taken.values()} == {encoded}


def test_a_batch_of_some_sites_keeps_no_other_site_in_memory() -> None:
    waiting = pending(ByteCounter())
    at = np.arange(2, dtype=np.int32)
    data = site_rows((1, *SITES), at)
    (batch,) = waiting.put(SITES, (1, 2, 3), at, data, encoded=False)
    assert not np.shares_memory(batch.data, data)


def test_a_site_that_came_alone_and_with_others_is_counted_once() -> None:
    waiting = pending(ByteCounter())
    prompt, generated = np.arange(10, dtype=np.int32), np.arange(10, 20, dtype=np.int32)
    for site in SITES:
        waiting.put((site,), (0,), prompt, site_rows((site,), prompt), encoded=False)
    waiting.put(SITES, ALL, generated, site_rows(SITES, generated), encoded=False)
    taken = waiting.take(waiting.cut(100, 12))
    assert [column.positions.tolist() for column in taken.values()] == [[*range(12)]] * 3


def test_rows_of_successive_tokens_are_one_batch_until_they_are_taken() -> None:
    byte_counter = ByteCounter()
    waiting = pending(byte_counter)
    for position in range(100):
        at = np.array([position], np.int32)
        waiting.put(SITES, ALL, at, site_rows(SITES, at), encoded=False)
    assert byte_counter.rows == 100 * len(SITES)
    assert byte_counter.bytes == 100 * len(SITES) * WIDTH * 4
    assert byte_counter.batches < 50
    taken = waiting.take(waiting.cut(70, 1000))
    for site, column in taken.items():
        assert column.positions.tolist() == [*range(70)]
        assert column.data.tolist() == [[site, p] for p in range(70)]
    assert byte_counter.rows == 30 * len(SITES)
    waiting.take(waiting.cut(1000, 1000))
    assert (byte_counter.rows, byte_counter.bytes, byte_counter.batches) == (0, 0, 0)


def test_large_rows_are_batches_of_their_own() -> None:
    waiting = pending(ByteCounter(), SITES[:1])
    batches = []
    for position in range(3):
        at = np.array([position], np.int32)
        large = np.zeros((1, 1, 1 << 15), np.float32)
        batches += waiting.put(SITES[:1], (0,), at, large, encoded=False)
    assert len(set(map(id, batches))) == 3


def test_part_of_a_batch_that_grew_can_be_dropped() -> None:
    byte_counter = ByteCounter()
    waiting = pending(byte_counter, SITES[:1])
    for position in range(10):
        at = np.array([position], np.int32)
        (batch,) = waiting.put(SITES[:1], (0,), at, site_rows(SITES[:1], at), encoded=False)
    assert batch.lose(3, 7) == 4
    assert byte_counter.rows == 6
    at = np.array([10], np.int32)
    waiting.put(SITES[:1], (0,), at, site_rows(SITES[:1], at), encoded=False)
    (column,) = waiting.take(waiting.cut(1000, 1000)).values()
    assert column.positions.tolist() == [0, 1, 2, 7, 8, 9, 10]
    assert column.data.tolist() == [[SITES[0], p] for p in column.positions]
    assert (byte_counter.rows, byte_counter.bytes, byte_counter.batches) == (0, 0, 0)
