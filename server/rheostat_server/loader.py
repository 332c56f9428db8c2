"""Keeps the workers' vectors in step with the store.

Invariant: a vector that `ensure` returned for is with the workers for as long as the store holds
it; one that left the store is dropped, unless it came back meanwhile. What was once sent to the
workers is noted even if nobody waits for it any more.
"""

import asyncio
import logging
from collections.abc import Sequence

from rheostat_server.errors import EngineLost
from rheostat_server.host import Backend
from rheostat_server.vectors import Vector, VectorStore

_LOG = logging.getLogger(__name__)


class VectorLoader:
    """Loads and drops the workers' vectors."""

    def __init__(self, backend: Backend, capacity: int) -> None:
        """A loader, and the store that it follows, of `capacity` bytes."""
        self.store = VectorStore(capacity, self._on_evict)
        self._backend = backend
        self._loaded: set[bytes] = set()
        self._turn = asyncio.Lock()
        self._loads: set[asyncio.Task[None]] = set()
        self._drops: set[asyncio.Task[None]] = set()

    async def ensure(self, vectors: Sequence[Vector]) -> None:
        """Returns once every worker has these vectors, which the store must hold.

        Raises:
            EngineLost: the engine is gone.
        """
        if all(vector.digest in self._loaded for vector in vectors):
            return
        task = asyncio.create_task(self._load(vectors))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        await asyncio.shield(task)

    async def _load(self, vectors: Sequence[Vector]) -> None:
        async with self._turn:
            missing = [vector for vector in vectors if vector.digest not in self._loaded]
            if missing:
                await self._backend.load_vectors(missing)
                self._loaded.update(vector.digest for vector in missing)
        if any(vector.digest not in self.store for vector in missing):
            self._drop_soon()

    def _on_evict(self, digest: bytes) -> None:
        if digest in self._loaded:
            self._drop_soon()

    def _drop_soon(self) -> None:
        if not self._drops:
            task = asyncio.get_running_loop().create_task(self._drop())
            self._drops.add(task)
            task.add_done_callback(self._drops.discard)

    async def _drop(self) -> None:
        async with self._turn:
            while doomed := [digest for digest in self._loaded if digest not in self.store]:
                self._loaded.difference_update(doomed)
                try:
                    await self._backend.drop_vectors(doomed)
                except EngineLost:
                    _LOG.info("the engine is gone; %d vectors went with it", len(doomed))
