"""Recognizes steps that repeat the last one, before anything of their requests is looked up.

Why
    If a step repeats the last one (see `StepTokens`), every part of the runtime has cached what it
    needs, and only positions are new. But between two steps, vLLM's own work replaces what the
    processor's caches held. So each function that is called and each array that is read takes
    several times as long as in a loop. Asking all parts for their caches took 13 us in a loop, and
    about 100 us with other work between the steps (256 requests, two CPU cores).
How
    The runtime stores a step for which all parts have used their caches. For a step that repeats
    it, two arrays are compared, and nothing else is done. The progress of the requests is recorded
    later: before anything reads or changes it, and before a step that does not repeat the last one.
"""

import numpy as np
import numpy.typing as npt

from rheostat_engine.worker.state.position_functions import Int64
from rheostat_engine.worker.step_tokens import Batch


class RepeatedSteps:
    """A step, and the steps that have repeated it without being recorded."""

    def __init__(
        self, batch: Batch, numbers: Int64, mask: npt.NDArray[np.bool_], steps: int
    ) -> None:
        """Stores a step that repeats its predecessor, and for which all parts used their caches.

        Args:
            batch: its batch, with one token of each request.
            numbers: [r]: the requests' numbers.
            mask: [sites]: the active sites.
            steps: the number of further steps for which the caches are valid.
        """
        self.numbers = numbers
        self.mask = mask
        self.steps = 0
        """How many steps have repeated it."""
        self._left = steps
        """How many more may."""
        self._ids = list(batch.request_ids)
        self._padded_tokens = batch.padded_tokens
        self._scheduled = batch.scheduled.tobytes()
        self._end = batch.computed + 1
        """[r]: one past the last computed position, where the next step begins."""
        self._next = self._end.tobytes()

    def repeat(self, batch: Batch) -> bool:
        """Whether a step repeats this one, or its last repetition. The step is counted then."""
        if (
            not self._left
            or batch.padded_tokens != self._padded_tokens
            or batch.request_ids != self._ids
            # Bytes are compared faster than arrays, and without releasing Python's lock.
            or batch.computed.tobytes() != self._next
            or batch.scheduled.tobytes() != self._scheduled
        ):
            return False
        self._end = batch.computed + 1
        self._next = self._end.tobytes()
        self._left -= 1
        self.steps += 1
        return True

    @property
    def end(self) -> Int64:
        """[r]: one past the last position of each request that these steps have computed."""
        return self._end.astype(np.int64)
