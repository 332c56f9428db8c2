"""A step's compact instructions, and their expansion to one instruction per token and site.

Invariant: the host sends five integers per token and one row per captured block, for any number of
sites. The device computes the rest.
"""

from typing import NamedTuple

import torch

from rheostat_engine.worker.state.buffers import Buffers

COLUMNS = 5
"""Integers of a token; see `Instructions.packed`."""


class Instructions(NamedTuple):
    """Device tensors from which the instructions are expanded."""

    packed: torch.Tensor
    """[5, T] int32, by token:

    * the slot of the bank; with a rule, the index of the interval's first variant;
    * the slot for measurements;
    * the rule about token ids; 0: none;
    * the captured block, from 1; 0: not captured;
    * the index within the block.
    """
    ids: torch.Tensor | None
    """[T or more] int32: input token ids; None if no rule applies."""
    bits: torch.Tensor
    """[rules, vocabulary] uint8; see `TokenRules`."""
    variants: torch.Tensor
    """[variants, 2] int32; see `TokenRules`."""
    code_of: torch.Tensor
    """[sites, slots] int32, the bank's."""
    base: torch.Tensor | None
    """[B, sites] int32: 1 + the block's first row at each site, counted from `first_row`; 0: the
    block is not captured there. None if nothing is captured."""
    first_row: int
    """The ring row at which the rows of the step begin."""


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
