"""The rows that the cells of a sweep put in: those of a run, a run's means, or zeros.

A sweep captures the runs that it needs, and deletes them in the end unless its client keeps them.
The rows of one site become one vector, which all cells of that site share.

Invariant: a row that a source lacks is an error of the cell that needs it. No cell runs without it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rheostat_engine import ModelSites, Site, largest_replaced
from rheostat_server.admission.admit import AdmittedRequest, admit
from rheostat_server.errors import (
    Defect,
    NonFinite,
    RunIncomplete,
    RunInUse,
    RunNotFound,
    VectorShape,
)
from rheostat_server.generation.responses import run
from rheostat_server.requests.manager import RequestManager
from rheostat_server.runs.store import Run, RunStore
from rheostat_server.selectors.sites import to_wire
from rheostat_server.selectors.spans import runs as runs_of
from rheostat_server.steering.replacements import averaged_rows
from rheostat_server.sweeps.grid import Grid
from rheostat_server.sweeps.pairs import Pair
from rheostat_server.tasks.offload import offload
from rheostat_server.tensors import FloatType, widened
from rheostat_server.vectors.store import Vector, make_vector
from rheostat_wire.v1 import (
    capture_pb2,
    generation_pb2,
    generation_service_pb2,
    selector_pb2,
    types_pb2,
)

_KEPT_SITES = 4
"""Sites, beyond those of a window, whose vectors a source keeps."""


class SourceRows(NamedTuple):
    """Rows at a site."""

    vector: Vector
    """All rows that the source has there."""
    rows: tuple[int, ...]
    """The row of each wanted position."""


class Source(Protocol):
    """Something that has rows to put in."""

    async def rows(self, site: Site, positions: Sequence[int]) -> SourceRows:
        """The rows at a site.

        Args:
            site: the site.
            positions: positions of the source's prompt. -1: there is none.

        Raises:
            RunIncomplete: the source lacks the site or a position.
            NonFinite: a row is too large.
        """


class Zeros:
    """Zeros everywhere."""

    def __init__(self, width: int) -> None:
        """Rows of this width."""
        data = np.zeros(width, np.float32).tobytes()
        self._vector = make_vector(FloatType.FLOAT32, 1, width, data, "zeros")

    async def rows(self, site: Site, positions: Sequence[int]) -> SourceRows:
        """A row of zeros for each position."""
        return SourceRows(self._vector, (0,) * len(positions))


class RunRows:
    """The rows of runs of one prompt, or the mean of each site's rows."""

    def __init__(
        self,
        runs: Sequence[Run],
        model: ModelSites,
        *,
        window: int,
        averaged: npt.NDArray[np.intp] | None = None,
    ) -> None:
        """Takes over runs that are held until the sweep ends.

        Args:
            runs: the runs, each of which has other sites.
            model: the model's sites.
            window: sites that a cell replaces at most.
            averaged: the rows of a site whose mean is put in at all positions. None: each
                position has its own row.
        """
        for one in runs:
            if one.width != model.width:
                raise VectorShape(
                    f"rows of the run {one.id} have {one.width} elements; the stream has "
                    f"{model.width}"
                )
        self._runs = tuple(runs)
        self._averaged = averaged
        self._kept = window + _KEPT_SITES
        self._vectors: OrderedDict[int, tuple[Run, Vector]] = OrderedDict()
        """By index of the site, least recently used first."""
        self._turn = asyncio.Lock()
        self._largest = largest_replaced(FloatType(model.dtype).finite_max)
        self._places = {
            one.id: {int(position): row for row, position in enumerate(one.positions)}
            for one in runs
        }

    async def rows(self, site: Site, positions: Sequence[int]) -> SourceRows:
        """The rows at a site."""
        if -1 in positions and self._averaged is None:
            raise RunIncomplete(
                "a position of the column has no partner in the other prompt, which differs there"
            )
        async with self._turn:
            run, vector = await self._vector(site)
        if self._averaged is not None:
            return SourceRows(vector, (0,) * len(positions))
        places = self._places[run.id]
        for position in positions:
            if position not in places:
                raise RunIncomplete(f"the run {run.id} has no row of position {position}")
        return SourceRows(vector, tuple(places[position] for position in positions))

    async def _vector(self, site: Site) -> tuple[Run, Vector]:
        found = self._vectors.get(site.index)
        if found is None:
            run = self._run_with(site)
            size = len(run.positions) * run.width * run.dtype.itemsize
            found = run, await offload(size, self._make, run, site)
            self._vectors[site.index] = found
            if len(self._vectors) > self._kept:
                self._vectors.popitem(last=False)
        self._vectors.move_to_end(site.index)
        return found

    def _run_with(self, site: Site) -> Run:
        for one in self._runs:
            if any(own.index == site.index for own in one.sites):
                return one
        raise RunIncomplete(
            f"the run {self._runs[0].id} has no rows of {site.point.value} {site.layer}"
        )

    def _make(self, run: Run, site: Site) -> Vector:
        rows, kind = run.rows(site), run.dtype
        if self._averaged is not None:
            rows = widened(rows[self._averaged], kind).mean(axis=0, dtype=np.float64, keepdims=True)
            rows, kind = rows.astype(np.float32), FloatType.FLOAT32
        vector = make_vector(kind, len(rows), run.width, rows.tobytes(), "")
        if (peak := max(vector.peaks, default=0.0)) > self._largest:
            raise NonFinite(
                f"a row of {site.point.value} {site.layer} reaches {peak:.4g}; rows of at most "
                f"{self._largest:.4g} can replace rows of this model"
            )
        return vector


