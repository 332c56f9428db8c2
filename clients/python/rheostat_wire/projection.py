"""The random matrix of ENCODING_RP8. `Quantization` in tensor.proto defines it by its seed."""

import math

import numpy as np

from rheostat_wire.dtypes import FloatArray

_INCREMENT = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
"""Constants of splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators"
(2014)."""


def projection_matrix(kept: int, width: int, seed: int) -> FloatArray:
    """Makes the matrix [kept, width] of a seed below 2^64. Its elements are +-1/sqrt(kept)."""
    state = np.arange(1, kept * width + 1, dtype=np.uint64)
    state *= np.uint64(_INCREMENT)
    state += np.uint64(seed)
    for shift, factor in _ROUNDS:
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    negative = (state ^ (state >> np.uint64(_LAST_SHIFT))) & np.uint64(1)
    size = np.float32(1 / math.sqrt(kept))
    return np.where(negative == 0, size, -size).reshape(kept, width)
