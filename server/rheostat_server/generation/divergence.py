"""How far two distributions lie apart of which only the most likely tokens are known.

Invariant: what is called a bound never exceeds the Kullback-Leibler divergence of the full
distributions, up to the accuracy of float32 log-probabilities. Sums are float64.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rheostat_wire.v1 import generation_pb2

RESOLUTION = 1e-6
"""Probability below which the mass of unlisted tokens cannot be told from rounding: float32
log-probabilities of a whole vocabulary sum to 1 within it."""


class Listed(NamedTuple):
    """What is known of a distribution."""

    logprobs: Mapping[int, float]
    """Natural log-probability by token id."""
    ceiling: float = 0.0
    """The most that the log-probability of a token that is not there can be."""


class Comparison(NamedTuple):
    """Two distributions over the same tokens."""

    kl: float
    """Lower bound of KL(first || second), in nats, at least 0."""
    compared: float
    """Probability under the first of the tokens that both sides list, 0 to 1."""


def compare(first: Listed, second: Listed) -> Comparison:
    """Bounds KL(first || second).

    Tokens that both sides list are classes of their own; those that the first alone lists, those
    that the second alone lists and all others are a class each. Merging tokens cannot raise the
    divergence: sum p ln(p/q) >= (sum p) ln((sum p) / (sum q)), the log-sum inequality (Cover and
    Thomas, Elements of Information Theory, theorem 2.7.1). What one side has of tokens that it does
    not list is only limited; the bound is the least that the divergence can then be.
    """
    ours, theirs = first.logprobs, second.logprobs
    shared = [
        (p, q)
        for token, p in ours.items()
        if (q := theirs.get(token, -math.inf)) != -math.inf and p != -math.inf
    ]
    compared = math.fsum(math.exp(p) for p, _ in shared)
    kl = math.fsum(math.exp(p) * (p - q) for p, q in shared)
    if compared < 1:
        left = 1 - compared, max(0.0, 1 - math.fsum(math.exp(q) for _, q in shared))
        kl += _least(_Side.of(first, theirs, left[0]), _Side.of(second, ours, left[1]))
    return Comparison(kl=0.0 if kl < 0 else kl, compared=min(compared, 1.0))


class _Side(NamedTuple):
    """Probabilities on one side, without those of the tokens that both sides list."""

    left: float
    """Of all tokens."""
    alone: float
    """Of the tokens that this side alone lists."""
    tokens: int
    """How many those are."""
    ceiling: float
    """The most that a token can have that this side does not list."""

    @classmethod
    def of(cls, side: Listed, other: Mapping[int, float], left: float) -> "_Side":
        alone = [p for token, p in side.logprobs.items() if token not in other]
        mass = min(left, math.fsum(map(math.exp, alone)))
        return cls(left, mass, len(alone), math.exp(side.ceiling))


def _least(p: _Side, q: _Side) -> float:
    """The least that three classes can add: listed by p alone, by q alone, and by neither.

    Unknown are q's part x of the first class and p's part y of the second. The sum is convex in
    both, so its least value lies where its slopes vanish or where x or y is at its limit.
    """
    most_x = min(p.tokens * q.ceiling, q.left - q.alone)
    most_y = min(q.tokens * p.ceiling, p.left - p.alone)

    def total(x: float, y: float) -> float:
        rest = _term(p.left - p.alone - y, q.left - q.alone - x)
        return _term(p.alone, x) + _term(y, q.alone) + rest

    best_y = _ratio(q.alone * (p.left - p.alone), q.left - most_x)
    best_x = _ratio(p.alone * (q.left - q.alone), p.left - most_y)
    found = [total(most_x, min(best_y, most_y)), total(min(best_x, most_x), most_y)]
    x, y = _ratio(p.alone * q.left, p.left), _ratio(q.alone * p.left, q.left)
    if x <= most_x and y <= most_y:
        found.append(_term(p.left, q.left))
    return min(found)


def _term(p: float, q: float) -> float:
    return p * math.log(p / max(q, RESOLUTION)) if p > 0 else 0.0


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0


def measure(
    sample: int,
    steered: Sequence[generation_pb2.TokenLogprobs],
    baseline: Sequence[generation_pb2.TokenLogprobs],
) -> generation_pb2.Divergence:
    """How far a sample lies from the baseline.

    Args:
        sample: which.
        steered: log-probabilities at the sample's tokens, from its first on.
        baseline: the baseline's at the same tokens; if it is shorter, the last ones are left out.
    """
    pairs = list(zip(steered, baseline, strict=False))
    comparisons = [compare(_known(ours), _known(theirs)) for ours, theirs in pairs]
    bounds = [comparison.kl for comparison in comparisons]
    return generation_pb2.Divergence(
        sample=sample,
        kl=bounds,
        compared=[comparison.compared for comparison in comparisons],
        baseline_logprobs=[theirs.token.logprob for _, theirs in pairs],
        mean_kl=math.fsum(bounds) / len(bounds) if bounds else 0.0,
    )


def _known(reading: generation_pb2.TokenLogprobs) -> Listed:
    known = {entry.token_id: entry.logprob for entry in reading.alternatives}
    ceiling = min(known.values(), default=0.0)
    known[reading.token.token_id] = reading.token.logprob
    return Listed(known, ceiling)
