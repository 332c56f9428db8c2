"""Instructions of one site for some tokens, and what they do, token by token in float64."""

import math
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from rheostat_engine import MAX_GATES, Activation, Kind, Normalise
from rheostat_engine.worker.state.buffers import SiteBuffers
from rheostat_engine.worker.steering.programs import FLOATS, GAIN_UNIT, INTS, ROW_UNIT

from .no_gates import no_gates

DOSE_SLOTS = 32
RING = 12
MASK = 5
"""The row of a mask: elements of 0, 1/2 and 1 in turn."""


class Step(NamedTuple):
    """A step of a chain, with numbers of rows and directions."""

    kind: Kind
    number: int
    low: float = 0.0
    high: float = 0.0
    strength: float = 1.0
    last: bool | int = True
    """Of a reading of a mean: the position at which it is read."""
    mask: int = 0
    """Of a readout: its normalisation, plus 16 times its activation, plus 256 if it is only on."""
    column: int = 0
    """1 plus the column of a reading, or the number of a gate; 0: none."""
    write: int = 0
    """The direction along which a pull moves; 0: the direction that it reads. Of a reading of a
    mean: the index of the sum."""
    written: float = 1.0
    """The factor of this direction."""
    bias: float = 0.0
    theta: float = 0.0
    factor: float = 1.0
    """Of the coordinate that is read."""
    gain: int = 0
    """1 plus the index of a gain; 0: none."""


def reading_kind(normalise: Normalise) -> Kind:
    """The kind of a step that reads a row."""
    return Kind.READ_ALONE if normalise is Normalise.PROJECTED_COSINE else Kind.READ


def chains() -> list[list[Step]]:
    """Chains of every kind of step, alone and one after the other."""
    ablation = Step(Kind.PULL, 1)
    clamp = Step(Kind.PULL, 2, -0.5, 0.25, 0.75)
    floor = Step(Kind.PULL, 3, 1.5, math.inf)
    push = Step(Kind.NORM_ADD, 2, strength=-0.5)
    added = Step(Kind.ADD, 3)
    half = Step(Kind.REPLACE, 2, strength=0.5, mask=MASK)
    last = Step(Kind.ADD_LAST, 3)
    pulls = [
        Step(Kind.PULL, 1, -0.25, 0.5, 0.75, mask=settings, write=write, written=1.5, **numbers)
        for normalise, activation, only_on in product(Normalise, Activation, (0, 1))
        for settings in [normalise | activation << 4 | only_on << 8]
        for write in (0, 2)
        for numbers in [{"bias": 0.5, "theta": 0.25, "factor": 2.0}]
    ]
    return [
        *([one] for one in pulls),
        [added, *pulls[::7], half],
        [last],
        [added, half, last._replace(strength=0.5, mask=MASK), last._replace(number=1)],
        [ablation],
        [clamp],
        [floor],
        [push],
        [added],
        [added, ablation, push, floor, added],
        [ablation._replace(last=False), clamp._replace(last=False), floor, push],
        [Step(Kind.PULL, 1, -math.inf, 0.0, 2.0), added, clamp],
        [Step(Kind.REPLACE, 1)],
        [half],
        [added, push, Step(Kind.REPLACE, 0, mask=MASK), half, Step(Kind.REPLACE, 4, strength=0.25)],
    ]


def huge_chains() -> list[list[Step]]:
    """Chains whose changes are infinite, or would make the stream so."""
    return [
        [Step(Kind.NORM_ADD, 1, strength=3e38)],
        [Step(Kind.PULL, 2, 1e38, 1e38)],
        [Step(Kind.PULL, 2, -1e38, -1e38, 3e38)],
        [Step(Kind.REPLACE, 1)],
        [Step(Kind.NORM_ADD, 1, strength=3e38), Step(Kind.NORM_ADD, 2, strength=-3e38)],
    ]


