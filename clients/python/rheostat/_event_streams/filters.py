"""Which requests a subscription or a watch selects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rheostat._errors import invalid
from rheostat._fields import flag, utf8_text
from rheostat._prompts import labels_to_wire
from rheostat_wire.v1 import capture_service_pb2


def request_filter(
    requests: str | Iterable[str] | None, labels: Mapping[str, str] | None, every: bool | None
) -> capture_service_pb2.RequestFilter | None:
    """The filter of these arguments; None if none is given.

    Raises InvalidRequest if several are given, or one is malformed.
    """
    given = [requests is not None, labels is not None, flag(every, "every", "every")]
    if sum(given) > 1:
        raise invalid("open.filter", "give one of requests=, labels= and every=True")
    message = capture_service_pb2.RequestFilter()
    if labels is not None:
        path = "open.filter.labels.labels"
        texts = labels_to_wire(labels, path)
        if not texts:
            raise invalid(
                path,
                "labels= is empty: name at least one label, or select all with every=True",
                "REASON_MISSING_FIELD",
            )
        message.labels.labels.update(texts)
    elif requests is not None:
        path = "open.filter.requests.request_ids"
        message.requests.request_ids.extend(
            utf8_text(request_id, f"{path}[{number}]", "a request id")
            for number, request_id in enumerate(
                [requests] if isinstance(requests, str) else requests
            )
        )
    elif every:
        message.every.SetInParent()
    else:
        return None
    return message
