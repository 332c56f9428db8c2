"""Rows that wait leave once, in order, however their sites came together."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_server.delivery.byte_budget import ByteCounter
from rheostat_server.delivery.pending_rows import PendingRows

SITES = (3, 8, 11)
ALL = (0, 1, 2)
WIDTH = 2


def rows(sites: tuple[int, ...], positions: np.ndarray) -> np.ndarray:
    """A row says which site and position it is of."""
    return np.array([[[site, p] for p in positions] for site in sites], np.float32)


@st.composite
def events(draw: st.DrawFn) -> list[tuple[tuple[int, ...], list[int], bool]]:
    """Sites, positions and whether the rows are made: of each site ascending, with gaps."""
    at = dict.fromkeys(SITES, 0)
    found = []
    for _ in range(draw(st.integers(1, 14))):
        sites = tuple(sorted(draw(st.sets(st.sampled_from(SITES), min_size=1))))
        first = max(at[site] for site in sites) - draw(st.integers(0, 2))
        positions = sorted(draw(st.sets(st.integers(0, 5), min_size=1)))
        positions = [max(0, first) + p for p in positions]
        found.append((sites, positions, draw(st.booleans())))
        for site in sites:
            at[site] = max(at[site], positions[-1] + 1)
    return found


@given(events(), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4)), max_size=20))
def test_each_row_leaves_once_in_order_and_of_one_kind(
    fed: list[tuple[tuple[int, ...], list[int], bool]], reads: list[tuple[int, int]]
) -> None:
    byte_counter = ByteCounter()
    waiting = PendingRows(SITES, byte_counter)
    wanted: dict[int, dict[int, bool]] = defaultdict(dict)
    given_out: dict[int, list[int]] = defaultdict(list)

    def read(frontier: int, most: int) -> bool:
        cut = waiting.cut(frontier, most)
        assert cut <= frontier
        taken = waiting.take(cut)
        for site, (positions, data, made) in taken.items():
            found = positions.tolist()
            assert data.tolist() == [[site, p] for p in found]
            assert {wanted[site][p] for p in found} <= {made}
            assert len(found) <= most
            given_out[site] += found
        return bool(taken)

    for (sites, positions, made), (frontier, most) in zip(
        fed, (reads + [(0, 1)] * len(fed))[: len(fed)], strict=True
    ):
        held = byte_counter.rows
        at = np.array(positions, np.int32)
        batches = waiting.put(sites, (*range(len(sites)),), at, rows(sites, at), made=made)
        new = 0
        for site in sites:
            known = max(wanted[site], default=-1)
            entered = {p: made for p in positions if p > known}
            wanted[site] |= entered
            new += len(entered)
            there = {p for one in batches if site in one.sites for p in one.positions.tolist()}
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
    waiting = PendingRows(SITES, ByteCounter())
    for start in range(0, 12, 4):
        at = np.arange(start, start + 4, dtype=np.int32)
        assert len(waiting.put(SITES, ALL, at, rows(SITES, at), made=False)) == 1
    assert waiting.cut(100, 5) == 5
    assert waiting.cut(3, 5) == 3
    assert [column.positions.tolist() for column in waiting.take(5).values()] == [[*range(5)]] * 3
    assert waiting.cut(100, 5) == 10


@pytest.mark.parametrize("made", [False, True])
def test_dropped_rows_are_not_taken(made: bool) -> None:
    byte_counter = ByteCounter()
    waiting = PendingRows(SITES, byte_counter)
    batches = []
    for start in (0, 3, 6):
        at = np.arange(start, start + 2, dtype=np.int32)
        batches += waiting.put(SITES, ALL, at, rows(SITES, at), made=made)
    batches[0].give_up()
    assert byte_counter.rows == 2 * 2 * len(SITES)
    taken = waiting.take(waiting.cut(100, 100))
    assert [column.positions.tolist() for column in taken.values()] == [[3, 4, 6, 7]] * 3
    assert {column.made for column in taken.values()} == {made}


def test_a_batch_of_some_sites_keeps_no_other_site_in_memory() -> None:
    waiting = PendingRows(SITES, ByteCounter())
    at = np.arange(2, dtype=np.int32)
    data = rows((1, *SITES), at)
    (batch,) = waiting.put(SITES, (1, 2, 3), at, data, made=False)
    assert not np.shares_memory(batch.data, data)


def test_a_site_that_came_alone_and_with_others_is_counted_once() -> None:
    waiting = PendingRows(SITES, ByteCounter())
    prompt, generated = np.arange(10, dtype=np.int32), np.arange(10, 20, dtype=np.int32)
    for site in SITES:
        waiting.put((site,), (0,), prompt, rows((site,), prompt), made=False)
    waiting.put(SITES, ALL, generated, rows(SITES, generated), made=False)
    taken = waiting.take(waiting.cut(100, 12))
    assert [column.positions.tolist() for column in taken.values()] == [[*range(12)]] * 3


def test_rows_of_successive_tokens_are_one_batch_until_they_are_taken() -> None:
    byte_counter = ByteCounter()
    waiting = PendingRows(SITES, byte_counter)
    for position in range(100):
        at = np.array([position], np.int32)
        waiting.put(SITES, ALL, at, rows(SITES, at), made=False)
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
    waiting = PendingRows(SITES[:1], ByteCounter())
    found = []
    for position in range(3):
        at = np.array([position], np.int32)
        large = np.zeros((1, 1, 1 << 15), np.float32)
        found += waiting.put(SITES[:1], (0,), at, large, made=False)
    assert len(set(map(id, found))) == 3


def test_part_of_a_batch_that_grew_can_be_dropped() -> None:
    byte_counter = ByteCounter()
    waiting = PendingRows(SITES[:1], byte_counter)
    for position in range(10):
        at = np.array([position], np.int32)
        (batch,) = waiting.put(SITES[:1], (0,), at, rows(SITES[:1], at), made=False)
    assert batch.lose(3, 7) == 4
    assert byte_counter.rows == 6
    at = np.array([10], np.int32)
    waiting.put(SITES[:1], (0,), at, rows(SITES[:1], at), made=False)
    (column,) = waiting.take(waiting.cut(1000, 1000)).values()
    assert column.positions.tolist() == [0, 1, 2, 7, 8, 9, 10]
    assert column.data.tolist() == [[SITES[0], p] for p in column.positions]
    assert (byte_counter.rows, byte_counter.bytes, byte_counter.batches) == (0, 0, 0)
