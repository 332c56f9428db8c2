"""Programs are rows or chains of steps, shared by content, and made whole or not at all."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import MAX_GATES, Activation, Kind, Normalise, Readout
from rheostat_engine.plan.composition import Direction, Program, Step
from rheostat_engine.plan.gains import MAX_GAINS
from rheostat_engine.plan.gates import Reading
from rheostat_engine.worker.state.id_allocators import BankError
from rheostat_engine.worker.steering.programs import ROW_UNIT, Programs
from rheostat_engine.worker.steering.vectors import Basis

from ...naive import units
from ...strategies import DIGESTS
from ...tables import CPU, VECTORS, WIDTH, capacity, chain

A, B, C = DIGESTS

PLAIN = [1.0, 0.0, 0.0, 1.0, 0.0]
"""Floats of a step that reads nothing, or a coordinate."""


def make(
    *, rows: int = 4, directions: int = 4, steps: int = 8, dtype: torch.dtype = torch.float32
) -> Programs:
    """A few of everything."""
    room = capacity(bank_rows=rows, directions=directions, steps=steps)
    return Programs(room, width=WIDTH, dtype=dtype, device=CPU)


def row(digest: bytes, scale: float = 1.0) -> Step:
    return Step(Kind.ADD, addends=((digest, 0, scale),))


def along(*digests: bytes, kind: Kind = Kind.PULL, last: bool = True) -> Step:
    direction = tuple((digest, 0) for digest in digests)
    return Step(kind, (), direction, -math.inf, 0.5, 0.25, last)


def acquire(programs: Programs, program: Program) -> int:
    (code,) = programs.acquire([program], VECTORS)
    return code


def counts(programs: Programs) -> tuple[int, int, int]:
    return programs.rows_used, programs.directions_used, programs.steps_used


def test_a_single_addition_is_a_row_and_no_step() -> None:
    programs = make()
    code = acquire(programs, (row(A, 2.0),))
    programs.flush()
    assert code > 0
    assert programs.rows[code].tolist() == (2 * VECTORS[A][0]).tolist()
    assert counts(programs) == (1, 0, 0)


@pytest.mark.parametrize(
    ("by", "number"),
    [
        ({"gate": 0}, 1),
        ({"gate": MAX_GATES - 1}, MAX_GATES),
        ({"gain": 0}, MAX_GATES + 1),
        ({"gain": MAX_GAINS - 1}, MAX_GATES + MAX_GAINS),
    ],
)
def test_the_code_of_an_addition_names_its_row_and_what_multiplies_it(
    by: dict[str, int], number: int
) -> None:
    programs = make()
    code = acquire(programs, (row(A)._replace(**by),))
    programs.flush()
    assert code // ROW_UNIT == number
    assert code < 2**31
    assert programs.rows[code % ROW_UNIT].tolist() == VECTORS[A][0].tolist()


def test_an_addition_with_a_gate_and_a_gain_or_beside_another_is_a_chain() -> None:
    programs = make()
    gated = row(A)._replace(gate=3)
    for program in ((gated._replace(gain=4),), (gated, row(B))):
        assert acquire(programs, program) < 0


def test_a_chain_names_what_it_uses_step_by_step() -> None:
    programs = make()
    program = (along(A, last=False), along(A, B), row(C), along(A, kind=Kind.NORM_ADD))
    code = acquire(programs, program)
    programs.flush()
    made = list(chain(programs, code))
    assert [ints[0] for ints, _ in made] == [Kind.PULL, Kind.PULL, Kind.ADD, Kind.NORM_ADD]
    assert [ints[2] for ints, _ in made] == [0, 1, 1, 1]
    assert [floats for _, floats in made] == [
        [-math.inf, 0.5, 0.25, *PLAIN],
        [-math.inf, 0.5, 0.25, *PLAIN],
        [0.0, 0.0, 0.0, *PLAIN],
        [-math.inf, 0.5, 0.25, *PLAIN],
    ]
    numbers = [ints[1] for ints, _ in made]
    assert numbers[0] == numbers[3] != numbers[1]
    assert programs.rows[numbers[2]].tolist() == VECTORS[C][0].tolist()
    for number, parts in ((numbers[0], [A]), (numbers[1], [A, B])):
        expected = units([VECTORS[d][0].astype(np.float64) for d in parts], orthogonal=True)[-1]
        np.testing.assert_allclose(programs.directions[number], expected, rtol=0, atol=1e-7)
    assert counts(programs) == (1, 2, 4)


def test_a_pull_that_writes_has_two_directions_and_the_numbers_of_its_readout() -> None:
    programs = make()
    readout = Readout(Normalise.NONE, Activation.JUMP_RELU, 0.5, 0.125)
    one = along(A)._replace(readout=readout, write=((B, 0),), only_on=True)
    other = one._replace(readout=readout._replace(normalise=Normalise.COSINE), write=())
    bare = one._replace(write=())
    code = acquire(programs, (one, other, bare))
    programs.flush()
    (first, numbers), (second, others), (third, bares) = chain(programs, code)
    norm_a, norm_b = (float(np.linalg.norm(VECTORS[d][0].astype(np.float64))) for d in (A, B))
    assert numbers[3:] == pytest.approx([norm_b, 0.5, 0.125, norm_a, 0.0])
    assert others[3:] == pytest.approx([1.0, 0.5, 0.125, 1.0, 0.0])
    assert bares[3:] == pytest.approx([1 / norm_a, 0.5, 0.125, norm_a, 0.0])
    assert [ints[3] for ints in (first, second, third)] == [
        Normalise.NONE | Activation.JUMP_RELU << 4 | 1 << 8,
        Normalise.COSINE | Activation.JUMP_RELU << 4 | 1 << 8,
        Normalise.NONE | Activation.JUMP_RELU << 4 | 1 << 8,
    ]
    assert (first[5] != first[1], second[5], third[5]) == (True, 0, 0)
    unit = VECTORS[B][0].astype(np.float64) / norm_b
    np.testing.assert_allclose(programs.directions[first[5]], unit, rtol=0, atol=1e-7)
    assert counts(programs) == (0, 2, 3)
    programs.release((one, other, bare))
    assert counts(programs) == (0, 0, 0)


def test_a_reading_names_the_three_readings_behind_it() -> None:
    programs = make()
    scattered = (along(A), along(B), along(C))  # so that the steps do not follow each other
    acquire(programs, scattered)
    acquire(programs, (along(A, B),))
    programs.release(scattered)
    readings = tuple(
        Step(
            Kind.READ,
            direction=((A, 0),),
            last=False,
            reading=Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, column),
        )
        for column in range(5)
    )
    first = -acquire(programs, (along(A), *readings))
    programs.flush()
    steps = [first]
    while following := int(programs.ints[steps[-1], 2]):
        steps.append(following)
    assert programs.ints[first, [3, 6]].tolist() == [1, 0]  # measured; writes nothing else
    behind = [*steps, 0, 0, 0]
    for at in range(1, len(steps)):
        assert programs.ints[steps[at], [2, 3, 6]].tolist() == behind[at + 1 : at + 4]
    assert len(steps) == 6


def test_where_the_written_direction_cannot_be_made_nothing_is_taken() -> None:
    programs = make(directions=1)
    writing = along(A)._replace(write=((B, 0),))
    with pytest.raises(BankError, match="every direction is in use"):
        acquire(programs, (writing,))
    with pytest.raises(BankError, match="is not in the worker"):
        acquire(programs, (along(A)._replace(write=((b"?", 0),)),))
    assert counts(programs) == (0, 0, 0)


def test_equal_programs_are_one_until_the_last_use_ends() -> None:
    programs = make()
    program = (along(A), row(B))
    code = acquire(programs, program)
    assert acquire(programs, program) == code
    assert counts(programs) == (1, 1, 2)
    programs.release(program)
    assert counts(programs) == (1, 1, 2)
    programs.release(program)
    assert counts(programs) == (0, 0, 0)


def test_programs_share_rows_and_directions_but_not_steps() -> None:
    programs = make()
    many: list[Program] = [(along(A), row(B)), (row(B), along(A)), (row(B),)]
    codes = [acquire(programs, program) for program in many]
    assert len(set(codes)) == 3
    assert counts(programs) == (1, 1, 4)
    for program, left in zip(many, [(1, 1, 2), (1, 0, 0), (0, 0, 0)], strict=True):
        programs.release(program)
        assert counts(programs) == left


def test_a_sum_of_zeros_in_a_chain_is_row_zero_and_is_counted_as_nothing() -> None:
    programs = make(rows=2)
    zero = Step(Kind.ADD, addends=((A, 0, -1.0), (A, 0, 1.0)))
    acquire(programs, (row(B),))
    code = acquire(programs, (along(A), zero, along(B), zero))
    programs.flush()
    assert [ints[1] for ints, _ in chain(programs, code)][1::2] == [0, 0]
    assert not programs.rows[0].any()
    assert counts(programs) == (1, 2, 4)
    programs.release((along(A), zero, along(B), zero))
    assert counts(programs) == (1, 0, 0)


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (make(rows=1), "every row of the bank is in use"),
        (make(directions=1), "every direction is in use"),
        (make(steps=3), "every step is in use"),
    ],
)
def test_where_room_is_short_nothing_is_taken(programs: Programs, message: str) -> None:
    with pytest.raises(BankError, match=f"^{message}$"):
        acquire(programs, (row(A), along(A), row(B), along(B)))
    assert counts(programs) == (0, 0, 0)
    assert acquire(programs, (row(A), along(A))) < 0


@pytest.mark.parametrize("step", [row(b"?"), along(b"?"), along(A, A), row(A, 1e39)])
def test_a_chain_that_cannot_be_made_to_its_end_takes_nothing(step: Step) -> None:
    programs = make()
    held = (row(A), along(B))
    acquire(programs, held)
    before = counts(programs)
    with pytest.raises(BankError):
        acquire(programs, (row(A), row(C), along(B), along(C), step))
    assert counts(programs) == before
    programs.release(held)
    assert counts(programs) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_directions_are_float32_whatever_the_stream_is(dtype: torch.dtype) -> None:
    programs = make(dtype=dtype)
    code = acquire(programs, (along(A), row(A)))
    programs.flush()
    (_, number, *_), (_, added, *_) = (ints for ints, _ in chain(programs, code))
    unit = VECTORS[A][0].astype(np.float64) / np.linalg.norm(VECTORS[A][0].astype(np.float64))
    assert torch.equal(programs.directions[number], torch.from_numpy(unit).float())
    assert torch.equal(programs.rows[added], torch.from_numpy(VECTORS[A][0]).to(dtype))


@pytest.mark.parametrize("kind", [Kind.REPLACE, Kind.ADD_LAST])
def test_a_step_that_acts_last_has_a_row_and_may_have_a_mask(kind: Kind) -> None:
    programs = make()
    whole = Step(kind, ((A, 0, 1.0),), strength=0.5)
    masked = whole._replace(mask=((B, 0, 1.0),))
    code = acquire(programs, (whole, masked))
    programs.flush()
    (first, floats), (second, _) = chain(programs, code)
    assert (first[0], first[3], floats[2]) == (kind, 0, 0.5)
    assert first[1] == second[1]
    assert programs.rows[second[1]].tolist() == VECTORS[A][0].tolist()
    assert programs.rows[second[3]].tolist() == VECTORS[B][0].tolist()
    assert counts(programs) == (2, 0, 2)
    programs.release((whole, masked))
    assert counts(programs) == (0, 0, 0)


def test_a_mask_of_zeros_is_refused_because_row_zero_means_no_mask() -> None:
    programs = make()
    masked = Step(Kind.REPLACE, ((A, 0, 1.0),), strength=1.0, mask=((B, 0, 0.0),))
    with pytest.raises(BankError, match="a mask is zero"):
        acquire(programs, (masked,))
    assert counts(programs) == (0, 0, 0)


def test_programs_are_made_together_or_not_at_all() -> None:
    programs = make()
    many: list[Program] = [(row(A),), (along(A), row(B)), (row(A),)]
    codes = programs.acquire(many, VECTORS)
    assert codes[0] == codes[2]
    before = counts(programs)
    with pytest.raises(BankError, match="is not in the worker"):
        programs.acquire([(row(C),), *many, (along(B), row(B), along(b"?"))], VECTORS)
    assert counts(programs) == before == (2, 1, 2)
    for program in many:
        programs.release(program)
    assert counts(programs) == (0, 0, 0)


LAST = float(np.finfo(np.float32).max)


@given(st.floats(LAST, LAST * (1 + 2**-23)) | st.floats(allow_infinity=True, allow_nan=True))
def test_what_a_step_is_told_is_finite_in_float32_or_refused(value: float) -> None:
    told = torch.tensor(value)
    steps = {
        Step(Kind.PULL, (), ((A, 0),), low=value): told < math.inf,
        Step(Kind.PULL, (), ((A, 0),), high=value): told > -math.inf,
        Step(Kind.PULL, (), ((A, 0),), strength=value): told.isfinite(),
    }
    for step, usable in steps.items():
        programs = make()
        if usable:
            acquire(programs, (step,))
        else:
            with pytest.raises(BankError, match="is not finite in float32"):
                acquire(programs, (step,))


VECTOR = st.lists(st.floats(-1, 1, width=32), min_size=5, max_size=5)


@given(st.lists(VECTOR, min_size=1, max_size=5), st.sampled_from([1e-30, 1.0, 1e30]))
def test_directions_are_unit_vectors_orthogonal_to_those_before_or_refused(
    rows: list[list[float]], size: float
) -> None:
    vectors = {A: (np.array(rows, np.float64) * size).astype(np.float32)}
    key: Direction = tuple((A, number) for number in range(len(rows)))
    made: list[np.ndarray] = []
    basis = Basis(vectors, 5)
    for count in range(1, len(rows) + 1):
        spanned = vectors[A][:count].astype(np.float64)
        try:
            unit = basis.unit_of(key[:count]).astype(np.float64)
        except BankError:
            scaled = spanned / np.maximum(np.linalg.norm(spanned, axis=1, keepdims=True), 1e-300)
            assert np.linalg.svd(scaled, compute_uv=False).min() < 1e-5
            return
        assert abs(np.linalg.norm(unit) - 1) < 1e-6
        assert all(abs(unit @ other) < 1e-6 for other in made)
        assert unit @ spanned[-1] > 0
        alone = Basis(vectors, 5).unit_of(key[:count])
        np.testing.assert_array_equal(unit.astype(np.float32), alone)
        made.append(unit)


class Counting(dict[bytes, np.ndarray]):
    """Vectors that count their lookups."""

    lookups = 0

    def get(self, key, default=None):
        self.lookups += 1
        return super().get(key, default)


def test_the_directions_of_a_subspace_are_made_orthogonal_once() -> None:
    rng = np.random.default_rng(0)
    vectors = Counting({A: rng.normal(size=(16, 32)).astype(np.float32)})
    parts = [(A, number) for number in range(16)]
    program = tuple(
        Step(Kind.PULL, (), tuple(parts[: number + 1]), last=number == 15) for number in range(16)
    )
    room = capacity(directions=16, steps=16)
    programs = Programs(room, width=32, dtype=torch.float32, device=CPU)
    programs.acquire([program], vectors)
    assert vectors.lookups == 16
    assert programs.directions_used == 16


def test_a_basis_follows_from_one_subspace_to_another() -> None:
    rng = np.random.default_rng(1)
    vectors = {A: rng.normal(size=(6, 32)).astype(np.float32)}
    basis = Basis(vectors, 32)
    for rows in ([0], [0, 1, 2], [0, 3], [3], [0, 1, 2, 4, 5], [0, 1]):
        key = tuple((A, row) for row in rows)
        made = basis.unit_of(key)
        np.testing.assert_array_equal(made, Basis(vectors, 32).unit_of(key))
        expected = units([vectors[A][row].astype(np.float64) for row in rows], orthogonal=True)[-1]
        np.testing.assert_allclose(made, expected, rtol=0, atol=1e-6)


def test_a_direction_of_its_own_may_be_small_beside_the_vector() -> None:
    nearly = VECTORS[A][0] * 3
    nearly[0] *= 1 + 1e-4
    vectors = {A: VECTORS[A][:1], B: nearly[None]}
    unit = Basis(vectors, WIDTH).unit_of(((A, 0), (B, 0))).astype(np.float64)
    first = VECTORS[A][0].astype(np.float64)
    assert abs(unit @ first) / np.linalg.norm(first) < 1e-7
    assert unit @ nearly > 0
