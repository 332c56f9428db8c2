"""Captured tokens are cut into blocks that fit the ring, and the ring never forgets a reader."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine.worker.capture.ring import Region, Ring, RowBlocks, cut_row_blocks, lay_out
from rheostat_engine.worker.capture.site_sets import SiteSetTable

SITE_SET_RANKS = np.array([[-1, -1, -1], [-1, 0, -1], [0, 1, 2], [0, -1, 1]], np.int32)
"""Class 0 captures nowhere, 1 at site 1, 2 everywhere, 3 at sites 0 and 2."""
RAW = SiteSetTable(
    SITE_SET_RANKS, np.zeros_like(SITE_SET_RANKS), np.array([[0], [1], [3], [2]], np.int32)
)
"""All of it as it is."""
FORMED = SiteSetTable(
    np.array([[-1, -1, -1], [-1, 0, -1], [0, 0, 1], [0, -1, 0]], np.int32),
    np.array([[0, 0, 0], [0, 2, 0], [2, 0, 2], [0, 0, 1]], np.int32),
    np.array([[0, 0, 0], [0, 0, 1], [1, 0, 2], [1, 1, 0]], np.int32),
)
"""The same sites in forms 0, 1 and 2: class 1 in form 2, the middle of class 2 in form 0, ..."""

Token = tuple[int, int, int]
"""Request number, class, position."""


@st.composite
def batches(draw: st.DrawFn) -> list[Token]:
    """Tokens of some requests; classes change and positions jump here and there."""
    numbers = draw(st.lists(st.integers(1, 9), unique=True, max_size=4))
    tokens = []
    for number in numbers:
        position = draw(st.integers(0, 5))
        for _ in range(draw(st.integers(0, 8))):
            tokens.append((number, draw(st.sampled_from([0, 1, 1, 2, 3])), position))
            position += draw(st.sampled_from([1, 1, 1, 3]))
    return tokens


def cut(tokens: list[Token]) -> RowBlocks:
    """The blocks of a batch."""
    numbers, site_sets, positions = (
        np.array([t[i] for t in tokens], dtype)
        for i, dtype in enumerate((np.int64, np.int32, np.int64))
    )
    return cut_row_blocks(numbers, site_sets, positions)


@given(batches())
def test_blocks_are_the_longest_runs_of_one_request_and_class(tokens: list[Token]) -> None:
    runs = groupby(enumerate(tokens), lambda e: (e[1][0], e[1][1], e[1][2] - e[0]))
    expected = []
    block = [0] * len(tokens)
    order = [0] * len(tokens)
    for (number, which, _), members in runs:
        run = list(members)
        if which:
            expected.append((number, which, run[0][1][2], len(run)))
        for place_in_run, (token, _) in enumerate(run):
            block[token] = len(expected) if which else 0
            order[token] = place_in_run
    blocks = cut(tokens)
    found = (blocks.request, blocks.site_set, blocks.start, blocks.count)
    assert list(zip(*(one.tolist() for one in found), strict=True)) == expected
    assert blocks.token_block.tolist() == block
    assert [o for o, b in zip(blocks.token_order.tolist(), block, strict=True) if b] == [
        o for o, b in zip(order, block, strict=True) if b
    ]


@given(batches(), st.integers(1, 40))
def test_the_smallest_blocks_that_fit_are_placed_one_after_the_other_site_by_site(
    tokens: list[Token], capacity: int
) -> None:
    blocks = cut(tokens)
    expected_rows = [
        int((SITE_SET_RANKS[which] >= 0).sum()) * count
        for which, count in zip(blocks.site_set.tolist(), blocks.count.tolist(), strict=True)
    ]
    fitting, left = set(), capacity
    for size, block in sorted((size, block) for block, size in enumerate(expected_rows)):
        left -= size
        fitting |= {block} if left >= 0 else set()
    expected_base, used = [], 0
    sizes = zip(blocks.site_set.tolist(), blocks.count.tolist(), strict=True)
    for block, (which, count) in enumerate(sizes):
        sites = [site for site in range(3) if SITE_SET_RANKS[which, site] >= 0]
        offsets = [-1, -1, -1]
        for site in sites if block in fitting else []:
            offsets[site] = used
            used += count
        expected_base.append(offsets)
    layout = lay_out(blocks, RAW, capacity)
    assert layout.base.tolist() == expected_base
    assert layout.rows.tolist() == expected_rows
    assert layout.total == used
    assert np.flatnonzero(layout.fits).tolist() == sorted(fitting)
    parts = (layout.part_block, layout.part_encoding, layout.part_rows)
    assert list(zip(*(part.tolist() for part in parts), strict=True)) == [
        (block, 0, expected_rows[block]) for block in sorted(fitting)
    ]


def test_rows_that_do_not_fit_take_no_room_from_a_smaller_request() -> None:
    wide, small = [(1, 2, position) for position in range(20)], [(2, 1, 0), (3, 3, 0)]
    layout = lay_out(cut([*wide, *small]), RAW, capacity=50)
    assert (layout.base >= 0).any(axis=1).tolist() == [False, True, True]
    assert layout.total == 3


@given(batches(), st.integers(1, 40))
def test_rows_of_a_form_lie_together_and_what_fits_does_not_depend_on_forms(
    tokens: list[Token], capacity: int
) -> None:
    blocks = cut(tokens)
    layout, plain = lay_out(blocks, FORMED, capacity), lay_out(blocks, RAW, capacity)
    assert layout.rows.tolist() == plain.rows.tolist()
    assert layout.total == plain.total
    expected_base = np.full(layout.base.shape, -1).tolist()
    parts, used = [], 0
    for encoding in range(3):
        for block, which in enumerate(blocks.site_set.tolist()):
            sites = [
                site
                for site in range(3)
                if plain.base[block, site] >= 0 and FORMED.encodings[which, site] == encoding
            ]
            for site in sites:
                expected_base[block][site] = used
                used += int(blocks.count[block])
            if sites:
                parts.append((block, encoding, len(sites) * int(blocks.count[block])))
    assert layout.base.tolist() == expected_base
    found = (layout.part_block, layout.part_encoding, layout.part_rows)
    assert list(zip(*(one.tolist() for one in found), strict=True)) == parts


class Copy:
    """A copy off the device that is under way until somebody waits for it."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.done = False

    def synchronize(self) -> None:
        self.done = True


def overlap(one: Region, other: Region) -> bool:
    return one.start < other.end and other.start < one.end


@given(st.integers(2, 12), st.lists(st.tuples(st.integers(1, 11), st.booleans()), max_size=40))
def test_a_region_never_overlaps_one_that_has_not_left_and_waits_for_no_other(
    rows: int, steps: list[tuple[int, bool]]
) -> None:
    ring = Ring(rows)
    copies: list[Copy] = []
    for wanted, leaves in steps:
        under_way = [copy for copy in copies if not copy.done]
        region = ring.reserve(min(wanted, ring.capacity))
        assert region.start >= 1
        assert region.end <= rows
        assert region.end - region.start == min(wanted, ring.capacity)
        assert {c.region for c in under_way if c.done} == {
            c.region for c in under_way if overlap(c.region, region)
        }
        if leaves:
            copies.append(Copy(region))
            ring.set_fence(region, copies[-1])


@pytest.mark.parametrize("rows", [0, 8])
def test_a_region_that_the_ring_cannot_hold_is_refused(rows: int) -> None:
    ring = Ring(8)
    assert ring.capacity == 7
    with pytest.raises(ValueError, match=f"^{rows} rows do not fit into a ring of 7$"):
        ring.reserve(rows)