class HeldRuns:
    """The runs that a sweep uses. They are neither evicted nor deleted while it runs."""

    def __init__(self, store: RunStore) -> None:
        """Nothing is held yet."""
        self._store = store
        self._held: list[Run] = []
        self._made: list[Run] = []

    @property
    def made_ids(self) -> list[str]:
        """The ids of the runs that the sweep has made."""
        return [run.id for run in self._made]

    def given(self, run_id: str, path: str) -> Run:
        """Holds a run of the client.

        Raises:
            RunNotFound: there is none.
        """
        run = self._store.hold(run_id, path)
        self._held.append(run)
        return run

    def made(self, run_id: str) -> Run:
        """Holds a run that the sweep has made."""
        try:
            run = self.given(run_id, "")
        except RunNotFound as error:
            raise Defect("the engine did not deliver every row") from error
        self._made.append(run)
        return run

    def release(self, *, keep: bool) -> None:
        """Holds nothing any more. Deletes what the sweep has made, unless `keep`."""
        for held in self._held:
            self._store.release(held)
        for made in self._made if not keep else ():
            with suppress(RunNotFound, RunInUse):
                self._store.delete(made.id, "")
        self._held.clear()
        self._made.clear()


async def capture_runs(
    admitted: AdmittedRequest, targets: Sequence[str], manager: RequestManager, runs: HeldRuns
) -> list[Run]:
    """Runs a request whose captures make runs.

    Args:
        admitted: the request.
        targets: the ids of the runs.
        manager: runs it.
        runs: holds the runs from then on.

    Raises:
        RheostatError: the request cannot run, or has failed.
    """
    async with aclosing(run(admitted, manager)) as responses:
        async for _ in responses:
            pass
    return [runs.made(run_id) for run_id in targets]


async def sources_of(
    pair: Pair,
    name: str,
    grid: Grid,
    lease: float | None,
    held: HeldRuns,
    manager: RequestManager,
) -> list[Source]:
    """Where the rows of a pair's cells come from, for each noise.

    Args:
        pair: the pair.
        name: the beginning of the ids of runs that are made.
        grid: the cells.
        lease: seconds for which these runs are kept; None: until the sweep ends.
        held: holds all runs.
        manager: runs the prompts.

    Raises:
        RheostatError: a run is missing or unfit, or a prompt cannot run.
    """
    model = manager.sites
    window = max(len(row.window) for row in grid.rows)
    match pair.message.WhichOneof("corruption"):
        case "zeros":
            return [Zeros(model.width)]
        case "mean":
            mean, path = pair.message.mean, f"{pair.path}.mean"
            run = held.given(mean.run_id, f"{path}.run_id")
            averaged = averaged_rows(mean, run, path)
            return [RunRows([run], model, window=window, averaged=averaged)]
        case "run_id" if pair.into_clean:
            run = held.given(pair.message.run_id, f"{pair.path}.run_id")
            return [RunRows([run], model, window=window)]
    sources: list[Source] = []
    for noise, prompt in enumerate(pair.corrupt if pair.into_clean else (pair.clean,)):
        runs = await _capture(prompt, pair, f"{name}-{noise}", grid, lease, held, manager)
        sources.append(RunRows(runs, model, window=window))
    return sources * len(pair.bases) if len(sources) == 1 else sources


async def _capture(
    prompt: AdmittedRequest,
    pair: Pair,
    name: str,
    grid: Grid,
    lease: float | None,
    held: HeldRuns,
    manager: RequestManager,
) -> list[Run]:
    """Captures all rows of a prompt that cells may put in: a run for each point."""
    layers: dict[types_pb2.Point.ValueType, set[int]] = {}
    for row in grid.rows:
        point = to_wire(row.site).point
        layers.setdefault(point, set()).update(site.layer for site in row.window)
    columns = map(pair.placed, range(grid.columns))
    positions = sorted({one for column in columns for one in column.source if one >= 0})
    if not positions:
        return []
    where = selector_pb2.Selector(
        include=[
            selector_pb2.Range(positions=selector_pb2.Window(start=start, end=end))
            for start, end in runs_of(np.array(positions))
        ]
    )
    request = generation_service_pb2.GenerateRequest(
        request_id=name,
        token_ids=types_pb2.TokenIds(ids=prompt.prompt.token_ids),
        sampling=generation_pb2.Sampling(max_tokens=1, temperature=0, ignore_eos=True),
    )
    ids = []
    for point, wanted in layers.items():
        ids.append(f"{name}-{types_pb2.Point.Name(point).removeprefix('POINT_').lower()}")
        target = capture_pb2.RunTarget(run_id=ids[-1])
        if lease is not None:
            target.lease.FromSeconds(int(lease))
        request.captures.append(
            capture_pb2.CaptureSpec(
                sites=types_pb2.SiteSet(
                    points=[point], list=types_pb2.LayerList(layers=sorted(wanted))
                ),
                where=where,
                run=target,
            )
        )
    admitted = await admit(request, manager.admission)
    # The prompt keeps the steering under which its pair was admitted.
    plan = replace(prompt.unobserved, captures=admitted.unobserved.captures).pack()
    admitted = replace(
        admitted,
        interventions=prompt.interventions,
        observer_captures=(),
        plan=replace(plan, request_id=name),
        unobserved=plan,
        vectors=prompt.vectors,
        lora=prompt.lora,
        server_wide=prompt.server_wide,
    )
    return await capture_runs(admitted, ids, manager, held)
