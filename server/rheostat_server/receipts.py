"""The receipt: what the engine says that it did, under the names that the request used."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rheostat._proto.v1 import receipt_pb2
from rheostat_engine import OPEN_END, Act, Dose, Released, Spans
from rheostat_server.admission import Admitted
from rheostat_server.capture_stream import wire_runs
from rheostat_server.sample import Sample
from rheostat_server.selection import united
from rheostat_server.sites import to_wire
from rheostat_server.steering import Intervention, float32


def receipt_work(admitted: Admitted, samples: Sequence[Sample]) -> int:
    """Bytes of tokens that `write_receipt` may go over."""
    tokens = sum(len(sample.tokens) for sample in samples)
    return 4 * tokens * (len(admitted.interventions) + len(admitted.captures))


def write_receipt(admitted: Admitted, samples: Sequence[Sample]) -> receipt_pb2.Receipt:
    """The receipt of a request whose samples are done."""
    ended = [sample.released for sample in samples if sample.released is not None]
    return receipt_pb2.Receipt(
        request_id=admitted.request_id,
        prompt_tokens=admitted.prompt_len,
        generated_tokens=sum(len(sample.tokens) for sample in samples),
        interventions=[_applied(record) for record in _records(admitted, samples)],
        captures=_captures(admitted, samples),
        cached_prompt_tokens=sum(sample.cached_tokens for sample in samples),
        recomputed_tokens=sum(released.recomputed for released in ended),
        preemptions=sum(released.preemptions for released in ended),
        global_version=admitted.server_wide.version,
        updates=len({one.update_id for sample in samples for one in sample.amendments}),
    )


class _Part(NamedTuple):
    """An intervention in one sample, at the positions between two changes of its steering."""

    sample: Sample
    released: Released
    intervention: Intervention
    act: Act
    doses: Sequence[Dose]
    start: int
    end: int

    def held(self, start: int, end: int) -> Spans:
        """The selected positions of [start, end)."""
        return self.sample.held(
            self.intervention.selection, max(start, self.start), min(end, self.end)
        )


@dataclass
class _Record:
    """An intervention in all samples."""

    intervention: Intervention
    ref: receipt_pb2.InterventionRef
    parts: list[_Part] = field(default_factory=list)


def _records(admitted: Admitted, samples: Sequence[Sample]) -> list[_Record]:
    """Every intervention, by the order in which they came into force."""
    found = {(one.origin, one.index, 0): _Record(one, one.ref) for one in admitted.interventions}
    for sample in samples:
        if sample.released is None:
            continue
        doses: dict[int, list[Dose]] = {}
        for dose in sample.released.doses:
            doses.setdefault(dose.act, []).append(dose)
        index = 0
        for interventions, update_id, start, end in _periods(admitted, sample):
            for one in interventions:
                ref = one.ref
                if one.origin == receipt_pb2.ORIGIN_UPDATE:
                    ref.update_id = update_id
                key = (one.origin, one.index, ref.update_id)
                record = found.setdefault(key, _Record(one, ref))
                if one.act is not None:
                    mine = doses.get(index, [])
                    record.parts.append(
                        _Part(sample, sample.released, one, one.act, mine, start, end)
                    )
                    index += 1
    return list(found.values())


class _Period(NamedTuple):
    """What acted on some positions of a sample."""

    interventions: Sequence[Intervention]
    update_id: int
    start: int
    end: int


def _periods(admitted: Admitted, sample: Sample) -> Iterator[_Period]:
    """What acted, in the order of the acts in the sample's plan as it ended; see `amend`."""
    ends = [amendment.first for amendment in sample.amendments]
    yield _Period(admitted.interventions, 0, 0, min(ends, default=OPEN_END))
    for index, amendment in enumerate(sample.amendments):
        end = min(ends[index + 1 :], default=OPEN_END)
        yield _Period(amendment.interventions, amendment.update_id, amendment.first, end)


def _applied(record: _Record) -> receipt_pb2.AppliedIntervention:
    """One intervention; it has no rows where it would not have changed a bit."""
    op = record.intervention.op
    message = receipt_pb2.AppliedIntervention(
        intervention=record.ref,
        digests=[vector.digest for vector in op.vectors],
        rows=_rows(record.parts),
    )
    for site in op.sites:
        applied = message.sites.add(site=to_wire(site))
        _measure(applied, site.index, record.parts)
    return message


def _measure(applied: receipt_pb2.AppliedSite, site: int, parts: Sequence[_Part]) -> None:
    """How often and how strongly the parts acted at a site.

    A step that ran on after the sample had ended is measured with the others; its rows are none of
    the request's.
    """
    acting = [part for part in parts if any(at == site for at, _ in part.act.rows)]
    if not all(part.released.measured for part in acting):
        applied.rows = sum(_count(_computed(part)) for part in acting)
        return
    doses = [dose for part in acting for dose in part.doses if dose.site == site]
    rows = sum(dose.rows for dose in doses)
    applied.rows = max(0, rows - sum(_surplus(part) for part in acting))
    if applied.rows:
        applied.dose.norm = float32(sum(dose.change for dose in doses) / rows)
        applied.dose.relative_mean = float32(sum(dose.relative for dose in doses) / rows)
        applied.dose.relative_max = float32(max(dose.relative_max for dose in doses))


def _rows(parts: Sequence[_Part]) -> list[receipt_pb2.AppliedRows]:
    by_sample: dict[int, list[_Part]] = {}
    for part in parts:
        by_sample.setdefault(part.sample.index, []).append(part)
    return [
        receipt_pb2.AppliedRows(
            sample=sample,
            positions=wire_runs(united(span for part in mine for span in _computed(part))),
            cached_positions=wire_runs(united(span for part in mine for span in _cached(part))),
        )
        for sample, mine in sorted(by_sample.items())
    ]


def _computed(part: _Part) -> Spans:
    """The positions that the sample computed under it."""
    start, end = part.released.computed
    return part.held(start, min(end, part.sample.row_end))


def _cached(part: _Part) -> Spans:
    """The selected positions that came from the prefix cache."""
    start, end = part.released.computed
    return part.held(0, min(start, end, part.sample.row_end))


def _surplus(part: _Part) -> int:
    """Rows that were computed beyond the sample's last one."""
    return _count(part.held(part.sample.row_end, part.released.computed[1]))


def _count(spans: Spans) -> int:
    return sum(end - start for start, end in spans)


def _captures(admitted: Admitted, samples: Sequence[Sample]) -> list[receipt_pb2.CaptureReceipt]:
    receipts = []
    for spec, capture in enumerate(admitted.captures):
        rows = sum(_count(sample.captures.delivered(spec)) for sample in samples)
        sites = [receipt_pb2.CapturedSite(site=to_wire(site), rows=rows) for site in capture.sites]
        receipts.append(receipt_pb2.CaptureReceipt(spec=spec, sites=sites))
    return receipts
