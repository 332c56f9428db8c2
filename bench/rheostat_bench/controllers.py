"""Controllers that the benchmarks measure, and how the engines of a benchmark find them.

It imports little, because the workers of those engines import it.
"""

import os
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rheostat_engine import CONTROLLERS_GROUP, ControllerStep

Floats = npt.NDArray[np.float32]

STEPS = 16
"""Different gains of `Stepped`."""


class Unchanged:
    """Sets the gains that there are: only what a call costs."""

    def decide(self, step: ControllerStep) -> Floats:
        """The present gains."""
        return step.gains


class Stepped:
    """Sets a gain that the first reading names."""

    def decide(self, step: ControllerStep) -> Floats:
        """`stepped` of the first reading, for every gain of a sample."""
        gains: Floats = np.broadcast_to(stepped(step.readings[:, :1]), step.gains.shape)
        return gains


PLUGINS = {"bench-unchanged": Unchanged, "bench-stepped": Stepped}
"""By the name that requests use."""


def stepped(readings: Floats) -> Floats:
    """Gains in [0, 1) of the last bits of readings, so that alike readings get different gains.

    1 where nothing was read.
    """
    bits = np.ascontiguousarray(readings, np.float32).view(np.uint32)
    gains = (bits % STEPS).astype(np.float32) / STEPS
    return np.where(np.isnan(readings), np.float32(1), gains)


def install(folder: Path) -> None:
    """Makes the controllers plugins of the engines and servers that this process starts.

    Args:
        folder: an empty folder, for the metadata of a package. It exists as long as they run.
    """
    about = folder / "rheostat_bench_controllers-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: rheostat-bench-controllers\nVersion: 1\n"
    )
    points = [f"{name} = {__name__}:{made.__name__}" for name, made in PLUGINS.items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{CONTROLLERS_GROUP}]", *points, ""]))
    # Processes that are spawned get Python's path of this one, other processes get the variable.
    sys.path.insert(0, str(folder))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(folder) if not before else f"{folder}{os.pathsep}{before}"
