"""Steps with gates and readings, run by the kernels and by the references; also on a GPU."""

import math
from itertools import product

import numpy as np
import torch

from rheostat_engine import Kind
from rheostat_engine.plan.gate_table import Held, State, gate_rows
from rheostat_engine.plan.gates import (
    NEVER,
    Activation,
    Combine,
    Form,
    Gate,
    GateCondition,
    Hold,
    Normalise,
    Pool,
)
from rheostat_engine.sites.kernels import launch_site
from rheostat_engine.sites.reference import run_site
from rheostat_engine.worker.state.buffers import GateBuffers, SiteBuffers
from rheostat_engine.worker.steering.gate_kernels import launch_fold
from rheostat_engine.worker.steering.gate_reference import fold_step

from .instructions import Step, buffers, reading_kind

COLUMNS = 3
"""Columns from which `any_gate` reads."""

BEGINS = 10
"""The first position of the samples of `chunk_differences`."""


def twin(site: SiteBuffers, device: str = "cpu") -> SiteBuffers:
    """Equal buffers, apart."""
    gates = GateBuffers(*(one.to(device, copy=True) for one in site.gates))
    tensors = site._replace(gates=None)._asdict()  # type: ignore[arg-type]  # replaced below
    copies = {name: one.to(device, copy=True) for name, one in tensors.items() if one is not None}
    return SiteBuffers(**copies, gates=gates)


def any_gate(rng: np.random.Generator, tokens: int) -> Gate:
    """Any gate for a sample of which `chunk_differences` computes so many tokens at once."""
    hold, decision = Hold(rng.integers(len(Hold))), BEGINS + int(rng.integers(tokens + 2))
    late = hold is not Hold.TOKEN and rng.uniform() < 0.4
    recorded = late and rng.uniform() < 0.5
    simple = rng.uniform() < 0.3
    conditions = []
    for _ in range(rng.integers(1, 4)):
        columns = rng.choice(COLUMNS, rng.integers(1, 1 + COLUMNS), replace=False).tolist()
        combine = Combine(rng.integers(len(Combine)))
        above, below = [(-0.2, math.inf), (-math.inf, 0.4), (-0.8, 0.9)][rng.integers(3)]
        summed, lags = combine is Combine.SUM, not simple and rng.uniform() < 0.5
        condition = GateCondition(
            tuple(columns),
            Pool.LAST if simple else Pool(rng.integers(len(Pool))),
            combine,
            -math.inf if summed else above,
            math.inf if summed else below,
            1 if summed or simple else int(rng.integers(1, 5)),
            NEVER if recorded or (not late and (simple or rng.uniform() < 0.7)) else decision,
            above - 0.4 if lags and not summed else None,
            below + 0.4 if lags and not summed else None,
        )
        conditions.append(condition)
    form, invert = Form(rng.integers(len(Form))), bool(rng.uniform() < 0.2)
    form = Form.STEP if recorded else form
    late_from = decision + 1 if late else 0
    end = BEGINS + tokens + 3 if recorded else 0
    combine, held = Combine(rng.integers(len(Combine))), int(rng.integers(1, 9))
    return Gate(
        tuple(conditions), combine, form, 0.27, 1.31, hold, held, invert, late_from, end, 0.25
    )


