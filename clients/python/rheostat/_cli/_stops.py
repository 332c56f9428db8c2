"""Bounds at which ``rheostat watch`` ends requests: as they are typed, as rules, and in words.

The owner of a request sees the words as the label of the stop. So they name the probe and the
number, not the rule of the watch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rheostat._capture.activations import IntArray
from rheostat._cli._common import is_finite
from rheostat._responses.signals import column_numbers
from rheostat._steering.gates import Condition, Pool, Probe
from rheostat._watches.events import Readings
from rheostat._watches.table import column_names

_POOLED: dict[Pool, str] = {"last": "", "mean": "mean of ", "max": "largest "}


@dataclass(frozen=True)
class Bound:
    """A bound of what a probe reads. Requests that read beyond it end."""

    probe: str
    """The name of its vector, as typed."""
    below: bool
    """Whether smaller numbers end a request, not larger ones."""
    number: float
    pool: Pool = "last"
    """The compared number of a token: its own reading, or the mean or largest up to it."""

    @property
    def flag(self) -> str:
        """The flag that sets it."""
        return "--stop-below" if self.below else "--stop-above"

    def condition(self, probe: Probe, *, after_prompt: bool) -> Condition:
        """Holds where the number is beyond the bound."""
        beyond = probe.below if self.below else probe.above
        return beyond(self.number, pool=self.pool, after_prompt=after_prompt)

    def passed(self, readings: Readings, positions: IntArray) -> str:
        """The first position at which a sample was beyond it, as "mood 3 is above 2.5 at 14".

        Means and largest numbers are compared, but not sent. So with these pools the text has no
        number: "mean of mood is above 2.5 at 14".

        Args:
            readings: what was read of the sample in this step.
            positions: the positions at which it was beyond the bound.
        """
        first = int(positions[0])
        what = self._read(readings, first) if self.pool == "last" else self._counts
        return f"{what} is {self._beyond} at {first}"

    def _read(self, readings: Readings, position: int) -> str:
        """What the probe read at the position, at the site that was farthest beyond the bound."""
        columns = column_numbers(probe_name(self.probe), readings.columns)
        values = readings.values[readings.positions == position][:, columns]
        if np.isnan(values).all():
            return self.probe
        farthest = int((np.nanargmin if self.below else np.nanargmax)(values))
        name = column_names(readings.columns)[columns[farthest]] if columns[1:] else self.probe
        return f"{name} {values.flat[farthest]:g}"

    @property
    def _counts(self) -> str:
        return f"{_POOLED[self.pool]}{self.probe}"

    @property
    def _beyond(self) -> str:
        return f"{'below' if self.below else 'above'} {self.number:g}"

    def __str__(self) -> str:
        """As "mood above 2.5"."""
        return f"{self._counts} {self._beyond}"


Bounds: TypeAlias = Mapping[str, Bound]
"""Bounds by the name of the rule that ends requests beyond it."""


def read_above(text: str) -> Bound:
    """Parses NAME:NUMBER of ``--stop-above``."""
    return _bound(text, below=False)


def read_below(text: str) -> Bound:
    """Parses NAME:NUMBER of ``--stop-below``."""
    return _bound(text, below=True)


def probe_name(vector: str) -> str:
    """The name of the probe along a vector: names of probes have no slash."""
    return vector.replace("/", ".")


def _bound(text: str, *, below: bool) -> Bound:
    name, _, number = text.rpartition(":")
    try:
        bound = float(number)
    except ValueError:
        name = ""
    if name and is_finite(bound):
        return Bound(name, below, bound)
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME:NUMBER, such as joy:2.5")
