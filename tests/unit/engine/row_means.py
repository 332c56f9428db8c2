"""Numbers that are read of means of rows, by the kernels and by the references; also on a GPU."""

import math
from itertools import product

import torch

from rheostat_engine import Kind
from rheostat_engine.plan.gate_table import Held, State, gate_rows
from rheostat_engine.plan.gates import (
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
from rheostat_engine.worker.state.buffers import SiteBuffers
from rheostat_engine.worker.steering.readout_kernels import launch_read_means
from rheostat_engine.worker.steering.readout_reference import read_means

from .gate_chunks import twin
from .instructions import Step, buffers

BEGINS, TOKENS = 5, 24
"""The first position of the sample that is summed, and the number of its tokens."""
CHUNKS = ((24,), (1, 20, 3), (7, 16, 1))


def mean_differences(
    width: int,
    dtype: torch.dtype,
    residual: torch.dtype | None,
    gain: float = 1.0,
    device: str = "cpu",
) -> float:
    """The largest difference between numbers that kernel and reference read of means.

    A site sums rows, and a later site reads the mean and opens a gate. Another sample is computed
    in the same steps. Each implementation must read the same bits in chunks of any size, and keep
    what it read before the gate. After the step, it must read the same if no gate did.
    """
    at = BEGINS + TOKENS - 1
    means = [
        Step(
            Kind.READ_MEAN,
            1 + n % 3,
            last=at,
            mask=normalise | activation << 4,
            column=1 + n,
            write=1,
            bias=0.1,
            theta=0.25,
            factor=0.5 if normalise is Normalise.NONE else 1.0,
        )
        for n, (normalise, activation) in enumerate(product(Normalise, Activation))
    ]
    gate = Step(Kind.GATE, 0, last=False, column=1)
    summing = [Step(Kind.ADD, 3), Step(Kind.SUM, 1, last=False), Step(Kind.READ, 1, column=99)]
    programs = [summing, [*means, gate, Step(Kind.ADD, 2, column=1)], means]
    none = [0] * (TOKENS + 1)
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(TOKENS, width, generator=generator).to(dtype)
    rest = None if residual is None else torch.randn(TOKENS, width, generator=generator)
    rest = None if rest is None else rest.to(residual)
    every = GateCondition((0,), Pool.LAST, Combine.ANY, -math.inf, math.inf)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for chunks in CHUNKS:
        other = buffers(width, dtype=dtype, codes=none, captured=none, programs=programs)
        ints, floats = gate_rows(Gate((every,), Combine.ALL, Form.STEP, 0.5, 0.0, Hold.TOKEN))
        other.gates.ints[1], other.gates.floats[1] = map(torch.from_numpy, (ints, floats))
        other.gates.row_sum_names[3] = 2
        site, done = twin(other, device), 0
        for count in chunks:
            for one in (site, other):
                _begin(one, count, BEGINS + done)
            for code in (-1, -1 - len(summing)):
                ours, theirs = (_rows(h, rest, done, count, to) for to in (device, "cpu"))
                for one in (site, other):
                    one.code[1 : 1 + count] = code
                launch_site(*ours, site, gain)
                run_site(*theirs, other, gain)
            torch.testing.assert_close(site.gates.openness.cpu(), other.gates.openness)
            done += count
        read = [one.gates.readings[count, : len(means)].cpu().clone() for one in (site, other)]
        step = 1 + sum(map(len, programs[:2]))
        due = torch.tensor([[count, step]], dtype=torch.int32)
        for forgets in (False, True):
            for one in (site, other) if forgets else ():
                one.gates.readings.fill_(torch.nan)
            launch_read_means(site, due.to(device))
            read_means(other, due[:, 0].long(), due[:, 1].long())
            for one, before in zip((site, other), read, strict=True):
                again = one.gates.readings[count, : len(means)].cpu()
                if not forgets:
                    assert torch.equal(again, before)
                torch.testing.assert_close(again, before)
        for one in (site, other):
            assert one.gates.readings[:count].isnan().all()
            assert one.gates.row_sums[2, -1] == TOKENS
            assert not one.gates.row_sums[[0, 1, 3, 4]].any()
        found.append((read[0], read[1]))
    for read_there in found:
        for one, first in zip(read_there, found[0], strict=True):
            assert torch.equal(one, first)
    ones, others = found[0]
    return float(((ones - others).abs() / others.abs().clamp(min=1.0)).max())


def _begin(site: SiteBuffers, count: int, position: int) -> None:
    """A step of so many tokens, behind a token of another sample."""
    gates = site.gates
    gates.readings.fill_(torch.nan)
    gates.openness.fill_(0)
    gates.states.fill_(0)
    gates.states[4, State.HEAD, Held.GATE] = 1
    gates.folded.fill_(0)
    site.code.fill_(0)
    gates.tokens[0] = torch.tensor([0, 0, 3, 0])
    gates.tokens[1 : 1 + count] = torch.tensor([4, 1, 0, 2])
    gates.tokens[1 : 1 + count, 2] += position + torch.arange(count, device=gates.tokens.device)


def _rows(
    h: torch.Tensor, rest: torch.Tensor | None, done: int, count: int, device: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copies of the rows of a chunk, behind a row of another sample."""
    chunk = range(done - 1, done + count)
    found = [None if rows is None else rows[list(chunk)].to(device) for rows in (h, rest)]
    assert found[0] is not None
    return found[0], found[1]
