"""Cells are handed out zero, and what they hold is read back as what each act did."""

import tracemalloc
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Kind, Plan
from rheostat_engine.plan.composition import MAX_STEPS, Variant, attribution
from rheostat_engine.worker.steering.doses import Doses, Measures, SlotRange

from ...strategies import DIGESTS, SITES, ablate, add, plans
from ...tables import CPU, VECTORS, variants_of

A = DIGESTS[0]
NORMS = {digest: np.linalg.norm(rows, axis=1) for digest, rows in VECTORS.items()}
Measured = tuple[int, float, float, float]
"""Rows, sum of the change, sum and largest of its share, as a cell has it."""
DOSE_SLOT = st.tuples(
    st.integers(0, 9),
    st.floats(0, 8, width=32),
    st.floats(0, 8, width=32),
    st.floats(0, 8, width=32),
)


def measures(plan: Plan) -> Measures:
    """What is measured of a plan's acts."""
    made = Measures(plan.acts, NORMS)
    for variant in acted(plan):
        made.measure(variant.members)
        made.add(variant.members, variant.dose_slots)
    return made


def acted(plan: Plan) -> list[Variant]:
    """The variants that do anything, each set of acts once."""
    table = plan.packed_acts.table
    all_token_variants = variants_of(table)
    found = {
        v.members: v
        for token_variants in all_token_variants
        for v in token_variants.variants
        if v.combination
    }
    return list(found.values())


@given(plans())
def test_every_measurement_of_every_variant_has_a_cell_of_its_own(plan: Plan) -> None:
    made = measures(plan)
    taken: list[int] = []
    for variant in acted(plan):
        start = made.first_slot(variant.members)
        assert start is not None
        taken += range(start, start + variant.dose_slots)
    assert sorted(taken) == list(range(made.dose_slots))
    assert made.first_slot((7,)) is None


@given(plans(), st.integers(0, 3), st.data())
def test_cells_are_read_as_sums_over_the_variants_of_each_act_and_site(
    plan: Plan, first_act: int, data: st.DataObject
) -> None:
    acts, made = plan.acts, measures(plan)
    measured = np.zeros((SITES, made.dose_slots, 4), np.float32)
    expected: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for variant in acted(plan):
        place = made.first_slot(variant.members)
        assert place is not None
        for site in range(SITES):
            for number, group in enumerate(attribution(acts, variant.members).get(site, [])):
                values: Measured = data.draw(DOSE_SLOT)
                measured[site, place + number] = values
                rows, change, share, largest = values
                for index in group if rows else ():
                    total, factor = expected[first_act + index, site], 1.0
                    if acts[index].kind is Kind.ADD:
                        row = dict(acts[index].rows)[site][0]
                        factor = acts[index].scale * float(NORMS[acts[index].vectors[0]][row])
                    total[0] += rows
                    total[1] += change * factor
                    total[2] += share * factor
                    total[3] = max(total[3], largest * factor)
    beside = 2  # slots of another request, which come first
    slots = np.concatenate([np.ones((SITES, beside, 4), np.float32), measured, measured], axis=1)
    found, again = made.read(slots, [beside, beside + made.dose_slots], first_act)
    assert again == found
    assert [dose[:3] for dose in found] == [
        (*key, total[0]) for key, total in sorted(expected.items())
    ]
    np.testing.assert_allclose(
        [dose[3:] for dose in found],
        [total[1:] for _, total in sorted(expected.items())] or np.zeros((0,)),
        rtol=1e-5,
    )


def test_a_negative_scale_is_a_dose_of_its_size() -> None:
    measured = np.zeros((SITES, 1, 4), np.float32)
    measured[2, 0] = 4, 4.0, 2.0, 0.75
    norm = float(NORMS[A][0])
    made = measures(Plan("r", (add(2, scale=-3.0),)))
    ((act, site, rows, change, share, largest),) = made.read(measured, [0], 0)[0]
    assert (act, site, rows) == (0, 2, 4)
    assert (change, share, largest) == pytest.approx((12 * norm, 6 * norm, 2.25 * norm))


