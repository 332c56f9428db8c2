"""Checks and resolves the message that opens a subscription, on a thread if that takes long."""

from dataclasses import dataclass

from rheostat_engine import ModelSites
from rheostat_server import validation
from rheostat_server.capture.specs import (
    ResolvedCapture,
    Target,
    check_spill,
    direction_vectors,
    resolve_capture,
)
from rheostat_server.errors import InvalidValue, MissingField
from rheostat_server.limits import (
    CAPTURES,
    ID_BYTES,
    OBSERVER_COST,
    REQUEST_RANGES,
    SUBSCRIBED_REQUESTS,
    SUBSCRIPTION_SELECTOR_BYTES,
)
from rheostat_server.selectors.selection import SelectionContext
from rheostat_server.steering.estimates import estimate_captures
from rheostat_server.subscriptions.observed import (
    ObservedCaptures,
    ObservedRequests,
    observed_captures,
    observed_requests,
)
from rheostat_server.tasks.offload import offload_plan
from rheostat_server.validation import field_path
from rheostat_server.vectors.store import Vector, VectorStore, VectorView
from rheostat_server.vectors.token_directions import with_directions
from rheostat_wire.v1 import capture_pb2, capture_service_pb2


@dataclass(frozen=True, slots=True)
class Opening:
    """The requests and captures of a new subscription."""

    requests: ObservedRequests
    """The filter for requests."""
    captures: ObservedCaptures
    """The captures of observed requests."""
    vectors: tuple[Vector, ...]
    """The vectors on which rows are projected, each once. Their names are resolved once, here. A
    later change of a name does not affect the subscription."""


async def check_opening(
    opened: capture_service_pb2.SubscribeOpen,
    *,
    model: ModelSites,
    typical: SelectionContext,
    store: VectorStore,
    spools: bool,
) -> Opening:
    """Checks the message that opens a subscription, except for the memory that it asks for.

    Args:
        opened: the message.
        model: the model's sites.
        typical: a context that stands for later requests.
        store: the stored vectors.
        spools: whether rows can wait on disk.

    Raises:
        InvalidArgument, FailedPrecondition: the message is malformed, or the server does not
            support what it asks for.
        NotFound: a vector or a name of a vector is not stored.
    """
    if not opened.HasField("filter"):
        raise MissingField("a filter is required", field="open.filter")
    validation.check_count(len(opened.captures), CAPTURES, "open.captures", "captures")
    _check_selectors(opened)
    validation.text_bytes(opened.namespace, ID_BYTES, "open.namespace")
    if opened.HasField("overload"):
        validation.known_enum(opened.overload, capture_pb2.Overload.values(), "open.overload")
        check_spill(opened.overload, "open.overload", spools=spools)
    work = opened.filter.ByteSize()
    work += estimate_captures(opened.captures, typical.prompt_len, model)
    resolved, captures = await with_directions(
        store.directions,
        opened,
        lambda: offload_plan(work, _resolve, opened, model, typical, store.view()),
    )
    if captures.cost > OBSERVER_COST:
        raise InvalidValue(
            f"sites, ranges and 8 for each capture add up to {captures.cost}; at most "
            f"{OBSERVER_COST} are allowed, because each observed request pays for them",
            field="open.captures",
        )
    vectors = direction_vectors(resolved)
    return Opening(observed_requests(opened.filter), captures, tuple(vectors.values()))


def _check_selectors(opened: capture_service_pb2.SubscribeOpen) -> None:
    ranges = size = 0
    for number, spec in enumerate(opened.captures):
        path = f"open.captures[{number}].where"
        ranges += len(spec.where.include) + len(spec.where.exclude)
        validation.check_count(ranges, REQUEST_RANGES, path, "ranges in the subscription")
        size += spec.where.ByteSize()
        validation.check_count(size, SUBSCRIPTION_SELECTOR_BYTES, path, "bytes of selectors")


def _resolve(
    opened: capture_service_pb2.SubscribeOpen,
    model: ModelSites,
    typical: SelectionContext,
    vectors: VectorView,
) -> tuple[list[ResolvedCapture], ObservedCaptures]:
    """Checks the filter, and resolves the captures."""
    check_filter(opened.filter)
    resolved = []
    for number, spec in enumerate(opened.captures):
        path = f"open.captures[{number}]"
        if (sent_to := spec.WhichOneof("to")) is not None:
            raise InvalidValue("the rows come here", field=field_path(path, sent_to))
        if spec.HasField("overload"):
            raise InvalidValue(
                "the subscription's own policy holds", field=field_path(path, "overload")
            )
        lenient = typical.lenient_copy
        resolved.append(resolve_capture(spec, model, lenient, vectors, path, Target.SUBSCRIPTION))
    return resolved, observed_captures(opened.captures, resolved)


def check_filter(wanted: capture_service_pb2.RequestFilter) -> None:
    """Checks a filter of requests.

    Raises:
        InvalidArgument: it is malformed.
    """
    path = "open.filter"
    kind = validation.required(wanted.WhichOneof("kind"), path, "requests, labels and every")
    if kind == "requests":
        ids, field = wanted.requests.request_ids, f"{path}.requests.request_ids"
        if not ids:
            raise InvalidValue("at least one request id is required", field=field)
        validation.check_count(len(ids), SUBSCRIBED_REQUESTS, field, "request ids")
        for index, request_id in enumerate(ids):
            validation.matches(request_id, validation.REQUEST_ID, f"{field}[{index}]")
    elif kind == "labels":
        labels, field = wanted.labels.labels, f"{path}.labels.labels"
        if not labels:
            raise InvalidValue("at least one label is required", field=field)
        validation.labels(labels, field)
