"""DeriveVectors: derives vectors from two sets of prompts.

Vectors are stored only after every prompt has run.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from rheostat_server import validation
from rheostat_server.derivation.contrast import Direction, Method, contrast
from rheostat_server.derivation.prompt_means import PromptMean, read_prompt
from rheostat_server.derivation.prompt_rows import Reading, prompt_selector
from rheostat_server.derivation.prompt_runner import (
    PromptRunner,
    check_prompts,
    check_size,
    jobs_of,
)
from rheostat_server.errors import InvalidValue, MissingField, RheostatError, StoreFull
from rheostat_server.requests.manager import RequestManager
from rheostat_server.selectors.sites import refuse_what_is_no_stream, resolve_sites, to_wire
from rheostat_server.tasks.offload import offload
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Name, Vector, make_vector
from rheostat_server.vectors.upload import check_label
from rheostat_wire.v1 import steering_service_pb2, types_pb2

_pb = steering_service_pb2

_METHODS = {
    _pb.DERIVE_METHOD_DIFFERENCE_OF_MEANS: Method.DIFFERENCE_OF_MEANS,
    _pb.DERIVE_METHOD_PRINCIPAL_COMPONENT: Method.PRINCIPAL_COMPONENT,
}


@dataclass(frozen=True, slots=True)
class _CheckedRequest:
    request: steering_service_pb2.DeriveVectorsRequest
    reading: Reading
    layers: tuple[int, ...]
    method: Method
    names: tuple[str, ...]
    """One per point; "" stands for no name."""
    width: int

    @property
    def size(self) -> int:
        """Bytes of the prompts' rows."""
        prompts = len(self.request.positive) + len(self.request.negative)
        return prompts * len(self.reading.sites) * self.width * FloatType.FLOAT32.itemsize


class _Rows:
    """The rows of one set of prompts."""

    def __init__(self, prompts: int, sites: int, width: int) -> None:
        self.rows = np.empty((sites, prompts, width), dtype=np.float32)
        self.norms = np.empty((sites, prompts))

    def set(self, prompt: int, mean: PromptMean) -> None:
        self.rows[:, prompt] = mean.rows
        self.norms[:, prompt] = mean.norms


class Derivations:
    """Runs the derivations of a server."""

    def __init__(self, runner: PromptRunner) -> None:
        """`runner` is shared with other calls that run sets of prompts."""
        self._runner = runner

    async def derive(
        self, request: steering_service_pb2.DeriveVectorsRequest, manager: RequestManager
    ) -> AsyncGenerator[steering_service_pb2.DeriveVectorsResponse, None]:
        """Derives vectors and stores them. Yields progress while prompts run, then the vectors.

        Raises:
            RheostatError: the request is invalid, there is too little memory, or a prompt failed.
        """
        checked = _check(request, manager)
        with self._runner.reserve(checked.size):
            async with aclosing(_derive(checked, manager, self._runner)) as events:
                async for event in events:
                    yield event


def _check(
    request: steering_service_pb2.DeriveVectorsRequest, manager: RequestManager
) -> _CheckedRequest:
    check_prompts(request.positive, "positive")
    check_prompts(request.negative, "negative")
    if not request.HasField("sites"):
        raise MissingField("sites are required", field="sites")
    selection = resolve_sites(request.sites, manager.sites, "sites")
    refuse_what_is_no_stream(selection, "sites")
    reading = Reading(
        request.sites,
        selection.sites,
        prompt_selector(request.where if request.HasField("where") else None),
        request.lora_name,
    )
    width = manager.sites.width
    checked = _CheckedRequest(
        request, reading, selection.layers, _method(request), _names(request), width
    )
    check_size(checked.size)
    stored = len(selection.sites) * width * FloatType.FLOAT32.itemsize
    if stored > manager.store.capacity:
        raise StoreFull(
            f"the vectors take {stored} bytes; the whole store has {manager.store.capacity}. Raise "
            "the server's --vector-store-mib",
            field="sites",
        )
    return checked


