"""Loads vectors of the store into the workers, and drops evicted vectors.

Vectors that are requested during a call of the workers are loaded together by the next call.

Invariants: once `ensure` returns, the workers have the vectors for as long as the store has them.
Evicted vectors are dropped, unless they were stored again meanwhile. A loaded vector is recorded,
even if its requests have ended. At most one call loads a vector, and all its requests get the
result of that call.
"""

import asyncio
import logging
from collections.abc import Sequence

from rheostat_server.engine.backend import Backend
from rheostat_server.errors import EngineLost
from rheostat_server.limits import CALL_BYTES
from rheostat_server.vectors.store import Vector, VectorStore
from rheostat_wire.dtypes import FloatArray

_LOG = logging.getLogger(__name__)


class WorkerVectorCache:
    """Loads and drops the workers' vectors."""

    def __init__(self, backend: Backend, capacity: int) -> None:
        """Makes a cache without vectors, and its store of `capacity` bytes."""
        self.store = VectorStore(capacity, self._on_evict)
        self.store.directions.connect(backend.info.vocabulary, self._directions)
        self._backend = backend
        self._loaded: set[bytes] = set()
        self._turn = asyncio.Lock()
        self._filling: list[Vector] = []
        """The vectors of the next call."""
        self._free = 0
        """Bytes that the next call can load in addition."""
        self._coming: dict[bytes, asyncio.Task[None]] = {}
        """The call that loads a vector, by digest."""
        self._dropping: asyncio.Task[None] | None = None

    async def _directions(self, token_ids: Sequence[int]) -> FloatArray:
        return (await self._backend.directions(token_ids)).rows

    async def ensure(self, vectors: Sequence[Vector]) -> None:
        """Returns once every worker has these vectors, which the store must hold.

        Raises:
            EngineLost: the engine is gone.
        """
        missing = [vector for vector in vectors if vector.digest not in self._loaded]
        if missing:
            calls = {self._call_with(vector) for vector in missing}
            await asyncio.shield(asyncio.gather(*calls))

    async def load_ahead(self, vectors: Sequence[Vector], owner: object) -> None:
        """Stores vectors that no request uses yet, and returns once every worker has them.

        Vectors for which the store has no room are left out; see `VectorStore.put_ahead`.

        Args:
            vectors: the vectors.
            owner: any object; the caller later passes it to `VectorStore.release_ahead`.

        Raises:
            EngineLost: the engine is gone.
        """
        await self.ensure([vector for vector in vectors if self.store.put_ahead(vector, owner)])

    def _call_with(self, vector: Vector) -> asyncio.Task[None]:
        """The call that loads a vector: a call that has it already, or else the next call."""
        if vector.digest not in self._coming:
            if self._filling and vector.float32_size <= self._free:
                call = self._coming[self._filling[0].digest]
            else:
                self._filling, self._free = [], CALL_BYTES
                call = asyncio.create_task(self._load(self._filling))
            self._filling.append(vector)
            self._free -= vector.float32_size
            self._coming[vector.digest] = call
        return self._coming[vector.digest]

    async def _load(self, vectors: list[Vector]) -> None:
        async with self._turn:
            if self._filling is vectors:
                self._filling = []
            try:
                await self._backend.load_vectors(vectors)
                self._loaded.update(vector.digest for vector in vectors)
            finally:
                for vector in vectors:
                    del self._coming[vector.digest]
        if any(vector.digest not in self.store for vector in vectors):
            self._drop_soon()

    def _on_evict(self, digest: bytes) -> None:
        if digest in self._loaded:
            self._drop_soon()

    def _drop_soon(self) -> None:
        if self._dropping is None or self._dropping.done():
            self._dropping = asyncio.create_task(self._drop())

    async def _drop(self) -> None:
        async with self._turn:
            while doomed := [digest for digest in self._loaded if digest not in self.store]:
                self._loaded.difference_update(doomed)
                try:
                    await self._backend.drop_vectors(doomed)
                except EngineLost:
                    _LOG.info("the engine is gone; %d vectors went with it", len(doomed))
