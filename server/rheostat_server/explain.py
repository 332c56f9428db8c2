"""What a request would do, from the very objects that Generate runs with."""

import hashlib
import struct
from dataclasses import replace

from rheostat._proto.v1 import generation_service_pb2, types_pb2
from rheostat_engine import OPEN_END, BlockKeys, Plan, compose
from rheostat_server.admission import Admitted
from rheostat_server.capture_stream import wire_runs
from rheostat_server.engine import EngineHost
from rheostat_server.offload import offload
from rheostat_server.planning import plan_work
from rheostat_server.selection import Selection, clipped
from rheostat_server.sites import to_wire
from rheostat_server.steering import float32

_pb = generation_service_pb2


async def explain(admitted: Admitted, host: EngineHost) -> generation_service_pb2.ExplainResponse:
    """Explains a request.

    Raises:
        ResourceExhausted: it could never run.
    """
    plan = replace(admitted.plan, epoch=host.epoch)
    keys = await offload(plan_work(plan), cache_keys, plan)
    return _pb.ExplainResponse(
        prompt_tokens=admitted.prompt_len,
        prompt_token_ids=types_pb2.TokenIds(ids=admitted.prompt.token_ids),
        interventions=_interventions(admitted),
        captures=_captures(admitted, host.sites.width),
        cache_keys=keys,
        new_bank_rows=host.new_bank_rows(admitted),
        global_version=admitted.server_wide.version,
    )


def cache_keys(plan: Plan) -> list[generation_service_pb2.CacheKey]:
    """What enters the prefix cache's keys: one for every piece of positions that a plan touches.

    A piece's digest is of where it lies, of what touches it, and of the digest before it, as vLLM
    chains its blocks; where nothing touches what follows, it goes on to hold. From
    `Plan.private_from` on nothing is shared.
    """
    shared_end = OPEN_END if plan.private_from is None else plan.private_from
    keys = BlockKeys(replace(plan, private_from=None))
    pieces = [piece for piece in compose(plan.acts) if piece.start < shared_end]
    found: list[generation_service_pb2.CacheKey] = []
    digest = b""
    for piece, end in zip(pieces, [*(p.start for p in pieces[1:]), shared_end], strict=False):
        key = keys.key(piece.start, end)
        if key is not None:
            members = sorted({member for variant in piece.variants for member in variant.members})
            place = struct.pack(f"<{2 + len(members)}q", piece.start, end, *members)
            digest = hashlib.sha256(digest + place + bytes.fromhex(key)).digest()
            found.append(_pb.CacheKey(position=piece.start, digest=digest))
    if plan.private_from is not None:
        found.append(_pb.CacheKey(position=plan.private_from, private=True))
    return found


def _selection(
    selection: Selection, admitted: Admitted
) -> generation_service_pb2.ResolvedSelection:
    end = admitted.context.row_end
    message = _pb.ResolvedSelection(positions=wire_runs(clipped(selection.known, 0, end)))
    for one in selection.conditions:
        if clipped(one.spans, 0, end):
            ids = message.token_ids if one.among else message.excluded_token_ids
            ids.extend(one.tokens)
    return message


def _interventions(admitted: Admitted) -> list[generation_service_pb2.ResolvedIntervention]:
    return [
        _pb.ResolvedIntervention(
            intervention=one.ref,
            sites=[to_wire(site) for site in one.op.sites],
            selection=_selection(one.selection, admitted),
            digests=[vector.digest for vector in one.op.vectors],
            doses=[
                _pb.SiteDose(site=to_wire(site), norm=float32(dose))
                for site, dose in zip(one.op.sites, one.op.doses, strict=False)
            ],
        )
        for one in admitted.interventions
    ]


def _captures(admitted: Admitted, width: int) -> list[generation_service_pb2.ResolvedCapture]:
    return [
        _pb.ResolvedCapture(
            spec=spec,
            sites=[to_wire(site) for site in capture.sites],
            selection=_selection(capture.selection, admitted),
            bytes=capture.payload_bytes(row_end=admitted.context.row_end, width=width),
        )
        for spec, capture in enumerate(admitted.captures)
    ]
