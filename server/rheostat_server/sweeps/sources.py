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
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rheostat_engine import ModelSites, Site, largest_replaced
from rheostat_server.admission.admit import admit
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.derivation.prompt_rows import renamed_errors
from rheostat_server.errors import (
    Defect,
    NonFinite,
    Resource,
    RheostatError,
    RunIncomplete,
    RunInUse,
    RunNotFound,
    VectorShape,
)
from rheostat_server.generation.responses import run
from rheostat_server.generation.sample import Response
from rheostat_server.requests.manager import RequestManager
from rheostat_server.runs.positions import find_rows
from rheostat_server.runs.store import Run, RunStore
from rheostat_server.selectors.sites import to_wire
from rheostat_server.selectors.spans import runs as runs_of
from rheostat_server.steering.replacements import averaged_rows
from rheostat_server.sweeps.grid import Grid
from rheostat_server.sweeps.pairs import Pair
from rheostat_server.sweeps.request_starter import RequestStarter
from rheostat_server.tasks.offload import offload, offload_plan
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
"""Sites whose vectors a source keeps besides those of cells that start or are expected."""

_RANGES = 256
"""Most ranges of positions of a capture."""

_POSITION_BYTES = 64
"""Bytes that `offload` counts for a position of a column."""

_NO_ROWS = np.empty(0, np.intp)


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

    async def vector(self, site: Site) -> Vector:
        """All rows at a site.

        Raises:
            RunIncomplete: the source has none.
            NonFinite: a row is too large.
        """

    async def make(self, sites: Sequence[Site]) -> None:
        """Makes the vectors of sites together, ahead of `vector`. Only `vector` raises errors."""


class Zeros:
    """Zeros everywhere."""

    def __init__(self, width: int) -> None:
        """Rows of this width."""
        data = np.zeros(width, np.float32).tobytes()
        self._vector = make_vector(FloatType.FLOAT32, 1, width, data, "zeros")

    async def rows(self, site: Site, positions: Sequence[int]) -> SourceRows:
        """A row of zeros for each position."""
        return SourceRows(self._vector, (0,) * len(positions))

    async def vector(self, site: Site) -> Vector:
        """A row of zeros."""
        return self._vector

    async def make(self, sites: Sequence[Site]) -> None:
        """Does nothing, because the vector exists already."""


