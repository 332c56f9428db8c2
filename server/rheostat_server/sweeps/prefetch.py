"""Loads the rows of coming cells into the workers.

Why
    A call that loads vectors waits for the end of the engine's current step, and all cells of a
    site wait for the call. If a site's rows were loaded only when its first cell starts, these
    cells would miss the next step too. Meanwhile the engine would compute smaller batches, which
    take more time for each cell.
The first cells
    A sweep starts no cell or baseline before the first call has ended, because a step of a few
    prompts would delay the call. Without this wait, on an H200, the first five steps of a sweep had
    1, 7, 40, 40 and 160 prompts, and took 140 ms.

Invariants: if rows are not loaded in time, the cells that need the rows load them. If a source
lacks rows, nothing fails here: the cells get the error. Rows of coming cells never take the place
of a vector in use, or of rows that are needed sooner. Any other vector may take the place of rows
of coming cells.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

from rheostat_engine import Site
from rheostat_server.engine.worker_vectors import WorkerVectorCache
from rheostat_server.errors import RheostatError
from rheostat_server.limits import CALL_BYTES
from rheostat_server.sweeps.settings import Settings
from rheostat_server.sweeps.sources import Source
from rheostat_server.vectors.store import Vector

_FIRST_VECTORS = 64
"""The most vectors of the first call. The sweep waits for it, and making a vector takes half a
millisecond."""

_MADE_TOGETHER = 16
"""The most vectors of a source that one call of a thread makes."""


class Prefetch:
    """Loads the rows of the coming cells of one sweep."""

    def __init__(
        self,
        settings: Settings,
        sources: Sequence[Sequence[Source]],
        worker_vectors: WorkerVectorCache,
    ) -> None:
        """Nothing is expected.

        Args:
            settings: the sweep's settings.
            sources: for each pair and noise, where rows come from; a live view.
            worker_vectors: loads vectors into the workers.
        """
        self._grid = settings.grid
        self.site_count = _sites_at_once(settings)
        """The most sites that the starting and the expected cells have at one time. It assumes that
        the client has no cell."""
        self._sources = sources
        self._worker_vectors = worker_vectors
        self._owner = object()
        """Owns the vectors that are stored ahead."""
        self._row = -1
        """The row of the last expected cell."""
        self._expected: set[Source] = set()
        """The sources whose rows were expected for `_row`."""
        self._waiting: deque[tuple[Source, Site]] = deque()
        """Sources and sites whose rows are not loaded yet."""
        self._task: asyncio.Task[None] | None = None
        """Loads the rows that wait."""
        self._first_ended = asyncio.Event()
        """Set once the first call has ended."""

    def expect(self, cell: int, pair: int, noise: int) -> None:
        """Begins to load the rows of a cell in a prompt of a pair."""
        row, _ = self._grid.place(cell)
        if row != self._row:
            self._row = row
            self._expected.clear()
        source = self._sources[pair][noise]
        if source in self._expected:
            return
        self._expected.add(source)
        self._waiting.extend((source, site) for site in self._grid.rows[row].window)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._load())

    async def first_loaded(self) -> None:
        """Returns once the first call to the workers has ended. Needs an earlier `expect`."""
        await self._first_ended.wait()

    async def close(self) -> None:
        """Loads no more rows."""
        self._waiting.clear()
        # A cancelled task keeps its error, whose traceback refers to this object.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self._worker_vectors.store.release_ahead(self._owner)

    async def _load(self) -> None:
        """Loads waiting rows until none waits."""
        try:
            while self._waiting:
                vectors = await self._take()
                with suppress(RheostatError):
                    await self._worker_vectors.load_ahead(vectors, self._owner)
                self._first_ended.set()
        finally:
            self._first_ended.set()  # so `first_loaded` returns even if this task fails

    async def _take(self) -> list[Vector]:
        """Takes waiting vectors for one call to the workers: at most `CALL_BYTES`, or one vector.

        The size is limited because vectors of other requests wait until the call has ended.
        """
        vectors: list[Vector] = []
        size = taken = 0
        while self._waiting:
            if len(vectors) >= _FIRST_VECTORS and not self._first_ended.is_set():
                break
            if taken % _MADE_TOGETHER == 0:
                await self._make_next()
            taken += 1
            source, site = self._waiting[0]
            with suppress(RheostatError):
                vector = await source.vector(site)
                size += vector.float32_size
                if vectors and size > CALL_BYTES:
                    break
                vectors.append(vector)
            self._waiting.popleft()
        return vectors

    async def _make_next(self) -> None:
        """Makes the next waiting vectors, with one call for each source."""
        by_source: dict[Source, list[Site]] = {}
        for source, site in islice(self._waiting, _MADE_TOGETHER):
            by_source.setdefault(source, []).append(site)
        for source, sites in by_source.items():
            await source.make(sites)


def _sites_at_once(settings: Settings) -> int:
    """The most sites of the cells that run first: from the next cell to the last expected one."""
    grid, prompts = settings.grid, sum(len(pair.bases) for pair in settings.pairs)
    rows, cells = [*range(len(grid.rows))], grid.cells
    if settings.zoom is not None:
        coarse = settings.zoom.coarse(grid)
        rows, cells = list(dict.fromkeys(grid.place(cell)[0] for cell in coarse)), len(coarse)
    ahead = 1 + settings.concurrency * len(rows) // (prompts * cells)
    sites = Counter[Site]()
    most = 0
    for number, row in enumerate(rows):
        sites.update(grid.rows[row].window)
        if number > ahead:
            sites.subtract(grid.rows[rows[number - ahead - 1]].window)
            sites = +sites
        most = max(most, len(sites))
    return most
