"""The numbers of a NoiseSource: independent, normal, and reproducible one row at a time.

Why counters: the row of a site and position follows from the seed alone. Batching, preemption, and
the other rows of a request change nothing. `NoiseSource` in replace.proto has the recipe, so that
clients in other languages can draw the same rows.
"""

import numpy as np
import numpy.typing as npt

_UNIT = 2.0**-53


def normal_row(seed: int, site: int, position: int, width: int) -> npt.NDArray[np.float64]:
    """Standard normal numbers, [width].

    Box and Muller (1958), of the words of Philox 4x64-10 (Salmon et al. 2011).

    Args:
        seed: 0 to 2**64 - 1.
        site: 4 * layer, plus 0 for resid_pre, 1 for attn_out, 2 for resid_mid, 3 for mlp_out, 4
            for resid_post.
        position: the token's position.
        width: W.
    """
    # One integer for all words of a key or counter, because numpy passes a list of integers above
    # 2**63 through float64. It increments the counter before each block of four words.
    generator = np.random.Philox(key=seed | site << 64, counter=position << 64)
    words = generator.random_raw(width + width % 2)
    uniform = (words >> np.uint64(11)) * _UNIT
    radius = np.sqrt(-2.0 * np.log1p(-uniform[0::2]))
    angle = (2.0 * np.pi) * uniform[1::2]
    row = np.empty(len(words))
    row[0::2], row[1::2] = radius * np.cos(angle), radius * np.sin(angle)
    return row[:width]
