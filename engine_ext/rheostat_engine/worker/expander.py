"""Copies a step's instructions to the device by token, and expands them there by site."""

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.worker.instructions import COLUMNS, Instructions, expand_reference
from rheostat_engine.worker.state.buffers import Buffers
from rheostat_engine.worker.state.device_table import StagingBuffers, to_device
from rheostat_engine.worker.steering.token_rules import TokenRules


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
        self._stages = StagingBuffers(COLUMNS * tokens, self._device)
        self._packed = torch.zeros(COLUMNS * tokens, dtype=torch.int32, device=self._device)
        self._last: Instructions | None = None

    def write(self, step: Instructions) -> None:
        """Expands a step's instructions into the buffers, and keeps them for `write_again`."""
        self._last = step
        self._expand(step)

    def write_again(self, first_row: int, ids: torch.Tensor) -> None:
        """Writes the last step's instructions for other ring rows and input ids.

        All else is still on the device. Arguments as in `instructions`.
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

    def instructions(
        self,
        columns: npt.NDArray[np.int32],
        base: npt.NDArray[np.int32] | None,
        first_row: int,
        ids: torch.Tensor,
    ) -> Instructions:
        """Launches the copy to the device; returns the kernel's arguments.

        Args:
            columns: [5, T]; see `Instructions.packed`.
            base: [B, sites]; see `Instructions.base`.
            first_row: see `Instructions.first_row`.
            ids: [T or more] int32: input token ids.
        """
        ruled = bool(columns[2].any())
        if ruled:
            self._rules.flush()
        on_device = None
        if base is not None:
            on_device = to_device(torch.from_numpy(base), self._device)
        return Instructions(
            packed=self._upload(columns),
            ids=ids if ruled else None,
            bits=self._rules.bits,
            variants=self._rules.variants,
            code_of=self._code_of,
            base=on_device,
            first_row=first_row,
        )

    def _upload(self, columns: npt.NDArray[np.int32]) -> torch.Tensor:
        host = self._stages.take()
        packed = host[: columns.size]
        packed.numpy()[:] = columns.ravel()
        if self._cuda:
            packed = self._packed[: columns.size].copy_(packed, non_blocking=True)
        self._stages.give(host)
        return packed.view(columns.shape)
