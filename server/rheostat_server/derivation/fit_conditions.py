"""FitConditions: finds a condition that tells two sets of prompts apart.

Every prompt runs once, and its rows are pooled in every way that the request's scores need. The
best direction is stored only after every prompt has run.
"""

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np

from rheostat_engine import Normalise, Site
from rheostat_server import validation
from rheostat_server.derivation.condition_fits import Fit, Made, PooledRows, Score, fits_of
from rheostat_server.derivation.derive import store_vector
from rheostat_server.derivation.prompt_rows import (
    EVERY_TOKEN,
    LAST_TOKEN,
    Reading,
    Rows,
    check_finite,
    check_prompt_selector,
    read_rows,
    sites_of_call,
)
from rheostat_server.derivation.prompt_runner import PromptRunner, check_prompts, check_size
from rheostat_server.errors import InvalidValue, NoContrast, NotSupported, ZeroVector
from rheostat_server.limits import DIRECTIONS, FIT_CHOICES, FITTED_COMPONENTS
from rheostat_server.requests.manager import RequestManager
from rheostat_server.selectors.sites import refuse_double_names, to_wire
from rheostat_server.steering.vector_lookup import FoundVector, find_vector, rows_by_layer
from rheostat_server.tasks.offload import offload
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import make_vector
from rheostat_server.vectors.token_directions import with_directions
from rheostat_server.vectors.upload import check_label
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import capture_pb2, gate_pb2, steering_service_pb2, types_pb2, vector_pb2

_pb = steering_service_pb2

PROBE_NAME = "fitted"
"""Name of the probe of the best condition."""

_POOLS = {gate_pb2.POOL_LAST: Score.LAST, gate_pb2.POOL_MEAN: Score.MEAN}
_MADE = {
    _pb.FIT_DIRECTION_DIFFERENCE_OF_MEANS: Made.DIFFERENCE_OF_MEANS,
    _pb.FIT_DIRECTION_PRINCIPAL_COMPONENT: Made.PRINCIPAL_COMPONENT,
}
_NORMALISES = {
    vector_pb2.NORMALISE_UNIT: Normalise.UNIT,
    vector_pb2.NORMALISE_COSINE: Normalise.COSINE,
    vector_pb2.NORMALISE_PROJECTED_COSINE: Normalise.PROJECTED_COSINE,
}
_EVERY_NORMALISE = (Normalise.UNIT, Normalise.COSINE)
"""Tried if a request has no `normalises`."""
_WIRE_POOLS = {score: wire for wire, score in _POOLS.items()} | {
    Score.OF_MEAN_ROW: gate_pb2.POOL_LAST  # the only number that the probe reads
}
_WIRE_MADE = {made: wire for wire, made in _MADE.items()}
_WIRE_NORMALISES = {normalise: wire for wire, normalise in _NORMALISES.items()}

Wire = TypeVar("Wire", bound=int)
Own = TypeVar("Own")


class _Given(NamedTuple):
    """A vector that the request gives."""

    found: FoundVector
    rows: Mapping[int, int]
    """By layer, its row."""


@dataclass(frozen=True, slots=True)
class _CheckedRequest:
    request: steering_service_pb2.FitConditionsRequest
    reading: Reading
    scores: tuple[Score, ...]
    made: tuple[Made, ...]
    given: tuple[_Given, ...]
    normalises: tuple[Normalise, ...]
    width: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the prompts' rows: kinds of `PooledRows`, sites, prompts and width."""
        prompts = len(self.request.positive) + len(self.request.negative)
        return 3 if self.means else 1, len(self.reading.sites), prompts, self.width

    @property
    def size(self) -> int:
        """Bytes of the prompts' rows."""
        return math.prod(self.shape) * FloatType.FLOAT32.itemsize

    @property
    def combinations(self) -> int:
        """The most conditions that are tried at a site."""
        directions = len(self.made) + len(self.given)
        return len(self.scores) * directions * len(self.normalises)

    @property
    def means(self) -> bool:
        """Whether means of the prompts' rows are needed."""
        return any(score is not Score.LAST for score in self.scores)

    def given_at(self, site: Site) -> tuple[FloatArray, ...]:
        """The rows of the given vectors at a site, [width] each."""
        return tuple(given.found.vector.row(given.rows[site.layer]) for given in self.given)


class _PromptRows(Rows):
    """Pools the rows of a prompt as they arrive, in float64."""

    def __init__(self, sites: Sequence[Site], width: int, *, means: bool) -> None:
        super().__init__(sites)
        self._means = means
        self._last = np.zeros((len(sites), width), np.float32)
        self._last_at = np.full(len(sites), -1, np.int64)
        self._sums = np.zeros((2, len(sites), width) if means else (2, 0, 0))

    def _take(self, indices: list[int], rows: FloatArray, part: capture_pb2.Captured) -> None:
        last = max(run.start + run.count for run in part.positions) - 1
        for index, values in zip(indices, rows, strict=True):
            if last > self._last_at[index]:
                self._last[index], self._last_at[index] = values[-1], last
        if self._means:
            wide = rows.astype(np.float64)
            with np.errstate(invalid="ignore"):
                norms = np.linalg.norm(wide, axis=2, keepdims=True)
                units = np.divide(wide, norms, out=np.zeros_like(wide), where=norms > 0)
            self._sums[0, indices] += wide.sum(axis=1)
            self._sums[1, indices] += units.sum(axis=1)

    def put(self, pooled: FloatArray) -> None:
        """Writes the pooled rows, [kinds of `PooledRows`, sites, width]. Every site needs a row."""
        pooled[0] = self._last
        if self._means:
            pooled[1:] = self._sums / self._counts[:, None]


