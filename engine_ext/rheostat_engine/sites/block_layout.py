"""The layout of a decoder block: the probe's result, from which sites are installed.

Invariant: a layout describes how the block behaved when it ran. Class names are not used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch import nn

from rheostat_engine.plan.points import Point


class StreamLayout(StrEnum):
    """How blocks pass the stream on."""

    PAIR = "pair"
    """(hidden, residual), whose sum is the stream."""
    SINGLE = "single"
    """One tensor, which is the stream."""


class SiteError(Exception):
    """The model's sites can't be found or verified; the message names the sites and the reason."""


@dataclass(frozen=True)
class Branch:
    """The tensor that attention or the MLP adds to the stream."""

    module: nn.Module | None
    """The module that returns it. None (pair layout only): the branch is the first of the two parts
    that enter the mid norm or leave the block."""
    gain: float = 1.0
    """The factor by which the block multiplies it before the addition."""


@dataclass(frozen=True)
class BlockLayout:
    """The layout of a decoder block. A missing point is None, with its reason in `refused`."""

    stream_layout: StreamLayout
    mid: nn.Module | None
    """The module whose input is the stream after attention. With pair layout it is the norm of both
    parts."""
    attention: Branch | None
    mlp: Branch | None
    refused: Mapping[Point, str] = field(default_factory=dict)
    """Why points are missing."""


@dataclass(frozen=True)
class Block:
    """A decoder block in the module tree."""

    layer: int
    module: nn.Module
    attention: tuple[nn.Module, ...]
    """Its layers with a KV cache or other state."""
