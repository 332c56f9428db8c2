"""How much tests try: `make test` runs short forms of tests that `make soak` runs at length.

Only property tests, tests that draw their calls from a seed, and grids of parameters have a short
form. A short form runs the same code and asserts the same as the long one.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

FACTOR = int(os.environ.get("RHEOSTAT_TEST_EFFORT", "1"))
"""How many times the usual number of examples or calls a test tries; `make soak` sets it to 10."""

at_length = pytest.mark.at_length
"""Marks a test that is longer with a larger `FACTOR`; property tests need no mark."""

Case = TypeVar("Case")


def some(cases: Sequence[Case], *chosen: Case) -> Sequence[Case]:
    """The chosen cases of a grid, or all cases where `FACTOR` is above 1."""
    assert set(chosen) <= set(cases)
    return chosen if FACTOR == 1 else cases
