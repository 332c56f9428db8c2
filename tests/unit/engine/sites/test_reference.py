"""The op in plain torch equals a loop in float64, and what changes nothing changes no bit."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rheostat_engine import MAX_GATES, Kind
from rheostat_engine.plan.gains import MAX_GAINS
from rheostat_engine.sites.reference import run_site
from rheostat_engine.worker.steering.programs import ROW_UNIT

from ..instructions import MASK, RING, Step, buffers, chains, huge_chains, naive

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ERROR = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of a row of size about 1 to 10: float32 sums, or the one rounding to the stream's dtype."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_the_op_equals_a_loop_over_tokens_and_steps(
    dtype: torch.dtype, data: st.DataObject, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens, width = data.draw(st.integers(1, 6)), data.draw(st.integers(3, 9))
    programs = chains()
    factors = st.sampled_from([0, 1, MAX_GATES, MAX_GATES + 1, MAX_GATES + MAX_GAINS])
    multiplied = st.builds(lambda row, by: row + ROW_UNIT * by, st.integers(0, 4), factors)
    code = st.integers(-len(programs), 4) | multiplied
    site_slots = data.draw(st.permutations(range(1, RING)))
    site = buffers(
        width,
        dtype=dtype,
        codes=data.draw(st.lists(code, min_size=tokens, max_size=tokens)),
        captured=[p if data.draw(st.booleans()) else 0 for p in site_slots[:tokens]],
        programs=programs,
        seed=seed,
    )
    site.gates.openness.uniform_(generator=generator)
    site.gates.gains.uniform_(0, 3, generator=generator)
    h = torch.randn(tokens, width, generator=generator).to(dtype)
    residual = None
    if data.draw(st.booleans()):
        other = data.draw(st.sampled_from([dtype, torch.float32]))
        residual = torch.randn(tokens, width, generator=generator).to(other)
    before = h.clone()
    expected = naive(h, residual, site)
    # Tokens beyond those of the step: their instructions must not be followed.
    longer = site._replace(
        code=torch.cat([site.code, torch.tensor([2, -1], dtype=torch.int32)]),
        cap_row=torch.cat([site.cap_row, torch.tensor([9, 9], dtype=torch.int32)]),
    )
    run_site(h, residual, longer)
    rtol, atol = 2 * ERROR[dtype], 10 * ERROR[dtype]
    if residual is not None:
        stream = h.float() + residual.float()
        whole = expected.h + expected.residual
        np.testing.assert_allclose(stream.double(), whole, rtol, atol)
        # An element that equals the row that replaces it, rounded, keeps its bits.
        kept = (expected.h == 0) & (h.double().numpy() != 0)
        rows = (stream.to(site.rows.dtype)[:, None] == site.rows).any(1)
        assert rows.numpy()[kept].all()
        expected.h[kept] = h.double().numpy()[kept]
        expected.residual[kept] = residual.double().numpy()[kept]
    np.testing.assert_allclose(h.double(), expected.h, rtol, atol)
    np.testing.assert_allclose(site.ring.double(), expected.ring, rtol, atol)
    # Replacements measure the rounded stream.
    rtol, atol = max(1e-3, rtol), max(1e-4, ERROR[dtype])
    np.testing.assert_allclose(site.doses.double(), expected.doses, rtol, atol)
    assert torch.equal(h[site.code[:tokens] == 0], before[site.code[:tokens] == 0])
    if residual is not None:
        np.testing.assert_allclose(residual.double(), expected.residual, rtol, atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_addition_is_one_float32_sum_rounded_once(dtype: torch.dtype) -> None:
    site = buffers(64, dtype=dtype, codes=[1, 2, 0, 2], captured=[0, 3, 4, 0], programs=[])
    h = torch.randn(4, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    residual = torch.randn(4, 64, generator=torch.Generator().manual_seed(6))
    added = torch.stack([site.rows[n].float() for n in (1, 2, 0, 2)])
    expected = (h.float() + added).to(dtype)
    run_site(h, residual, site)
    assert torch.equal(h, expected)
    captured = (expected.float() + residual).to(dtype)
    assert torch.equal(site.ring[3:5], captured[1:3])
    assert not site.ring[[0, 1, 2, *range(5, RING)]].any()


class _Counting(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's own signature
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_tokens_whose_rows_are_only_replaced_take_few_operations() -> None:
    # A step runs a site's op for each layer, and each operation takes about 10 us on a slow CPU.
    site = buffers(
        8, dtype=torch.float32, codes=[-1] * 4, captured=[0] * 4, programs=[[Step(Kind.REPLACE, 1)]]
    )
    with _Counting() as counting:
        run_site(torch.ones(4, 8), torch.ones(4, 8), site)
    assert counting.count < 120


ABLATION = [Step(Kind.PULL, 1)]
WIDE = Step(Kind.PULL, 1, -1e6, 1e6)
IDLE = {
    "row 0 in a chain": [Step(Kind.ADD, 0)],
    "strength 0 of an ablation": [Step(Kind.PULL, 1, strength=0.0)],
    "strength 0 of a push": [Step(Kind.NORM_ADD, 1, strength=0.0)],
    "a band wider than the data": [WIDE],
    "a band without an upper bound": [WIDE._replace(high=math.inf)],
    "a band without a lower bound": [WIDE._replace(low=-math.inf)],
    "strength 0 of a replacement": [Step(Kind.REPLACE, 1, strength=0.0)],
    "row 0 added last": [Step(Kind.ADD_LAST, 0), Step(Kind.ADD_LAST, 0, mask=MASK)],
    "strength 0 of a last addition": [Step(Kind.ADD_LAST, 1, strength=0.0)],
    "all of them": [
        *[Step(Kind.ADD, 0), WIDE, Step(Kind.NORM_ADD, 2, strength=0.0), WIDE],
        Step(Kind.REPLACE, 1, strength=0.0),
    ],
}


def special(dtype: torch.dtype) -> torch.Tensor:
    """Rows with zeros of both signs, subnormal, small and large numbers."""
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    rows[1] = torch.tensor([0.0, -0.0, 1e-7, -1e-7, 3e4, -3e-4, 1e-40, -1e-40])
    rows[2] = -0.0
    rows[3] = 0.0
    return rows.to(dtype)


@pytest.mark.parametrize("residual", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", IDLE)
def test_what_changes_nothing_changes_no_bit(
    name: str, dtype: torch.dtype, residual: torch.dtype | None
) -> None:
    site = buffers(8, dtype=dtype, codes=[-1] * 4, captured=[0] * 4, programs=[IDLE[name]])
    h = special(dtype)
    rest = None if residual is None else special(residual) / 7
    run_site(h, rest, site)
    assert torch.equal(h.view(torch.uint8), special(dtype).view(torch.uint8))
    assert site.doses[:, 0].sum() == 4 * sum(one.last for one in IDLE[name])
    added = sum(one.kind is Kind.ADD for one in IDLE[name])
    assert site.doses[:, 1].sum() == 4 * added  # a factor of 1, for a row of zeros


def test_elements_that_a_change_leaves_alone_keep_their_bits() -> None:
    site = buffers(8, dtype=torch.float32, codes=[1, -1], captured=[0, 0], programs=[ABLATION])
    site.rows[1] = torch.tensor([0.0, 0.0, 1.0, -0.0, 0.0, 0.0, 0.0, 0.0])
    site.directions[1] = torch.tensor([0.0, 1.0, -0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    h = torch.full((2, 8), -0.0)
    h[1, 1] = 5.0
    run_site(h, None, site)
    assert h[0, 2] == 1.0
    assert h[1, 1] == 0.0
    untouched = torch.ones(2, 8, dtype=torch.bool)
    untouched[0, 2] = untouched[1, 1] = False
    assert torch.signbit(h[untouched]).all()


@pytest.mark.parametrize("residual", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_change_makes_the_stream_infinite_or_nan(
    dtype: torch.dtype, residual: torch.dtype | None
) -> None:
    programs = huge_chains()
    codes = [0, *range(-len(programs), 0), 1]
    captured = [*range(1, len(codes) + 1)]
    site = buffers(16, dtype=dtype, codes=codes, captured=captured, programs=programs)
    site.rows[1] = torch.finfo(dtype).max
    site.directions[1, 3:] = 0.0
    h = torch.randn(len(codes), 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    before = h.clone()
    run_site(h, None if residual is None else torch.ones(len(codes), 16), site)
    assert h[1:].isfinite().all()
    assert h[1:].abs().max() <= 1.001 * most_of(dtype)
    assert torch.equal(h[1], before[1])  # infinity less infinity is no change
    assert (h[2:] != before[2:]).any(1).all()
    assert torch.equal(h[-2, 3:], before[-2, 3:])  # this program's direction is 0 there
    assert torch.equal(h[0], before[0])
    norms = h.float().square().sum(1)
    assert norms.isfinite().all()
    assert site.ring.isfinite().all()


def most_of(dtype: torch.dtype) -> float:
    """The largest magnitude of a changed element of the stream."""
    return min(1e15, torch.finfo(dtype).max / 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sums_of_a_model_stay_finite_whose_every_site_is_changed_hugely(
    dtype: torch.dtype,
) -> None:
    """The model adds h to the stream in its own dtype, and adds another branch after each site.

    The sum of all these branches fits between the limit and the largest number of the dtype.
    """
    site = buffers(4, dtype=dtype, codes=[1, 2], captured=[0, 1], programs=[])
    site.rows[1], site.rows[2] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    branch = torch.full((2, 4), 0.018 * torch.finfo(torch.float16).max).to(dtype)
    stream = torch.zeros(2, 4, dtype=dtype)
    for number in range(12):
        h = branch * (-1 if number % 3 else 1)
        run_site(h, stream, site)
        stream = stream + h
        assert stream.isfinite().all()
        assert stream.abs().max() <= 1.01 * most_of(dtype) + 2 * (number + 1) * branch[0, 0]
        stream = stream + branch
        assert stream.isfinite().all()
    assert site.ring.isfinite().all()


@pytest.mark.parametrize("gain", [0.22, 4.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_branch_that_the_model_multiplies_stays_finite(dtype: torch.dtype, gain: float) -> None:
    site = buffers(4, dtype=dtype, codes=[1, 1], captured=[0, 1], programs=[])
    site.rows[1] = torch.finfo(dtype).max
    h = torch.ones(2, 4, dtype=dtype)
    run_site(h, None, site, gain)
    assert h.isfinite().all()
    assert (h.float() * gain).abs().max() <= 1.01 * most_of(dtype)
    assert site.ring.isfinite().all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_beyond_the_limit_may_shrink_and_does_not_grow(
    dtype: torch.dtype, sign: int
) -> None:
    site = buffers(4, dtype=dtype, codes=[1, 2, 3], captured=[0, 0, 0], programs=[])
    large = sign * 1.5 * most_of(dtype)
    site.rows[1], site.rows[2], site.rows[3] = large / 10, -large / 10, -large
    h = torch.full((3, 4), large).to(dtype)
    before = h.clone()
    run_site(h, None, site)
    assert torch.equal(h[0], before[0])
    torch.testing.assert_close(h[1], before[1] * 0.9, rtol=1e-2, atol=0)
    torch.testing.assert_close(h[2], before[2] * 0, rtol=0, atol=most_of(dtype) * 1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_that_was_not_finite_is_left_alone(dtype: torch.dtype) -> None:
    site = buffers(4, dtype=dtype, codes=[1], captured=[0], programs=[])
    h = torch.tensor([[math.inf, -math.inf, math.nan, 0.0]]).to(dtype)
    run_site(h, None, site)
    assert h[0, :2].tolist() == [math.inf, -math.inf]
    assert h[0, 2].isnan()
    assert h[0, 3] == site.rows[1, 3]


def test_a_row_of_zeros_has_a_share_of_zero_and_no_nan() -> None:
    push = [Step(Kind.NORM_ADD, 1)]
    site = buffers(8, dtype=torch.float32, codes=[1, -1], captured=[0, 0], programs=[push])
    h = torch.zeros(2, 8)
    run_site(h, None, site)
    assert torch.equal(h[0], site.rows[1])
    assert not h[1].any()
    assert site.doses[[0, 5]].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]


def test_measurements_add_up_over_tokens_and_steps_that_share_cells() -> None:
    site = buffers(8, dtype=torch.float32, codes=[1, 2, 3], captured=[0] * 3, programs=[])
    site.dose_slot[:] = 7
    h = torch.zeros(3, 8)
    h[:, 0] = torch.tensor([2.0, 4.0, 0.5])
    run_site(h.clone(), None, site)
    run_site(h.clone(), None, site)
    assert site.doses[7].tolist() == [6, 6, 2 * (0.5 + 0.25 + 2), 2]


def test_an_addition_is_measured_by_what_multiplies_it() -> None:
    open_half, shut, gained = 1 + ROW_UNIT, 1 + ROW_UNIT, 1 + ROW_UNIT * (MAX_GATES + MAX_GAINS)
    codes = [open_half, shut, gained, 1]
    site = buffers(8, dtype=torch.float32, codes=codes, captured=[0] * 4, programs=[])
    site.gates.openness[:, 0] = torch.tensor([0.5, 0.0, 0.25, 0.25])
    site.gates.gains[:, -1] = torch.tensor([3.0, 3.0, 2.0, 3.0])
    h = torch.zeros(4, 8)
    h[:, 0] = 4.0
    expected = h + torch.outer(torch.tensor([0.5, 0.0, 2.0, 1.0]), site.rows[1])
    run_site(h, None, site)
    assert torch.equal(h, expected)
    measured = site.doses[site.dose_slot.long()].tolist()
    assert measured == [[1, 0.5, 0.125, 0.125], [0] * 4, [1, 2, 0.5, 0.5], [1, 1, 0.25, 0.25]]


@pytest.mark.parametrize("shape", [(4, 8), (2, 2, 8), (1, 4, 8)])
def test_leading_dimensions_are_tokens(shape: tuple[int, ...]) -> None:
    site = buffers(
        8, dtype=torch.float32, codes=[0, 1, 2, -6], captured=[0, 4, 0, 5], programs=chains()
    )
    flat = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    folded = flat.clone().view(shape)
    ring = site.ring.clone()
    run_site(flat, flat.clone() / 2, site)
    one = site.ring.clone()
    site.ring.copy_(ring)
    run_site(folded, folded.clone() / 2, site)
    assert torch.equal(folded.view(4, 8), flat)
    assert torch.equal(site.ring, one)


@pytest.mark.parametrize("gain", [0.22, -3.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_branch_is_changed_and_copied_as_it_is_added(dtype: torch.dtype, gain: float) -> None:
    programs = chains()
    codes = [0, 3, *range(-len(programs), 0)]
    captured = [1 + n % 11 if n % 2 else 0 for n in range(len(codes))]
    site, twin = (
        buffers(8, dtype=dtype, codes=codes, captured=captured, programs=programs) for _ in range(2)
    )
    h = torch.randn(len(codes), 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    before, added = h.clone(), h.float() * gain
    run_site(h, None, site, gain)
    run_site(added, None, twin)
    rtol, atol = 4 * ERROR[dtype], 20 * ERROR[dtype]
    torch.testing.assert_close(h.float() * gain, added, rtol=rtol, atol=atol)
    torch.testing.assert_close(site.ring, twin.ring, rtol=rtol, atol=atol)
    torch.testing.assert_close(site.doses, twin.doses, rtol=1e-3, atol=1e-4)
    assert torch.equal(h[0], before[0])


@pytest.mark.parametrize("residual", [None, "same", torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_replaced_row_is_the_other_row_bit_for_bit(
    dtype: torch.dtype, residual: torch.dtype | str | None
) -> None:
    programs = [[Step(Kind.ADD, 2), Step(Kind.PULL, 1), Step(Kind.REPLACE, 1)]]
    site = buffers(64, dtype=dtype, codes=[-1, 0], captured=[1, 2], programs=programs)
    h = torch.randn(2, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    rest = None
    if residual is not None:
        noise = torch.randn(2, 64, generator=torch.Generator().manual_seed(6))
        rest = (5 * noise).to(dtype if isinstance(residual, str) else residual)
    before = h.clone(), None if rest is None else rest.clone()
    run_site(h, rest, site)
    stream = h.float() if rest is None else h.float() + rest.float()
    assert torch.equal(stream[0], site.rows[1].float())
    assert torch.equal(site.ring[1], site.rows[1])
    assert torch.equal(h[1], before[0][1])
    assert rest is None or (before[1] is not None and torch.equal(rest[1], before[1][1]))


@pytest.mark.parametrize("gain", [1.0, 0.22, -3.0])
@pytest.mark.parametrize("residual", [None, "same", torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_replacing_a_row_by_its_own_captured_row_changes_no_bit(
    dtype: torch.dtype, residual: torch.dtype | str | None, gain: float
) -> None:
    steered = [Step(Kind.ADD, 2), Step(Kind.NORM_ADD, 1, strength=0.3), Step(Kind.PULL, 2)]
    weaker = Step(Kind.REPLACE, 4, strength=0.7)
    programs = [steered, [*steered, Step(Kind.REPLACE, 3), weaker._replace(number=3, mask=MASK)]]
    outcomes = []
    row = None
    for code in (-1, -2):
        site = buffers(64, dtype=dtype, codes=[code], captured=[1], programs=programs)
        if row is not None:
            site.rows[3] = row
        generator = torch.Generator().manual_seed(5)
        h, rest = torch.randn(1, 64, generator=generator).to(dtype), None
        if residual is not None:
            rest = 5 * torch.randn(1, 64, generator=generator)
            rest = rest.to(dtype if isinstance(residual, str) else residual)
        run_site(h, rest, site, gain)
        row = site.ring[1].clone()
        outcomes.append((h, rest, row))
    for one, other in zip(*outcomes, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("residual", [None, "same", torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_added_last_in_one_float32_sum_rounded_once(
    dtype: torch.dtype, residual: torch.dtype | str | None
) -> None:
    steered = [Step(Kind.ADD, 2), Step(Kind.PULL, 1)]
    outcomes = []
    for last in ([], [Step(Kind.ADD_LAST, 4)], [Step(Kind.REPLACE, 1), Step(Kind.ADD_LAST, 4)]):
        programs = [[*steered, *last]]
        site = buffers(64, dtype=dtype, codes=[-1], captured=[1], programs=programs)
        generator = torch.Generator().manual_seed(5)
        h, rest = torch.randn(1, 64, generator=generator).to(dtype), None
        if residual is not None:
            rest = 5 * torch.randn(1, 64, generator=generator)
            rest = rest.to(dtype if isinstance(residual, str) else residual)
        run_site(h, rest, site)
        outcomes.append(h.float() if rest is None else h.float() + rest.float())
    before, added, replaced = outcomes
    kept = dtype if residual is None or isinstance(residual, str) else residual
    assert torch.equal(added, (before + site.rows[4].float()).to(kept).float())
    want = (site.rows[1].float() + site.rows[4].float()).to(kept).float()
    assert torch.equal(replaced[0], want)


def test_a_row_added_last_leaves_alone_what_is_not_finite() -> None:
    site = buffers(
        4, dtype=torch.float32, codes=[-1], captured=[0], programs=[[Step(Kind.ADD_LAST, 1)]]
    )
    h = torch.tensor([[math.inf, -math.inf, math.nan, 0.0]])
    run_site(h, None, site)
    assert h[0, :2].tolist() == [math.inf, -math.inf]
    assert h[0, 2].isnan()
    assert h[0, 3] == site.rows[1, 3]


def test_elements_outside_a_mask_keep_their_bits() -> None:
    program = [Step(Kind.REPLACE, 1, mask=MASK)]
    site = buffers(9, dtype=torch.float32, codes=[-1], captured=[0], programs=[program])
    h, rest = torch.full((1, 9), -0.0), torch.full((1, 9), 0.1)
    run_site(h, rest, site)
    outside = site.rows[MASK] == 0
    assert outside.any()
    assert torch.signbit(h[0, outside]).all()
    assert (rest[0, outside] == 0.1).all()
    whole = site.rows[MASK] == 1
    assert torch.equal((h + rest)[0, whole], site.rows[1, whole])
    half = site.rows[MASK] == 0.5
    torch.testing.assert_close((h + rest)[0, half], (0.1 + site.rows[1, half]) / 2)


def test_a_replaced_row_heals_what_was_not_finite() -> None:
    program = [Step(Kind.REPLACE, 1)]
    site = buffers(4, dtype=torch.float32, codes=[-1], captured=[0], programs=[program])
    h = torch.tensor([[math.inf, -math.inf, math.nan, 0.0]])
    run_site(h, None, site)
    assert torch.equal(h[0], site.rows[1])
