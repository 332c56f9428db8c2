"""What opens a subscription, built from what a caller writes: a new one, or one that was left."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import TypedDict

from rheostat._capture.captures import OVERLOADS, CaptureLike, Overload, captures_of
from rheostat._connection.calls import BidiCall
from rheostat._errors import Refused, invalid
from rheostat._fields import UINT64, builds_message, utf8_text, whole_number
from rheostat._prompts import labels_to_wire
from rheostat._subscriptions.events import Cursor
from rheostat._subscriptions.payloads import Payloads
from rheostat._subscriptions.shared_memory import namespace
from rheostat._subscriptions.state import DEFAULT_CREDIT, Acknowledgement, SubscriptionState
from rheostat_wire.v1 import capture_service_pb2


class ResumeOptions(TypedDict, total=False):
    """What resume takes beside the cursor: how events are taken here."""

    credit: int
    """Bytes that may wait here until the loop takes them, at least a row. Default: 64 MiB."""
    ack: Acknowledgement
    """"auto": an event counts as dealt with once the next one is asked for. "manual": once `ack`
    is called. Default: "auto"."""
    shared_memory: bool | None
    """Whether large chunks come through shared memory of this host rather than the connection.
    True: or not at all, which raises Refused. Default: None, if possible;
    `Subscription.inline_reason` says what came of it."""
    views: bool
    """Leave rows where they lie, until they are acknowledged: `CapturedRows.elements`. Default:
    False, each event's arrays are its own."""


class SubscribeOptions(ResumeOptions, total=False):
    """What subscribe takes, beside what `ResumeOptions` has.

    With ``capture`` one of ``requests``, ``labels`` and ``every`` is given, without it none.
    """

    capture: CaptureLike
    """Rows to get of every request that is selected, of those that run already from their next step
    on. Default: none but what requests send here, by ``rheostat.Capture(..., to=subscription)``."""
    requests: str | Iterable[str] | None
    """Ids of requests, up to 4096. Default: none."""
    labels: Mapping[str, str] | None
    """Requests that carry all of these labels, up to 16. Default: none."""
    every: bool
    """Every request. Default: False."""
    overload: Overload | None
    """When this client is too slow for the server's buffer: "fail" ends the subscription, and a
    request that sends rows here; "drop_oldest" and "drop_newest" lose rows, which `DroppedRows`
    names; "spill" lets rows wait on the server's disk, if it has a spool. Default: "fail"."""
    buffer_bytes: int | None
    """Bytes that the server holds, what is not acknowledged included; at least one position of
    ``capture``. Default: a sixteenth of what it has for all subscriptions."""


@builds_message
def opening(
    *,
    capture: CaptureLike = None,
    requests: str | Iterable[str] | None = None,
    labels: Mapping[str, str] | None = None,
    every: bool = False,
    overload: Overload | None = None,
    buffer_bytes: int | None = None,
    credit: int = DEFAULT_CREDIT,
    ack: Acknowledgement = "auto",
    shared_memory: bool | None = None,
    views: bool = False,
) -> SubscriptionState:
    """A new subscription. Raises InvalidRequest for what can be seen to be wrong here."""
    captures = captures_of(capture)
    for number, spec in enumerate(captures):
        if spec.to is not None:
            raise invalid(
                f"open.captures[{number}].subscription_id",
                "rows of a subscription's captures come here: leave out to=",
            )
    given = [requests is not None, labels is not None, every]
    if sum(given) > 1 or (captures and not any(given)):
        raise invalid("open.filter", "give one of requests=, labels= and every=True")
    if any(given) and not captures:
        raise invalid(
            "open.captures",
            "these requests are selected, but nothing is captured of them: add capture=; if "
            "requests send their rows here themselves, select none",
        )
    message = capture_service_pb2.SubscribeOpen(captures=[spec.to_spec() for spec in captures])
    if labels is not None:
        path = "open.filter.labels.labels"
        texts = labels_to_wire(labels, path)
        if not texts:
            raise invalid(
                path,
                "labels= is empty: name at least one label, or select every request by every=True",
                "REASON_MISSING_FIELD",
            )
        message.filter.labels.labels.update(texts)
    elif every:
        message.filter.every.SetInParent()
    else:
        # The wire wants a filter, and without specs none selects anything.
        ids = [uuid.uuid4().hex] if requests is None else requests
        path = "open.filter.requests.request_ids"
        message.filter.requests.request_ids.extend(
            utf8_text(request_id, f"{path}[{number}]", "a request id")
            for number, request_id in enumerate([ids] if isinstance(ids, str) else ids)
        )
    if overload is not None:
        if overload not in OVERLOADS:
            policies = ", ".join(map(repr, OVERLOADS))
            raise invalid("open.overload", f"overload is one of {policies}, not {overload!r}")
        message.overload = OVERLOADS[overload]
    if buffer_bytes is not None:
        message.buffer_bytes = whole_number(
            buffer_bytes, "open.buffer_bytes", "a buffer", least=1, most=UINT64
        )
    payloads = _payloads(shared_memory, views)
    if shared_memory is not False:
        message.namespace = namespace()
        message.shared_memory = bool(message.namespace)
        if shared_memory and not message.namespace:
            raise Refused("this system has no /dev/shm, and thus no shared memory")
    return SubscriptionState(message, None, credit, ack, payloads)


def resuming(
    cursor: Cursor,
    *,
    credit: int = DEFAULT_CREDIT,
    ack: Acknowledgement = "auto",
    shared_memory: bool | None = None,
    views: bool = False,
) -> SubscriptionState:
    """A subscription that somebody had. Raises InvalidRequest for what is no cursor."""
    try:
        name, sequence = cursor
    except (TypeError, ValueError):
        raise invalid("open.resume", f"{cursor!r} is no rheostat.Cursor") from None
    if not utf8_text(name, "open.resume.subscription_id", "a subscription's id"):
        raise invalid("open.resume.subscription_id", "the cursor names no subscription")
    sequence = whole_number(
        sequence, "open.resume.after_sequence", "a sequence number", most=UINT64
    )
    payloads = _payloads(shared_memory, views)
    return SubscriptionState(None, Cursor(name, sequence), credit, ack, payloads)


def _payloads(shared_memory: bool | None, views: bool) -> Payloads:
    if not isinstance(shared_memory, bool | None):
        raise invalid(
            "shared_memory", f"shared_memory is True, False or None, not {shared_memory!r}"
        )
    if not isinstance(views, bool):
        raise invalid("views", f"views is True or False, not {views!r}")
    return Payloads(shared_memory, views)


SUBSCRIBE = BidiCall("/rheostat.v1.CaptureService/Subscribe", capture_service_pb2.SubscribeResponse)
"""Rows of requests that others, or other calls, run."""
