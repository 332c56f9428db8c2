"""Writes receipts: what the engine reports to have done, under the names that the request used."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from rheostat_engine import OPEN_END, Dose, Released, Spans
from rheostat_engine.cached_property import cached_property
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.delivery.row_messages import add_runs
from rheostat_server.generation.applied_sites import Moved, applied_site, applied_sites
from rheostat_server.generation.sample import Sample
from rheostat_server.requests.request_holds import RequestHolds
from rheostat_server.requests.signals import RequestSignals
from rheostat_server.requests.steering_change import Control
from rheostat_server.selectors.spans import clipped, length, united
from rheostat_server.steering.interventions import Intervention
from rheostat_server.tensors import float32
from rheostat_wire.v1 import receipt_pb2

_MANY = 8
"""The sites of an intervention at so many sites or more are written together."""

_ACT = attrgetter("act")


def estimate_receipt(admitted: AdmittedRequest, samples: Sequence[Sample]) -> int:
    """Bytes that `offload` counts for `write_receipt`."""
    changes = max((sample.sequence.steering_changes for sample in samples), key=len)
    parts = len(admitted.interventions) + sum(len(change.interventions) for change in changes)
    tokens = sum(len(sample.tokens) for sample in samples)
    work = admitted.work + sum(change.work for change in changes)
    # A receipt has two messages for each site.
    return 2 * len(samples) * work + 4 * tokens * (parts + len(admitted.captures))


def write_receipt(
    admitted: AdmittedRequest,
    samples: Sequence[Sample],
    handed_over: Mapping[int, tuple[int, int]],
    runs: Mapping[int, str],
) -> receipt_pb2.Receipt:
    """The receipt of a request whose samples are done.

    Args:
        admitted: the request.
        samples: its own samples, without baselines.
        handed_over: the numbers of delivered and of lost positions, by index of the capture.
        runs: ids of the runs that were stored, by index of the capture.
    """
    ended = [sample.released for sample in samples if sample.released is not None]
    receipt = receipt_pb2.Receipt(
        request_id=admitted.request_id,
        prompt_token_count=admitted.prompt_len,
        generated_token_count=sum(len(sample.tokens) for sample in samples),
        cached_prompt_token_count=sum(sample.cached_tokens for sample in samples),
        recomputed_token_count=sum(released.recomputed for released in ended),
        preemption_count=sum(released.preemptions for released in ended),
        global_version=admitted.server_wide.version,
        update_count=len(
            {
                steering_change.update_id
                for sample in samples
                for steering_change in sample.sequence.steering_changes
            }
            - {0}
        ),
        # A gain goes to all samples that run, so the sample that ended last had all of them.
        gain_count=max((sample.sequence.gain_count for sample in samples), default=0),
    )
    _add_captures(receipt, admitted, handed_over, runs)
    for intervention, parts in _parts(admitted, samples):
        _apply(receipt.interventions.add(), intervention, parts)
    return receipt


def add_rules(
    receipt: receipt_pb2.Receipt,
    admitted: AdmittedRequest,
    signals: RequestSignals | None,
    samples: Sequence[Sample],
) -> None:
    """Writes where the rules of a request fired."""
    version, policy = admitted.server_wide.version, admitted.server_wide.policy
    keys = [(0, name) for name in admitted.rule_names]
    for key in (*keys, *((version, rule.name) for rule in policy.rules)):
        message = receipt.rules.add(rule_name=key[1], server_wide=key[0] > 0)
        for sample in samples:
            fired = None if signals is None else signals.firings(sample.index).get(key)
            if fired is None:
                continue
            positions = clipped(fired.positions, 0, sample.row_end)
            beyond = length(fired.positions) - length(positions)
            if positions:
                in_sample = message.samples.add(
                    sample=sample.index,
                    position_count=fired.count - beyond,
                    stopped=fired.stopped,
                )
                add_runs(in_sample.positions.add, positions)


def add_watches(
    receipt: receipt_pb2.Receipt,
    control: Control | None,
    holds: RequestHolds,
    samples: Sequence[Sample],
) -> None:
    """Writes what watches did to a request: changes of its steering, holds, and ends of samples."""
    if control is not None:
        receipt.watches.extend(control.by_watches)
    holds.write(receipt)
    written = {message.watch_id: message for message in receipt.watches}
    for sample in samples:
        if sample.stopped_by is None or not (watch := sample.stopped_by.watch):
            continue
        if watch not in written:
            written[watch] = receipt.watches.add(watch_id=watch)
        written[watch].stopped_samples.append(sample.index)


def add_controller(
    receipt: receipt_pb2.Receipt, admitted: AdmittedRequest, samples: Sequence[Sample]
) -> None:
    """Writes which controller a request had, and where it was disabled."""
    if admitted.controlled is None:
        return
    receipt.controller.controller_name = admitted.controlled.name
    for sample in samples:
        disabled = sample.sequence.controller_disabled
        if disabled is not None:
            receipt.controller.disabled_reason = disabled.reason
            receipt.controller.disabled_from.add(sample=sample.index, position=disabled.first)


# Not frozen, because creating a frozen object takes three times as long.
@dataclass
class _Part:
    """An intervention in one sample, at the positions between two changes of its steering."""

    sample: Sample
    released: Released
    intervention: Intervention
    doses: Sequence[Dose]
    """The measured doses of its acts, ascending by act, then site."""
    start: int
    end: int

    @cached_property
    def by_site(self) -> Mapping[int, Sequence[Dose]]:
        """Its doses, by index of the site."""
        by_site: dict[int, list[Dose]] = {}
        for dose in self.doses:
            by_site.setdefault(dose.site, []).append(dose)
        return by_site

    @cached_property
    def computed_rows(self) -> int:
        """The number of positions that the sample computed under it."""
        return length(self.computed)

    @cached_property
    def computed(self) -> Spans:
        """The positions that the sample computed under it."""
        start, end = self.released.computed
        return self._selected(start, min(end, self.sample.row_end))

    @cached_property
    def cached(self) -> Spans:
        """The selected positions that came from the prefix cache."""
        start, end = self.released.computed
        return self._selected(0, min(start, end, self.sample.row_end))

    def surplus(self, rows: int) -> int:
        """Of `rows` changed rows at a site, the number beyond the sample's last position.

        A sample that ends with a stop text, or is aborted, may have computed tokens that the server
        never received. If the selection depends on such a token, the row is beyond the end as well.
        Without recomputation there are no more rows than selected positions, which shows how many.
        """
        unselected = 0
        if self.released.recomputed == 0:
            unselected = min(rows - self._beyond - self.computed_rows, self._undecided)
        return self._beyond + max(0, unselected)

    @cached_property
    def _beyond(self) -> int:
        """The number of selected positions that were computed beyond the sample's end."""
        after = self._selected(self.sample.row_end, self.released.computed[1])
        index = self.intervention.index
        source = self.intervention.source
        if self.intervention.own and self.sample.last_gain(source, index) is not None:
            at = partial(self.sample.gain_at, source, index)
            return sum(at(position) != 0 for start, end in after for position in range(start, end))
        return length(after)

    @cached_property
    def _undecided(self) -> int:
        """Number of computed positions whose token decides, but never reached the server."""
        start, end = (
            max(self.sample.token_end, self.start),
            min(self.released.computed[1], self.end),
        )
        selection = self.intervention.selection
        return length(clipped(selection.reach, start, end)) - length(
            clipped(selection.spans, start, end)
        )

    def _selected(self, start: int, end: int) -> Spans:
        return self.sample.selected(
            self.intervention.selection, max(start, self.start), min(end, self.end)
        )