async def fit_conditions(
    request: steering_service_pb2.FitConditionsRequest,
    manager: RequestManager,
    runner: PromptRunner,
) -> AsyncGenerator[steering_service_pb2.FitConditionsResponse, None]:
    """Fits conditions. Yields progress while prompts run, then the conditions.

    Raises:
        RheostatError: the request is invalid, there is too little memory, or a prompt failed.
    """

    async def check() -> _CheckedRequest:
        return _check(request, manager)

    checked = await with_directions(manager.store.directions, request, check)
    sites, shape = checked.reading.sites, checked.shape
    with runner.reserve(checked.size):
        rows = np.empty(shape, np.float32)

        async def read(prompt: types_pb2.Prompt, path: str, index: int) -> None:
            received = _PromptRows(sites, shape[-1], means=checked.means)
            await read_rows(prompt, path, checked.reading, manager, received)
            received.put(rows[:, :, index])
            check_finite(rows[0, :, index], sites, path)

        async with aclosing(runner.run(request, read)) as events:
            async for progress in events:
                yield _pb.FitConditionsResponse(progress=progress)
        count = len(request.positive)
        fits: list[tuple[Site, Fit]] = []
        for number, site in enumerate(sites):
            p, n = PooledRows(*rows[:, number, :count]), PooledRows(*rows[:, number, count:])
            work = (p.last.nbytes + n.last.nbytes) * checked.combinations
            of_site = await offload(work, _fits_at, p, n, checked, site)
            fits += [(site, fit) for fit in of_site]
        if not fits:
            raise NoContrast("both sets of prompts read alike at every site", field="sites")
        best = max(range(len(fits)), key=lambda index: (*fits[index][1].rank, -index))
        fitted = await _store(checked, *fits[best], manager)
        fitted.best = best
        fitted.fits.extend(_to_wire(site, fit, checked) for site, fit in fits)
        yield _pb.FitConditionsResponse(fitted=fitted)


def _check(
    request: steering_service_pb2.FitConditionsRequest, manager: RequestManager
) -> _CheckedRequest:
    if manager.info.no_gates:
        raise NotSupported(manager.info.no_gates)
    check_prompts(request)
    selection = sites_of_call(request, manager.sites)
    refuse_double_names(selection, "sites")
    check_label(request.name, request.description, "")
    where = check_prompt_selector(request.where) if request.HasField("where") else EVERY_TOKEN
    reading = Reading(request.sites, selection.sites, where, request.lora_name)
    given = _given(request.vectors, selection.layers, manager)
    every_direction = () if given else tuple(_MADE.values())
    made = _chosen(request.directions, _MADE, _pb.FitDirection.values(), "directions", "")
    normalises = _normalises(request.normalises) or _EVERY_NORMALISE
    checked = _CheckedRequest(
        request,
        reading,
        _scores(request, normalises),
        made or every_direction,
        given,
        normalises,
        manager.sites.width,
    )
    check_size(checked.size)
    prompts = len(request.positive) + len(request.negative)
    if Made.PRINCIPAL_COMPONENT in checked.made and prompts > FITTED_COMPONENTS:
        raise InvalidValue(
            f"principal components are made of at most {FITTED_COMPONENTS} prompts; there are "
            f"{prompts}. Name FIT_DIRECTION_DIFFERENCE_OF_MEANS alone",
            field="directions",
        )
    return checked


def _chosen(
    values: Sequence[Wire],
    served: Mapping[Wire, Own],
    known: Sequence[int],
    path: str,
    advice: str,
) -> tuple[Own, ...]:
    """What a repeated enum names; each value once."""
    validation.check_count(len(values), FIT_CHOICES, path, path)
    validation.no_repeats(values, path, path)
    for index, value in enumerate(values):
        field = f"{path}[{index}]"
        validation.known_enum(value, known, field)
        if value not in served:
            raise NotSupported(f"is not served here: use {advice}", field=field)
    return tuple(served[value] for value in values)


def _scores(
    request: steering_service_pb2.FitConditionsRequest, normalises: Sequence[Normalise]
) -> tuple[Score, ...]:
    """How the rows of a prompt become one number."""
    served = "POOL_LAST or POOL_MEAN"
    pools = _chosen(request.pools, _POOLS, gate_pb2.Pool.values(), "pools", served)
    pools = pools or tuple(_POOLS.values())
    of_rows = {
        gate_pb2.PROBE_ROWS_EACH: pools,
        gate_pb2.PROBE_ROWS_PROMPT_MEAN: (Score.OF_MEAN_ROW,),
    }
    chosen = _chosen(request.rows, of_rows, gate_pb2.ProbeRows.values(), "rows", "") or (pools,)
    scores = tuple(chain.from_iterable(chosen))
    if not any(score.reads(normalise) for score in scores for normalise in normalises):
        raise NotSupported(
            "NORMALISE_PROJECTED_COSINE is not averaged over tokens (POOL_MEAN): read the mean row "
            "(PROBE_ROWS_PROMPT_MEAN), or the last token (POOL_LAST)",
            field="pools",
        )
    return scores


