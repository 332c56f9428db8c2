"""Device tables that are written now and then, a few rows at a time.

Invariant: what was put down before `flush` reaches the device in few copies per table, in the order
of the current stream, and the calling thread never waits for it. Of several contents for one row
the last one stays.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.core.devices import to_device

_MOST = 1 << 20
"""Bytes that may wait."""


class Table:
    """A tensor on the device with rows that are waiting to be written along one dimension."""

    def __init__(self, tensor: torch.Tensor, *, dim: int = 0) -> None:
        """`tensor` is written along `dim`."""
        self.tensor = tensor
        self._dim = dim
        self._numbers: list[int] = []
        self._contents: list[torch.Tensor] = []
        self._bytes = 0

    def put(self, number: int, content: torch.Tensor | npt.NDArray[np.generic]) -> None:
        """Row `number` is to hold `content`."""
        self.put_all([number], torch.as_tensor(content).unsqueeze(self._dim))

    def put_all(
        self, numbers: Sequence[int], contents: torch.Tensor | npt.NDArray[np.generic]
    ) -> None:
        """Rows `numbers` are to hold `contents`, which lie along the table's dimension."""
        held = torch.as_tensor(contents)
        self._numbers += numbers
        self._contents.append(held)
        self._bytes += held.nbytes
        if self._bytes > _MOST:
            self.flush()

    def flush(self) -> None:
        """Writes what waits, rounded to the table's dtype."""
        if not self._numbers:
            return
        device, dim = self.tensor.device, self._dim
        shape = list(self.tensor.shape)
        shape[dim] = len(self._numbers)
        content = torch.empty(shape, dtype=self.tensor.dtype, pin_memory=device.type != "cpu")
        parts = content.split([one.shape[dim] for one in self._contents], dim)
        for part, one in zip(parts, self._contents, strict=True):
            part.copy_(one)
        last = {number: index for index, number in enumerate(self._numbers)}
        if len(last) < len(self._numbers):
            content = content.index_select(dim, torch.tensor(list(last.values())))
        where = torch.tensor(list(last))
        self._numbers, self._contents, self._bytes = [], [], 0
        self.tensor.index_copy_(dim, to_device(where, device), to_device(content, device))
