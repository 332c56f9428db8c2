"""How a decoder block carries the stream: what the probe finds and what installation needs.

Invariant: a form describes what was seen when the block ran, never what a class name suggests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch import nn

from rheostat_engine.points import Point


class Carrier(StrEnum):
    """In what shape blocks hand the stream on."""

    PAIR = "pair"
    """(hidden, residual), whose sum is the stream."""
    SINGLE = "single"
    """One tensor, which is the stream."""


class SiteError(Exception):
    """The model's sites can't be found or can't be trusted; says which and why."""


@dataclass(frozen=True)
class Branch:
    """Where something that a block adds to the stream is found."""

    module: nn.Module | None
    """The module that returns it. None, in pair form: the first of the two parts that the mid norm
    is given, or that leave the block."""
    gain: float = 1.0
    """What the block multiplies it by before it adds it."""


@dataclass(frozen=True)
class BlockForm:
    """One decoder block. A point that it lacks is None, and refused with the reason."""

    carrier: Carrier
    mid: nn.Module | None
    """The module whose input is the stream after attention: in pair form the norm that is given
    both parts, in single form whatever comes next."""
    attention: Branch | None
    mlp: Branch | None
    refused: Mapping[Point, str] = field(default_factory=dict)
    """Why points are lacking."""


@dataclass(frozen=True)
class Block:
    """A decoder block in the module tree."""

    layer: int
    module: nn.Module
    attention: tuple[nn.Module, ...]
    """The layers in it that hold KV or state."""