def chunk_differences(
    gate: Gate, seed: int, tokens: int, device: str = "cpu", programs: int = 0
) -> dict[str, float]:
    """The largest differences between kernels and references, over the steps of one sample.

    Under a late gate the last step computes two positions again.

    Args:
        gate: all tokens of the sample have it.
        seed: of what is read.
        tokens: of the first step; the others have 1 and 2.
        device: where the kernels run.
        programs: how many tokens of the step open the gate, evenly spaced; 0: all.
    """
    rng = np.random.default_rng(seed)
    # A gate of one term is also computed as if it had several, every other time.
    one_term = int(len(gate.columns) == 1 and seed % 2 == 0)
    chain = [Step(Kind.GATE, 0, last=False, column=2, mask=one_term), Step(Kind.ADD, 1, column=2)]
    every = max(1, tokens // programs) if programs else 1
    codes = [-(token % every == 0) for token in range(tokens)]
    none = [0] * tokens
    other = buffers(4, dtype=torch.float32, codes=codes, captured=none, programs=[chain])
    ints, floats = gate_rows(gate)
    other.gates.ints[1], other.gates.floats[1] = torch.from_numpy(ints), torch.from_numpy(floats)
    other.gates.states[4, State.HEAD, [Held.RECORD, Held.GATE]] = 1
    site = twin(other, device)
    names = ("stream", "openness", "fold", "states", "positions")
    begins, differences = BEGINS, dict.fromkeys(names, 0.0)

    def compare(name: str, one: torch.Tensor, two: torch.Tensor) -> None:
        equal_infinity = (one.cpu() == two.cpu()) | (one.cpu() - two.cpu()).isnan()
        apart = torch.where(equal_infinity, 0.0, (one.cpu() - two.cpu()).abs())
        differences[name] = max(differences[name], float(apart.max()))

    for count in (tokens, 1, 2, 3)[: 4 if gate.late else 3]:
        begins -= 2 * (count == 3 and count != tokens)
        read = rng.normal(size=(count, COLUMNS)).astype(np.float32)
        read[rng.uniform(size=read.shape) < rng.choice([0.0, 0.3, 0.95])] = np.nan
        for buffer in (site, other):
            gates = buffer.gates
            gates.readings[:count, :COLUMNS] = torch.from_numpy(read).to(gates.readings.device)
            gates.tokens[:, 0], gates.tokens[:, 1] = 3, 0
            gates.tokens[:count, 2] = begins + torch.arange(count, device=gates.tokens.device)
            buffer.code[count:] = 0
        folds = torch.tensor([[4, 1, 1, 0, count, begins, one_term]], dtype=torch.int32)
        begins += count
        ones, others = torch.zeros(tokens, 4, device=device), torch.zeros(tokens, 4)
        launch_site(ones, None, site)
        run_site(others, None, other)
        compare("stream", ones, others)
        opened, opening = site.gates.openness.clone(), (site.code[:count] != 0).to(device)
        found = other.gates.openness[:count]
        compare("openness", opened[:count][opening], found[opening.cpu()])
        folded = folds.to(device, copy=True)
        launch_fold(site.gates, folded)
        fold_step(other.gates, folds)
        compare("positions", folded, folds)
        compare("positions", site.gates.tokens, other.gates.tokens)
        compare("openness", site.gates.openness[:count][opening], opened[:count][opening])
        compare("fold", site.gates.openness, other.gates.openness)
        compare("states", site.gates.states, other.gates.states)
    return differences


def reading_differences(
    width: int,
    dtype: torch.dtype,
    residual: torch.dtype | None,
    gain: float = 1.0,
    device: str = "cpu",
) -> float:
    """The largest difference between numbers that kernel and reference read, in every way."""
    chain = [
        Step(
            reading_kind(normalise),
            1 + n % 3,
            last=False,
            mask=normalise | activation << 4,
            column=1 + n,
            bias=0.1,
            theta=0.25,
            factor=0.5 if normalise is Normalise.NONE else 1.0,
        )
        for n, (normalise, activation) in enumerate(product(reversed(Normalise), Activation))
    ]
    codes = [-1, -2, -1, 0, -1, -3, -4, -5, -6, -7]
    programs = [chain, [Step(Kind.ADD, 3), Step(Kind.PULL, 2), *chain[:2]]]
    programs += [chain[n : 2 * n] for n in range(1, 6)]  # some end within four readings
    captured = [0] * len(codes)
    other = buffers(width, dtype=dtype, codes=codes, captured=captured, programs=programs)
    site = twin(other, device)
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(len(codes), width, generator=generator).to(dtype)
    rest = None
    if residual is not None:
        rest = torch.randn(len(codes), width, generator=generator).to(residual)
    h[2] = 0.0  # the cosine of nothing is 0
    ones = h.to(device, copy=True)
    launch_site(ones, None if rest is None else rest.to(device, copy=True), site, gain)
    run_site(h, rest, other, gain)
    read, expected = site.gates.readings.cpu(), other.gates.readings
    assert torch.equal(read.isnan(), expected.isnan())
    assert not expected[0, : len(chain)].isnan().any()
    apart = (read - expected).abs() / expected.abs().clamp(min=1.0)
    return float(apart.nan_to_num(0.0).max())
