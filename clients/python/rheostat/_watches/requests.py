"""Builds the state of a watch from the arguments of watch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias, TypedDict, Unpack, get_args

from rheostat._errors import invalid
from rheostat._event_streams.filters import request_filter
from rheostat._event_streams.state import DEFAULT_CREDIT
from rheostat._fields import UINT64, builds_message, whole_number, word
from rheostat._steering.rules import ProbesLike, RulesLike, probes_to_wire, rules_of
from rheostat._watches.state import WatchState
from rheostat_wire.v1 import monitor_service_pb2

Report: TypeAlias = Literal["every", "fired", "summary"]
"""Which tokens a watch reports: every token that a probe reads, those at which a rule fired, or
none; the end of each request has summaries in any case."""

OnLost: TypeAlias = Literal["continue", "hold", "stop"]
"""What happens to the requests of a watch that its client does not resume within the server's
resume window. "continue": they go on unwatched. "stop": they end, and new ones are refused until a
watch with the same filter is opened. "hold": as "stop", and they pause as soon as the connection
breaks."""

_REPORTS = {
    name: monitor_service_pb2.WatchReport.Value(f"WATCH_REPORT_{name.upper()}")
    for name in get_args(Report)
}
_ON_LOST = {
    name: monitor_service_pb2.WatchLost.Value(f"WATCH_LOST_{name.upper()}")
    for name in get_args(OnLost)
}


class WatchOptions(TypedDict, total=False):
    """Arguments of watch.

    One of ``requests``, ``labels`` and ``every`` is needed, and a probe, of ``probes`` or of a
    rule.
    """

    probes: ProbesLike
    """Probes that read every selected request, up to 256 readings. Default: none; rules bring their
    own."""
    rules: RulesLike
    """Up to 16 rules, on which the server acts without the client: `Observe`, `Stop`, `Steer`, or
    `Gain`, which multiplies the requests' own steering. Default: none."""
    requests: str | Iterable[str] | None
    """Ids of requests, up to 4096. Default: none."""
    labels: Mapping[str, str] | None
    """Requests that have all of these labels, up to 16. Default: none."""
    every: bool
    """Every request. Default: False."""
    report: Report | None
    """Which tokens are reported: "every" that a probe reads, those where a rule "fired", or none,
    with a "summary" at each request's end. Default: "every"."""
    steers: bool
    """Whether `Watch.steer` and `Watch.gain` may change the steering of the requests. Then no other
    request reads the KV of their generated tokens. Default: False."""
    on_lost: OnLost | None
    """What happens to the requests if this client does not resume the watch within the server's
    resume window: "continue", or "stop". With "hold" they pause as soon as the connection breaks,
    continue if the watch is resumed, and stop after the window. Default: "continue"."""
    buffer_bytes: int | None
    """Size of the server's buffer, 64 KiB or more. If it is full, the oldest readings are dropped
    and reported. Default: 8 MiB."""
    credit: int
    """Bytes of readings that may wait in the client until the loop reads them. Default: 64 MiB."""


@builds_message
def opening(**options: Unpack[WatchOptions]) -> WatchState:
    """The state of a new watch. Raises InvalidRequest for errors that the client finds."""
    report, on_lost = options.get("report"), options.get("on_lost")
    buffer_bytes = options.get("buffer_bytes")
    selected = request_filter(options.get("requests"), options.get("labels"), options.get("every"))
    if selected is None:
        raise invalid(
            "open.filter",
            "give one of requests=, labels= and every=True",
            "REASON_MISSING_FIELD",
        )
    listed = rules_of(options.get("rules"))
    message = monitor_service_pb2.WatchOpen(
        filter=selected,
        probes=probes_to_wire((), options.get("probes"), listed),
        rules=[rule.to_wire(f"open.rules[{number}]") for number, rule in enumerate(listed)],
        steers=options.get("steers", False),
    )
    if not message.probes:
        raise invalid("open.probes", "give probes= or rules=", "REASON_MISSING_FIELD")
    if report is not None:
        message.report = word(report, _REPORTS, "open.report")
    if on_lost is not None:
        message.on_lost = word(on_lost, _ON_LOST, "open.on_lost")
    if buffer_bytes is not None:
        message.buffer_bytes = whole_number(
            buffer_bytes, "open.buffer_bytes", "a buffer", least=1, most=UINT64
        )
    credit = options.get("credit", DEFAULT_CREDIT)
    return WatchState(message, [rule.name for rule in listed], credit)
