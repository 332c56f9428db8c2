"""A subscription that takes part in a request that already runs: what is told, and to whom.

Invariant: nothing of a sample reaches such a subscription before the engine has said from which
position on it is captured.
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


class Missed(NamedTuple):
    """A request that runs and cannot be joined."""

    request_id: str
    reason: str


class PendingChange:
    """A change of what is captured of a sample, for which somebody waits."""

    def __init__(self, change: int) -> None:
        """Nothing is known yet.

        Args:
            change: its number.
        """
        self.change = change
        self.told = asyncio.Event()

    def tell(self, track: SequenceKey, attached: Attached) -> None:
        """The engine has said what became of it."""
        self.told.set()


class PendingAttachment(PendingChange):
    """One that captures for a tap."""

    def __init__(self, change: int, feed: RowFeed, refuse: Callable[[RowFeed, str], None]) -> None:
        """Nothing is known yet.

        Args:
            change: its number.
            feed: where its rows go.
            refuse: hears of a change that cannot be.
        """
        super().__init__(change)
        self.feed = feed
        self._refuse = refuse

    def tell(self, track: SequenceKey, attached: Attached) -> None:
        """The engine has said what became of it."""
        if attached.error:
            self._refuse(self.feed, attached.error)
        self.feed.begin(track, attached.first)
        super().tell(track, attached)


def to_wire(feeds: Iterable[ItemSource]) -> list[capture_service_pb2.Attached]:
    """What is said of the tracks that taps have joined."""
    tracks = ((feed, *one) for feed in feeds for one in feed.first_positions.items())
    return [
        _pb.Attached(
            request_id=feed.request_id,
            sample=track.sample,
            baseline=track.baseline,
            first_position=first,
        )
        for feed, track, first in islice(tracks, MISSED_REQUESTS)
    ]


def tell(
    opened: capture_service_pb2.SubscribeOpened,
    attached: Iterable[RowFeed],
    missed: Iterable[Missed],
) -> None:
    """Says which requests a subscription has joined, and which it could not."""
    opened.attached.extend(to_wire(attached))
    for one in islice(missed, MISSED_REQUESTS):
        opened.missed_request_ids.append(one.request_id)
        opened.missed.add(request_id=one.request_id, reason=one.reason)
