"""Sums of rows: taken whole, whatever is free, and cleared before they are used."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine.worker.state.buffers import SiteBuffers
from rheostat_engine.worker.state.id_allocators import Exhausted
from rheostat_engine.worker.steering.row_sums import Means, RowSums

from ...no_gates import no_gates

SUMS, WIDTH = 12, 3
EMPTY = torch.zeros(0)


def row_sums() -> tuple[RowSums, SiteBuffers]:
    gates = no_gates(4, states=32, row_sums=SUMS, width=WIDTH)
    site = SiteBuffers(*[EMPTY] * 7, gates, EMPTY, EMPTY)
    return RowSums(site), site


def named(site: SiteBuffers, sums: RowSums, state: int, count: int) -> list[int]:
    first = int(sums.first[state])
    found: list[int] = site.gates.row_sum_names[first : first + count].tolist()
    return found


@given(st.lists(st.integers(1, 7), min_size=1, max_size=60))
def test_a_sample_gets_its_sums_while_so_many_are_free(sizes: list[int]) -> None:
    sums, site = row_sums()
    held: dict[int, int] = {}
    for number, size in enumerate(sizes):
        state = 1 + number % 31
        if state in held:
            sums.release(state)
            del held[state]
        while sum(held.values()) + size > SUMS:  # the oldest but one, which leaves gaps
            with pytest.raises(Exhausted):
                sums.acquire(state, Means(size, 5, 0))
            gone = list(held)[min(1, len(held) - 1)]
            sums.release(gone)
            del held[gone]
        sums.acquire(state, Means(size, 5, 0))
        held[state] = size
        site.gates.row_sums.fill_(1.0)
        sums.clear(np.zeros(0, np.int64))
        every = [one for own, count in held.items() for one in named(site, sums, own, count)]
        assert sorted(set(every)) == sorted(every)
        assert 0 not in every
        own = named(site, sums, state, size)
        assert not site.gates.row_sums[own].any()
        others = [one for one in range(SUMS + 1) if one not in own]
        assert (site.gates.row_sums[others] == 1).all()
    assert sums.used == sum(held.values())


def test_a_sample_that_begins_again_begins_with_zeros() -> None:
    sums, site = row_sums()
    for state in (3, 9):
        sums.acquire(state, Means(2, 5, 0))
    sums.clear(np.zeros(0, np.int64))
    site.gates.row_sums.fill_(1.0)
    sums.clear(np.array([4, 9]))
    assert not site.gates.row_sums[named(site, sums, 9, 2)].any()
    assert (site.gates.row_sums[named(site, sums, 3, 2)] == 1).all()