class RunRows:
    """The rows of runs of one prompt, or the mean of each site's rows."""

    def __init__(
        self,
        runs: Sequence[Run],
        wanted: Sequence[int],
        model: ModelSites,
        *,
        kept: int,
        averaged: npt.NDArray[np.intp] | None = None,
    ) -> None:
        """Takes over runs that are held until the sweep ends.

        Args:
            runs: the runs, all of the same positions. Each has other sites.
            wanted: the positions whose rows are put in.
            model: the model's sites.
            kept: the most sites whose vectors are kept.
            averaged: the rows of a site whose mean is put in at all positions. None: each
                position has its own row.
        """
        for stored in runs:
            if stored.width != model.width:
                raise VectorShape(
                    f"rows of the run {stored.id} have {stored.width} elements; the stream has "
                    f"{model.width}"
                )
        self._runs = tuple(runs)
        self._by_site = {site.index: run for run in reversed(runs) for site in run.sites}
        """The first run that has each site."""
        self._averaged = averaged is not None
        at = find_rows(runs[0], wanted) if runs and averaged is None else _NO_ROWS
        self._at = np.sort(averaged) if averaged is not None else at[at >= 0]
        """The rows of each site that are put in, or averaged."""
        present = (position for position, row in zip(wanted, at, strict=False) if row >= 0)
        self._places = {position: row for row, position in enumerate(present)}
        """The row of each position in a site's vector."""
        self._kept = kept
        self._vectors: OrderedDict[int, Vector] = OrderedDict()
        """By index of the site, least recently used first."""
        self._turn = asyncio.Lock()
        self._largest = largest_replaced(FloatType(model.dtype).finite_max)

    async def rows(self, site: Site, positions: Sequence[int]) -> SourceRows:
        """The rows at a site."""
        if not self._averaged:
            self._check_present(site, positions)
        vector = await self.vector(site)
        if self._averaged:
            return SourceRows(vector, (0,) * len(positions))
        return SourceRows(vector, tuple(self._places[position] for position in positions))

    async def vector(self, site: Site) -> Vector:
        """All rows at a site that are put in."""
        if not len(self._at):
            raise RunIncomplete("no position of the columns has a row in the other prompt")
        if site.index not in self._vectors:
            async with self._turn:
                if site.index not in self._vectors:
                    run = self._run_with(site)
                    made = await offload(self._size(run), self._make, run, site)
                    self._vectors[site.index] = made
                    self._drop_oldest()
        self._vectors.move_to_end(site.index)
        return self._vectors[site.index]

    async def make(self, sites: Sequence[Site]) -> None:
        """Makes the missing vectors of sites in one call of a thread."""
        async with self._turn:
            missing = [
                (self._by_site[site.index], site)
                for site in sites
                if site.index in self._by_site and site.index not in self._vectors
            ][: self._kept]
            size = sum(self._size(run) for run, _ in missing)
            if size:
                self._vectors.update(await offload(size, self._make_some, missing))
                self._drop_oldest()

    def _make_some(self, wanted: Sequence[tuple[Run, Site]]) -> dict[int, Vector]:
        made: dict[int, Vector] = {}
        for stored, site in wanted:
            with suppress(NonFinite):  # `vector` raises this error
                made[site.index] = self._make(stored, site)
        return made

    def _check_present(self, site: Site, positions: Sequence[int]) -> None:
        if -1 in positions:
            raise RunIncomplete(
                "a position of the column has no partner in the other prompt, which differs there "
                "or is shorter"
            )
        run = self._run_with(site)
        for position in positions:
            if position not in self._places:
                raise RunIncomplete(f"the run {run.id} has no row of position {position}")

    def _size(self, run: Run) -> int:
        """Bytes of the rows of a site that are put in, or averaged."""
        return len(self._at) * run.width * run.dtype.itemsize

    def _drop_oldest(self) -> None:
        while len(self._vectors) > self._kept:
            self._vectors.popitem(last=False)

    def _run_with(self, site: Site) -> Run:
        run = self._by_site.get(site.index)
        if run is None:
            raise RunIncomplete(
                f"the run {self._runs[0].id} has no rows of {site.point.value} {site.layer}"
            )
        return run

    def _make(self, run: Run, site: Site) -> Vector:
        (rows,), kind = run.read([run.index_of(site)], self._at), run.dtype
        if self._averaged:
            rows = widened(rows, kind).mean(axis=0, dtype=np.float64, keepdims=True)
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

    def __init__(self, store: RunStore, lease: float | None) -> None:
        """Nothing is held yet.

        Args:
            store: the runs of the server.
            lease: seconds for which the runs that the sweep makes are kept; None: not at all.
        """
        self._store = store
        self.lease = lease
        self._held: list[Run] = []
        self.made_ids: list[str] = []
        """The ids of runs that the sweep makes, from before they are stored."""

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
            return self.given(run_id, "")
        except RunNotFound as error:
            raise Defect("the engine did not deliver every row") from error

    def release(self, *, keep: bool) -> None:
        """Releases all runs. Deletes the runs that the sweep has made, or begins their lease.

        Args:
            keep: whether the runs are kept.
        """
        for held in self._held:
            self._store.release(held)
        for run_id in self.made_ids:
            with suppress(RunNotFound, RunInUse):
                if keep and self.lease is not None:
                    self._store.renew(run_id, self.lease, "")
                else:
                    self._store.delete(run_id, "")
        self._held.clear()


class Captured(NamedTuple):
    """Where the rows of a pair's cells come from."""

    sources: list[Source]
    """For each noise."""
    computed: int
    """Prompt tokens that were computed."""


async def sources_of(
    pair: Pair,
    name: str,
    grid: Grid,
    site_count: int,
    held: HeldRuns,
    manager: RequestManager,
    starter: RequestStarter,
) -> Captured:
    """Finds or captures the rows of a pair's cells.

    Args:
        pair: the pair.
        name: the beginning of the ids of runs that are made.
        grid: the cells.
        site_count: sites of cells that start or are expected at one time.
        held: holds all runs.
        manager: runs the prompts.
        starter: starts them.

    Raises:
        RheostatError: a run is missing or unfit, or a prompt cannot run.
    """
    model = manager.sites
    kept = site_count + _KEPT_SITES
    match pair.message.WhichOneof("corruption"):
        case "zeros":
            return Captured([Zeros(model.width)], 0)
        case "mean":
            mean, path = pair.message.mean, f"{pair.path}.mean"
            run = held.given(mean.run_id, f"{path}.run_id")
            averaged = averaged_rows(mean, run, path)
            return Captured([RunRows([run], (), model, kept=kept, averaged=averaged)], 0)
    size = _POSITION_BYTES * sum(map(len, pair.columns))
    wanted = await offload_plan(size, _wanted, pair, grid.columns)
    if pair.into_clean and pair.message.HasField("run_id"):
        return Captured([RunRows([_given(pair, held)], wanted, model, kept=kept)], 0)
    sources: list[Source] = []
    computed = 0
    for noise, prompt in enumerate(pair.corrupt if pair.into_clean else (pair.clean,)):
        runs: list[Run] = []
        if wanted:
            with renamed_errors(lambda error: _rename(error, pair.path)):
                request = await _capturing(prompt, f"{name}-{noise}", wanted, grid, held, manager)
                computed += await starter.run(partial(_capture, request))
            manager.check_not_lost()  # else `held.made` would call missing rows a defect
            runs = [held.made(capture.run.id) for capture in request.captures if capture.run]
        sources.append(RunRows(runs, wanted, model, kept=kept))
    return Captured(sources * len(pair.bases) if len(sources) == 1 else sources, computed)


