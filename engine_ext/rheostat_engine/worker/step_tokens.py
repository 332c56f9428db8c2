"""The batch of a step, its tokens, and whether the step only repeats the last one.

Why
    In most steps, each request of the last step computes one more token. The instructions of such a
    step are mostly those of the last one, and looking them up again takes many numpy calls. So
    `Steering` and `Captures` cache their results, with the number of steps for which they are
    valid.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.worker.state.position_functions import Int64, consecutive


class Batch(NamedTuple):
    """The batch of the next forward pass, in the runner's order."""

    request_ids: Sequence[str]
    """vLLM's ids."""
    computed: npt.NDArray[np.integer]
    """[r]: computed tokens, which is the position of the first scheduled token."""
    scheduled: npt.NDArray[np.integer]
    """[r]: scheduled tokens."""
    padded_tokens: int
    """Tokens of the forward pass, including padding."""
    input_ids: torch.Tensor
    """[padded_tokens or more] int32, on the device."""


class StepTokens(NamedTuple):
    """The tokens of a step."""

    numbers: Int64
    """[n]: the request number of each token."""
    positions: Int64
    """[n]: its position."""
    repeated: bool = False
    """Whether the requests are those of the last step, in the same order, and each computes one
    token, the next. Their plans may have changed; see `Requests.changes`."""


class TokensOfSteps:
    """Finds the tokens of each step."""

    def __init__(self) -> None:
        self._numbers: Int64 | None = None
        """`numbers` of the last call, if each request had one token; otherwise None."""
        self._ones = b""
        """`scheduled` of the last call, as bytes."""
        self._next = b""
        """The positions of a step that repeats the last one, as bytes."""

    def forget(self) -> None:
        """The next step does not repeat the last one."""
        self._numbers = None

    def find(self, numbers: Int64, computed: Int64, scheduled: Int64) -> StepTokens:
        """The tokens of the next step.

        Args:
            numbers: [r]: the number of each request of the batch. The same object means the same
                requests as in the last call; another object means other requests.
            computed: [r]: the position of its first token.
            scheduled: [r]: the number of its tokens.
        """
        # Bytes are compared faster than arrays, and without releasing Python's lock.
        same = numbers is self._numbers and scheduled.tobytes() == self._ones
        if not same and (scheduled != 1).any():
            self._numbers = None
            return StepTokens(np.repeat(numbers, scheduled), consecutive(computed, scheduled))
        repeated = same and computed.tobytes() == self._next
        if not same:
            self._numbers, self._ones = numbers, scheduled.tobytes()
        self._next = (computed + 1).tobytes()
        return StepTokens(numbers, computed, repeated)
