"""The content that a plan needs has the same keys with and without the path for single rows."""

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Act, Kind, Plan
from rheostat_engine.plan import needs
from rheostat_engine.plan.needs import Needs

from ..strategies import DIGESTS, plans


def check_equal_to_combined(acts: tuple[Act, ...]) -> Needs:
    found = Plan("p", acts).packed_acts.needs
    with patch.object(needs, "_single_row_act", lambda *_: None):
        combined = Plan("p", acts).packed_acts.needs
    for own, other in zip(found, combined, strict=True):
        np.testing.assert_array_equal(own, other)
    return found


@given(plans("p"))
def test_any_plan_needs_what_combining_its_acts_gives(plan: Plan) -> None:
    check_equal_to_combined(plan.acts)


@given(
    st.lists(st.integers(0, 1 << 20), min_size=1, max_size=40),
    st.sampled_from([kind for kind in Kind if kind.acts_last]),
    st.sampled_from([1.0, 0.5]),
)
def test_acts_that_replace_each_row_by_one_need_a_bank_row_and_a_step_for_each(
    rows: list[int], kind: Kind, scale: float
) -> None:
    acts = tuple(
        Act(
            kind,
            (DIGESTS[0],),
            tuple((5 * site, ((row + position) % (1 << 20),)) for site, row in enumerate(rows)),
            ((position, position + 1),),
            scale,
        )
        for position in range(3)
    )
    found = check_equal_to_combined(acts).total
    distinct = {(row + position) % (1 << 20) for row in rows for position in range(3)}
    assert found["bank_rows"] == found["steps"] == len(distinct)
