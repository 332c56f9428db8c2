"""Gains: numbers that multiply the strength of a request's interventions while it runs.

A gain acts from a position on. All positions that are computed later get it, and no earlier one. So
a preempted request computes its tokens again with the gains that they had.

Invariant: a sample has one number for each of its interventions and position. What is unchanged
takes no memory, and `MAX_GAIN_CHANGES` bounds what the changes of a sample take.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

MAX_GAINS = 256
"""The most interventions of a request, each of which may have a gain."""

LARGEST_GAIN = 16.0

MAX_GAIN_CHANGES = 65_536
"""The most changes of a sample: a gain that changes k interventions makes k. A change takes ten
bytes in each worker."""


class GainsUpdate(NamedTuple):
    """New gains of a running sample from its next step on."""

    name: str
    """The id of its plan."""
    change: int
    """The server's number of the change; the report names it."""
    not_before: int
    """The first position that may change."""
    gains: Mapping[int, float]
    """By intervention, as `Act.gain`."""


_DECODER = msgspec.msgpack.Decoder(list[GainsUpdate])


def updates_to(updates: Iterable[GainsUpdate]) -> bytes:
    """Serializes updates."""
    return msgspec.msgpack.encode(list(updates))


def updates_from(wire: bytes) -> list[GainsUpdate]:
    """Parses the bytes of `updates_to`.

    Raises:
        ValueError: the bytes are no updates.
    """
    try:
        updates = _DECODER.decode(wire)
    except msgspec.MsgspecError as error:
        raise ValueError(f"these are no gains: {error}") from error
    for update in updates:
        for index, gain in update.gains.items():
            if not (0 <= index < MAX_GAINS and 0 <= gain <= LARGEST_GAIN):
                raise ValueError(f"these are no gains: {gain} of intervention {index}")
    return updates


def merged_gains(earlier: GainsUpdate | None, later: GainsUpdate) -> GainsUpdate:
    """Two updates of a sample that act from the same step on: the last gain of each wins."""
    if earlier is None:
        return later
    not_before = max(earlier.not_before, later.not_before)
    return later._replace(gains={**earlier.gains, **later.gains}, not_before=not_before)
