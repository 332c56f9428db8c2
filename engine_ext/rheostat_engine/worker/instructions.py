"""A step's compact instructions, and their expansion to one instruction per token and site.

Invariant: the host sends five integers per token and one row per captured block, for any number of
sites. The device computes the rest.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.worker.state.buffers import Buffers

COLUMNS = 5
"""Integers of a token: the columns of `Compact` without `base`."""


class Compact(NamedTuple):
    """The instructions of a step by token."""

    slot: npt.NDArray[np.int32]
    """[T]: slot of the bank. With a rule: index of the interval's first variant."""
    dose_slot: npt.NDArray[np.int32]
    """[T]: slot for measurements."""
    rule: npt.NDArray[np.int32]
    """[T]: rule about token ids; 0: none."""
    block: npt.NDArray[np.int32]
    """[T]: captured block, from 1; 0: not captured."""
    order: npt.NDArray[np.int32]
    """[T]: index within the block."""
    base: npt.NDArray[np.int32] | None
    """[B, sites]: 1 + the block's first row at each site, counted from `first_row`; 0: the block is
    not captured there."""
    first_row: int = 0
    """The ring row at which the rows of the step begin."""

    @classmethod
    def padded(
        cls, *columns: npt.NDArray[np.int32] | None, tokens: int, first_row: int = 0
    ) -> "Compact":
        """Pads all columns but the last to `tokens`; a column of None becomes zeros."""
        *short, base = columns
        padded = np.zeros((COLUMNS, tokens), np.int32)
        for row, column in zip(padded, short, strict=True):
            if column is not None:
                row[: len(column)] = column
        slot, dose_slot, rule, block, order = padded
        return cls(slot, dose_slot, rule, block, order, base, first_row)


class Instructions(NamedTuple):
    """Device tensors from which the instructions are expanded."""

    packed: torch.Tensor
    """[5, T] int32: the rows of `Compact`."""
    ids: torch.Tensor | None
    """[T or more] int32: input token ids; None if no rule applies."""
    bits: torch.Tensor
    """[rules, vocabulary] uint8; see `TokenRules`."""
    variants: torch.Tensor
    """[variants, 2] int32; see `TokenRules`."""
    code_of: torch.Tensor
    """[sites, slots] int32, the bank's."""
    base: torch.Tensor | None
    """[B, sites] int32; None if nothing is captured."""
    first_row: int
    """See `Compact`."""


def expand_reference(step: Instructions, buffers: Buffers) -> None:
    """Writes a step's instructions.

    code[s, t] = code_of[s, slot[t]]; cap_row[s, t] = first_row + base[block[t]-1, s]-1 + order[t],
    or 0.
    """
    slot, dose_slot, rule, block, order = step.packed.long()
    count = len(slot)
    if step.ids is not None:
        ruled = rule > 0
        names = torch.where(ruled, step.ids[:count].long(), 0)  # the ids of padding are undefined
        variant = torch.where(ruled, slot + step.bits[rule, names].long(), 0)
        slot = torch.where(ruled, step.variants[variant, 0].long(), slot)
        dose_slot = torch.where(ruled, step.variants[variant, 1].long(), dose_slot)
    buffers.code[:, :count] = step.code_of[:, slot]
    buffers.dose_slot[:count] = dose_slot.int()
    buffers.cap_row[:, :count] = 0
    if step.base is not None:
        start = step.base[(block - 1).clamp(min=0)].T
        wanted = (start > 0) & (block > 0)
        rows = start + order + (step.first_row - 1)
        buffers.cap_row[:, :count] = torch.where(wanted, rows, 0).int()
