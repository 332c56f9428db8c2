"""The active sites: those with instructions in the current step.

Invariant: no site is active between two steps. So warm-up, dummy and profiling runs never execute
the last step's instructions.
"""

import numpy as np
import numpy.typing as npt


class ActiveSites:
    """The active sites of the current step."""

    def __init__(self, sites: int) -> None:
        self.in_step = False
        """Whether a step runs. Outside of steps no site is active."""
        self.steps = {"plain": 0, "active": 0}
        """Steps without and with active sites since the start."""
        self._none = np.zeros(sites, np.bool_)
        self.mask: npt.NDArray[np.bool_] = self._none
        """[sites]."""
        self.key: bytes | None = None
        """Equal for equal masks; None if no site is active."""
        self._last_mask = self._none
        """The last mask that was set, and its key."""
        self._last_key: bytes | None = None
        self.own_graphs = 0
        """CUDA graphs made for a single mask, since the start."""
        self.held_graphs = 0
        """CUDA graphs for a single mask that exist now."""

    def set(self, mask: npt.NDArray[np.bool_]) -> None:
        """Begins a step in which exactly the sites of `mask`, which must not change, are active."""
        self.in_step = True
        self.steps["active"] += 1
        if mask is not self._last_mask:
            self._last_mask, self._last_key = mask, mask.tobytes() if mask.any() else None
        self.mask, self.key = mask, self._last_key

    def set_none(self) -> None:
        """Begins a step in which no site is active."""
        self.clear()
        self.in_step = True
        self.steps["plain"] += 1

    def clear(self) -> None:
        """Ends the step."""
        self.in_step = False
        self.mask = self._none
        self.key = None
