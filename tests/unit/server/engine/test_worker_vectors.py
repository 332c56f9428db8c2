"""The workers' vectors follow the store, whoever stops waiting."""

import asyncio

import numpy as np
import pytest

from rheostat_server.engine import worker_vectors as loading
from rheostat_server.engine.worker_vectors import WorkerVectorCache
from rheostat_server.errors import EngineLost
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Vector, make_vector

from ..fakes import WIDTH, ScriptedBackend
from ..streams import until


class Slow(ScriptedBackend):
    """Loads once `gate` is set, call by call."""

    gate: asyncio.Event

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[float]] = []
        self.trouble: EngineLost | None = None

    async def load_vectors(self, vectors) -> None:
        await super().load_vectors(vectors)
        self.calls.append([vector.peaks[0] for vector in vectors])
        await self.gate.wait()
        if self.trouble is not None:
            raise self.trouble


def vector(value: float) -> Vector:
    data = np.full((1, WIDTH), value, dtype="<f4").tobytes()
    return make_vector(FloatType.FLOAT32, 1, WIDTH, data, "v")


async def cancelled_while_loading(backend: Slow, worker_vectors: WorkerVectorCache) -> None:
    backend.gate = asyncio.Event()
    waiting = asyncio.create_task(worker_vectors.ensure([vector(1)]))
    await until(lambda: bool(backend.loaded))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_vectors_that_nobody_waits_for_any_more_are_loaded_once_and_dropped_in_time() -> None:
    backend = Slow()
    worker_vectors = WorkerVectorCache(backend, vector(1).size)
    worker_vectors.store.put(vector(1))
    await cancelled_while_loading(backend, worker_vectors)
    backend.gate.set()
    await worker_vectors.ensure([vector(1)])
    assert backend.loaded == [vector(1).digest.hex()]
    worker_vectors.store.put(vector(2))
    await until(lambda: backend.dropped == [vector(1).digest.hex()])


async def test_vectors_that_leave_the_store_while_they_are_loaded_are_dropped() -> None:
    backend = Slow()
    worker_vectors = WorkerVectorCache(backend, vector(1).size)
    worker_vectors.store.put(vector(1))
    await cancelled_while_loading(backend, worker_vectors)
    worker_vectors.store.put(vector(2))
    backend.gate.set()
    await until(lambda: backend.dropped == [vector(1).digest.hex()])


async def test_vectors_that_leave_the_store_as_a_call_that_drops_others_ends_are_dropped() -> None:
    ended = asyncio.Event()

    class SlowToDrop(ScriptedBackend):
        async def drop_vectors(self, digests) -> None:
            await super().drop_vectors(digests)
            await ended.wait()

    backend = SlowToDrop()
    worker_vectors = WorkerVectorCache(backend, 2 * vector(1).size)
    for stored in (vector(1), vector(2)):
        worker_vectors.store.put(stored)
    await worker_vectors.ensure([vector(1), vector(2)])
    worker_vectors.store.put(vector(3))
    await until(lambda: backend.dropped == [vector(1).digest.hex()])

    async def store_another() -> None:
        await ended.wait()
        worker_vectors.store.put(vector(4))

    storing = asyncio.create_task(store_another())
    await asyncio.sleep(0)
    ended.set()  # wakes the call first, then `storing`, in one iteration of the event loop
    await storing
    await until(lambda: len(backend.dropped) == 2)
    assert backend.dropped == [vector(1).digest.hex(), vector(2).digest.hex()]


async def waiting_for(
    backend: Slow, worker_vectors: WorkerVectorCache, *wanted: list[int]
) -> list[asyncio.Task]:
    """Waits for vectors, each request by itself; the first one's are on their way."""
    backend.gate = asyncio.Event()
    tasks = []
    for values in wanted:
        vectors = [vector(value) for value in values]
        worker_vectors.store.retain(vectors)
        tasks.append(asyncio.create_task(worker_vectors.ensure(vectors)))
        await until(lambda: bool(backend.calls))
    await asyncio.sleep(0)
    return tasks


async def test_vectors_that_are_wanted_meanwhile_are_loaded_together_and_once() -> None:
    backend = Slow()
    worker_vectors = WorkerVectorCache(backend, 1 << 20)
    waiting = await waiting_for(backend, worker_vectors, [1], [2, 3], [4], [3, 1], [1])
    assert backend.calls == [[1]]
    backend.gate.set()
    await asyncio.gather(*waiting)
    assert backend.calls == [[1], [2, 3, 4]]
    await worker_vectors.ensure([vector(value) for value in (1, 2, 3, 4)])
    assert len(backend.calls) == 2


async def test_a_call_carries_so_many_bytes_or_one_vector(monkeypatch) -> None:
    monkeypatch.setattr(loading, "CALL_BYTES", 3 * vector(1).size - 1)
    backend = Slow()
    worker_vectors = WorkerVectorCache(backend, 1 << 20)
    waiting = await waiting_for(backend, worker_vectors, [1], [2, 3], [4], [5, 6], [2])
    backend.gate.set()
    await asyncio.gather(*waiting)
    assert backend.calls == [[1], [2, 3], [4, 5], [6]]
    monkeypatch.setattr(loading, "CALL_BYTES", 1)
    await worker_vectors.ensure([vector(7), vector(8)])
    assert backend.calls[4:] == [[7], [8]]


async def test_all_who_wait_for_a_call_that_fails_learn_of_it() -> None:
    backend = Slow()
    worker_vectors = WorkerVectorCache(backend, 1 << 20)
    waiting = await waiting_for(backend, worker_vectors, [1], [2], [3, 2], [1, 3])
    backend.trouble = EngineLost("gone")
    backend.gate.set()
    assert await asyncio.gather(*waiting, return_exceptions=True) == [backend.trouble] * 4
    backend.trouble = None
    await worker_vectors.ensure([vector(1), vector(2)])
    assert backend.calls == [[1], [2, 3], [1, 2]]


async def test_who_stops_waiting_takes_nothing_from_the_others() -> None:
    backend = Slow()
    worker_vectors = WorkerVectorCache(backend, 1 << 20)
    first, second, third = await waiting_for(backend, worker_vectors, [1], [2], [2, 3])
    first.cancel()
    second.cancel()
    backend.gate.set()
    await third
    assert backend.calls == [[1], [2, 3]]
    for task in (first, second):
        with pytest.raises(asyncio.CancelledError):
            await task
