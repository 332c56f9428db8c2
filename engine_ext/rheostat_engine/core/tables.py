"""Device tables that are written now and then, a few rows at a time.

Invariant: what was put down before `flush` reaches the device in one copy per table, in the order
of the current stream, and the calling thread never waits for it.
"""

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.core.devices import to_device


class Table:
    """A tensor on the device with rows that are waiting to be written along one dimension."""

    def __init__(self, tensor: torch.Tensor, *, dim: int = 0) -> None:
        """`tensor` is written along `dim`."""
        self.tensor = tensor
        self._dim = dim
        self._waiting: dict[int, torch.Tensor] = {}

    def put(self, number: int, content: torch.Tensor | npt.NDArray[np.generic]) -> None:
        """Row `number` is to hold `content`."""
        held = torch.as_tensor(content)
        self._waiting[number] = held.to(self.tensor.dtype)

    def flush(self) -> None:
        """Writes what waits."""
        if not self._waiting:
            return
        device = self.tensor.device
        where = torch.tensor(list(self._waiting), dtype=torch.int64)
        content = torch.stack(list(self._waiting.values()), dim=self._dim)
        self._waiting = {}
        self.tensor.index_copy_(self._dim, to_device(where, device), to_device(content, device))
