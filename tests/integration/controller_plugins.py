"""Controllers for the tests, which `install` makes plugins of the engines and servers they start.

It imports little, because the workers of those engines import it.
"""

from pathlib import Path

import numpy as np

from rheostat_engine import ControllerStep


class Hold:
    """Holds the first reading of each sample at a set point."""

    set_point = 2.0
    proportional = 0.2
    most = 4.0

    def __init__(self) -> None:
        self._integrals: dict[int, float] = {}

    @classmethod
    def law(cls, error: float, integral: float) -> float:
        """The gain of the next position."""
        return float(np.clip(1.0 + cls.proportional * error + 0.05 * integral, 0.0, cls.most))

    def decide(self, step: ControllerStep) -> np.ndarray:
        gains = step.gains.copy()
        for row, sample in enumerate(step.samples.tolist()):
            error = self.set_point - float(step.readings[row, 0])
            self._integrals[sample] = self._integrals.get(sample, 0.0) + error
            gains[row, 0] = self.law(error, self._integrals[sample])
        for sample in step.ended:
            del self._integrals[sample]
        return gains


class HoldAtThree(Hold):
    """Does so with less force."""

    set_point = 3.0
    proportional = 0.1
    most = 16.0


class Fails:
    """Raises at its last call."""

    last = 5

    def __init__(self) -> None:
        self._calls = 0

    def decide(self, step: ControllerStep) -> np.ndarray:
        self._calls += 1
        if self._calls == self.last:
            raise RuntimeError("no more")
        return np.full_like(step.gains, 0.5)


class AlsoFails(Fails):
    """The same, for another test."""


class FailsSoon(Fails):
    """Raises at the third call."""

    last = 3


class NotANumber:
    """Returns no number."""

    def decide(self, step: ControllerStep) -> np.ndarray:
        return np.full_like(step.gains, np.nan)


_PLUGINS = (Hold, HoldAtThree, Fails, AlsoFails, FailsSoon, NotANumber)


def install(folder: Path) -> None:
    """Writes an installed package with these controllers into a folder of Python's path.

    Their names are those of the classes, in lower case.
    """
    (folder / "plugin_of_tests.py").write_text(Path(__file__).read_text())
    about = folder / "plugin_of_tests-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-tests\nVersion: 1\n")
    points = [f"{one.__name__.lower()} = plugin_of_tests:{one.__name__}" for one in _PLUGINS]
    (about / "entry_points.txt").write_text("\n".join(["[rheostat.controllers]", *points, ""]))
