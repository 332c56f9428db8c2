"""Explain: describes what a request would do, without running it.

The answer is made of the objects that Generate uses, so that the two cannot differ.
"""

import hashlib
import struct
from contextlib import nullcontext
from dataclasses import replace

from rheostat_engine import OPEN_END, BlockKeys, Plan, SteeredBlocks
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.delivery.row_messages import add_runs
from rheostat_server.limits import OFFLOAD_BYTES
from rheostat_server.requests.manager import RequestManager
from rheostat_server.selectors.selection import Selection
from rheostat_server.selectors.sites import to_wire
from rheostat_server.selectors.spans import clipped
from rheostat_server.steering.interventions import Intervention
from rheostat_server.tasks.offload import offload
from rheostat_server.tensors import float32
from rheostat_wire.v1 import generation_service_pb2, types_pb2

_pb = generation_service_pb2


async def explain(
    admitted: AdmittedRequest, manager: RequestManager
) -> generation_service_pb2.ExplainResponse:
    """Explains a request. Few large requests are explained at a time; see `LARGE_REQUESTS`.

    Raises:
        ResourceExhausted: the request could never run.
    """
    plan = replace(admitted.plan, epoch=manager.epoch)
    async with manager.admission.large if admitted.work > OFFLOAD_BYTES else nullcontext():
        answer = await offload(admitted.work, _explain, admitted, plan)
    answer.new_bank_row_count = manager.new_bank_row_count(admitted)
    return answer


def _explain(admitted: AdmittedRequest, plan: Plan) -> generation_service_pb2.ExplainResponse:
    answer = _pb.ExplainResponse(
        prompt_token_count=admitted.prompt_len,
        prompt_token_ids=types_pb2.TokenIds(ids=admitted.prompt.token_ids),
        cache_keys=cache_keys(plan),
        global_version=admitted.server_wide.version,
    )
    end = admitted.context.row_end
    for intervention in admitted.interventions:
        _add_intervention(answer, intervention, end)
    for index, capture in enumerate(admitted.captures):
        message = answer.captures.add(
            capture_index=index,
            sites=[to_wire(site) for site in capture.sites],
            payload_bytes=capture.payload_bytes(row_end=end),
        )
        _select(message.selection, capture.selection, end)
    return answer


def cache_keys(plan: Plan) -> list[generation_service_pb2.CacheKey]:
    """The parts of prefix cache keys that a plan adds, one for each run of positions it steers.

    A digest covers the run's positions, the acts that steer them, and the digest before it. vLLM
    chains the hashes of blocks in the same way. A digest also holds for the positions after its
    run, if they are not steered. From `Plan.private_from` and from the first gated position on, no
    block is shared, unless the gates stay shut (`BlockKeys.decide`).
    """
    table = plan.packed_acts.table
    shared_end = OPEN_END if plan.private_from is None else plan.private_from
    if table is not None:
        shared_end = min(shared_end, table.first_gated)
    parts: list[generation_service_pb2.CacheKey] = []
    digest = b""
    if table is not None:
        keys = BlockKeys(replace(plan, private_from=None), SteeredBlocks(table))
        holding = [
            sorted({table.clauses[i].act for i in members}) for members in table.intervals.members
        ]
        starts, sets = table.intervals.starts.tolist(), table.intervals.sets.tolist()
        for start, end, number in zip(starts, [*starts[1:], OPEN_END], sets, strict=True):
            key = keys.key(start, min(end, shared_end)) if start < shared_end else None
            if key is None:
                continue
            acts = holding[number]
            place = struct.pack(f"<{2 + len(acts)}q", start, min(end, shared_end), *acts)
            digest = hashlib.sha256(digest + place + bytes.fromhex(key)).digest()
            parts.append(_pb.CacheKey(position=start, digest=digest))
    if shared_end != OPEN_END:
        parts.append(_pb.CacheKey(position=shared_end, private=True))
    return parts


def _add_intervention(
    answer: generation_service_pb2.ExplainResponse, intervention: Intervention, end: int
) -> None:
    message = answer.interventions.add(
        intervention=intervention.ref,
        sites=[to_wire(site) for site in intervention.op.sites],
        digests=[vector.digest for vector in intervention.op.vectors],
        doses=[
            _pb.SiteDose(site=to_wire(site), norm=float32(dose))
            for site, dose in zip(intervention.op.sites, intervention.op.doses, strict=False)
        ],
    )
    _select(message.selection, intervention.selection, end)
    if intervention.op.replacement is not None:
        intervention.op.replacement.write_source(message.source)


def _select(
    message: generation_service_pb2.ResolvedSelection, selection: Selection, end: int
) -> None:
    """Adds the selected tokens before position `end` to a message."""
    message.SetInParent()
    add_runs(message.positions.add, clipped(selection.known, 0, end))
    for condition in selection.conditions:
        if clipped(condition.spans, 0, end):
            ids = message.token_ids if condition.among else message.excluded_token_ids
            ids.extend(condition.tokens)
