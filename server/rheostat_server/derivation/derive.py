"""DeriveVectors: derives vectors from two sets of prompts.

Vectors are stored only after every prompt has run.
"""

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from rheostat_server import validation
from rheostat_server.derivation.contrast import Direction, Method, contrast
from rheostat_server.derivation.prompt_means import read_prompt
from rheostat_server.derivation.prompt_rows import (
    LAST_TOKEN,
    Reading,
    check_prompt_selector,
    sites_of_call,
)
from rheostat_server.derivation.prompt_runner import PromptRunner, check_prompts, check_size
from rheostat_server.errors import InvalidValue, RheostatError, StoreFull
from rheostat_server.requests.manager import RequestManager
from rheostat_server.selectors.sites import to_wire
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
    shape: tuple[int, int, int]
    """Sites, prompts and width of the prompts' rows."""

    @property
    def size(self) -> int:
        """Bytes of the prompts' rows."""
        return math.prod(self.shape) * FloatType.FLOAT32.itemsize


async def derive_vectors(
    request: steering_service_pb2.DeriveVectorsRequest,
    manager: RequestManager,
    runner: PromptRunner,
) -> AsyncGenerator[steering_service_pb2.DeriveVectorsResponse, None]:
    """Derives vectors and stores them. Yields progress while prompts run, then the vectors.

    Raises:
        RheostatError: the request is invalid, there is too little memory, or a prompt failed.
    """
    checked = _check(request, manager)
    with runner.reserve(checked.size):
        rows = np.empty(checked.shape, np.float32)
        norms = np.empty(checked.shape[:2])

        async def read(prompt: types_pb2.Prompt, path: str, index: int) -> None:
            mean = await read_prompt(prompt, path, checked.reading, manager)
            rows[:, index], norms[:, index] = mean.rows, mean.norms

        async with aclosing(runner.run(request, read)) as events:
            async for progress in events:
                yield _pb.DeriveVectorsResponse(progress=progress)
        count, directions = len(request.positive), []
        for of_site in rows:
            p, n = of_site[:count], of_site[count:]
            directions.append(await offload(of_site.nbytes, contrast, p, n, checked.method))
        derived_rows = [
            _pb.DerivedRow(
                layer=site.layer,
                norm=direction.norm,
                stream_norm=norm,
                explained=direction.explained,
                separation=direction.separation,
            )
            for site, direction, norm in zip(
                checked.reading.sites, directions, norms.mean(axis=1).tolist(), strict=True
            )
        ]
        derived = await _store_vectors(checked, directions, derived_rows, manager)
        yield _pb.DeriveVectorsResponse(derived=derived)


def _check(
    request: steering_service_pb2.DeriveVectorsRequest, manager: RequestManager
) -> _CheckedRequest:
    check_prompts(request)
    selection = sites_of_call(request, manager.sites)
    reading = Reading(
        request.sites,
        selection.sites,
        check_prompt_selector(request.where) if request.HasField("where") else LAST_TOKEN,
        request.lora_name,
    )
    prompts = len(request.positive) + len(request.negative)
    shape = len(selection.sites), prompts, manager.sites.width
    checked = _CheckedRequest(
        request, reading, selection.layers, _method(request), _names(request), shape
    )
    check_size(checked.size)
    stored = len(selection.sites) * manager.sites.width * FloatType.FLOAT32.itemsize
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
            len(data),
            make_vector,
            FloatType.FLOAT32,
            len(indices),
            checked.shape[-1],
            data,
            "sites",
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
