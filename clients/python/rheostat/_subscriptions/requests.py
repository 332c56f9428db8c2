"""Builds the state of a subscription from the arguments of subscribe and resume."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import TypedDict, Unpack

from rheostat._capture.captures import OVERLOADS, CaptureLike, Overload, captures_of, one_of
from rheostat._errors import Refused, invalid
from rheostat._event_streams.filters import request_filter
from rheostat._event_streams.state import DEFAULT_CREDIT, Acknowledgement
from rheostat._fields import UINT64, builds_message, utf8_text, whole_number
from rheostat._subscriptions.events import Cursor
from rheostat._subscriptions.payloads import Payloads
from rheostat._subscriptions.shared_memory import namespace
from rheostat._subscriptions.state import SubscriptionState
from rheostat_wire.v1 import capture_service_pb2


class ResumeOptions(TypedDict, total=False):
    """Arguments of resume besides the cursor."""

    credit: int
    """Bytes that may wait in the client until the loop reads them, at least a row. Default: 64
    MiB."""
    ack: Acknowledgement
    """"auto": an event is acknowledged when the next event is read. "manual": when `ack` is called.
    Default: "auto"."""
    shared_memory: bool | None
    """Whether large chunks are sent through shared memory of this host. True raises Refused if that
    is not possible; None uses it if possible, see `Subscription.inline_reason`. Default: None."""
    views: bool
    """Do not copy rows out of shared memory: see `CapturedRows.elements`. Default: False."""


class SubscribeOptions(ResumeOptions, total=False):
    """Arguments of subscribe, besides those of `ResumeOptions`.

    With ``capture``, one of ``requests``, ``labels`` and ``every`` is needed; without it, none.
    """

    capture: CaptureLike
    """Rows to capture of every selected request. Default: none; then only rows arrive that requests
    send by ``rheostat.Capture(..., to=subscription)``."""
    requests: str | Iterable[str] | None
    """Ids of requests, up to 4096. Default: none."""
    labels: Mapping[str, str] | None
    """Requests that carry all of these labels, up to 16. Default: none."""
    every: bool
    """Every request. Default: False."""
    overload: Overload | None
    """If the server's buffer is full: "fail" ends the subscription, and requests that send rows to
    it; "drop_oldest" and "drop_newest" drop rows and report `DroppedRows`; "spill" writes rows to
    the server's disk, if it has a spool. Default: "fail"."""
    buffer_bytes: int | None
    """Size of the server's buffer, which also holds rows that are not acknowledged; at least one
    position of ``capture``. Default: a sixteenth of the server's limit for all subscriptions."""


@builds_message
def opening(**options: Unpack[SubscribeOptions]) -> SubscriptionState:
    """The state of a new subscription. Raises InvalidRequest for errors that the client finds."""
    overload, buffer_bytes = options.get("overload"), options.get("buffer_bytes")
    captures = captures_of(options.get("capture"))
    for number, spec in enumerate(captures):
        if spec.to is not None:
            raise invalid(
                f"open.captures[{number}].subscription_id",
                "rows of a subscription's captures are sent to it: leave out to=",
            )
    selected = request_filter(options.get("requests"), options.get("labels"), options.get("every"))
    if captures and selected is None:
        raise invalid("open.filter", "give one of requests=, labels= and every=True")
    if selected is not None and not captures:
        raise invalid(
            "open.captures",
            "these requests are selected, but nothing is captured of them: add capture=, or "
            "select none if the requests themselves send rows to the subscription",
        )
    message = capture_service_pb2.SubscribeOpen(captures=[spec.to_spec() for spec in captures])
    if selected is None:
        # The server requires a filter. Without captures it has no effect, so a random id will do.
        message.filter.requests.request_ids.append(uuid.uuid4().hex)
    else:
        message.filter.CopyFrom(selected)
    if overload is not None:
        message.overload = one_of(OVERLOADS, overload, "open.overload")
    if buffer_bytes is not None:
        message.buffer_bytes = whole_number(
            buffer_bytes, "open.buffer_bytes", "a buffer", least=1, most=UINT64
        )
    shared_memory = options.get("shared_memory")
    payloads = _payloads(shared_memory, options.get("views", False))
    if shared_memory is not False:
        message.namespace = namespace()
        message.shared_memory = bool(message.namespace)
        if shared_memory and not message.namespace:
            raise Refused("this system has no /dev/shm, so it has no shared memory")
    credit, ack = options.get("credit", DEFAULT_CREDIT), options.get("ack", "auto")
    return SubscriptionState(message, None, credit, ack, payloads)


def resuming(cursor: Cursor, **options: Unpack[ResumeOptions]) -> SubscriptionState:
    """The state of a resumed subscription. Raises InvalidRequest for an invalid cursor."""
    try:
        name, sequence = cursor
    except (TypeError, ValueError):
        raise invalid("open.resume", f"{cursor!r} is no rheostat.Cursor") from None
    if not utf8_text(name, "open.resume.subscription_id", "a subscription's id"):
        raise invalid("open.resume.subscription_id", "the cursor names no subscription")
    sequence = whole_number(
        sequence, "open.resume.after_sequence", "a sequence number", most=UINT64
    )
    payloads = _payloads(options.get("shared_memory"), options.get("views", False))
    credit, ack = options.get("credit", DEFAULT_CREDIT), options.get("ack", "auto")
    return SubscriptionState(None, Cursor(name, sequence), credit, ack, payloads)


def _payloads(shared_memory: bool | None, views: bool) -> Payloads:
    if not isinstance(shared_memory, bool | None):
        raise invalid(
            "shared_memory", f"shared_memory is True, False or None, not {shared_memory!r}"
        )
    if not isinstance(views, bool):
        raise invalid("views", f"views is True or False, not {views!r}")
    return Payloads(shared_memory, views)