def _normalises(values: Sequence[vector_pb2.Normalise.ValueType]) -> tuple[Normalise, ...]:
    validation.check_count(len(values), FIT_CHOICES, "normalises", "normalises")
    for index, value in enumerate(values):
        if value == vector_pb2.NORMALISE_NONE:
            raise InvalidValue(
                "the norm of a direction says nothing: use NORMALISE_UNIT",
                field=f"normalises[{index}]",
            )
    return _chosen(values, _NORMALISES, vector_pb2.Normalise.values(), "normalises", "")


def _given(
    refs: Sequence[vector_pb2.VectorRef], layers: Sequence[int], manager: RequestManager
) -> tuple[_Given, ...]:
    """The given vectors.

    Raises:
        RheostatError: there are too many, or one is not found, or has a row of zeros.
    """
    validation.check_count(len(refs), DIRECTIONS, "vectors", "vectors")
    vectors = [
        find_vector(ref, manager.store.view(), manager.sites, f"vectors[{index}]")
        for index, ref in enumerate(refs)
    ]
    given = tuple(_Given(vector, rows_by_layer(vector, layers)) for vector in vectors)
    for found, rows in given:
        for row in sorted(set(rows.values())):
            if found.vector.peaks[row] == 0:
                raise ZeroVector(f"row {row} is zero and has no direction", field=found.path)
    return given


def _fits_at(p: PooledRows, n: PooledRows, checked: _CheckedRequest, site: Site) -> list[Fit]:
    given = checked.given_at(site)
    return list(fits_of(p, n, checked.scores, checked.made, given, checked.normalises))


def _to_wire(site: Site, fit: Fit, checked: _CheckedRequest) -> steering_service_pb2.ConditionFit:
    message = _pb.ConditionFit(
        site=to_wire(site),
        pool=_WIRE_POOLS[fit.score],
        rows=_wire_rows(fit),
        normalise=_WIRE_NORMALISES[fit.normalise],
        threshold=fit.threshold.bound,
        below=fit.threshold.below,
        f1=fit.f1,
        margin=fit.margin,
    )
    if fit.direction < len(checked.made):
        message.made = _WIRE_MADE[checked.made[fit.direction]]
    else:
        message.vector_index = fit.direction - len(checked.made)
    if fit.held_out is not None:
        message.held_out_f1 = fit.held_out.f1
        message.held_out_accuracy = fit.held_out.accuracy
    return message


def _wire_rows(fit: Fit) -> gate_pb2.ProbeRows.ValueType:
    if fit.score is Score.OF_MEAN_ROW:
        return gate_pb2.PROBE_ROWS_PROMPT_MEAN
    return gate_pb2.PROBE_ROWS_EACH


async def _store(
    checked: _CheckedRequest, site: Site, fit: Fit, manager: RequestManager
) -> steering_service_pb2.FittedConditions:
    """Stores the direction of the best condition. Returns the condition, without the table."""
    ref = vector_pb2.VectorRef()
    if fit.direction < len(checked.made):
        data = fit.row.astype("<f4").tobytes()
        vector = await offload(
            len(data), make_vector, FloatType.FLOAT32, 1, checked.width, data, "sites"
        )
        layers = [site.layer]
    else:
        found, rows = checked.given[fit.direction - len(checked.made)]
        vector, layers = found.vector, list(found.row_layers or sorted(rows))
        if vector.rows > 1:
            ref.row_layers.layers.extend(layers)
    ref.digest = vector.digest
    request, where = checked.request, checked.reading.where
    at = types_pb2.LayerList(layers=layers if vector.rows > 1 else [site.layer])
    sites = types_pb2.SiteSet(points=[to_wire(site).point], list=at)
    await store_vector(vector, request.name, request.description, sites, manager)
    if not request.HasField("where") and fit.score is Score.LAST:
        where = LAST_TOKEN  # fewer tokens of a cached prompt are computed again
    read_at = types_pb2.LayerList(layers=[site.layer])
    probe = gate_pb2.Probe(
        name=PROBE_NAME,
        sites=types_pb2.SiteSet(points=sites.points, list=read_at),
        read=vector_pb2.Readout(vector=ref, normalise=_WIRE_NORMALISES[fit.normalise]),
        where=where,
        rows=_wire_rows(fit),
    )
    condition = gate_pb2.Condition(
        probe_name=PROBE_NAME, pool=_WIRE_POOLS[fit.score], after_prompt=True
    )
    if fit.threshold.below:
        condition.below = fit.threshold.bound
    else:
        condition.above = fit.threshold.bound
    return _pb.FittedConditions(probe=probe, condition=condition, digest=vector.digest)
