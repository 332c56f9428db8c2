"""Regions of shared memory: none overlaps, and none that is free is out of reach."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_server.subscriptions.regions import Regions

PAGE = 4096
PAGES = 12


def whole(size: int) -> int:
    return -(-size // PAGE)


@given(
    st.lists(
        st.one_of(
            st.integers(1, 5 * PAGE),  # takes so many bytes
            st.integers(-PAGES, -1),  # gives back one of those taken
        ),
        max_size=60,
    )
)
def test_regions_are_those_of_a_row_of_pages(steps: list[int]) -> None:
    regions = Regions(PAGE, PAGE * (PAGES + 1))
    pages: list[int | None] = [None] * PAGES
    for number, step in enumerate(steps):
        held = sorted({page for page in pages if page is not None})
        if step < 0:
            if held:
                gone = held[-step % len(held)]
                regions.give_back(PAGE * (1 + pages.index(gone)))
                pages = [None if page == gone else page for page in pages]
        else:
            need = whole(step)
            fits = [at for at in range(PAGES - need + 1) if pages[at : at + need] == [None] * need]
            assert regions.take(step) == (PAGE * (1 + fits[0]) if fits else None)
            if fits:
                pages[fits[0] : fits[0] + need] = [number] * need
        assert regions.idle == all(page is None for page in pages)


@given(st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=40), st.integers(1, 3))
def test_regions_freed_in_order_can_be_reserved_for_ever(sizes: list[int], kept: int) -> None:
    """As acknowledgements do: at most `kept` chunks of at most 3 pages at a time."""
    regions = Regions(0, PAGE * 3 * 2 * (kept + 1))
    held: list[int] = []
    for size in sizes:
        start = regions.take(size)
        assert start is not None
        held.append(start)
        if len(held) > kept:
            regions.give_back(held.pop(0))


def test_only_what_is_taken_can_be_given_back() -> None:
    regions = Regions(0, 4 * PAGE)
    start = regions.take(2 * PAGE)
    assert start == 0
    with pytest.raises(KeyError):
        regions.give_back(PAGE)
    regions.give_back(start)
    with pytest.raises(KeyError):
        regions.give_back(start)
    assert regions.take(4 * PAGE) == 0
