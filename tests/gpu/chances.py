"""What a count says of a rate; needs no GPU."""

import math

_SURE = 0.05
"""Probability with which a bound may be wrong."""


def upper_bound(count: int, of: int) -> float:
    """The largest rate that gives so few, or fewer, with a probability of 5 % (Clopper-Pearson)."""
    if count >= of:
        return 1.0
    low, high = count / of, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        logs = [
            math.log(math.comb(of, k)) + k * math.log(rate) + (of - k) * math.log1p(-rate)
            for k in range(count + 1)
            if rate > 0
        ]
        if sum(map(math.exp, logs)) > _SURE:
            low = rate
        else:
            high = rate
    return high
