"""How rows leave the device: copied aside while the next step already runs.

Invariant: handing rows over costs the step thread no wait; their region of the ring may be written
again once the returned fence has happened.
"""

from collections.abc import Callable, Sequence

import torch

from rheostat_engine.core.delivery import Delivery, Frame
from rheostat_engine.core.ring import Fence
from rheostat_engine.events import Head, RowsHead


class Outlet:
    """Rows and events of one worker, on their way to the server."""

    def __init__(self, delivery: Delivery, device: torch.device, *, limit: int) -> None:
        """Rows are copied on a stream of their own where the device has streams.

        Args:
            delivery: the way out.
            device: where the rows come from.
            limit: bytes of rows that may wait for the server.
        """
        self._delivery = delivery
        self._limit = limit
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def free_bytes(self) -> int:
        """Bytes of rows that may still be handed over now."""
        return max(0, self._limit - self._delivery.pending_bytes)

    def send(self, frame: Frame) -> None:
        """Hands over a frame without rows."""
        self._delivery.send(frame)

    def send_rows(self, head: RowsHead, rows: torch.Tensor) -> Fence | None:
        """Hands over rows that the work launched so far will have written.

        Returns:
            When the rows have left the device; None if they already have.
        """
        host, left = self._copy(rows)
        self._delivery.send(Frame(head, host, left))
        return left

    def send_measured(
        self,
        measured: torch.Tensor,
        heads: Callable[[torch.Tensor], Sequence[Head]],
        otherwise: Sequence[Head],
    ) -> None:
        """Hands over frames that are made of what the work launched so far will have measured.

        Args:
            measured: on the device.
            heads: makes the frames' heads of it once it is on the host, on another thread.
            otherwise: what is sent where that fails.
        """
        host, left = self._copy(measured)
        self._delivery.send(Frame(lambda: heads(host), ready=left, otherwise=otherwise))

    def _copy(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        if self._stream is None:
            return values.clone(), None
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        values.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            host.copy_(values, non_blocking=True)
            left = torch.cuda.Event()
            left.record(self._stream)
        return host, left

    def close(self) -> None:
        """Sends what has been handed over, then stops."""
        self._delivery.close()
