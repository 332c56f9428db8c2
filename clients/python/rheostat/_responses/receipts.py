"""The receipt: the interventions and captures that the server carried out for a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from rheostat._fields import counted, read_word, same_fields
from rheostat._notebook import table
from rheostat._points import Site, knows_point, read_site
from rheostat._positions import read_ranges, show_points, show_ranges, unknown_sites_text
from rheostat_wire.v1 import generation_service_pb2, receipt_pb2


@dataclass(frozen=True)
class Dose:
    """The change of rows; norms are L2, in float32."""

    norm: float
    """Mean norm of the change, in the units of the stream."""
    relative_mean: float | None
    """Mean of norm of the change / norm of the stream; None if it was not measured."""
    relative_max: float | None
    """Maximum of norm of the change / norm of the stream."""


@dataclass(frozen=True)
class AppliedSite:
    """An intervention at one site."""

    site: Site
    row_count: int
    """Rows on which it acted; a token that was computed twice counts twice."""
    dose: Dose | None
    """Size of the change; None if no row was changed, or if it was not measured."""


@dataclass(frozen=True)
class AppliedRows:
    """The tokens of one sample on which an intervention acted."""

    sample: int
    """Sample, from 0."""
    positions: tuple[range, ...]
    """Positions that this request computed with the intervention."""
    cached_positions: tuple[range, ...]
    """Selected positions that the prefix cache provided, computed with an equal intervention."""


@dataclass(frozen=True)
class ReplaceSource:
    """The rows that a replacement used."""

    run_id: str
    """The run that they come from; empty for other sources."""
    rows: tuple[tuple[int, int | None], ...]
    """(position, the run's position) for each replaced position; the latter is None if the source
    is no run. Empty: all positions get the same row."""
    sha256: str
    """SHA-256 of the rows as float32, by site, then position; hex."""


@dataclass(frozen=True)
class AppliedIntervention:
    """An intervention, as it was carried out."""

    origin: str
    """Its source: "global", "request", "rule", "update", "watch"."""
    index: int
    """Index in the list of that source."""
    op: str
    """"add", "norm_add", "ablate", "clamp", "scale" or "replace"."""
    digests: tuple[str, ...]
    """Digests of its vectors, hex."""
    sites: tuple[AppliedSite, ...]
    """By layer, then point."""
    rows: tuple[AppliedRows, ...]
    rule_name: str = ""
    """The rule, if ``origin`` is "rule", or "global" or "watch" and a rule of the server's policy,
    or of the watch, steers."""
    update_id: int | None = None
    """The update of the session or the watch, if ``origin`` is "update" or "watch" and no rule
    steers."""
    watch_id: str = ""
    """The watch that set it; "" if none did."""
    source: ReplaceSource | None = None
    """The rows that were put in, if ``op`` is "replace"."""
    unknown_sites: int = 0
    """Number of further sites, at points that only newer clients know."""
    last_gain: float | None = None
    """The last gain: the product of what session and watches set. None if none was set."""
    gate_probes: tuple[str, ...] = ()
    """The names of the probes of its gate; empty if it has none. The row counts are of rows at
    which the gate was open, and ``rows`` are the tokens at which it could be."""


@dataclass(frozen=True)
class CapturedSite:
    """A capture at one site."""

    site: Site
    row_count: int
    """Delivered rows of all samples."""
    dropped_row_count: int
    """Selected rows that were lost."""


@dataclass(frozen=True)
class CaptureReceipt:
    """A capture, as it was carried out."""

    index: int
    """Index in the request's captures."""
    sites: tuple[CapturedSite, ...]
    """By layer, then point."""
    run_id: str = ""
    """The run that stores the rows; "" if the capture has another destination."""
    unknown_sites: int = 0
    """Number of further sites, at points that only newer clients know."""


@dataclass(frozen=True)
class RuleFirings:
    """The positions at which a rule fired in one sample."""

    sample: int
    """Sample, from 0."""
    positions: tuple[range, ...]
    """The positions, as ranges; at most the first 1024 ranges."""
    position_count: int
    """Number of all positions."""
    stopped: bool
    """Whether the rule ended the sample."""


@dataclass(frozen=True)
class RuleReceipt:
    """Where a rule of the request, or of the server's policy, fired."""

    rule_name: str
    samples: tuple[RuleFirings, ...]
    """The samples in which it fired."""
    server_wide: bool = False
    """Whether it is a rule of the server's policy, whose version is `Receipt.global_version`."""


@dataclass(frozen=True)
class WatchChange:
    """A change of the steering by a watch."""

    update_id: int
    """The id of the watch's update."""
    first_positions: Mapping[int, int]
    """The first position on which it acts, by sample."""
    factor: float | None = None
    """The gain that it set; None if it set steering."""
    interventions: tuple[int, ...] = ()
    """Indices of the interventions with this gain; empty: all of the request's own."""
    layer_size: int | None = None
    """The number of interventions of the layer that it set; None if it set none."""
    replace_size: int | None = None
    """The number of interventions that replaced the request's own; None if it replaced none."""


@dataclass(frozen=True)
class WatchReceipt:
    """What one watch did to the request."""

    watch_id: str
    changes: tuple[WatchChange, ...]
    """In order; at most the first 256 changes of all watches together are listed."""
    change_count: int
    """Number of all changes."""
    hold_count: int = 0
    """How often the request was held because the watch had no reader (``on_lost="hold"``)."""
    held_seconds: float = 0.0
    """Total time for which it was held."""
    stopped_samples: tuple[int, ...] = ()
    """The samples that it ended, by a message or by a rule; `Sample.label` says why."""


@dataclass(frozen=True)
class ControllerReceipt:
    """The controller that set a request's gains."""

    controller_name: str
    disabled_reason: str = ""
    """Why the controller was disabled before the request ended; empty if it was not."""
    disabled_from: tuple[tuple[int, int], ...] = ()
    """(sample, first position whose gains it did not set)."""


@dataclass(frozen=True, repr=False)
class Receipt:
    """A record of the interventions and captures that were carried out. ``print`` shows a text."""

    request_id: str
    prompt_token_count: int
    generated_token_count: int
    """Tokens generated, all samples together."""
    interventions: tuple[AppliedIntervention, ...] = ()
    """Every intervention. If it changed nothing, its row count is 0."""
    captures: tuple[CaptureReceipt, ...] = ()
    cached_prompt_token_count: int = 0
    """Prompt tokens that came from the prefix cache."""
    recomputed_token_count: int = 0
    """Tokens computed again after a preemption, and cached ones computed for captures or probes."""
    preemption_count: int = 0
    global_version: int = 0
    """Version of the server-wide steering that applied."""
    update_count: int = 0
    """Updates of the session's steering that were carried out; a stop does not count."""
    rules: tuple[RuleReceipt, ...] = ()
    """Every rule of the request, then those of the server's policy."""
    gain_count: int = 0
    """Gains of the session and of watches that were carried out."""
    watches: tuple[WatchReceipt, ...] = ()
    """The watches that changed its steering, in the order of their first changes, then those that
    only held it, then those that only ended samples."""
    controller: ControllerReceipt | None = None
    """The controller of its gains; None if it had none."""

    def __repr__(self) -> str:
        parts = [
            repr(self.request_id),
            f"{self.prompt_token_count} + {self.generated_token_count} tokens",
            *_counted(len(self.interventions), "intervention"),
            *_counted(len(self.captures), "capture"),
        ]
        return f"Receipt({', '.join(parts)})"

    def __str__(self) -> str:
        return "\n".join(
            [f"receipt of {self.request_id}", *(f"  {k}: {v}" for k, v in _rows(self))]
        )

    def _repr_html_(self) -> str:
        return table(("receipt", self.request_id), _rows(self))


def _counted(count: int, what: str) -> list[str]:
    return [counted(count, what)] if count else []


def _rows(receipt: Receipt) -> list[tuple[str, str]]:
    rows = [
        (
            "tokens",
            f"{receipt.prompt_token_count} of the prompt "
            f"({receipt.cached_prompt_token_count} from the cache), "
            f"{receipt.generated_token_count} generated, "
            f"{receipt.recomputed_token_count} recomputed, "
            f"{counted(receipt.preemption_count, 'preemption')}",
        )
    ]
    for applied in receipt.interventions:
        reference = Reference(**same_fields(Reference, applied), gate_probes=applied.gate_probes)
        rows.append((str(reference), _intervention_text(applied)))
    for capture in receipt.captures:
        lost = sum(site.dropped_row_count for site in capture.sites)
        count = sum(site.row_count for site in capture.sites)
        text = f"{counted(count, 'row')} of {_sites_text(capture)}"
        text += f", {lost} lost" if lost else ""
        text += f", stored in run {capture.run_id}" if capture.run_id else ""
        rows.append((f"capture {capture.index}", text))
    if receipt.global_version and any(
        intervention.origin == "global" for intervention in receipt.interventions
    ):
        rows.append(("server-wide steering", f"version {receipt.global_version}"))
    for rule in receipt.rules:
        name = f"rule {rule.rule_name}" + (" (server-wide)" if rule.server_wide else "")
        rows.append((name, _rule_text(rule)))
    if receipt.update_count:
        rows.append(("updates", f"{receipt.update_count} carried out"))
    if receipt.gain_count:
        rows.append(("gains", f"{receipt.gain_count} carried out"))
    for watch in receipt.watches:
        text = counted(watch.change_count, "change")
        if watch.hold_count:
            text += f", held {counted(watch.hold_count, 'time')} for {watch.held_seconds:.1f} s"
        if watch.stopped_samples:
            text += f", ended {', '.join(f'sample {number}' for number in watch.stopped_samples)}"
        rows.append((f"watch {watch.watch_id}", text))
    if receipt.controller is not None:
        disabled = receipt.controller.disabled_reason
        text = f"disabled: {disabled}" if disabled else "set the gains"
        rows.append((f"controller {receipt.controller.controller_name}", text))
    return rows


def _rule_text(rule: RuleReceipt) -> str:
    count = sum(firings.position_count for firings in rule.samples)
    if not count:
        return "did not fire"
    text = f"fired at {count} positions in {len(rule.samples)} samples"
    if len(rule.samples) == 1:
        places = "position" if count == 1 else "positions"
        text = f"fired at {places} {show_ranges(rule.samples[0].positions)}"
    stopped = sum(firings.stopped for firings in rule.samples)
    return text + "".join(f", stopped {some}" for some in _counted(stopped, "sample"))


def _intervention_text(applied: AppliedIntervention) -> str:
    text = counted(sum(site.row_count for site in applied.sites), "row")
    if sites_text := _sites_text(applied):
        text += f" at {sites_text}"
    doses = [site.dose for site in applied.sites if site.dose is not None]
    if doses:
        text += f", dose {_between([dose.norm for dose in doses])}"
        means = [100 * dose.relative_mean for dose in doses if dose.relative_mean is not None]
        most = [100 * dose.relative_max for dose in doses if dose.relative_max is not None]
        if means:
            text += f" ({_between(means)} % of the stream"
            text += f", at most {max(most):.3g} %)" if most else ")"
    if applied.last_gain is not None:
        text += f", last gain {applied.last_gain:.3g}"
    if applied.source is not None and applied.source.run_id:
        text += f", from run {applied.source.run_id}"
    samples = Counter((rows.positions, rows.cached_positions) for rows in applied.rows)
    if not any(positions or cached for positions, cached in samples):
        return text
    some = "of " if applied.gate_probes or applied.rule_name else ""
    for (positions, cached), count in samples.items():
        text += f", {some}positions {show_ranges(positions)}"
        text += f" and from the cache {show_ranges(cached)}" if cached else ""
        text += f" in {count} samples" if count > 1 else ""
    return text


def _between(numbers: list[float]) -> str:
    low, high = f"{min(numbers):.3g}", f"{max(numbers):.3g}"
    return low if low == high else f"{low} to {high}"


def _sites_text(applied: AppliedIntervention | CaptureReceipt) -> str:
    """As "resid_post 2-5, resid_pre 0"."""
    return ", ".join(
        [
            *show_points(site.site for site in applied.sites),
            *unknown_sites_text(applied.unknown_sites),
        ]
    )


@dataclass(frozen=True)
class Reference:
    """The identity of an intervention."""

    origin: str
    index: int
    op: str
    rule_name: str = ""
    update_id: int | None = None
    watch_id: str = ""
    gate_probes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As "add (request 0, gated by mood)", "clamp (update 3, 1)", "add (watch w 3, 0)"."""
        of = self.rule_name if self.update_id is None else str(self.update_id)
        of = f"{self.watch_id} {of}" if self.watch_id else of
        gate = f", gated by {' and '.join(self.gate_probes)}" if self.gate_probes else ""
        return f"{self.op} ({self.origin} {f'{of}, ' if of else ''}{self.index}{gate})"


def read_reference(message: receipt_pb2.InterventionRef) -> Reference:
    return Reference(
        read_word(receipt_pb2.Origin.DESCRIPTOR, message.origin, "ORIGIN_"),
        message.index,
        read_word(receipt_pb2.Op.DESCRIPTOR, message.op, "OP_"),
        message.rule_name,
        message.update_id or None,
        message.watch_id,
        tuple(message.gate_probe_names),
    )


def _read_change(change: receipt_pb2.WatchChange) -> WatchChange:
    firsts = {
        first_position.sample: first_position.position for first_position in change.first_positions
    }
    if change.HasField("replace"):
        return WatchChange(change.update_id, firsts, replace_size=change.replace.intervention_count)
    if change.HasField("layer"):
        return WatchChange(change.update_id, firsts, layer_size=change.layer.intervention_count)
    return WatchChange(
        change.update_id, firsts, change.gain.factor, tuple(change.gain.interventions)
    )


def read_receipt(message: receipt_pb2.Receipt) -> Receipt:
    return Receipt(
        **same_fields(Receipt, message),
        interventions=tuple(_read_applied(intervention) for intervention in message.interventions),
        captures=tuple(_read_capture(capture.SerializeToString()) for capture in message.captures),
        rules=tuple(
            RuleReceipt(
                rule.rule_name,
                tuple(
                    RuleFirings(
                        fired.sample,
                        read_ranges(fired.positions),
                        fired.position_count,
                        fired.stopped,
                    )
                    for fired in rule.samples
                ),
                rule.server_wide,
            )
            for rule in message.rules
        ),
        watches=tuple(
            WatchReceipt(
                watch.watch_id,
                tuple(map(_read_change, watch.changes)),
                watch.change_count,
                watch.hold_count,
                watch.held_duration.ToTimedelta().total_seconds(),
                tuple(watch.stopped_samples),
            )
            for watch in message.watches
        ),
        controller=_read_controller(message) if message.HasField("controller") else None,
    )


@lru_cache(maxsize=64)
def _read_capture(serialized: bytes) -> CaptureReceipt:
    """Reads the receipt of a capture. Cached, because many requests have equal receipts."""
    message = receipt_pb2.CaptureReceipt.FromString(serialized)
    sites = [
        CapturedSite(read_site(site.site), site.row_count, site.dropped_row_count)
        for site in message.sites
        if knows_point(site.site.point)
    ]
    unknown = len(message.sites) - len(sites)
    return CaptureReceipt(message.capture_index, tuple(sites), message.run_id, unknown)


def _read_controller(message: receipt_pb2.Receipt) -> ControllerReceipt:
    controller = message.controller
    return ControllerReceipt(
        controller.controller_name,
        controller.disabled_reason,
        tuple((disabled.sample, disabled.position) for disabled in controller.disabled_from),
    )


def _read_applied(message: receipt_pb2.AppliedIntervention) -> AppliedIntervention:
    sites = [
        AppliedSite(
            read_site(site.site),
            site.row_count,
            _read_dose(site.dose) if site.HasField("dose") else None,
        )
        for site in message.sites
        if knows_point(site.site.point)
    ]
    return AppliedIntervention(
        **vars(read_reference(message.intervention)),
        digests=tuple(digest.hex() for digest in message.digests),
        source=read_source(message),
        sites=tuple(sites),
        unknown_sites=len(message.sites) - len(sites),
        last_gain=message.last_gain if message.HasField("last_gain") else None,
        rows=tuple(
            AppliedRows(
                rows.sample, read_ranges(rows.positions), read_ranges(rows.cached_positions)
            )
            for rows in message.rows
        ),
    )


def read_source(
    message: receipt_pb2.AppliedIntervention | generation_service_pb2.ResolvedIntervention,
) -> ReplaceSource | None:
    """The source of a replacement; None for other ops."""
    if not message.HasField("source"):
        return None
    source = message.source
    rows = (
        (row.position, row.source_position if row.HasField("source_position") else None)
        for row in source.rows
    )
    return ReplaceSource(source.run_id, tuple(rows), source.sha256.hex())


def _read_dose(message: receipt_pb2.Dose) -> Dose:
    return Dose(
        message.norm,
        message.relative_mean if message.HasField("relative_mean") else None,
        message.relative_max if message.HasField("relative_max") else None,
    )