def _parts(
    admitted: AdmittedRequest, samples: Sequence[Sample]
) -> Iterable[tuple[Intervention, list[_Part]]]:
    """Every intervention in all samples, in the order in which they became active."""
    found: dict[tuple[object, ...], tuple[Intervention, list[_Part]]] = {
        _key(intervention): (intervention, []) for intervention in admitted.interventions
    }
    for sample in samples:
        if sample.released is None:
            continue
        doses = sample.released.doses
        index = 0
        for acting, start, end in _periods(admitted, sample):
            for intervention in acting:
                _, parts = found.setdefault(_key(intervention), (intervention, []))
                if intervention.acts:
                    after = index + len(intervention.acts)
                    first = bisect_left(doses, index, key=_ACT)
                    mine = doses[first : bisect_left(doses, after, key=_ACT)]
                    parts.append(_Part(sample, sample.released, intervention, mine, start, end))
                    index = after
            index += admitted.read_count
    return found.values()


def _key(intervention: Intervention) -> tuple[object, ...]:
    """Equal for an intervention in several lists."""
    return (
        intervention.origin,
        intervention.rule,
        intervention.index,
        intervention.update_id,
        intervention.watch_id,
    )


class _Period(NamedTuple):
    """The interventions that acted on a range of positions of a sample."""

    acting: Sequence[Intervention]
    start: int
    end: int


