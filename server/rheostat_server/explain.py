"""What a request would do, from the very objects that Generate runs with."""

from rheostat._proto.v1 import generation_service_pb2, receipt_pb2, types_pb2
from rheostat_engine import Spans
from rheostat_server.admission import Admitted
from rheostat_server.capture_stream import wire_runs
from rheostat_server.engine import EngineHost
from rheostat_server.selection import clipped
from rheostat_server.sites import to_wire
from rheostat_server.steering import float32

_pb = generation_service_pb2


def explain(admitted: Admitted, host: EngineHost) -> generation_service_pb2.ExplainResponse:
    """Explains a request.

    Raises:
        ResourceExhausted: it could never run.
    """
    plan = admitted.plan
    response = _pb.ExplainResponse(
        prompt_tokens=admitted.prompt_len,
        prompt_token_ids=types_pb2.TokenIds(ids=admitted.prompt.token_ids),
        interventions=_interventions(admitted),
        captures=_captures(admitted, host.sites.width),
        new_bank_rows=host.new_bank_rows(plan, admitted.prompt_len),
    )
    salt = plan.cache_salt()
    if salt is not None:
        response.cache_keys.add(position=0, digest=bytes.fromhex(salt))
    return response


def _selection(spans: Spans, admitted: Admitted) -> generation_service_pb2.ResolvedSelection:
    known = clipped(spans, 0, admitted.context.row_end)
    return _pb.ResolvedSelection(positions=wire_runs(known))


def _interventions(admitted: Admitted) -> list[generation_service_pb2.ResolvedIntervention]:
    return [
        _pb.ResolvedIntervention(
            intervention=receipt_pb2.InterventionRef(
                origin=receipt_pb2.ORIGIN_REQUEST, index=index, op=receipt_pb2.OP_ADD
            ),
            sites=[to_wire(site) for site in add.sites],
            selection=_selection(add.spans, admitted),
            digests=[add.vector.digest],
            doses=[
                _pb.SiteDose(site=to_wire(site), norm=float32(dose))
                for site, dose in zip(add.sites, add.doses, strict=True)
            ],
        )
        for index, add in enumerate(admitted.additions)
    ]


def _captures(admitted: Admitted, width: int) -> list[generation_service_pb2.ResolvedCapture]:
    return [
        _pb.ResolvedCapture(
            spec=spec,
            sites=[to_wire(site) for site in capture.sites],
            selection=_selection(capture.spans, admitted),
            bytes=capture.payload_bytes(row_end=admitted.context.row_end, width=width),
        )
        for spec, capture in enumerate(admitted.captures)
    ]
