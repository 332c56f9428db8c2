"""How far the distributions of cells lie from those of their clean prompts."""

import asyncio
from dataclasses import dataclass

import numpy as np

from rheostat_server.derivation.lens import rows_per_call
from rheostat_server.requests.manager import RequestManager
from rheostat_wire.dtypes import FloatArray


@dataclass(frozen=True, eq=False)
class _Compared:
    row: FloatArray
    reference: FloatArray
    result: asyncio.Future[float]


class Divergences:
    """Compares rows, all that wait in one call to the workers."""

    def __init__(self, manager: RequestManager) -> None:
        """Nothing waits."""
        self._manager = manager
        # Each row is read with its reference.
        self._most = max(1, rows_per_call(manager.info) // 2)
        self._waiting: list[_Compared] = []
        self._turn = asyncio.Lock()

    async def between(self, reference: FloatArray, row: FloatArray) -> float:
        """KL(reference || row) of the distributions that follow from two rows, in nats.

        Args:
            reference: [1, W], of the stream behind the last layer.
            row: [1, W], likewise.

        Raises:
            EngineLost: the engine is gone.
        """
        result: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(compared := _Compared(row, reference, result))
        try:
            async with self._turn:
                # Turns come in the order of `_waiting`, so the first of it is this row, unless
                # an earlier turn has read it.
                if not result.done():
                    await self._read_waiting()
        finally:
            if not result.done():
                self._waiting.remove(compared)
        return result.result()

    async def _read_waiting(self) -> None:
        """Reads what waits. If it fails or is cancelled, the next turn reads the same again."""
        together = self._waiting[: self._most]
        read = await self._manager.backend.lens(
            np.concatenate([compared.row for compared in together]),
            0,
            (),
            np.concatenate([compared.reference for compared in together]),
        )
        for compared, value in zip(together, read.divergences.tolist(), strict=True):
            if compared in self._waiting:
                compared.result.set_result(value)
        self._waiting = [compared for compared in self._waiting if not compared.result.done()]
