"""Vectors, prompts and plans that the tests of the extension share."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine import (
    OPEN_END,
    Act,
    Activation,
    Band,
    Capture,
    Kind,
    Normalise,
    Plan,
    Spans,
)

from .models import VOCAB, WIDTH
from .reference import Change, Float

EVERYWHERE: Spans = ((0, OPEN_END),)


def vector(seed: int) -> tuple[bytes, npt.NDArray[np.float32]]:
    """A digest and a [1, W] vector."""
    values = np.random.default_rng(seed).normal(size=(1, WIDTH)).astype(np.float32)
    return hashlib.sha256(values.tobytes()).digest(), values


def prompts(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens and lengths in [low, high)."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, rng.integers(low, high)).tolist() for _ in range(count)]


def add(seed: int, site: int, spans: Spans = EVERYWHERE, scale: float = 1.0) -> Act:
    """One vector at one site."""
    return Act(Kind.ADD, (vector(seed)[0],), ((site, (0,)),), spans, scale)


def put(seed: int, site: int, spans: Spans, alpha: float = 1.0) -> Act:
    """One vector in the place of rows of one site."""
    return Act(Kind.REPLACE, (vector(seed)[0],), ((site, (0,)),), spans, alpha)


def steer(*acts: Act) -> Plan:
    """A plan that steers."""
    return Plan("", acts)


def capture(*sites: int, spans: Spans = EVERYWHERE) -> Plan:
    """A plan that captures."""
    return Plan("", (), (Capture(tuple(sites), spans),))


def as_hooks(plan: Plan, seeds: int, tokens: Sequence[int]) -> list[Change]:
    """The same acts for the reference, each as its formula says, in float64.

    Args:
        plan: whose acts use `vector(0)` to `vector(seeds - 1)`.
        seeds: how many vectors there are.
        tokens: the sequence that the reference will run.
    """
    values = dict(vector(seed) for seed in range(seeds))
    return [
        Change(site, _naive(act, values), positions)
        for act in sorted(plan.acts, key=lambda act: act.kind.acts_last)
        if (positions := selected(act, tokens))
        for site, _ in act.rows
    ]


def selected(act: Act, tokens: Sequence[int]) -> list[int]:
    """The positions at which an act touches a sequence."""
    return [
        position
        for position, token in enumerate(tokens)
        if _holds(act.spans, position)
        or any(_holds(c.spans, position) and (token in c.tokens) == c.among for c in act.conditions)
    ]


def _holds(spans: Spans, position: int) -> bool:
    return any(a <= position < b for a, b in spans)


def _naive(act: Act, values: dict[bytes, Float]) -> Callable[[torch.Tensor], torch.Tensor]:
    rows = torch.from_numpy(np.stack([values[digest][0] for digest in act.vectors])).double()
    units = rows / rows.norm(dim=1, keepdim=True)

    def change(x: torch.Tensor) -> torch.Tensor:
        y = x.double()
        if act.kind is Kind.ADD:
            y = y + act.scale * rows[0]
        elif act.kind is Kind.NORM_ADD:
            y = y + act.scale * y.norm(dim=1, keepdim=True) * units[0]
        elif act.kind.acts_last:
            mask = rows[1] if len(rows) > 1 else 1.0
            y = y + act.scale * mask * (rows[0] - y * (act.kind is Kind.REPLACE))
        elif act.orthogonal:
            span = rows.T @ torch.linalg.inv(rows @ rows.T) @ rows
            y = y - act.bands[0].strength * (y @ span)
        else:
            at = 0
            for band in act.bands:
                y = y + _pull(y, band, rows[at], rows[at + band.vectors - 1])
                at += band.vectors
        return y.to(x.dtype)

    return change


def _pull(x: torch.Tensor, band: Band, read: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
    """How a band changes rows; `write` is `read` where it writes no other vector."""
    settings = band.readout
    number = x @ read
    if settings.normalise is Normalise.PROJECTED_COSINE:
        projected = torch.outer(number / (read @ read), read).tanh()
        lengths = x.norm(dim=1) * projected.norm(dim=1)
        number = torch.where(lengths > 0, (x * projected).sum(dim=1) / lengths, 0.0)
    elif settings.normalise is not Normalise.NONE:
        number = number / read.norm()
    if settings.normalise is Normalise.COSINE:
        number = number / x.norm(dim=1)
    number = number + settings.bias
    match settings.activation:
        case Activation.RELU:
            number = number.relu()
        case Activation.JUMP_RELU:
            number = number * (number > settings.theta)
        case Activation.TANH:
            number = number.tanh()
    if not band.writes:
        write = read / read.norm() ** (2 if settings.normalise is Normalise.NONE else 1)
    change = band.strength * torch.outer(number.clamp(band.low, band.high) - number, write)
    return torch.where((number == 0)[:, None], 0.0, change) if band.only_on else change
