"""Cells are handed out zero, and what they hold is read back as what each act did."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Kind, Plan, compose
from rheostat_engine.composition import MAX_STEPS, Variant, attribution
from rheostat_engine.core.doses import CellRun, Doses, cell_of, read_doses

from .strategies import DIGESTS, SITES, ablate, add, plans
from .tables import CPU, VECTORS

A, B, C = DIGESTS
NORMS = {digest: np.linalg.norm(rows, axis=1) for digest, rows in VECTORS.items()}
Measured = tuple[int, float, float, float]
"""Rows, sum of the change, sum and largest of its share, as a cell has it."""
CELL = st.tuples(
    st.integers(0, 9),
    st.floats(0, 8, width=32),
    st.floats(0, 8, width=32),
    st.floats(0, 8, width=32),
)


def acted(plan: Plan) -> list[Variant]:
    """The variants that do anything, each set of acts once."""
    found = {v.members: v for piece in compose(plan.acts) for v in piece.variants if v.combination}
    return list(found.values())


@given(plans())
def test_every_measurement_of_every_variant_has_a_cell_of_its_own(plan: Plan) -> None:
    doses = Doses(SITES, CPU)
    run = doses.acquire(compose(plan.acts))
    assert run is not None
    taken: list[int] = []
    for variant in acted(plan):
        start = cell_of([run], variant)
        taken += range(start, start + variant.cells)
    assert sorted(taken) == list(range(run.start, run.start + run.count))
    assert not taken or min(taken) >= MAX_STEPS
    assert cell_of([run], Variant((), ())) == 0
    assert cell_of([], Variant((0,), ((0, ()),))) == 0


@given(plans(), plans(), st.data())
def test_cells_are_read_as_sums_over_the_variants_of_each_act_and_site(
    first: Plan, second: Plan, data: st.DataObject
) -> None:
    acts = (*first.acts, *second.acts)
    doses = Doses(SITES, CPU)
    shifted = [
        piece._replace(
            variants=tuple(
                v._replace(members=tuple(m + len(first.acts) for m in v.members))
                for v in piece.variants
            )
        )
        for piece in compose(second.acts)
    ]
    runs = [doses.acquire(compose(first.acts)), doses.acquire(shifted)]
    assert runs[0] is not None
    assert runs[1] is not None
    held: list[CellRun] = [runs[0], runs[1]]
    expected: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for run in held:
        for members, place in run.places.items():
            for site in range(SITES):
                for number, group in enumerate(attribution(acts, members).get(site, [])):
                    values: Measured = data.draw(CELL)
                    doses.cells[site, place + number] = torch.tensor(values)
                    rows, change, share, largest = values
                    for index in group if rows else ():
                        total, factor = expected[index, site], 1.0
                        if acts[index].kind is Kind.ADD:
                            row = dict(acts[index].rows)[site][0]
                            factor = acts[index].scale * float(NORMS[acts[index].vectors[0]][row])
                            change = rows * factor
                        total[0] += rows
                        total[1] += change
                        total[2] += share * factor
                        total[3] = max(total[3], largest * factor)
    measured = doses.take_out(held)
    if measured is None:
        assert not expected
        return
    found = read_doses(acts, held, measured.numpy(), NORMS)
    assert [dose[:3] for dose in found] == [
        (*key, total[0]) for key, total in sorted(expected.items())
    ]
    np.testing.assert_allclose(
        [dose[3:] for dose in found],
        [total[1:] for _, total in sorted(expected.items())] or np.zeros((0,)),
        rtol=1e-5,
    )
    assert not doses.cells.any()


def test_a_negative_scale_is_a_dose_of_its_size() -> None:
    acts = (add(2, scale=-3.0),)
    run = CellRun(MAX_STEPS, 1, {(0,): MAX_STEPS})
    measured = np.zeros((SITES, 1, 4), np.float32)
    measured[2, 0] = 4, 0, 2.0, 0.75
    norm = float(NORMS[A][0])
    ((act, site, rows, change, share, largest),) = read_doses(acts, [run], measured, NORMS)
    assert (act, site, rows) == (0, 2, 4)
    assert (change, share, largest) == pytest.approx((12 * norm, 6 * norm, 2.25 * norm))


def test_an_act_without_rows_has_no_dose() -> None:
    run = CellRun(MAX_STEPS, 2, {(0, 1): MAX_STEPS})
    measured = np.zeros((SITES, 2, 4), np.float32)
    measured[0, 1] = 1, 5.0, 0.5, 0.5
    assert read_doses((ablate(1), ablate(0)), [run], measured, NORMS) == []
    acts = (ablate(0), ablate(0))
    assert read_doses(acts, [run], measured, NORMS) == [(1, 0, 1, 5.0, 0.5, 0.5)]


def test_cells_come_back_zero_and_are_handed_out_again() -> None:
    doses = Doses(SITES, CPU)
    pieces = compose([add(0), ablate(0)])
    run, other = doses.acquire(pieces), doses.acquire(pieces)
    assert run is not None
    assert other is not None
    assert other.start == run.start + run.count
    doses.cells[:] = torch.arange(SITES * doses.cells.shape[1] * 4).view_as(doses.cells)
    before = doses.cells.clone()
    measured = doses.take_out([other, run])
    assert measured is not None
    where = [*range(other.start, other.start + 2), *range(run.start, run.start + 2)]
    assert torch.equal(measured, before[:, where])
    assert not doses.cells[:, where].any()
    assert torch.equal(doses.cells[:, other.start + 2 :], before[:, other.start + 2 :])
    assert doses.acquire(pieces) == run


def test_taking_out_nothing_takes_nothing() -> None:
    doses = Doses(SITES, CPU)
    run = doses.acquire(compose([]))
    assert run == CellRun(0, 0, {})
    assert doses.take_out([run, run]) is None


def test_a_request_with_too_many_variants_gets_no_cells() -> None:
    doses = Doses(SITES, CPU)
    apart = [replace(add(0), spans=((n, n + 1),)) for n in range(513)]
    assert doses.acquire(compose(apart)) is None
    run = doses.acquire(compose(apart[:512]))
    assert run is not None
    assert run.count == 512


def test_once_all_cells_are_taken_the_next_request_gets_none() -> None:
    doses = Doses(1, CPU)
    pieces = compose([replace(add(0), spans=((n, n + 1),)) for n in range(512)])
    runs = [doses.acquire(pieces) for _ in range(16)]
    assert None not in runs
    assert doses.acquire(compose([add(0)])) is None
    doses.take_out([run for run in runs[:1] if run is not None])
    assert doses.acquire(compose([add(0)])) is not None
