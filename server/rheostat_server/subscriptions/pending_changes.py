"""Changes of what is captured of a running sample, until the engine has applied them.

Invariant: no rows of a sample reach an attached subscription before the engine has reported the
first captured position.
"""

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from rheostat_engine import Attached
from rheostat_server.delivery.items import ItemSource, SequenceKey
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.limits import MISSED_REQUESTS
from rheostat_wire.v1 import capture_service_pb2

_pb = capture_service_pb2

_ENDED_FIRST = (
    "it ran when the subscription was attached to it, and ended before the engine could capture a "
    "row. Open the subscription before the request, or before the sweep of which it is a cell"
)


class MissedRequest(NamedTuple):
    """A running request that a subscription selects and could not be attached to."""

    request_id: str
    reason: str


class PendingChange:
    """A change of the captures of a sample, whose caller waits for the engine."""

    def __init__(self, change: int) -> None:
        """The engine has not answered.

        Args:
            change: its number.
        """
        self.change = change
        self.resolved = asyncio.Event()

    def resolve(self, sequence_key: SequenceKey, attached: Attached) -> None:
        """Handles the engine's answer."""
        self.resolved.set()


class PendingAttachment(PendingChange):
    """The change that begins to capture a sample for a feed."""

    def __init__(self, change: int, feed: RowFeed, refuse: Callable[[RowFeed, str], None]) -> None:
        """The engine has not answered.

        Args:
            change: its number.
            feed: takes the rows.
            refuse: called with the reason if the engine refuses the change.
        """
        super().__init__(change)
        self.feed = feed
        self._refuse = refuse

    def resolve(self, sequence_key: SequenceKey, attached: Attached) -> None:
        """Handles the engine's answer."""
        if attached.error:
            self._refuse(self.feed, attached.error)
        self.feed.begin(sequence_key, attached.first)
        super().resolve(sequence_key, attached)


def to_wire(feeds: Iterable[ItemSource]) -> list[capture_service_pb2.Attached]:
    """The sequences to which feeds were attached while they ran."""
    attached = ((feed, *first) for feed in feeds for first in feed.first_positions.items())
    return [
        _pb.Attached(
            request_id=feed.request_id,
            sample=sequence_key.sample,
            baseline=sequence_key.baseline,
            first_position=first,
        )
        for feed, sequence_key, first in islice(attached, MISSED_REQUESTS)
    ]


def missed_reason(feed: ItemSource, lost: int) -> str:
    """Why nothing of an ended request was captured for a feed; empty if there is another reason.

    Args:
        feed: takes the rows of the request.
        lost: rows that were counted as lost.
    """
    if feed.missed_reason or lost or not feed.finish_reasons or not feed.first_positions:
        return feed.missed_reason
    captured = any(first is not None for first in feed.first_positions.values())
    return "" if captured else _ENDED_FIRST


def write_attachments(
    opened: capture_service_pb2.SubscribeOpened,
    attached: Iterable[RowFeed],
    missed: Iterable[MissedRequest],
) -> None:
    """Writes the requests to which a subscription was attached, and those that it misses."""
    opened.attached.extend(to_wire(attached))
    for request in islice(missed, MISSED_REQUESTS):
        opened.missed_request_ids.append(request.request_id)
        opened.missed.add(request_id=request.request_id, reason=request.reason)
