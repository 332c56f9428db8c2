"""The workers' vectors follow the store, whoever stops waiting."""

import asyncio

import numpy as np
import pytest

from rheostat_server.loader import VectorLoader
from rheostat_server.tensors import FloatType
from rheostat_server.vectors import Vector, make_vector

from .fakes import WIDTH, ScriptedBackend
from .streams import until


class Slow(ScriptedBackend):
    """Loads once `gate` is set."""

    gate: asyncio.Event

    async def load_vectors(self, vectors) -> None:
        await super().load_vectors(vectors)
        await self.gate.wait()


def vector(value: float) -> Vector:
    data = np.full((1, WIDTH), value, dtype="<f4").tobytes()
    return make_vector(FloatType.FLOAT32, 1, WIDTH, data, "v")


async def cancelled_while_loading(backend: Slow, loader: VectorLoader) -> None:
    backend.gate = asyncio.Event()
    waiting = asyncio.create_task(loader.ensure([vector(1)]))
    await until(lambda: bool(backend.loaded))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_vectors_that_nobody_waits_for_any_more_are_loaded_once_and_dropped_in_time() -> None:
    backend = Slow()
    loader = VectorLoader(backend, vector(1).size)
    loader.store.put(vector(1))
    await cancelled_while_loading(backend, loader)
    backend.gate.set()
    await loader.ensure([vector(1)])
    assert backend.loaded == [vector(1).digest.hex()]
    loader.store.put(vector(2))
    await until(lambda: backend.dropped == [vector(1).digest.hex()])


async def test_vectors_that_leave_the_store_while_they_are_loaded_are_dropped() -> None:
    backend = Slow()
    loader = VectorLoader(backend, vector(1).size)
    loader.store.put(vector(1))
    await cancelled_while_loading(backend, loader)
    loader.store.put(vector(2))
    backend.gate.set()
    await until(lambda: backend.dropped == [vector(1).digest.hex()])
