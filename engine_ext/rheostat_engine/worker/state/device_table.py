"""Copies between host and device, and tables on the device with occasional writes of a few rows.

Invariants: `flush` writes all staged rows with few copies per table, in the order of the current
stream, without waiting for them. If a row is put twice, the last content is written.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_MOST = 1 << 20
"""Staged bytes above which `put_all` flushes."""

_STAGES = 4
"""Staging buffers on CUDA, so that the host may run some steps ahead."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor through pinned memory on the current stream, without waiting."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """An event after the work launched on the current stream; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class HostCopy:
    """A tensor while it is copied to the host, on the current stream."""

    def __init__(self, values: torch.Tensor) -> None:
        """Begins the copy. On a CPU the result is `values` itself."""
        self._host = values.to("cpu", non_blocking=True)
        self._copied = recorded_event(values.device)

    def numpy(self) -> npt.NDArray[np.float32]:
        """The values, float32. Waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        values: npt.NDArray[np.float32] = self._host.numpy()
        return values


class StagingBuffers:
    """Host buffers of int32, of which each step copies one to the device.

    Invariant: a buffer is written again only after the device has copied it.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocates buffers of `size` integers."""
        self._device = device
        cuda = device.type == "cuda"
        self._stages: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        for _ in range(_STAGES if cuda else 1):
            self._stages.append((torch.zeros(size, dtype=torch.int32, pin_memory=cuda), None))

    def take(self) -> torch.Tensor:
        """A buffer to write."""
        host, copied = self._stages.popleft()
        if copied is not None:
            copied.synchronize()
        return host

    def give(self, host: torch.Tensor) -> None:
        """Call this once the copy of the buffer was launched on the current stream."""
        self._stages.append((host, recorded_event(self._device)))


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
