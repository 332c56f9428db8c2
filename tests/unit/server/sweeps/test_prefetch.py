"""Rows of coming cells are in the workers before the cells start, and give way to all others."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from rheostat_engine import Point, Rows, Site
from rheostat_server.engine import worker_vectors as loading
from rheostat_server.engine.backend import Delta, Job
from rheostat_server.engine.worker_vectors import WorkerVectorCache
from rheostat_server.errors import RunIncomplete, StoreFull
from rheostat_server.sweeps import prefetch as prefetching
from rheostat_server.sweeps.grid import Grid, Row, ZoomPlan
from rheostat_server.sweeps.prefetch import Prefetch
from rheostat_server.sweeps.sources import SourceRows
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Vector, make_vector
from rheostat_wire.v1 import sweep_pb2

from ..fakes import LAYERS, WIDTH, ScriptedBackend, positions_of
from ..streams import settled, until
from ..uploads import chunk, header, put, values
from .patched import CLEAN, PatchedBackend, order, pair, prompt, swept

COLUMNS = 4


def vector(value: float) -> Vector:
    data = np.full((1, WIDTH), value, dtype="<f4").tobytes()
    return make_vector(FloatType.FLOAT32, 1, WIDTH, data, "v")


class Numbers:
    """A source whose row at a site is a number of its own, without a row at some layers."""

    def __init__(self, first: float = 1.0, *, without: Sequence[int] = ()) -> None:
        self._first = first
        self._without = without
        self.made: list[list[int]] = []
        """The layers of each call of `make`."""

    async def vector(self, site: Site) -> Vector:
        if site.layer in self._without:
            raise RunIncomplete("none")
        return vector(self._first + site.layer)

    async def rows(self, site: Site, positions: Sequence[int]) -> SourceRows:
        return SourceRows(await self.vector(site), (0,) * len(positions))

    async def make(self, sites: Sequence[Site]) -> None:
        self.made.append([site.layer for site in sites])


def prefetch(
    sources: Sequence[Sequence[Numbers]],
    *,
    window: int = 1,
    concurrency: int = 8,
    capacity: int = 1 << 20,
    zoom: ZoomPlan | None = None,
) -> tuple[Prefetch, ScriptedBackend, WorkerVectorCache]:
    sites = [Site(Point.RESID_POST, layer) for layer in range(8)]
    rows = tuple(Row(at, tuple(sites[at.layer : at.layer + window])) for at in sites)
    settings = SimpleNamespace(
        pairs=[SimpleNamespace(bases=noises) for noises in sources],
        grid=Grid(rows, COLUMNS),
        concurrency=concurrency,
        zoom=zoom,
    )
    backend = ScriptedBackend()
    worker_vectors = WorkerVectorCache(backend, capacity)
    return Prefetch(settings, sources, worker_vectors), backend, worker_vectors


def names(*values: float) -> list[str]:
    return [vector(value).digest.hex() for value in values]


async def test_rows_of_expected_cells_are_loaded_once_and_not_kept() -> None:
    ahead, backend, worker_vectors = prefetch([[Numbers(1.0)], [Numbers(100.0)]], window=2)
    for cell in range(COLUMNS + 1):
        for number in range(2):
            ahead.expect(cell, number, 0)
    await until(lambda: len(backend.loaded) == 6)
    assert sorted(backend.loaded) == sorted(names(1, 2, 3, 100, 101, 102))
    await ahead.close()
    assert len(worker_vectors.store) == 6
    assert worker_vectors.store.pins == 0


async def test_noises_of_one_source_expect_its_rows_once() -> None:
    source = Numbers(without=[0])
    ahead, backend, _ = prefetch([[source, source]])
    ahead.expect(0, 0, 0)
    ahead.expect(0, 0, 1)
    ahead.expect(COLUMNS, 0, 0)
    ahead.expect(COLUMNS, 0, 1)
    await until(lambda: bool(backend.loaded))
    await ahead.close()
    assert backend.loaded == names(2)


async def test_rows_that_cannot_be_had_or_kept_are_left_to_the_cells() -> None:
    ahead, backend, worker_vectors = prefetch([[Numbers(without=[1])]], capacity=2 * 4 * WIDTH)
    worker_vectors.store.pin(vector(50))
    worker_vectors.store.pin(vector(51))
    with pytest.raises(StoreFull):
        worker_vectors.store.pin(vector(1))
    ahead.expect(0, 0, 0)
    await asyncio.sleep(0.01)
    assert not backend.loaded
    worker_vectors.store.unpin([vector(50).digest])
    for row in (1, 2):
        ahead.expect(row * COLUMNS, 0, 0)
    await until(lambda: backend.loaded == names(3))
    await ahead.close()


async def test_a_sweep_that_ends_expects_nothing_more() -> None:
    ahead, backend, worker_vectors = prefetch([[Numbers()]])
    backend.loading = asyncio.Event()
    ahead.expect(0, 0, 0)
    await until(lambda: len(worker_vectors.store) == 1)
    ahead.expect(COLUMNS, 0, 0)
    await ahead.close()
    assert len(worker_vectors.store) == 1
    backend.loading.set()
    await until(lambda: backend.loaded == names(1))  # the call was under way


async def test_rows_that_are_loaded_ahead_take_only_free_places_of_their_store() -> None:
    ahead, backend, _ = prefetch([[Numbers()]], capacity=3 * 4 * WIDTH)
    for row in range(8):
        ahead.expect(row * COLUMNS, 0, 0)
    await until(lambda: backend.loaded == names(1, 2, 3))
    await ahead.close()
    assert not backend.dropped


async def test_rows_are_loaded_ahead_one_call_at_a_time(monkeypatch) -> None:
    """Otherwise vectors of other requests would wait for several calls."""
    calls: list[int] = []

    class Counting(ScriptedBackend):
        async def load_vectors(self, vectors: Sequence[Vector]) -> None:
            await super().load_vectors(vectors)
            calls.append(len(vectors))

    class Halves(Numbers):
        async def vector(self, site: Site) -> Vector:
            data = np.full((1, WIDTH), 1 + site.layer, dtype="<f2").tobytes()
            return make_vector(FloatType.FLOAT16, 1, WIDTH, data, "v")

    for module in (prefetching, loading):
        monkeypatch.setattr(module, "CALL_BYTES", 3 * 4 * WIDTH - 1)
    ahead, _, worker_vectors = prefetch([[Halves()]])
    worker_vectors._backend = Counting()
    for row in range(8):
        ahead.expect(row * COLUMNS, 0, 0)
    await until(lambda: sum(calls) == 8)
    assert calls == [2, 2, 2, 2]
    await ahead.close()


async def test_rows_that_a_closed_sweep_expected_give_way_to_those_of_another() -> None:
    ahead, backend, worker_vectors = prefetch([[Numbers()]], capacity=4 * WIDTH)
    other, _, _ = prefetch([[Numbers(100.0)]])
    other._worker_vectors = worker_vectors
    ahead.expect(0, 0, 0)
    await until(lambda: backend.loaded == names(1))
    other.expect(0, 0, 0)
    await asyncio.sleep(0.01)
    assert backend.loaded == names(1)
    await ahead.close()
    other.expect(COLUMNS, 0, 0)
    await until(lambda: backend.loaded == names(1, 101))
    await other.close()


@pytest.mark.parametrize(
    ("concurrency", "window", "sites"), [(1, 1, 2), (3, 3, 4), (4, 1, 3), (4, 3, 5), (99, 3, 8)]
)
async def test_a_source_has_room_for_all_sites_up_to_the_expected_cells(
    concurrency: int, window: int, sites: int
) -> None:
    ahead, _, _ = prefetch([[Numbers()]], concurrency=concurrency, window=window)
    assert ahead.site_count == sites


@pytest.mark.parametrize(("concurrency", "sites"), [(1, 4), (3, 6), (99, 8)])
async def test_a_coarse_grid_has_more_sites_up_to_the_expected_cells(
    concurrency: int, sites: int
) -> None:
    """Its rows have fewer cells, and their windows overlap less."""
    zoom = ZoomPlan(2, 2, 1, 1, 1, range(COLUMNS), COLUMNS)  # every second row and column
    ahead, _, _ = prefetch([[Numbers()]], concurrency=concurrency, window=2, zoom=zoom)
    assert ahead.site_count == sites


@dataclass
class HeldCells(PatchedBackend):
    """Answers cells only once `free` is set. Each site has its own rows.

    If `second` is set, the second call that loads vectors waits for it.
    """

    free: asyncio.Event = field(default_factory=asyncio.Event)
    second: asyncio.Event | None = None

    async def load_vectors(self, vectors: Sequence[Vector]) -> None:
        self.loading = self.second if self.loaded else None
        await super().load_vectors(vectors)

    def _capture(self, job: Job, start: int, end: int) -> None:
        for capture in job.plan.captures:
            kept = np.array(positions_of(capture.spans, start, end), np.int32)
            for number in capture.sites if len(kept) else ():
                rows = np.full((1, len(kept), WIDTH), number, np.float32)
                self.deliver(Rows(job.plan.request_id, (number,), kept, rows))

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        self.room = self.free if job.plan.acts else None
        async for delta in super().generate(job):
            yield delta


async def test_rows_are_loaded_before_the_cells_before_them_have_run(starter) -> None:
    backend = HeldCells()
    running = await starter(backend)
    request = order(max_concurrent_cells=len(CLEAN), baseline_count=1)
    calling = asyncio.create_task(swept(running, request))
    await until(lambda: backend.at_once == len(CLEAN))
    await until(lambda: len(backend.loaded) == 2)  # one row of cells runs, one is expected
    assert LAYERS > 2
    backend.free.set()
    await calling
    assert len(backend.loaded) == LAYERS
    await settled(running)


async def test_vectors_of_a_source_are_made_together(monkeypatch) -> None:
    monkeypatch.setattr(prefetching, "_MADE_TOGETHER", 3)
    one, other = Numbers(1.0), Numbers(100.0)
    ahead, backend, _ = prefetch([[one], [other]])
    for cell in range(0, 3 * COLUMNS, COLUMNS):
        for number in range(2):
            ahead.expect(cell, number, 0)
    await until(lambda: len(backend.loaded) == 6)
    assert (one.made, other.made) == ([[0, 1], [2]], [[0], [1, 2]])
    await ahead.close()


async def test_nothing_starts_before_the_rows_of_the_first_cells_are_loaded(
    starter, monkeypatch
) -> None:
    monkeypatch.setattr(prefetching, "_FIRST_VECTORS", 2)
    backend = PatchedBackend(loading=asyncio.Event())
    running = await starter(backend)
    calling = asyncio.create_task(swept(running, order(max_concurrent_cells=16)))
    await until(lambda: len(backend.asked) == 1)  # the other prompt's own number
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(backend.asked) == 1
    backend.loading.set()
    cells, _ = await calling
    assert len(cells) == LAYERS * len(CLEAN)
    await settled(running)


@pytest.mark.parametrize("loading", [True, False])
async def test_a_vector_of_another_client_takes_the_place_of_rows_that_are_loaded_ahead(
    starter, loading: bool
) -> None:
    backend = HeldCells(second=asyncio.Event())
    size = len(CLEAN) * 4 * WIDTH
    running = await starter(backend, vector_store_bytes=2 * size)
    request = order(max_concurrent_cells=len(CLEAN), baseline_count=1)
    calling = asyncio.create_task(swept(running, request))
    await until(lambda: running.manager.store.used_bytes == 2 * size)
    if not loading:
        backend.second.set()
        await until(lambda: len(backend.loaded) == 2)
    uploaded = values(9.0, rows=len(CLEAN))
    answer = await put(running.client, header(rows=len(CLEAN)), chunk(uploaded))
    assert answer.digest in running.manager.store
    backend.second.set()
    backend.free.set()
    cells, _ = await calling
    assert len(cells) == LAYERS * len(CLEAN)
    assert not any(cell.HasField("error") for cell in cells.values())
    await settled(running)


async def test_a_prompt_without_any_partner_has_cells_with_errors_alone(starter) -> None:
    running = await starter(PatchedBackend())
    alone = pair(prompt=prompt(1, 2, 3), corrupt=prompt(7, 8))
    cells, _ = await swept(running, order(alone, direction=sweep_pb2.SWEEP_DIRECTION_NOISE))
    assert any(cell.HasField("error") for cell in cells.values())
    await settled(running)


async def test_a_prefetch_that_is_closed_while_it_loads_leaves_no_cycle() -> None:
    class Slow(Numbers):
        async def vector(self, site: Site) -> Vector:
            await asyncio.Event().wait()
            raise AssertionError("it is cancelled before")

    ahead, _, _ = prefetch([[Slow()]])
    ahead.expect(0, 0, 0)
    await asyncio.sleep(0)
    await ahead.close()
    left = weakref.ref(ahead)
    gc.disable()
    try:
        del ahead
        await asyncio.sleep(0)
        assert left() is None
    finally:
        gc.enable()
