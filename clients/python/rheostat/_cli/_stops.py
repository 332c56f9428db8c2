"""Bounds at which ``rheostat watch`` ends requests: as typed, as conditions of rules, and as text.

The client whose request ends receives the text as the label of the stop. So it names the probe and
the number, not the watch's rule, which that client does not know.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rheostat._capture.activations import IntArray
from rheostat._fields import is_finite
from rheostat._responses.signals import column_numbers
from rheostat._steering.gates import Condition, Pool, Probe
from rheostat._watches.events import Readings
from rheostat._watches.table import column_names

_POOLED: dict[Pool, str] = {"last": "", "mean": "mean of ", "max": "largest "}


@dataclass(frozen=True)
class Bound:
    """A bound for a probe's readings. A request with a reading beyond it ends."""

    probe: str
    """The name of its vector, as typed."""
    below: bool
    """Whether smaller numbers end a request, not larger ones."""
    number: float
    pool: Pool = "last"
    """The number that is compared at a token: its reading, or the mean or largest so far."""

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

        The server sends readings, not their mean or largest. So with these pools the text has only
        the bound: "mean of mood is above 2.5 at 14".

        Args:
            readings: what was read of the sample in this step.
            positions: the positions at which it was beyond the bound.
        """
        first = int(positions[0])
        what = self._read(readings, first) if self.pool == "last" else self._quantity
        return f"{what} is {self._beyond} at {first}"

    def _read(self, readings: Readings, position: int) -> str:
        """The probe's reading at the position, at the site that was farthest beyond the bound."""
        columns = column_numbers(probe_name(self.probe), readings.columns)
        values = readings.values[readings.positions == position][:, columns]
        if np.isnan(values).all():
            return self.probe
        farthest = int((np.nanargmin if self.below else np.nanargmax)(values))
        name = column_names(readings.columns)[columns[farthest]] if columns[1:] else self.probe
        return f"{name} {values.flat[farthest]:g}"

    @property
    def _quantity(self) -> str:
        return f"{_POOLED[self.pool]}{self.probe}"

    @property
    def _beyond(self) -> str:
        return f"{'below' if self.below else 'above'} {self.number:g}"

    def __str__(self) -> str:
        """As "mood above 2.5"."""
        return f"{self._quantity} {self._beyond}"


Bounds: TypeAlias = Mapping[str, Bound]
"""Bounds by the name of the rule that ends requests beyond it."""


def probe_name(vector: str) -> str:
    """The name of the probe along a vector, without slashes, which probe names cannot have."""
    return vector.replace("/", ".")


def read_bound(text: str, *, below: bool) -> Bound:
    """Parses NAME:NUMBER of ``--stop-above`` or, with ``below``, of ``--stop-below``."""
    name, _, number = text.rpartition(":")
    try:
        bound = float(number)
    except ValueError:
        name = ""
    if name and is_finite(bound):
        return Bound(name, below, bound)
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME:NUMBER, such as joy:2.5")
