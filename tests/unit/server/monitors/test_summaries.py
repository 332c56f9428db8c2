"""Summaries of readings, beside sums over all of them."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_server.monitors import summaries as module
from rheostat_server.monitors.summaries import Summaries

COLUMNS = 3
NUMBERS = st.sampled_from([np.nan, -2.0, -0.5, 0.0, 1.25, 3.0])
ROWS = st.lists(st.tuples(*[NUMBERS] * COLUMNS), min_size=1, max_size=4)
STEPS = st.lists(st.dictionaries(st.integers(0, 80), ROWS, min_size=1), max_size=6)


@pytest.mark.parametrize(("few", "waiting"), [(1, 1), (3, 256), (16, 7), (1000, 256)])
@given(STEPS)
def test_they_equal_sums_over_all_readings(few: int, waiting: int, steps) -> None:
    with patch.multiple(module, _FEW_ROWS=few, _WAITING_ROWS=waiting):
        check(steps)


def check(steps) -> None:
    """Adds steps, each with rows of some samples; after each step, a position is lost."""
    summaries = Summaries(COLUMNS)
    slots: dict[int, int] = {}
    read: dict[int, list[tuple[float, ...]]] = {}
    for step in steps:
        for sample in step:
            if sample not in slots:
                slots[sample] = summaries.acquire()
                read[sample] = []
        firsts = [len(read[sample]) for sample in step]
        counts = [len(rows) for rows in step.values()]
        values = np.array([row for rows in step.values() for row in rows], np.float32)
        summaries.add(
            np.array([slots[sample] for sample in step]), np.array(firsts), np.array(counts), values
        )
        for sample, rows in step.items():
            read[sample] += [*rows, (np.nan,) * COLUMNS]
    for sample, slot in slots.items():
        summary = summaries.release(slot)
        values = np.array(read[sample], np.float32)
        for column in range(COLUMNS):
            own = values[:, column]
            known = own[~np.isnan(own)]
            assert summary.readings[column] == len(known)
            assert summary.total[column] == known.astype(np.float64).sum()
            if len(known):
                assert summary.largest[column] == known.max()
                assert summary.largest_at[column] == np.flatnonzero(own == known.max())[0]


def test_a_slot_that_is_used_again_has_read_nothing() -> None:
    summaries = Summaries(1)
    used: set[int] = set()
    again = 0
    while again < 3:
        slot = summaries.acquire()
        again += slot in used
        used.add(slot)
        one = np.array([slot]), np.array([5]), np.array([1]), np.array([[7]], np.float32)
        summaries.add(*one)
        summary = summaries.release(slot)
        assert (summary.readings[0], summary.total[0], summary.largest[0]) == (1, 7, 7)