def _method(request: steering_service_pb2.DeriveVectorsRequest) -> Method:
    if not request.HasField("method"):
        return Method.DIFFERENCE_OF_MEANS
    validation.known_enum(request.method, _METHODS, "method")
    method = _METHODS[request.method]
    if method is Method.PRINCIPAL_COMPONENT and len(request.positive) != len(request.negative):
        raise InvalidValue(
            f"there are {len(request.negative)} negative prompts and {len(request.positive)} "
            "positive ones; DERIVE_METHOD_PRINCIPAL_COMPONENT pairs them and needs as many of each",
            field="negative",
        )
    return method


def _names(request: steering_service_pb2.DeriveVectorsRequest) -> tuple[str, ...]:
    points = request.sites.points
    if len(points) == 1 or not request.name:
        names = (request.name,) * len(points)
    else:
        endings = (types_pb2.Point.Name(point).removeprefix("POINT_").lower() for point in points)
        names = tuple(f"{request.name}/{ending}" for ending in endings)
    for name in names:
        check_label(name, request.description, "")
    return names


async def _derive(
    checked: _CheckedRequest, manager: RequestManager, runner: PromptRunner
) -> AsyncGenerator[steering_service_pb2.DeriveVectorsResponse, None]:
    request, sites = checked.request, checked.reading.sites
    positive, negative = (
        _Rows(len(prompts), len(sites), checked.width)
        for prompts in (request.positive, request.negative)
    )

    async def read(prompt: types_pb2.Prompt, path: str, rows: _Rows, index: int) -> None:
        rows.set(index, await read_prompt(prompt, path, checked.reading, manager))

    jobs = jobs_of(request, positive, negative, read)
    async with aclosing(runner.run(jobs)) as counts:
        async for done in counts:
            progress = _pb.DeriveProgress(done_prompt_count=done, total_prompt_count=len(jobs))
            yield _pb.DeriveVectorsResponse(progress=progress)
    directions = []
    for p, n in zip(positive.rows, negative.rows, strict=True):
        directions.append(await offload(p.nbytes + n.nbytes, contrast, p, n, checked.method))
    norms = np.concatenate([positive.norms, negative.norms], axis=1).mean(axis=1)
    rows = [
        _pb.DerivedRow(
            layer=site.layer,
            norm=direction.norm,
            stream_norm=norm,
            explained=direction.explained,
            separation=direction.separation,
        )
        for site, direction, norm in zip(sites, directions, norms.tolist(), strict=True)
    ]
    derived = await _store_vectors(checked, directions, rows, manager)
    yield _pb.DeriveVectorsResponse(derived=derived)


async def _store_vectors(
    checked: _CheckedRequest,
    directions: Sequence[Direction],  # one per site
    rows: Sequence[steering_service_pb2.DerivedRow],  # one per site
    manager: RequestManager,
) -> steering_service_pb2.DerivedVectors:
    """Makes all vectors before it stores the first."""
    points = [to_wire(site).point for site in checked.reading.sites]
    vectors = []
    for point, name in zip(checked.request.sites.points, checked.names, strict=True):
        indices = [index for index, site_point in enumerate(points) if site_point == point]
        data = np.stack([directions[index].row for index in indices]).astype("<f4").tobytes()
        vector = await offload(
            len(data), make_vector, FloatType.FLOAT32, len(indices), checked.width, data, "sites"
        )
        derived = _pb.DerivedVector(
            point=point, digest=vector.digest, name=name, rows=[rows[index] for index in indices]
        )
        vectors.append((derived, vector))
    layers = types_pb2.LayerList(layers=checked.layers)
    for derived, vector in vectors:
        sites = types_pb2.SiteSet(points=[derived.point], list=layers)
        await store_vector(vector, derived.name, checked.request.description, sites, manager)
    return _pb.DerivedVectors(vectors=[derived for derived, _ in vectors])


async def store_vector(
    vector: Vector,
    name: str,
    description: str,
    sites: types_pb2.SiteSet,
    manager: RequestManager,
) -> None:
    """Stores a vector, under a name unless that is empty."""
    if not name:
        await manager.persistent_vectors.put(vector)
        return
    try:
        label = Name(vector.digest, description, sites)
        await manager.persistent_vectors.put_named(vector, name, label)
    except RheostatError as error:
        error.field = "name" if error.field else ""
        raise
