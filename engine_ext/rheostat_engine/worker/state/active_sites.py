"""The sites that the current step uses.

Invariant: between two steps no site is active. Warm-up, dummy and profiling runs therefore never
read instructions of the last step from the buffers.
"""

import numpy as np
import numpy.typing as npt


class ActiveSites:
    """The sites that this step uses."""

    def __init__(self, sites: int) -> None:
        """None of `sites` is active."""
        self._none = np.zeros(sites, np.bool_)
        self.mask: npt.NDArray[np.bool_] = self._none
        """[sites]."""
        self.key: bytes | None = None
        """Equal for equal masks; None if no site is active."""
        self.own_graphs = 0
        """The number of CUDA graphs that were made for a single mask."""
        self.held_graphs = 0
        """The number of these graphs that are held now."""

    def set(self, mask: npt.NDArray[np.bool_]) -> None:
        """Makes exactly the sites of `mask` active."""
        self.mask = mask
        self.key = mask.tobytes() if mask.any() else None

    def clear(self) -> None:
        """Makes no site active."""
        self.mask = self._none
        self.key = None
