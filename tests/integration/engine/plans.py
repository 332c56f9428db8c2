"""Vectors, prompts and plans that the tests of the extension share."""

import hashlib

import numpy as np
import numpy.typing as npt

from rheostat_engine import OPEN_END, Act, Capture, Kind, Plan, Spans

from .models import VOCAB, WIDTH
from .reference import Add

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


def steer(*acts: Act) -> Plan:
    """A plan that steers."""
    return Plan("", acts)


def capture(*sites: int, spans: Spans = EVERYWHERE) -> Plan:
    """A plan that captures."""
    return Plan("", (), (Capture(tuple(sites), spans),))


def as_hooks(plan: Plan, seeds: dict[bytes, int], length: int) -> list[Add]:
    """The same additions for the reference, for a sequence of `length` tokens."""
    hooks = []
    for act in plan.acts:
        values = act.scale * vector(seeds[act.vectors[0]])[1][0]
        positions = [p for a, b in act.spans for p in range(a, min(b, length))]
        hooks += [Add(site, values, positions) for site, _ in act.rows]
    return hooks
