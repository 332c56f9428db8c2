"""Tables on the device with occasional writes of a few rows.

Invariants: `flush` writes all staged rows with few copies per table, in the order of the current
stream, without waiting for them. If a row is put twice, the last content is written.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_MOST = 1 << 20
"""Staged bytes above which `put_all` flushes."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor through pinned memory on the current stream, without waiting."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Table:
    """A tensor on the device, with staged rows along one dimension."""

    def __init__(self, tensor: torch.Tensor, *, dim: int = 0) -> None:
        self.tensor = tensor
        self._dim = dim
        self._numbers: list[int] = []
        self._contents: list[npt.NDArray[np.generic]] = []
        self._bytes = 0

    def put(self, number: int, content: npt.NDArray[np.generic]) -> None:
        """Stages the content of a row until the next flush."""
        self.put_all([number], np.expand_dims(content, self._dim))

    def put_all(self, numbers: Sequence[int], contents: npt.NDArray[np.generic]) -> None:
        """Stages the contents of rows, along the table's dimension, until the next flush."""
        self._numbers += numbers
        self._contents.append(contents)
        self._bytes += contents.nbytes
        if self._bytes > _MOST:
            self.flush()

    def flush(self) -> None:
        """Writes the staged rows, rounded to the table's dtype."""
        if not self._numbers:
            return
        device, dim = self.tensor.device, self._dim
        # Numpy joins the parts, because each operation of torch releases the GIL.
        joined = torch.from_numpy(np.concatenate(self._contents, dim))
        pinned = device.type != "cpu"
        content = torch.empty(joined.shape, dtype=self.tensor.dtype, pin_memory=pinned)
        content.copy_(joined)
        last = {number: index for index, number in enumerate(self._numbers)}
        if len(last) < len(self._numbers):
            content = content.index_select(dim, torch.tensor(list(last.values())))
        where = torch.tensor(list(last))
        self._numbers, self._contents, self._bytes = [], [], 0
        self.tensor.index_copy_(dim, to_device(where, device), to_device(content, device))
