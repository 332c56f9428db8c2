"""The calls that store, fetch, list and name vectors, as values of `rheostat._connection.calls`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy.typing as npt

from rheostat._arrays import ArrayLike, Element, vector_data
from rheostat._connection.calls import PAGE, DownloadCall, PagedCall, UnaryCall, UploadCall
from rheostat._errors import invalid
from rheostat._fields import builds_message, utf8_text, vector_digest, vector_name
from rheostat._points import LayersLike, PointsLike, layers_of, points_of, site_set
from rheostat._prompts import Prompt, put_prompt
from rheostat._selectors import SelectorLike, prompt_tokens
from rheostat._steering.derivations import (
    METHODS,
    Derivation,
    DerivationAccumulator,
    DeriveMethod,
)
from rheostat._steering.transfers import Progress, VectorAccumulator, VectorUpload
from rheostat._steering.vectors import (
    Vector,
    VectorInfo,
    check_row_count,
    defaults,
    read_info,
    refuse_dose,
)
from rheostat_wire.dtypes import TO_WIRE
from rheostat_wire.v1 import steering_service_pb2, types_pb2


@builds_message
def put_vector(
    array: ArrayLike | npt.ArrayLike | Vector,
    *,
    points: PointsLike | None,
    layers: LayersLike | None,
    name: str | None,
    description: str | None,
    dtype: Element | None,
    progress: Progress | None,
) -> UploadCall[steering_service_pb2.PutVectorResponse, Vector]:
    refuse_dose(array, "vector")
    at_points, at_layers = defaults(points, layers)
    if isinstance(array, Vector):
        at_points, at_layers = at_points or array.points, at_layers or array.layers
        name = array.name if name is None else name
        description = array.description if description is None else description
        if array.rows is None or dtype not in (None, array.rows.element):
            data = vector_data(array.values, dtype)
        else:
            data = array.rows
    else:
        data = vector_data(array, dtype)
    check_row_count(data.shape, at_layers)
    digest = data.digest
    header = steering_service_pb2.VectorHeader(
        dtype=TO_WIRE[data.element],
        shape=data.shape,
        digest=digest,
        total_bytes=len(data.data),
        name="" if name is None else vector_name(name),
        description=utf8_text(description or "", "description", "a description"),
        sites=None if at_points is None or at_layers is None else site_set(at_points, at_layers),
    )
    vector = Vector(
        digest.hex(), name, data.shape, data.element, at_points, at_layers,
        description=description or "",
    )  # fmt: skip
    return UploadCall(
        "/rheostat.v1.SteeringService/PutVector",
        VectorUpload(header, data, progress),
        steering_service_pb2.PutVectorResponse,
        lambda _: vector,
    )


@builds_message
def get_vector(
    name: str | None, digest: str | None
) -> DownloadCall[steering_service_pb2.GetVectorResponse, None, Vector]:
    if name is not None and digest is not None:
        raise invalid("digest", "give the vector's name or its digest, not both")
    if name is None and digest is None:
        raise invalid("name", "give the vector's name or its digest", "REASON_MISSING_FIELD")
    request = steering_service_pb2.GetVectorRequest()
    if digest is not None:
        request.digest = vector_digest(digest)
    if name is not None:
        request.name = vector_name(name)
    return DownloadCall(
        "/rheostat.v1.SteeringService/GetVector",
        request,
        steering_service_pb2.GetVectorResponse,
        VectorAccumulator,
    )


def list_vectors(
    prefix: str,
) -> PagedCall[steering_service_pb2.ListVectorsResponse, VectorInfo]:
    utf8_text(prefix, "name_prefix", "a prefix")
    return PagedCall(
        "/rheostat.v1.SteeringService/ListVectors",
        lambda token: steering_service_pb2.ListVectorsRequest(
            page_size=PAGE, page_token=token, name_prefix=prefix
        ),
        steering_service_pb2.ListVectorsResponse,
        lambda page: [read_info(info) for info in page.vectors],
    )


@builds_message
def derive_vectors(
    positive: Iterable[Prompt],
    negative: Iterable[Prompt],
    *,
    points: PointsLike,
    layers: LayersLike,
    where: SelectorLike,
    method: DeriveMethod,
    name: str | None,
    description: str,
    lora: str | None,
    progress: Progress | None,
) -> DownloadCall[steering_service_pb2.DeriveVectorsResponse, None, Derivation]:
    if method not in METHODS:
        raise invalid(
            "method", f"methods are {', '.join(METHODS)}, not {method!r}", "REASON_UNKNOWN_ENUM"
        )
    at_layers = layers_of(layers)
    request = steering_service_pb2.DeriveVectorsRequest(
        positive=prompts_to_wire(positive, "positive"),
        negative=prompts_to_wire(negative, "negative"),
        sites=site_set(points_of(points), at_layers),
        method=METHODS[method],
        name="" if name is None else vector_name(name),
        description=utf8_text(description, "description", "a description"),
        lora_name="" if lora is None else utf8_text(lora, "lora", "an adapter's name"),
        where=None if where is None else prompt_tokens(where),
    )
    return DownloadCall(
        "/rheostat.v1.SteeringService/DeriveVectors",
        request,
        steering_service_pb2.DeriveVectorsResponse,
        partial(DerivationAccumulator, at_layers, progress),
    )


def prompts_to_wire(prompts: object, path: str) -> list[types_pb2.Prompt]:
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise invalid(path, "a set is a list of prompts, not a single prompt")
    messages: list[types_pb2.Prompt] = []
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence):
            raise invalid(
                f"{path}[{number}]", "a prompt is text, token ids or messages, in a list of them"
            )
        messages.append(types_pb2.Prompt())
        put_prompt(messages[-1], prompt, f"{path}[{number}]")
    return messages


@builds_message
def set_name(
    name: str,
    vector: Vector | str,
    *,
    expected: Vector | str | None,
    points: PointsLike | None,
    layers: LayersLike | None,
    description: str | None,
) -> UnaryCall[steering_service_pb2.SetNameResponse, str]:
    """Its result is the digest that had the name before, "" for none."""
    refuse_dose(vector, "vector")
    at_points, at_layers = defaults(points, layers)
    if isinstance(vector, Vector):
        at_points, at_layers = at_points or vector.points, at_layers or vector.layers
        description = description or vector.description or None
    request = steering_service_pb2.SetNameRequest(
        name=vector_name(name),
        digest=_digest(vector, "digest"),
        description=None
        if description is None
        else utf8_text(description, "description", "a description"),
        sites=None if at_points is None or at_layers is None else site_set(at_points, at_layers),
    )
    if expected is not None:
        request.expected_digest = _digest(expected, "expected") if expected else b""
    return UnaryCall(
        "/rheostat.v1.SteeringService/SetName",
        request,
        steering_service_pb2.SetNameResponse,
        lambda answer: answer.previous_digest.hex(),
    )


def _digest(vector: Vector | str, path: str) -> bytes:
    if not isinstance(vector, Vector):
        return vector_digest(vector, path)
    if vector.digest is None:
        raise invalid(
            path,
            f"the client does not know the digest of {vector.label}: use engine.vectors.get",
        )
    return vector_digest(vector.digest, path)


@builds_message
def delete_name(name: str) -> UnaryCall[steering_service_pb2.DeleteNameResponse, str]:
    """Its result is the digest of the vector that had the name."""
    return UnaryCall(
        "/rheostat.v1.SteeringService/DeleteName",
        steering_service_pb2.DeleteNameRequest(name=vector_name(name)),
        steering_service_pb2.DeleteNameResponse,
        lambda answer: answer.digest.hex(),
    )
