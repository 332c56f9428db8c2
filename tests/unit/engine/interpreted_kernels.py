"""The Triton kernels, interpreted on CPU, beside their plain twins; run by test_kernels.py."""

import math
import sys
from collections.abc import Iterable, Sequence
from itertools import cycle, product
from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from rheostat_engine import Kind
from rheostat_engine.plan.gains import MAX_GAINS
from rheostat_engine.plan.gate_table import Held, State, gate_rows
from rheostat_engine.plan.gates import (
    MAX_GATES,
    MAX_TERMS,
    NEVER,
    Activation,
    Combine,
    Form,
    Gate,
    GateCondition,
    Hold,
    Normalise,
    Pool,
    Readout,
)
from rheostat_engine.sites.kernels import launch_site, warm_up
from rheostat_engine.sites.reference import run_site
from rheostat_engine.worker.expand_kernel import launch_expand
from rheostat_engine.worker.expander import Expander
from rheostat_engine.worker.instructions import COLUMNS, Instructions, expand_reference
from rheostat_engine.worker.state.buffers import Buffers, SiteBuffers
from rheostat_engine.worker.steering import gate_kernels
from rheostat_engine.worker.steering.gate_kernels import launch_fold
from rheostat_engine.worker.steering.gate_reference import fold_step
from rheostat_engine.worker.steering.programs import FLOATS, INTS, ROW_UNIT
from rheostat_engine.worker.steering.token_rules import TokenRules

from .fast_interpreter import SCAN, interpret_faster, scan_all_rows
from .gate_chunks import any_gate, chunk_differences, reading_differences, twin
from .instructions import MASK, Step, buffers, chains, huge_chains, reading_kind
from .no_gates import no_gates
from .row_means import mean_differences
from .strategies import packed_ids

CPU = torch.device("cpu")
SITES = 5
VOCABULARY = 50
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Up to the order of float32 sums; the interpreter truncates to bfloat16."""


def tensors(site: SiteBuffers) -> list[torch.Tensor]:
    """All buffers of a site, those of gates included."""
    return [*site._replace(gates=no_gates(1))[:-3], *site.gates, *site[-2:]]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether signs of zeros are equal too."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class Parts(NamedTuple):
    """The parts of a stream that enter a site."""

    h: torch.Tensor
    residual: torch.Tensor | None

    @classmethod
    def of(cls, h: torch.Tensor, residual: torch.Tensor | None) -> "Parts":
        """Copies of both."""
        return cls(h.clone(), None if residual is None else residual.clone())

    def assert_close(self, other: "Parts", *, rtol: float, atol: float) -> None:
        """Compares the parts with those of another implementation."""
        torch.testing.assert_close(self.h, other.h, rtol=rtol, atol=atol)
        torch.testing.assert_close(self.residual, other.residual, rtol=rtol, atol=atol)


def noise(tokens: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Something that enters a site."""
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_additions(
    width: int, dtype: torch.dtype, residual: torch.dtype | None, gain: float = 1.0
) -> None:
    """Rows are added and copied bit for bit."""
    codes = [0, 3, 0, 4, 1, 0, 2, 2, 0]
    captured = [0, 0, 4, 7, 0, 1, 2, 0, 9]
    site = buffers(width, dtype=dtype, codes=codes, captured=captured, programs=[])
    other = twin(site)
    h = noise(len(codes), width, dtype, 1)
    rest = None if residual is None else noise(len(codes), width, residual, 2)
    ones, others = h.clone(), h.clone()
    launch_site(ones, rest, site, gain)
    run_site(others, rest, other, gain)
    assert same_bits(ones, others)
    assert same_bits(site.ring, other.ring)
    torch.testing.assert_close(site.doses, other.doses, rtol=1e-5, atol=1e-6)
    assert not torch.equal(ones, h)
    assert site.doses[:, 0].sum() == 5


