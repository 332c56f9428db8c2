"""Copies a step's compact instructions to the device, and expands them there.

Invariant: a staging buffer is written again only after the device has copied it.
"""

from collections import deque

import torch

from rheostat_engine.worker.instructions import COLUMNS, Compact, Instructions, expand_reference
from rheostat_engine.worker.state.buffers import Buffers
from rheostat_engine.worker.state.device_table import to_device
from rheostat_engine.worker.steering.token_rules import TokenRules

_STAGES = 4
"""Staging buffers on CUDA, so that the host may run some steps ahead."""


class Expander:
    """Copies a step's instructions to the device and expands them there."""

    def __init__(
        self, buffers: Buffers, code_of: torch.Tensor, rules: TokenRules, tokens: int
    ) -> None:
        """`code_of`, [sites, slots], is the bank's; a step has at most `tokens` tokens."""
        self._buffers = buffers
        self._code_of = code_of
        self._rules = rules
        self._device = code_of.device
        self._cuda = self._device.type == "cuda"
        self._stages: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        for _ in range(_STAGES if self._cuda else 1):
            host = torch.zeros(COLUMNS * tokens, dtype=torch.int32, pin_memory=self._cuda)
            self._stages.append((host, None))
        self._packed = torch.zeros(COLUMNS * tokens, dtype=torch.int32, device=self._device)
        self._last: Instructions | None = None

    def write(self, compact: Compact, ids: torch.Tensor) -> None:
        """Writes a step's instructions to the buffers; `ids`, [T or more] int32: input ids."""
        self._last = self.instructions(compact, ids)
        self._expand(self._last)

    def write_again(self, first_row: int, ids: torch.Tensor) -> None:
        """Writes the last step's instructions for other ring rows and input ids.

        All else is still on the device. `first_row` as in `Compact`; `ids` as in `write`.
        """
        last = self._last
        assert last is not None
        if last.ids is None and last.base is None:
            return  # the buffers still have the same instructions
        self._expand(last._replace(ids=None if last.ids is None else ids, first_row=first_row))

    def _expand(self, step: Instructions) -> None:
        if not self._cuda:
            expand_reference(step, self._buffers)
            return
        from rheostat_engine.worker.expand_kernel import launch_expand

        launch_expand(step, self._buffers)

    def instructions(self, compact: Compact, ids: torch.Tensor) -> Instructions:
        """Launches the copy to the device; returns the kernel's arguments."""
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
            first_row=compact.first_row,
        )

    def _upload(self, compact: Compact) -> torch.Tensor:
        count = len(compact.slot)
        host, copied = self._stages.popleft()
        if copied is not None:
            copied.synchronize()
        staged = host.numpy()[: COLUMNS * count].reshape(COLUMNS, count)
        for column, values in enumerate(compact[:COLUMNS]):
            staged[column] = values
        used = host[: COLUMNS * count]
        if not self._cuda:
            self._stages.append((host, None))
            return used.view(COLUMNS, count)
        device = self._packed[: COLUMNS * count]
        device.copy_(used, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._stages.append((host, copied))
        return device.view(COLUMNS, count)
