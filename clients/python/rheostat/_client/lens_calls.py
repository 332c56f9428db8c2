"""Calls that read rows with the model's final norm and unembedding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from rheostat._connection.calls import DownloadCall, UnaryCall
from rheostat._errors import invalid
from rheostat._fields import builds_message, token_id_list, utf8_text, whole_number
from rheostat._points import LayersLike, PointsLike, layers_of, points_of, site_set
from rheostat._prompts import Prompt, put_prompt
from rheostat._responses.lens import Attribution, LensAccumulator, LensResult, read_attribution
from rheostat._runs import RunInfo, id_of, position_list
from rheostat._selectors import SelectorLike, prompt_tokens
from rheostat._steering.steering import SteeringLike, steering_to_wire
from rheostat._steering.token_directions import token_direction_to_wire
from rheostat_wire.v1 import lens_service_pb2, types_pb2


@builds_message
def lens(
    prompt: Prompt | None,
    *,
    run: str | RunInfo | None,
    points: PointsLike | None,
    layers: LayersLike,
    where: SelectorLike,
    positions: int | Iterable[int] | None,
    top_k: int | None,
    tokens: Sequence[int],
    steering: SteeringLike,
    lora: str | None,
) -> DownloadCall[lens_service_pb2.LensResponse, None, LensResult]:
    ids = token_id_list(tokens, "token_ids", "tokens")
    if (prompt is None) == (run is None):
        raise invalid("prompt", "give a prompt or run=, and not both", "REASON_MISSING_FIELD")
    request = lens_service_pb2.LensRequest(
        run_id="" if run is None else id_of(run),
        sites=_sites(run, points, layers),
        positions=None if positions is None else position_list(positions),
        steering=steering_to_wire(steering),
        lora_name="" if lora is None else utf8_text(lora, "lora", "an adapter's name"),
        top_k=None if top_k is None else whole_number(top_k, "top_k", "top_k"),
        token_ids=ids,
        where=None if where is None else prompt_tokens(where),
    )
    if prompt is not None:
        put_prompt(request.prompt, prompt)
    return DownloadCall(
        "/rheostat.v1.LensService/Lens",
        request,
        lens_service_pb2.LensResponse,
        partial(LensAccumulator, ids),
    )


def _sites(
    run: str | RunInfo | None, points: PointsLike | None, layers: LayersLike
) -> types_pb2.SiteSet | None:
    """The sites of a lens; None for all sites of a run."""
    if points is None and run is not None:
        if layers != "all":
            raise invalid("sites.points", "layers of a run need points", "REASON_MISSING_FIELD")
        return None
    return site_set(points_of("resid_post" if points is None else points), layers_of(layers))


@builds_message
def attribute(
    prompt: Prompt, token: int, *, minus: int | None, steering: SteeringLike, lora: str | None
) -> UnaryCall[lens_service_pb2.AttributeResponse, Attribution]:
    request = lens_service_pb2.AttributeRequest(
        direction=token_direction_to_wire(token, minus, "direction"),
        steering=steering_to_wire(steering),
        lora_name="" if lora is None else utf8_text(lora, "lora", "an adapter's name"),
    )
    put_prompt(request.prompt, prompt)
    return UnaryCall(
        "/rheostat.v1.LensService/Attribute",
        request,
        lens_service_pb2.AttributeResponse,
        read_attribution,
    )