def check_multiplied(width: int, dtype: torch.dtype, residual: torch.dtype | None) -> None:
    """Codes that add a row with a gate or a gain give the bits that chains of one step give."""
    numbers = [1, MAX_GATES, MAX_GATES + 1, MAX_GATES + MAX_GAINS]
    codes = [0, *(row + ROW_UNIT * number for row in (1, 3, 0) for number in numbers), 2]
    chained = [
        [Step(Kind.ADD, row, column=gate, gain=gain)]
        for row in (1, 3, 0)
        for gate, gain in ((1, 0), (MAX_GATES, 0), (0, 1), (0, MAX_GAINS))
    ]
    captured = [1 + n % 11 for n in range(len(codes))]
    h = noise(len(codes), width, dtype, 1)
    rest = None if residual is None else noise(len(codes), width, residual, 2)
    for most in (3.0, 1.0, 0.0):
        site = buffers(width, dtype=dtype, codes=codes, captured=captured, programs=[])
        chain_codes = [0, *range(-1, -len(chained) - 1, -1), 2]
        chain = buffers(width, dtype=dtype, codes=chain_codes, captured=captured, programs=chained)
        for gates in (site.gates, chain.gates):
            generator = torch.Generator().manual_seed(5)
            gates.openness.uniform_(0, 1, generator=generator)
            gates.gains.uniform_(0, 1, generator=generator)
            for factors in (gates.openness, gates.gains):
                factors.mul_(most) if most == 3 else factors.fill_(most)
        other = twin(site)
        ones, others, chains_of_one = h.clone(), h.clone(), h.clone()
        launch_site(ones, rest, site)
        run_site(others, rest, other)
        launch_site(chains_of_one, rest, chain)
        assert same_bits(ones, others)
        assert same_bits(ones, chains_of_one)
        assert same_bits(site.ring, other.ring)
        torch.testing.assert_close(site.doses, other.doses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(site.doses, chain.doses, rtol=1e-5, atol=1e-6)
        if most == 0:
            assert same_bits(ones[:-1], h[:-1])
            assert site.doses[:, 0].sum() == 1


def check_chains(
    width: int, dtype: torch.dtype, residual: torch.dtype | None, gain: float = 1.0
) -> None:
    """Every kind of step, alone and in chains, with rows copied after."""
    programs = chains()
    codes = [0, *range(-len(programs), 0), 2]
    captured = [1 + n % 11 if n % 2 else 0 for n in range(len(codes))]
    site = buffers(width, dtype=dtype, codes=codes, captured=captured, programs=programs)
    other = twin(site)
    h = 3 * noise(len(codes), width, dtype, 3)
    rest = None if residual is None else noise(len(codes), width, residual, 4)
    ones, others = Parts.of(h, rest), Parts.of(h, rest)
    launch_site(*ones, site, gain)
    run_site(*others, other, gain)
    rtol, atol = TOLERANCE[dtype], 10 * TOLERANCE[dtype]
    ones.assert_close(others, rtol=rtol, atol=atol)
    torch.testing.assert_close(site.ring, other.ring, rtol=rtol, atol=atol)
    # Replacements measure the rounded stream.
    torch.testing.assert_close(site.doses, other.doses, rtol=max(1e-4, rtol), atol=1e-5)
    assert same_bits(ones.h[0], h[0])
    assert int(site.doses[:, 0].sum()) == 1 + sum(one.last for chain in programs for one in chain)


def check_replacements(width: int, dtype: torch.dtype, residual: torch.dtype | None) -> None:
    """Whole rows are replaced, or added last, bit for bit, and rows by themselves not at all."""
    programs = [
        [Step(Kind.REPLACE, 1)],
        [Step(Kind.ADD, 2), Step(Kind.REPLACE, 3)],
        [Step(Kind.ADD, 2), Step(Kind.ADD_LAST, 3), Step(Kind.ADD_LAST, 4)],
    ]
    codes, captured = [-1, -2, 0, -3], [1, 2, 3, 4]
    site = buffers(width, dtype=dtype, codes=codes, captured=captured, programs=programs)
    h = noise(4, width, dtype, 1)
    rest = None if residual is None else noise(4, width, residual, 2)
    own = h[0].float() if rest is None else h[0].float() + rest[0].float()
    site.rows[1] = own.to(dtype)
    other, ones, others = twin(site), Parts.of(h, rest), Parts.of(h, rest)
    launch_site(*ones, site)
    run_site(*others, other)
    for one, twin_part, before in zip(ones, others, (h, rest), strict=True):
        if one is not None and twin_part is not None and before is not None:
            assert same_bits(one, twin_part)
            assert same_bits(one[[0, 2]], before[[0, 2]])
    assert same_bits(site.ring, other.ring)
    assert torch.equal(site.ring[2], site.rows[3])


def check_huge(dtype: torch.dtype, residual: torch.dtype | None, gain: float = 1.0) -> None:
    """What would be infinite is limited alike, and nothing becomes NaN."""
    programs = huge_chains()
    codes = [0, *range(-len(programs), 0), 1]
    captured = [*range(1, len(codes) + 1)]
    site = buffers(12, dtype=dtype, codes=codes, captured=captured, programs=programs)
    site.rows[1] = torch.finfo(dtype).max
    site.directions[1, 3:] = 0.0
    other = twin(site)
    h = noise(len(codes), 12, dtype, 8)
    rest = None if residual is None else 2e4 * noise(len(codes), 12, residual, 9)
    h[:, 7] = 2.5e4  # beyond the limit of float16 where the residual part is of the same sign
    ones, others = Parts.of(h, rest), Parts.of(h, rest)
    launch_site(*ones, site, gain)
    run_site(*others, other, gain)
    assert ones.h.isfinite().all()
    rtol, atol = 2 * TOLERANCE[dtype], 2e4 * TOLERANCE[dtype]
    ones.assert_close(others, rtol=rtol, atol=atol)
    torch.testing.assert_close(site.ring, other.ring, rtol=rtol, atol=2 * atol)
    assert same_bits(ones.h[0], h[0])


def check_not_finite(dtype: torch.dtype) -> None:
    """Elements that were not finite stay as they were."""
    site = buffers(12, dtype=dtype, codes=[1, -1], captured=[0, 0], programs=huge_chains()[:1])
    h = noise(2, 12, dtype, 8)
    h[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    h[1] = math.inf
    ones, others = h.clone(), h.clone()
    launch_site(ones, None, site)
    run_site(others, None, twin(site))
    torch.testing.assert_close(ones, others, rtol=TOLERANCE[dtype], atol=1e-2, equal_nan=True)
    assert same_bits(ones[1], h[1])
    assert same_bits(ones[0, :3], h[0, :3])


def check_narrow(width: int, dtype: torch.dtype, ring: torch.dtype) -> None:
    """Rows that are narrower than the ring's fill their first columns."""
    captured = [0, 3, 1, 0, 7]
    none = [0] * len(captured)
    site = buffers(24, dtype=ring, codes=none, captured=captured, programs=[])
    other = twin(site)
    h = noise(len(captured), width, dtype, 1)
    before = h.clone()
    launch_site(h, None, site)
    run_site(h, None, other)
    assert same_bits(h, before)
    assert same_bits(site.ring, other.ring)
    assert torch.equal(site.ring[[3, 1, 7], :width], h[[1, 2, 4]].to(ring))
    assert not site.doses.any()


IDLE = [
    [Step(Kind.ADD, 0)],
    [Step(Kind.PULL, 1, strength=0.0)],
    [Step(Kind.NORM_ADD, 1, strength=0.0)],
    [Step(Kind.PULL, 1, -1e6, 1e6)],
    [Step(Kind.PULL, 1, -1e6, math.inf)],
    [Step(Kind.PULL, 1, -math.inf, 1e6)],
]


def check_idle(dtype: torch.dtype, residual: torch.dtype | None) -> None:
    """What changes nothing changes no bit."""
    programs = [*IDLE, [one for chain in IDLE for one in chain]]
    codes = [*range(-len(programs), 0), 0]
    none = [0] * len(codes)
    site = buffers(13, dtype=dtype, codes=codes, captured=none, programs=programs)
    h = noise(len(codes), 13, dtype, 5)
    h[:, 3:6] = torch.tensor([0.0, -0.0, -1e-7]).to(dtype)
    h[2] = -0.0
    before = h.clone()
    launch_site(h, None if residual is None else noise(len(codes), 13, residual, 6), site)
    assert same_bits(h, before)
    assert not site.ring.any()
    added = sum(one.kind is Kind.ADD for chain in programs for one in chain)
    assert site.doses[:, 1].sum() == added  # a factor of 1, for rows of zeros


def some_gates() -> list[Gate]:
    """Gates of every form and hold, on columns 0 to 2, and late ones of every hold."""
    pools, combines = cycle(Pool), cycle(Combine)
    found = []
    for n, (hold, form) in enumerate(product(Hold, Form)):
        combine = next(combines)
        bounds = (-math.inf, math.inf) if combine is Combine.SUM else (0.1, math.inf)
        decided_at = 12 if n % 2 else NEVER
        conditions = (
            GateCondition((0, 2), next(pools), combine, *bounds, 1 + n % 2, decided_at),
            GateCondition((1,), next(pools), Combine.ANY, -0.5, 0.8, 1, NEVER, -1.0, 1.5),
        )[: 1 + n % 3 % 2]
        found.append(Gate(conditions, next(combines), form, 0.2, 1.1, hold, 2, n % 4 == 3))
    for n, (hold, decided_at) in enumerate(product(list(Hold)[1:], (2, 12))):
        once = GateCondition((0, 1), next(pools), Combine.ANY, -0.5, math.inf, 1, decided_at, -1.0)
        found.append(
            Gate((once,), Combine.ALL, Form.RAMP, 0.0, 2.0, hold, 1, n % 3 == 2, decided_at + 1)
        )
    for n, (hold, late) in enumerate(product(list(Hold)[1:], (3, 11))):
        anew = GateCondition((0, 1), next(pools), Combine.ANY, -0.5, math.inf, 1, NEVER, -1.0)
        found.append(Gate((anew,), Combine.ALL, Form.STEP, 0.5, 0.0, hold, 1, n % 3 == 2, late, 13))
    return found


GATED = 5
"""Tokens of the first sample; the second has two, and the last token has no gates."""


def gated_buffers(
    width: int, dtype: torch.dtype, gate: Gate, readouts: Sequence[Readout]
) -> SiteBuffers:
    """Two samples, each in the middle, with numbers that were read in this step."""
    opening = Step(Kind.GATE, 0, last=False, column=1)
    steps = [
        Step(Kind.ADD, 3, column=1),
        Step(Kind.NORM_ADD, 2, strength=0.5, column=1, gain=2),
        Step(Kind.PULL, 2, -0.5, 0.25, 0.75, column=1),
        Step(Kind.PULL, 1),
        Step(Kind.REPLACE, 2, strength=0.5, mask=MASK, column=1, gain=1),
        Step(Kind.ADD_LAST, 1, strength=0.5, column=1),
    ]
    readings = [
        Step(
            reading_kind(readout.normalise),
            1,
            last=False,
            mask=readout.normalise | readout.activation << 4,
            column=11 + n,
            bias=0.5,
            theta=0.25,
            factor=2.0,
        )
        for n, readout in enumerate(readouts)
    ]
    readings.sort(key=lambda one: -one.kind)
    programs = [[opening, *steps, *readings], [*readings], [Step(Kind.ADD, 1), *readings[:2]]]
    codes = [-1] * (GATED + 2) + [-3]
    codes[1] = -2
    site = buffers(width, dtype=dtype, codes=codes, captured=[0] * len(codes), programs=programs)
    generator = torch.Generator().manual_seed(11)
    gates = site.gates
    gates.gains[:, :2] = torch.rand(len(codes), 2, generator=generator)
    gates.readings[:, :3] = torch.randn(len(codes), 3, generator=generator)
    gates.readings[[0, 3, 6], [0, 1, 2]] = torch.nan
    gates.tokens[:] = torch.tensor(
        [
            [4, 4, 4, 4, 4, 6, 6, 0],
            [0, 0, 0, 0, 0, 5, 5, 7],
            [9, 10, 11, 12, 13, 3, 4, 8],
            [0] * 8,
        ]
    ).T
    ints, floats = gate_rows(gate)
    gates.ints[1], gates.floats[1] = torch.from_numpy(ints), torch.from_numpy(floats)
    gates.states[6, State.VALUE] = torch.randn(MAX_TERMS, generator=generator)
    gates.states[6, State.COUNT] = 2
    gates.states[6, State.RUN] = 1
    gates.states[6, State.HEAD, :4] = torch.tensor([0.5, 3.0, 3.0, 1.0])  # held up to 3
    gates.states[4, State.HEAD, :4] = torch.tensor([1.0, 12.0, 12.0, 4.0])  # computed up to 12
    gates.states[[4, 6], State.HEAD, Held.GATE] = 1
    gates.states.view(torch.int32)[8, 0, 0] = 0b10000001  # open at a position of its record
    return site


def check_gates(
    width: int, dtype: torch.dtype, gate: Gate, readouts: Sequence[Readout]
) -> torch.Tensor:
    """Steps with a gate and steps that read; then the step's readings enter the states.

    Returns:
        How far the gate was open.
    """
    site = gated_buffers(width, dtype, gate, readouts)
    h = noise(len(site.code), width, dtype, 3)
    other, ones, others = twin(site), h.clone(), h.clone()
    launch_site(ones, None, site)
    run_site(others, None, other)
    rtol = TOLERANCE[dtype]
    torch.testing.assert_close(ones, others, rtol=rtol, atol=10 * rtol)
    torch.testing.assert_close(site.doses, other.doses, rtol=max(1e-4, rtol), atol=1e-5)
    folds = torch.tensor([[4, 1, 0, 0, GATED, 9, 0], [6, 1, 0, GATED, 2, 3, 0]], dtype=torch.int32)
    launch_fold(site.gates, folds.clone())
    fold_step(other.gates, folds)
    for one, two in zip(site.gates, other.gates, strict=True):
        torch.testing.assert_close(one, two, rtol=rtol, atol=10 * rtol, equal_nan=True)
    return site.gates.openness[: GATED + 2, 0]


def check_chunks() -> None:
    """Steps with many tokens of a prompt, and those behind them, under gates of all kinds."""
    rng, scans = np.random.default_rng(5), (SCAN, scan_all_rows)
    for seed in range(24):
        interpreter.ScanOps.generic_scan = scans[seed > 2]
        # Few rows at once, because the interpreter takes long for many.
        gate_kernels._ROWS = tl.constexpr((4, 8)[seed % 2])
        tokens = 3 + 7 * (seed % 4)
        gate = any_gate(rng, tokens)
        found = chunk_differences(gate, seed, tokens, programs=4)
        assert max(found.values()) < 1e-5, (found, gate)
    gate_kernels._ROWS = tl.constexpr(256)


def check_gains(width: int, dtype: torch.dtype, residual: torch.dtype | None) -> None:
    """Steps with gains, one of them the last that there is; gains of 1 and 0 to the bit."""
    gained = [
        [one._replace(gain=1 if one.kind is Kind.ADD else MAX_GAINS) for one in chain]
        for chain in chains()
    ]
    codes = [0, *range(-len(gained), 0)]
    captured = [1 + n % 11 for n in range(len(codes))]
    h = 3 * noise(len(codes), width, dtype, 3)
    rest = None if residual is None else noise(len(codes), width, residual, 4)
    for gains in (None, 1.0, 0.0):
        site = buffers(width, dtype=dtype, codes=codes, captured=captured, programs=gained)
        if gains is None:
            site.gates.gains.uniform_(0, 3, generator=torch.Generator().manual_seed(5))
        else:
            site.gates.gains.fill_(gains)
        other = twin(site)
        ones, others = Parts.of(h, rest), Parts.of(h, rest)
        launch_site(*ones, site)
        run_site(*others, other)
        rtol, atol = TOLERANCE[dtype], 30 * TOLERANCE[dtype]
        ones.assert_close(others, rtol=rtol, atol=atol)
        torch.testing.assert_close(site.ring, other.ring, rtol=rtol, atol=atol)
        torch.testing.assert_close(site.doses, other.doses, rtol=max(1e-4, rtol), atol=1e-4)
        if gains == 0:
            assert same_bits(ones.h, h)
            assert not site.doses.any()
        if gains == 1:
            plain = buffers(width, dtype=dtype, codes=codes, captured=captured, programs=chains())
            expected = Parts.of(h, rest)
            launch_site(*expected, plain)
            assert same_bits(ones.h, expected.h)
            assert same_bits(site.ring, plain.ring)


def all_buffers(tokens: int) -> Buffers:
    """Buffers, each filled with something."""
    generator = torch.Generator().manual_seed(7)
    return Buffers(
        tokens=tokens,
        rows=torch.randn(4, 24, generator=generator),
        directions=torch.randn(3, 24, generator=generator),
        ints=torch.zeros(2, INTS, dtype=torch.int32),
        floats=torch.zeros(2, FLOATS),
        gates=no_gates(tokens),
        doses=torch.zeros(SITES, 20, 4),
        ring=torch.randn(6, 24, generator=generator),
    )


def check_expand(*, captures: bool, rules: bool) -> None:
    """One step's instructions, more than a block of tokens long."""
    rng = np.random.default_rng(0)
    count = 200

    def each(top: int) -> np.ndarray:
        return rng.integers(0, top, count).astype(np.int32)

    table = TokenRules(3, 8, VOCABULARY, CPU)
    for sets in (((1, 4), (2, 3, 4)), ((0,),), ((7,), (8,), (9,), tuple(range(5, 30)))):
        table.acquire(tuple(map(packed_ids, sets)))
    dose_slots = rng.integers(0, 99, 32).astype(np.int32)
    table.add_variants(each(6)[:32].reshape(2, 16), dose_slots.reshape(2, 16))
    starts = rng.integers(1, 900, (3, SITES)) * rng.integers(0, 2, (3, SITES))
    rule = each(4) if rules else np.zeros(count, np.int32)
    base = starts.astype(np.int32) if captures else None
    columns = np.stack([each(6), each(99), rule, each(4), each(50)])
    code_of = torch.from_numpy(rng.integers(-100, 100, (SITES, 6)).astype(np.int32))
    names = np.where(rule > 0, rng.integers(0, VOCABULARY, count), 10**9)
    ids = torch.from_numpy(names.astype(np.int32))
    ones, others = all_buffers(256), all_buffers(256)
    for made in (ones, others):
        made.code[:], made.cap_row[:], made.dose_slot[:] = -1, -1, -1
    expander = Expander(ones, code_of, table, 256)
    step: Instructions = expander.instructions(columns, base, 700, ids)
    assert (step.ids is not None) == rules
    launch_expand(step, ones)
    expand_reference(step, others)
    for name in ("code", "cap_row", "dose_slot"):
        assert torch.equal(getattr(ones, name), getattr(others, name)), name
    assert bool((ones.cap_row > 0).any()) == captures
    assert bool((ones.code[:, count:] == -1).all())


def check_warm_up() -> None:
    """Warming up changes nothing that a step could see."""
    made, before = all_buffers(16), all_buffers(16)
    code_of = torch.zeros(SITES, 8, dtype=torch.int32)
    expander = Expander(made, code_of, TokenRules(1, 8, VOCABULARY, CPU), 16)
    none = np.zeros((COLUMNS, 1), np.int32)
    warm_up(made, expander.instructions(none, None, 0, torch.zeros(0)))
    for site in range(SITES):
        for one, other in zip(tensors(made.of(site)), tensors(before.of(site)), strict=True):
            assert same_bits(one, other)


EXACT = (torch.float32, torch.float16)  # the interpreter truncates to bfloat16


def streams(dtypes: Iterable[torch.dtype]) -> list[tuple[torch.dtype, torch.dtype | None]]:
    """Every dtype of a stream, with no residual part, one of the same dtype, and one in float32."""
    found = [(dtype, other) for dtype in dtypes for other in (None, dtype, torch.float32)]
    return list(dict.fromkeys(found))


def check_codes() -> None:
    """Rows that are added by their codes and copied; rows of gains; instructions of a step."""
    for width in (1500, 48, 7):
        for stream in streams(EXACT):
            check_additions(width, *stream)
        for dtype in EXACT:
            check_additions(width, dtype, None, 0.25)
    for width in (4, 24, 9):
        check_narrow(width, torch.float32, torch.float32)
        check_narrow(width, torch.float32, torch.float16)
    for width, dtype in ((48, torch.float32), (7, torch.float16)):
        for residual in (None, torch.float32):
            check_multiplied(width, dtype, residual)
    for stream in streams(EXACT):
        check_gains(24, *stream)
    for captures, rules in product([False, True], repeat=2):
        check_expand(captures=captures, rules=rules)
    check_warm_up()


def check_programs() -> None:
    """Chains of steps, replaced rows, and numbers that are huge or not finite."""
    widths = (300, 64, 5)
    for n, stream in enumerate(streams(TOLERANCE)):
        # Two of the widths for each, so that every width meets every dtype and every residual part.
        for width in (widths[n % 3], widths[(n + 1) % 3]):
            check_chains(width, *stream)
    for width, dtype in zip(widths, TOLERANCE, strict=True):
        check_chains(width, dtype, None, -0.22)
    for width, stream in product([300, 5], streams(EXACT)):
        check_replacements(width, *stream)
    for stream in streams(TOLERANCE):
        check_idle(*stream)
        check_huge(*stream)
    for dtype in TOLERANCE:
        for gain in (0.22, -4.0):
            check_huge(dtype, None, gain)
        check_not_finite(dtype)


def check_all_gates() -> None:
    """Gates of every form, and readings of every kind."""
    readouts = [Readout(*kinds) for kinds in product(Normalise, Activation)]
    pairs = cycle(zip(readouts, readouts[5:] + readouts[:5], strict=True))
    gate_kernels._ROWS = tl.constexpr(8)  # see check_chunks
    interpreter.ScanOps.generic_scan = scan_all_rows
    opened = torch.cat([check_gates(24, torch.float32, gate, next(pairs)) for gate in some_gates()])
    assert ((opened > 0) & (opened < 1)).sum() > 5
    assert (opened == 0).sum() > 5
    assert (opened == 1).sum() > 5
    gate_kernels._ROWS = tl.constexpr(256)
    check_gates(300, torch.float16, some_gates()[1], readouts)
    for residual, gain in product((None, torch.float32), (1.0, 0.5)):
        assert reading_differences(300, torch.float32, residual, gain) < 1e-5
        assert mean_differences(300, torch.float32, residual, gain) < 1e-5


PARTS = {
    "codes": check_codes,
    "programs": check_programs,
    "gates": check_all_gates,
    "chunks": check_chunks,
}
"""Parts of the check that take about as long as each other."""


def main(part: str) -> None:
    """Checks every variant of one part."""
    interpret_faster()
    PARTS[part]()
    sys.stdout.write("kernels equal their twins\n")


if __name__ == "__main__":
    main(sys.argv[1])
