"""Tables on the device that are written from time to time, a few rows at once.

Invariants: `flush` copies all waiting rows in few copies per table, in the order of the current
stream, and the calling thread does not wait for them. If a row was put twice, the last content
stays.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_MOST = 1 << 20
"""Bytes that may wait for a flush."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor through pinned memory, in the current stream's order, without waiting."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Table:
    """A tensor on the device, and rows along one dimension that wait to be written."""

    def __init__(self, tensor: torch.Tensor, *, dim: int = 0) -> None:
        """Wraps a tensor whose rows are along `dim`."""
        self.tensor = tensor
        self._dim = dim
        self._numbers: list[int] = []
        self._contents: list[torch.Tensor] = []
        self._bytes = 0

    def put(self, number: int, content: torch.Tensor | npt.NDArray[np.generic]) -> None:
        """Writes the content of a row at the next flush."""
        self.put_all([number], torch.as_tensor(content).unsqueeze(self._dim))

    def put_all(
        self, numbers: Sequence[int], contents: torch.Tensor | npt.NDArray[np.generic]
    ) -> None:
        """Writes the contents of rows, which are along the table's dimension, at the next flush."""
        tensor = torch.as_tensor(contents)
        self._numbers += numbers
        self._contents.append(tensor)
        self._bytes += tensor.nbytes
        if self._bytes > _MOST:
            self.flush()

    def flush(self) -> None:
        """Writes the waiting rows, rounded to the table's dtype."""
        if not self._numbers:
            return
        device, dim = self.tensor.device, self._dim
        shape = list(self.tensor.shape)
        shape[dim] = len(self._numbers)
        content = torch.empty(shape, dtype=self.tensor.dtype, pin_memory=device.type != "cpu")
        parts = content.split([rows.shape[dim] for rows in self._contents], dim)
        for part, rows in zip(parts, self._contents, strict=True):
            part.copy_(rows)
        last = {number: index for index, number in enumerate(self._numbers)}
        if len(last) < len(self._numbers):
            content = content.index_select(dim, torch.tensor(list(last.values())))
        where = torch.tensor(list(last))
        self._numbers, self._contents, self._bytes = [], [], 0
        self.tensor.index_copy_(dim, to_device(where, device), to_device(content, device))