def _wanted(pair: Pair, columns: int) -> list[int]:
    """The positions whose rows cells put in, ascending."""
    sources = (pair.positions(column).source for column in range(columns))
    return sorted({position for source in sources for position in source if position >= 0})


def _given(pair: Pair, held: HeldRuns) -> Run:
    """Holds the run of a pair.

    Raises:
        RunNotFound: it is gone, or another one has its id by now.
    """
    path = f"{pair.path}.run_id"
    run = held.given(pair.message.run_id, path)
    if tuple(run.prompt_token_ids.tolist()) != tuple(pair.corrupt[0].prompt.token_ids):
        raise RunNotFound(
            f"the run {run.id} was replaced by one of another prompt while the sweep began",
            field=path,
            resource=Resource("run", run.id),
        )
    return run


async def _capturing(
    prompt: AdmittedRequest,
    name: str,
    positions: Sequence[int],
    grid: Grid,
    held: HeldRuns,
    manager: RequestManager,
) -> AdmittedRequest:
    """A request that captures the rows of some positions of a prompt: a run for each point.

    Scattered positions are captured with all that lie between them, because a capture of many
    ranges is refused.
    """
    layers: dict[types_pb2.Point.ValueType, set[int]] = {}
    for row in grid.rows:
        point = to_wire(row.site).point
        layers.setdefault(point, set()).update(site.layer for site in row.window)
    spans = runs_of(np.array(positions))
    if len(spans) > _RANGES:
        spans = ((positions[0], positions[-1] + 1),)
    where = selector_pb2.Selector(
        include=[
            selector_pb2.Range(positions=selector_pb2.Window(start=start, end=end))
            for start, end in spans
        ]
    )
    request = generation_service_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=prompt.prompt.token_ids),
        sampling=generation_pb2.Sampling(max_tokens=1, temperature=0, ignore_eos=True),
    )
    ids = []
    for point, wanted in layers.items():
        ids.append(f"{name}-{types_pb2.Point.Name(point).removeprefix('POINT_').lower()}")
        target = capture_pb2.RunTarget(run_id=ids[-1])
        if held.lease is not None:
            target.lease.FromNanoseconds(int(held.lease * 1e9))
        request.captures.append(
            capture_pb2.CaptureSpec(
                sites=types_pb2.SiteSet(
                    points=[point], list=types_pb2.LayerList(layers=sorted(wanted))
                ),
                where=where,
                run=target,
            )
        )
    admitted = await admit(request, replace(manager.admission, watches=None))
    held.made_ids += ids
    # The prompt keeps the steering under which its pair was admitted.
    plan = replace(prompt.unobserved, captures=admitted.unobserved.captures).pack()
    return replace(
        prompt,
        prompt=admitted.prompt,
        context=admitted.context,
        sampling=admitted.sampling,
        captures=admitted.captures,
        observer_captures=(),
        plan=plan,
        unobserved=plan,
        work=admitted.work,
    )


async def _capture(request: AdmittedRequest, request_id: str, manager: RequestManager) -> int:
    """Runs a request whose captures make runs. Returns the number of tokens that it computes.

    Raises:
        RheostatError: the request cannot run, or has failed.
    """
    plan = replace(request.plan, request_id=request_id)
    admitted = replace(request, request_id=request_id, plan=plan)
    computed = admitted.prompt_len
    async with aclosing(run(admitted, manager)) as responses:
        async for response in responses:
            if isinstance(response, Response) and response.HasField("receipt"):
                computed -= response.receipt.cached_prompt_token_count
    return computed


def _rename(error: RheostatError, path: str) -> None:
    """Makes an error of a capture name the pair."""
    if error.field.startswith(("steering", "lora_name")):
        error.message = f"{path}: {error.message}"
    else:
        error.field = path
