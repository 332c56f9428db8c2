"""Sync controllers: plugins of the server that set gains from what probes read, within a step.

A controller is found by its entry point in the group `rheostat.controllers`. The entry point names
a function without arguments that returns a `Controller`; a class is such a function. The server's
operator chooses controllers by name, so a plugin that is only installed does nothing.

The rules a controller must follow
    It is called once after each step, for all samples that it controls, on one thread of the worker
    that reports. All requests wait meanwhile, so it must return within the server's budget. It must
    not keep the arrays that it gets.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

CONTROLLERS_GROUP = "rheostat.controllers"
"""The entry point group; each entry point names a function that returns a `Controller`."""

MAX_CONTROLLED = 16
"""The most gains of a sample that a controller sets."""


class ControllerStep(NamedTuple):
    """What a controller sees of a step: one row for each sample that it controls."""

    samples: npt.NDArray[np.int64]
    """[n]: numbers of the samples. A number is never used for another sample."""
    positions: npt.NDArray[np.int64]
    """[n]: the position of the token that was computed, the prompt's last or a generated one."""
    readings: npt.NDArray[np.float32]
    """[n, r]: what the request's probes read at that token, in the order of its probes and their
    sites. NaN if the probe does not read the token, and beyond the readings of a request that has
    fewer than others."""
    gains: npt.NDArray[np.float32]
    """[n, g]: the present gain of each intervention of the request; 1 beyond those that it has."""
    ended: tuple[int, ...]
    """The samples, of those that it was called for, that have ended since the last call. Their last
    row may be in this step."""


class Controller(Protocol):
    """Sets the gains of the next position of each sample."""

    def decide(self, step: ControllerStep) -> npt.NDArray[np.float32]:
        """Returns gains for the position after each of `step.positions`.

        Returns:
            [n, g], as `step.gains`: 0 to 16. Numbers beyond the interventions of a request are
            ignored.
        """
