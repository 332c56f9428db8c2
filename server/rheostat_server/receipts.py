"""The receipt: what the engine says that it did, under the names that the request used."""

from collections.abc import Sequence

from rheostat._proto.v1 import receipt_pb2
from rheostat_engine import Spans
from rheostat_server.admission import Admitted
from rheostat_server.capture_stream import wire_runs
from rheostat_server.sample import Sample
from rheostat_server.selection import clipped
from rheostat_server.sites import to_wire
from rheostat_server.steering import ResolvedAdd, float32


def write_receipt(admitted: Admitted, samples: Sequence[Sample]) -> receipt_pb2.Receipt:
    """The receipt of a request whose samples are done."""
    ended = [sample.released for sample in samples if sample.released is not None]
    return receipt_pb2.Receipt(
        request_id=admitted.request_id,
        prompt_tokens=admitted.prompt_len,
        generated_tokens=sum(len(sample.tokens) for sample in samples),
        interventions=_interventions(admitted, samples),
        captures=_captures(admitted, samples),
        cached_prompt_tokens=sum(sample.cached_tokens for sample in samples),
        recomputed_tokens=sum(released.recomputed for released in ended),
        preemptions=sum(released.preemptions for released in ended),
    )


def _interventions(
    admitted: Admitted, samples: Sequence[Sample]
) -> list[receipt_pb2.AppliedIntervention]:
    return [_applied(index, add, samples) for index, add in enumerate(admitted.additions)]


def _applied(
    index: int, add: ResolvedAdd, samples: Sequence[Sample]
) -> receipt_pb2.AppliedIntervention:
    """One Add; it has no rows where it would not have changed a bit."""
    acts = add.addition() is not None
    message = receipt_pb2.AppliedIntervention(
        intervention=receipt_pb2.InterventionRef(
            origin=receipt_pb2.ORIGIN_REQUEST, index=index, op=receipt_pb2.OP_ADD
        ),
        digests=[add.vector.digest],
    )
    touched = 0
    for sample in samples:
        if not acts or sample.released is None:
            continue
        rows = _rows(add.spans, sample, *sample.released.computed)
        touched += sum(run.count for run in rows.positions)
        message.rows.append(rows)
    for site, row, dose in zip(add.sites, add.rows, add.doses, strict=True):
        count = touched if add.vector.peaks[row] > 0 else 0
        applied = message.sites.add(site=to_wire(site), rows=count)
        if count:
            applied.dose.norm = float32(dose)
    return message


def _rows(spans: Spans, sample: Sample, start: int, end: int) -> receipt_pb2.AppliedRows:
    end = min(end, sample.row_end)
    return receipt_pb2.AppliedRows(
        sample=sample.index,
        positions=wire_runs(clipped(spans, start, end)),
        cached_positions=wire_runs(clipped(spans, 0, min(start, end))),
    )


def _captures(admitted: Admitted, samples: Sequence[Sample]) -> list[receipt_pb2.CaptureReceipt]:
    receipts = []
    for spec, capture in enumerate(admitted.captures):
        rows = sum(
            end - start for sample in samples for start, end in sample.captures.delivered(spec)
        )
        sites = [receipt_pb2.CapturedSite(site=to_wire(site), rows=rows) for site in capture.sites]
        receipts.append(receipt_pb2.CaptureReceipt(spec=spec, sites=sites))
    return receipts