def test_an_act_without_rows_has_no_dose() -> None:
    measured = np.zeros((SITES, 2, 4), np.float32)
    assert measures(Plan("r", (ablate(0), ablate(0)))).read(measured, [0], 0) == [[]]
    measured[0, 1] = 1, 5.0, 0.5, 0.5
    made = measures(Plan("r", (ablate(0), ablate(0))))
    assert made.read(measured, [0], 0) == [[(1, 0, 1, 5.0, 0.5, 0.5)]]


def test_reading_makes_objects_of_measured_acts_alone() -> None:
    acts, requests = 200, 16
    made = Measures([ablate(*range(SITES))] * acts, NORMS)
    for index in range(acts):
        made.measure((index,))
        made.add((index,), 1)
    slots = np.zeros((SITES, requests * acts, 4), np.float32)
    begins = range(0, requests * acts, acts)
    made.read(slots, begins, 0)  # the columns of the table are made once
    slots[:, 3::acts] = 2, 5.0, 0.5, 0.25
    tracemalloc.start()
    try:
        found = made.read(slots, begins, 0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == [[(3, site, 2, 5.0, 0.5, 0.25) for site in range(SITES)]] * requests
    assert most < 48 * SITES * requests * acts  # a tuple of a dose takes about 200 bytes


def test_what_was_noted_slice_by_slice_is_what_was_noted_at_once() -> None:
    plan = Plan("r", (add(0, 2), ablate(1, 2), add(2, 3, scale=2.0)))
    (variant,) = acted(plan)
    whole, sliced = Measures(plan.acts, NORMS), Measures(plan.acts, NORMS)
    whole.measure(variant.members)
    for sites in (range(1), range(1, 3), range(3, 4)):
        sliced.measure(variant.members, sites)
    for made in (whole, sliced):
        assert made.add(variant.members, variant.dose_slots) == 0
    measured = (
        np.random.default_rng(0).uniform(1, 9, (SITES, whole.dose_slots, 4)).astype(np.float32)
    )
    assert whole.read(measured, [0], 0) == sliced.read(measured, [0], 0)


def test_cells_come_back_zero_and_are_handed_out_again() -> None:
    doses = Doses(SITES, CPU)
    run, other = doses.acquire(2), doses.acquire(2)
    assert run is not None
    assert other is not None
    assert other.start == run.start + run.count
    doses.dose_slots[:] = torch.arange(SITES * doses.dose_slots.shape[1] * 4).view_as(
        doses.dose_slots
    )
    before = doses.dose_slots.clone()
    measured = doses.take_out([other, run])
    assert measured is not None
    where = [*range(other.start, other.start + 2), *range(run.start, run.start + 2)]
    assert torch.equal(measured, before[:, where])
    assert not doses.dose_slots[:, where].any()
    assert torch.equal(doses.dose_slots[:, other.start + 2 :], before[:, other.start + 2 :])
    assert doses.acquire(2) == run


def test_taking_out_nothing_takes_nothing() -> None:
    doses = Doses(SITES, CPU)
    run = doses.acquire(0)
    assert run == SlotRange(0, 0)
    assert doses.take_out([run, run]) is None


def test_a_request_with_too_many_variants_gets_no_cells() -> None:
    doses = Doses(SITES, CPU)
    assert doses.acquire(513) is None
    run = doses.acquire(512)
    assert run == SlotRange(MAX_STEPS, 512)
    assert doses.acquire(1, [run]) is None
    assert doses.acquire(0, [run]) == SlotRange(0, 0)


def test_once_all_cells_are_taken_the_next_request_gets_none() -> None:
    doses = Doses(1, CPU)
    runs = [doses.acquire(512) for _ in range(16)]
    assert None not in runs
    assert doses.acquire(1) is None
    doses.take_out([run for run in runs[:1] if run is not None])
    assert doses.acquire(1) is not None
