"""A step's compact instructions, and their expansion to one per token and site.

Invariant: the host sends three small integers per token and one row per captured block, whatever
the number of sites; the device makes the rest.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.core.program import Program

_STAGES = 4


class Compact(NamedTuple):
    """What a step does, per token."""

    slot: npt.NDArray[np.int32]
    """[T]: slot of the bank."""
    block: npt.NDArray[np.int32]
    """[T]: captured block, from 1; 0: not captured."""
    order: npt.NDArray[np.int32]
    """[T]: place within the block."""
    base: npt.NDArray[np.int32] | None
    """[B, sites]: ring row of the block's first token at each site, 0: not captured there."""


def expand_reference(
    slot: torch.Tensor,
    block: torch.Tensor,
    order: torch.Tensor,
    row_of: torch.Tensor,
    base: torch.Tensor | None,
    add_row: torch.Tensor,
    cap_row: torch.Tensor,
) -> None:
    """add_row[s, t] = row_of[s, slot[t]]; cap_row[s, t] = base[block[t]-1, s] + order[t] or 0."""
    count = slot.shape[0]
    add_row[:, :count] = row_of[:, slot.long()]
    cap_row[:, :count] = 0
    if base is not None:
        start = base[(block.long() - 1).clamp(min=0)].T
        wanted = (start > 0) & (block > 0)
        cap_row[:, :count] = torch.where(wanted, start + order, 0)


class Expander:
    """Brings a step's instructions to the device and expands them there."""

    def __init__(self, program: Program, row_of: torch.Tensor, tokens: int) -> None:
        """Allocates the staging memory.

        Args:
            program: whose instructions are written.
            row_of: [sites, slots], the bank's.
            tokens: the most tokens of a step.
        """
        self._program = program
        self._row_of = row_of
        self._device = row_of.device
        self._cuda = self._device.type == "cuda"
        self._stages: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        for _ in range(_STAGES if self._cuda else 1):
            host = torch.zeros(3 * tokens, dtype=torch.int32, pin_memory=self._cuda)
            self._stages.append((host, None))
        self._compact = torch.zeros(3 * tokens, dtype=torch.int32, device=self._device)

    def write(self, compact: Compact) -> None:
        """Makes the program's buffers say what `compact` says, for its tokens."""
        count = len(compact.slot)
        packed = self._upload(compact, count)
        slot, block, order = packed[:count], packed[count : 2 * count], packed[2 * count :]
        base = None if compact.base is None else torch.from_numpy(compact.base)
        program = self._program
        if not self._cuda:
            expand_reference(
                slot, block, order, self._row_of, base, program.add_row, program.cap_row
            )
            return
        from rheostat_engine.sites.kernels import launch_expand

        if base is not None:
            base = base.pin_memory().to(self._device, non_blocking=True)
        launch_expand(slot, block, order, self._row_of, base, program.add_row, program.cap_row)

    def _upload(self, compact: Compact, count: int) -> torch.Tensor:
        host, copied = self._stages.popleft()
        if copied is not None:
            copied.synchronize()
        staged = host.numpy()
        staged[:count] = compact.slot
        staged[count : 2 * count] = compact.block
        staged[2 * count : 3 * count] = compact.order
        if not self._cuda:
            self._stages.append((host, None))
            return host[: 3 * count]
        device = self._compact[: 3 * count]
        device.copy_(host[: 3 * count], non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._stages.append((host, copied))
        return device
