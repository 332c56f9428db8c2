"""Attribute: takes the logit of the token after a prompt apart, in one forward pass.

The final norm is linear once its scale is fixed to that of the pass, and so is the unembedding. So
the logit is a sum over the terms of the stream: the embedding, and what each attention and each MLP
added. The logit itself comes from the model's own head, and what the sum leaves is reported.
"""

import numpy as np

from rheostat_engine import Point, Site
from rheostat_server.derivation.lens import raw_tensor, refuse_without_lens, rows_of_prompt
from rheostat_server.derivation.prompt_rows import LAST_TOKEN, Reading, check_prompt
from rheostat_server.errors import NotSupported
from rheostat_server.requests.manager import RequestManager
from rheostat_server.selectors.sites import resolve_sites, to_wire
from rheostat_server.vectors.token_directions import checked_tokens
from rheostat_wire.v1 import lens_service_pb2, types_pb2

_POINTS = (
    types_pb2.POINT_RESID_PRE,
    types_pb2.POINT_RESID_POST,
    types_pb2.POINT_ATTN_OUT,
    types_pb2.POINT_MLP_OUT,
)


async def attribute(
    request: lens_service_pb2.AttributeRequest, manager: RequestManager
) -> lens_service_pb2.AttributeResponse:
    """Runs a prompt, and takes a logit apart.

    Raises:
        RheostatError: the request is invalid, or has failed.
    """
    refuse_without_lens(manager)
    if manager.sites.no_directions:
        raise NotSupported(
            f"this model's logits are no sum of contributions: {manager.sites.no_directions}. Read "
            "the stream with Lens instead"
        )
    check_prompt(request.prompt, "prompt")
    tokens = checked_tokens(
        request.direction if request.HasField("direction") else None,
        manager.info.vocabulary,
        "direction",
    )
    every = types_pb2.SiteSet(points=_POINTS, all=types_pb2.AllLayers())
    selection = resolve_sites(every, manager.sites, "")
    reading = Reading(every, selection.sites, LAST_TOKEN, request.lora_name, request.steering)
    rows = await rows_of_prompt(request.prompt, reading, manager)
    by_site = dict(zip(rows.sites, rows.values[:, 0].astype(np.float64), strict=True))
    last = by_site[Site(Point.RESID_POST, manager.sites.num_layers - 1)]
    read = await manager.backend.lens(last[None].astype(np.float32), 0, tokens)
    directions = await manager.backend.directions(tokens)
    signs = np.array([1.0, -1.0])[: len(tokens)]
    scale = float(read.scales[0])
    direction = signs @ directions.rows.astype(np.float64)
    sites = [Site(Point.RESID_PRE, 0)] + [
        Site(point, layer)
        for layer in range(manager.sites.num_layers)
        for point in (Point.ATTN_OUT, Point.MLP_OUT)
    ]
    contributions = scale * np.array([by_site[site] @ direction for site in sites])
    bias = float(signs @ directions.offsets)
    normalizer = float(read.log_normalizers[0]) if len(tokens) == 1 else 0.0
    logit = float(signs @ read.logprobs[0].astype(np.float64)) + normalizer
    return lens_service_pb2.AttributeResponse(
        sites=map(to_wire, sites),
        contributions=raw_tensor(contributions),
        bias=bias,
        logit=logit,
        remainder=logit - bias - float(contributions.sum()),
        scale=scale,
        prompt_token_ids=types_pb2.TokenIds(ids=rows.prompt_token_ids),
    )