def _periods(admitted: AdmittedRequest, sample: Sample) -> Iterator[_Period]:
    """The periods of a sample, in the order of the acts in its last plan."""
    ends = [change.first for change in sample.sequence.steering_changes]
    yield _Period(admitted.interventions, 0, min(ends, default=OPEN_END))
    for index, change in enumerate(sample.sequence.steering_changes):
        end = min(ends[index + 1 :], default=OPEN_END)
        yield _Period(change.interventions, change.first, end)


def _apply(
    message: receipt_pb2.AppliedIntervention, intervention: Intervention, parts: Sequence[_Part]
) -> None:
    """Writes what an intervention did. It has no rows if it would not have changed a bit."""
    message.MergeFromString(intervention.receipt)
    _add_rows(message, parts)
    for part in parts:
        if intervention.own:  # others have no gains
            gain = part.sample.last_gain(intervention.source, intervention.index)
            if gain is not None:
                message.last_gain = gain
    sites = _sites_together(intervention, parts)
    if sites is None:
        each = zip(intervention.site_fields, intervention.site_indices, strict=True)
        sites = b"".join([applied_site(field, *_measured(site, parts)) for field, site in each])
    message.MergeFromString(sites)


def _sites_together(intervention: Intervention, parts: Sequence[_Part]) -> bytes | None:
    """All sites of an intervention in wire format, if they are many and have equal numbers of rows.

    Nearly every intervention at many sites changed the same number of rows at each. None: this one
    did not, and each of its sites is written alone.
    """
    indices = intervention.site_indices
    if len(parts) != 1 or len(indices) < _MANY or intervention.gate is not None:
        return None
    (part,) = parts
    doses = part.doses
    if len(doses) != len(indices) or not part.released.measured:
        return None
    _, sites, rows, *moved = zip(*doses, strict=True)
    count = doses[0].rows
    if sites != indices or rows.count(count) < len(rows):
        return None
    left = count - part.surplus(count)
    if left <= 0:
        return None
    change, relative, relative_max = moved
    return applied_sites(intervention, left, count, (change, relative, relative_max))


def _measured(site: int, parts: Sequence[_Part]) -> tuple[int, Moved | None]:
    """How often an intervention acted at a site, and how strongly; None if nothing was measured.

    The scheduler may run some steps past the sample's end. The measured doses include their rows,
    so they are subtracted here, unless a gate decides whether they are counted.
    """
    acting = [part for part in parts if site in part.intervention.acting_sites]
    for part in acting:
        if not part.released.measured:
            return sum(other.computed_rows for other in acting), None
    rows = surplus = 0
    change = relative = relative_max = 0.0
    for part in acting:
        mine = 0
        for _, _, count, changed, share, largest in part.by_site.get(site, ()):
            mine += count
            change += changed
            relative += share
            relative_max = max(relative_max, float32(largest))  # `max` would skip NaN
        rows += mine
        if part.intervention.gate is None:
            surplus += part.surplus(mine)
    if rows <= surplus:
        return 0, None
    return rows - surplus, Moved(rows, change, relative, relative_max)


def _add_rows(message: receipt_pb2.AppliedIntervention, parts: Sequence[_Part]) -> None:
    if len(parts) == 1:  # mostly: one sample, and no update
        (part,) = parts
        rows = message.rows.add(sample=part.sample.index)
        add_runs(rows.positions.add, part.computed)
        add_runs(rows.cached_positions.add, part.cached)
        return
    by_sample: dict[int, list[_Part]] = {}
    for part in parts:
        by_sample.setdefault(part.sample.index, []).append(part)
    for sample, mine in sorted(by_sample.items()):
        rows = message.rows.add(sample=sample)
        add_runs(rows.positions.add, united(chain.from_iterable(part.computed for part in mine)))
        add_runs(rows.cached_positions.add, united(chain.from_iterable(p.cached for p in mine)))


def _add_captures(
    receipt: receipt_pb2.Receipt,
    admitted: AdmittedRequest,
    handed_over: Mapping[int, tuple[int, int]],
    runs: Mapping[int, str],
) -> None:
    for spec, capture in enumerate(admitted.captures):
        rows, lost = handed_over.get(spec, (0, 0))
        message = receipt.captures.add(capture_index=spec, run_id=runs.get(spec, ""))
        message.MergeFromString(capture.site_forms.receipt(rows, lost))
