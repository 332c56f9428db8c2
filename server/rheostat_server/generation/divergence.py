"""Bounds the divergence of two distributions of which only the most likely tokens are known.

Invariant: a bound never exceeds the Kullback-Leibler divergence of the full
distributions, up to the accuracy of float32 log-probabilities. Sums are float64.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rheostat_wire.v1 import generation_pb2

RESOLUTION = 1e-6
"""Probability that rounding can produce: float32 log-probabilities of a whole vocabulary sum to 1
within it. Less mass of unlisted tokens is not counted."""


class Listed(NamedTuple):
    """The listed tokens of a distribution."""

    logprobs: Mapping[int, float]
    """Natural log-probability by token id."""
    ceiling: float = 0.0
    """Upper bound of the log-probability of a token that is not listed."""


class Comparison(NamedTuple):
    """Two distributions over the same tokens."""

    kl: float
    """Lower bound of KL(first || second), in nats, at least 0."""
    compared: float
    """Probability under the first of the tokens that both sides list, 0 to 1."""


def compare(first: Listed, second: Listed) -> Comparison:
    """Bounds KL(first || second).

    Each token that both sides list is a class. Three more classes are the tokens that only the
    first side lists, the tokens that only the second lists, and all others. Merging tokens into
    classes cannot raise the divergence: sum p ln(p/q) >= (sum p) ln((sum p) / (sum q)), the log-sum
    inequality (Cover and Thomas, Elements of Information Theory, theorem 2.7.1). A side only limits
    the probability of tokens that it does not list. The bound is the least divergence within these
    limits.
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
    """Probabilities on one side, without the tokens that both sides list."""

    left: float
    """Of all tokens."""
    alone: float
    """Of the tokens that this side alone lists."""
    tokens: int
    """Number of these tokens."""
    ceiling: float
    """Upper bound of the probability of a token that this side does not list."""

    @classmethod
    def of(cls, side: Listed, other: Mapping[int, float], left: float) -> "_Side":
        alone = [p for token, p in side.logprobs.items() if token not in other]
        mass = min(left, math.fsum(map(math.exp, alone)))
        return cls(left, mass, len(alone), math.exp(side.ceiling))


def _least(p: _Side, q: _Side) -> float:
    """The least that the classes "only p lists", "only q lists" and "neither lists" can add.

    Unknown are the probability x that q gives the first class, and y that p gives the second. The
    sum is convex in both. So its least value lies where its slopes vanish, or where x or y is at
    its limit.
    """
    most_x = min(p.tokens * q.ceiling, q.left - q.alone)
    most_y = min(q.tokens * p.ceiling, p.left - p.alone)

    def total(x: float, y: float) -> float:
        rest = _term(p.left - p.alone - y, q.left - q.alone - x)
        return _term(p.alone, x) + _term(y, q.alone) + rest

    best_y = _ratio(q.alone * (p.left - p.alone), q.left - most_x)
    best_x = _ratio(p.alone * (q.left - q.alone), p.left - most_y)
    totals = [total(most_x, min(best_y, most_y)), total(min(best_x, most_x), most_y)]
    x, y = _ratio(p.alone * q.left, p.left), _ratio(q.alone * p.left, q.left)
    if x <= most_x and y <= most_y:
        totals.append(_term(p.left, q.left))
    return min(totals)


def _term(p: float, q: float) -> float:
    return p * math.log(p / max(q, RESOLUTION)) if p > 0 else 0.0


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0


def measure(
    sample: int,
    steered: Sequence[generation_pb2.TokenLogprobs],
    baseline: Sequence[generation_pb2.TokenLogprobs],
) -> generation_pb2.Divergence:
    """The divergence of a sample from its baseline.

    Args:
        sample: index of the sample.
        steered: log-probabilities at the sample's tokens, from its first on.
        baseline: the baseline's at the same tokens. If it is shorter, the last tokens are ignored.
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