def buffers(
    width: int,
    *,
    dtype: torch.dtype,
    codes: list[int],
    captured: list[int],
    programs: list[list[Step]],
    seed: int = 0,
) -> SiteBuffers:
    """A site's buffers: rows 0 (zeros) to 4, a mask, directions 1 to 3 and some programs.

    Args:
        width: W.
        dtype: of the rows and the ring.
        codes: of each token: 0, the code of an addition, or minus a program's number from 1.
        captured: ring row of each token.
        programs: the chains.
        seed: of the rows and directions.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(MASK + 1, width, generator=generator).to(dtype)
    rows[0] = 0
    rows[MASK] = torch.arange(width) % 3 / 2
    directions = torch.randn(4, width, generator=generator)
    directions /= directions.norm(dim=1, keepdim=True)
    ints, floats, begins = [[0] * INTS], [[0.0] * FLOATS], []
    for chain in programs:
        begins.append(len(ints))
        for at, one in enumerate(chain):
            following = len(ints) + 1 if at + 1 < len(chain) else 0
            factors = one.column + GAIN_UNIT * one.gain
            measured, write = int(one.last), one.write
            if one.kind is Kind.READ:
                measured, write = (
                    len(ints) + more if at + more < len(chain) else 0 for more in (2, 3)
                )
            ints.append([one.kind, one.number, following, measured, one.mask, factors, write])
            floats.append(
                [one.low, one.high, one.strength, one.written, one.bias, one.theta, one.factor, 0.0]
            )
    return SiteBuffers(
        code=torch.tensor([-begins[-c - 1] if c < 0 else c for c in codes], dtype=torch.int32),
        cap_row=torch.tensor(captured, dtype=torch.int32),
        dose_slot=torch.tensor(
            [(5 * token) % 16 for token in range(len(codes))], dtype=torch.int32
        ),
        rows=rows,
        directions=directions,
        ints=torch.tensor(ints, dtype=torch.int32),
        floats=torch.tensor(floats),
        gates=no_gates(len(codes), states=8, gates=8, row_sums=4, width=width),
        doses=torch.zeros(DOSE_SLOTS, 4),
        ring=torch.zeros(RING, width, dtype=dtype),
    )


@dataclass
class Expected:
    """What a site's instructions do, in float64; nothing is rounded."""

    h: np.ndarray
    residual: np.ndarray | None
    ring: np.ndarray
    doses: np.ndarray = field(default_factory=lambda: np.zeros((DOSE_SLOTS, 4)))


def naive(h: torch.Tensor, residual: torch.Tensor | None, site: SiteBuffers) -> Expected:
    """One token after the other, one step after the other."""
    expected = Expected(
        h.double().numpy().copy(),
        None if residual is None else residual.double().numpy().copy(),
        site.ring.double().numpy().copy(),
    )
    rows, directions = site.rows.double().numpy(), site.directions.double().numpy()
    for token in range(len(h)):
        rest = np.zeros(h.shape[1]) if expected.residual is None else expected.residual[token]
        replaced = np.zeros(h.shape[1], bool)
        x = before = expected.h[token] + rest
        code, dose_slot = int(site.code[token]), int(site.dose_slot[token])
        if code > 0:
            number, row = divmod(code, ROW_UNIT)
            gates = site.gates
            if number > MAX_GATES:
                by = float(gates.gains[token, number - MAX_GATES - 1])
            else:
                by = float(gates.openness[token, number - 1]) if number else 1.0
            x = x + by * rows[row]
            _count(expected.doses[dose_slot], before, None, by)
        step = max(0, -code)
        while step:
            kind, number, following, last, mask, _, write = site.ints[step].tolist()
            low, high, strength, written = site.floats[step, :4].tolist()
            if kind == Kind.ADD:
                x = x + rows[number]
            elif kind == Kind.NORM_ADD:
                x = x + strength * np.linalg.norm(x) * directions[number]
            elif kind in (Kind.REPLACE, Kind.ADD_LAST):
                weight = strength * (rows[mask] if mask else np.ones(len(x)))
                x = x + weight * (rows[number] - x * (kind == Kind.REPLACE))
                replaced |= weight != 0
            else:
                along = number_of(x, directions[number], mask, site.floats[step].tolist())
                amount = strength * (np.clip(along, low, high) - along) * written
                if along or not mask >> 8:
                    x = x + amount * directions[write or number]
            if last:
                _count(expected.doses[dose_slot], before, None if kind == Kind.ADD else x - before)
                before, dose_slot = x, dose_slot + 1
            step = following
        expected.h[token] = x - rest
        if expected.residual is not None:
            expected.h[token, replaced], rest[replaced] = 0.0, x[replaced]
        if site.cap_row[token]:
            expected.ring[int(site.cap_row[token])] = x
    return expected


def number_of(x: np.ndarray, unit: np.ndarray, settings: int, floats: list[float]) -> float:
    """What a step reads of a row."""
    bias, theta, factor, _ = floats[4:]
    z = float(x @ unit) * factor
    if settings & 15 == Normalise.COSINE:
        z = z / float(np.linalg.norm(x)) if x.any() else 0.0
    elif settings & 15 == Normalise.PROJECTED_COSINE:
        projected = np.tanh(z * unit)
        norm = float(np.linalg.norm(x) * np.linalg.norm(projected))
        z = float(x @ projected) / norm if norm else 0.0
    z += bias
    match settings >> 4 & 15:
        case Activation.RELU:
            return max(z, 0.0)
        case Activation.JUMP_RELU:
            return z if z > theta else 0.0
        case Activation.TANH:
            return math.tanh(z)
    return z


def _count(
    dose_slot: np.ndarray, before: np.ndarray, change: np.ndarray | None, factor: float = 1.0
) -> None:
    norm = np.linalg.norm(before)
    moved = factor if change is None else np.linalg.norm(change)
    share = moved / norm if norm > 0 else 0.0
    dose_slot[:] = (
        dose_slot[0] + (factor > 0),
        dose_slot[1] + moved,
        dose_slot[2] + share,
        max(dose_slot[3], share),
    )
