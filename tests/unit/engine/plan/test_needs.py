"""The content that a plan needs has the same keys with and without the path for single rows."""

from unittest.mock import patch

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from rheostat_engine import Act, Kind, PackedActs, Plan
from rheostat_engine.plan import needs
from rheostat_engine.plan.needs import Needs

from ..gated import gated_plans
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


@given(gated_plans(), st.floats(-8, 8))
def test_a_plan_with_other_numbers_in_its_gates_is_as_if_it_was_packed_anew(
    plan: Plan, more: float
) -> None:
    plan = plan.pack()
    gates = plan.packed_acts.gates
    assume(gates)
    others = {gate: gate._replace(a=gate.a + more, b=gate.b + more) for gate in gates}
    assume(len(set(others.values())) == len(gates))
    found = plan.with_gates(others).packed_acts
    anew = PackedActs(found.acts, found.signals).build()
    for own, other in ((found.needs, anew.needs), (found.gate_needs, anew.gate_needs)):
        for column, same in zip(own, other, strict=True):
            np.testing.assert_array_equal(column, same)
    assert found.encoded == anew.encoded
    assert found.gates == anew.gates
    assert found.table is not None
    assert anew.table is not None
    for field in ("gates", "means", "plan_cost", "ruled", "first_read", "first_gated"):
        assert getattr(found.table, field) == getattr(anew.table, field)
    assert (found.ruled, found.gate_states, found.row_sums) == (
        anew.ruled,
        anew.gate_states,
        anew.row_sums,
    )
