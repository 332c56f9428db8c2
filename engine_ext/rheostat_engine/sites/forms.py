"""How a decoder block carries the stream: what the probe finds and what installation needs.

Invariant: a form describes what was seen when the block ran, never what a class name suggests.
"""

from dataclasses import dataclass
from enum import StrEnum

from torch import nn


class Carrier(StrEnum):
    """In what shape blocks hand the stream on."""

    PAIR = "pair"
    """(hidden, residual), whose sum is the stream."""
    SINGLE = "single"
    """One tensor, which is the stream."""


class SiteError(Exception):
    """The model's sites can't be found or can't be trusted; says which and why."""


@dataclass(frozen=True)
class BlockForm:
    """One decoder block."""

    carrier: Carrier
    mid: nn.Module | None
    """The module whose input is the stream after attention: in pair form the norm that is given
    both parts, in single form whatever comes next. None: the block has no `resid_mid`."""
    no_mid: str
    """Why there is no `resid_mid`; empty where there is one."""


@dataclass(frozen=True)
class Block:
    """A decoder block in the module tree."""

    layer: int
    module: nn.Module
    attention: tuple[nn.Module, ...]
    """The layers in it that hold KV or state."""
