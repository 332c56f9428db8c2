"""A step's compact instructions, and their expansion to one per token and site.

Invariant: the host sends five small integers per token and one row per captured block, whatever
the number of sites; the device makes the rest.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.core.buffers import Buffers
from rheostat_engine.core.devices import to_device
from rheostat_engine.core.rules import TokenRules

_STAGES = 4
_COLUMNS = 5


class Compact(NamedTuple):
    """What a step does, per token."""

    slot: npt.NDArray[np.int32]
    """[T]: slot of the bank; under a rule the first of the piece's variants."""
    cell: npt.NDArray[np.int32]
    """[T]: where measurements go."""
    rule: npt.NDArray[np.int32]
    """[T]: rule about token ids; 0: none."""
    block: npt.NDArray[np.int32]
    """[T]: captured block, from 1; 0: not captured."""
    order: npt.NDArray[np.int32]
    """[T]: place within the block."""
    base: npt.NDArray[np.int32] | None
    """[B, sites]: ring row of the block's first token at each site, 0: not captured there."""

    @classmethod
    def padded(cls, *columns: npt.NDArray[np.int32] | None, tokens: int) -> "Compact":
        """All columns, but the last made as long as `tokens`. None: nothing is captured."""
        *short, base = columns
        made = np.zeros((_COLUMNS, tokens), np.int32)
        for row, column in zip(made, short, strict=True):
            if column is not None:
                row[: len(column)] = column
        slot, cell, rule, block, order = made
        return cls(slot, cell, rule, block, order, base)


class Instructions(NamedTuple):
    """What is expanded, on the device."""

    packed: torch.Tensor
    """[5, T] int32: the rows of `Compact`."""
    ids: torch.Tensor | None
    """[T or more] int32: input token ids; None where no rule applies."""
    bits: torch.Tensor
    """[rules, vocabulary] uint8; this and the next as in `TokenRules`."""
    variants: torch.Tensor
    """[variants, 2] int32."""
    code_of: torch.Tensor
    """[sites, slots] int32, the bank's."""
    base: torch.Tensor | None
    """[B, sites] int32; None where nothing is captured."""


def expand_reference(step: Instructions, buffers: Buffers) -> None:
    """code[s, t] = code_of[s, slot[t]]; cap_row[s, t] = base[block[t]-1, s] + order[t] or 0."""
    slot, cell, rule, block, order = step.packed.long()
    count = len(slot)
    if step.ids is not None:
        ruled = rule > 0
        names = torch.where(ruled, step.ids[:count].long(), 0)  # others' ids may be anything
        variant = torch.where(ruled, slot + step.bits[rule, names].long(), 0)
        slot = torch.where(ruled, step.variants[variant, 0].long(), slot)
        cell = torch.where(ruled, step.variants[variant, 1].long(), cell)
    buffers.code[:, :count] = step.code_of[:, slot]
    buffers.cell[:count] = cell.int()
    buffers.cap_row[:, :count] = 0
    if step.base is not None:
        start = step.base[(block - 1).clamp(min=0)].T
        wanted = (start > 0) & (block > 0)
        buffers.cap_row[:, :count] = torch.where(wanted, start + order, 0).int()


class Expander:
    """Brings a step's instructions to the device and expands them there."""

    def __init__(
        self, buffers: Buffers, code_of: torch.Tensor, rules: TokenRules, tokens: int
    ) -> None:
        """Allocates the staging memory.

        Args:
            buffers: where the instructions are written.
            code_of: [sites, slots], the bank's.
            rules: rules about token ids.
            tokens: the most tokens of a step.
        """
        self._buffers = buffers
        self._code_of = code_of
        self._rules = rules
        self._device = code_of.device
        self._cuda = self._device.type == "cuda"
        self._stages: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        for _ in range(_STAGES if self._cuda else 1):
            host = torch.zeros(_COLUMNS * tokens, dtype=torch.int32, pin_memory=self._cuda)
            self._stages.append((host, None))
        self._packed = torch.zeros(_COLUMNS * tokens, dtype=torch.int32, device=self._device)

    def write(self, compact: Compact, ids: torch.Tensor) -> None:
        """Makes the buffers say what `compact` says, for its tokens.

        Args:
            compact: what the step does.
            ids: [T or more] int32: input token ids, on the device.
        """
        step = self.instructions(compact, ids)
        if not self._cuda:
            expand_reference(step, self._buffers)
            return
        from rheostat_engine.sites.kernels import launch_expand

        launch_expand(step, self._buffers)

    def instructions(self, compact: Compact, ids: torch.Tensor) -> Instructions:
        """What `compact` says, on its way to the device."""
        ruled = bool(compact.rule.any())
        if ruled:
            self._rules.flush()
        base = None
        if compact.base is not None:
            base = to_device(torch.from_numpy(compact.base), self._device)
        return Instructions(
            packed=self._upload(compact),
            ids=ids if ruled else None,
            bits=self._rules.bits,
            variants=self._rules.variants,
            code_of=self._code_of,
            base=base,
        )

    def _upload(self, compact: Compact) -> torch.Tensor:
        count = len(compact.slot)
        host, copied = self._stages.popleft()
        if copied is not None:
            copied.synchronize()
        staged = host.numpy()[: _COLUMNS * count].reshape(_COLUMNS, count)
        for column, values in enumerate(compact[:_COLUMNS]):
            staged[column] = values
        used = host[: _COLUMNS * count]
        if not self._cuda:
            self._stages.append((host, None))
            return used.view(_COLUMNS, count)
        device = self._packed[: _COLUMNS * count]
        device.copy_(used, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._stages.append((host, copied))
        return device.view(_COLUMNS, count)
