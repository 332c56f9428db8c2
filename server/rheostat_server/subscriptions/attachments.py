"""What a request knows of a subscription that takes part in it."""

from typing import NamedTuple

from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.subscriptions.observer_captures import ObserverCapture


class Attachment(NamedTuple):
    """A subscription that takes part in a request which began before it."""

    observer_capture: ObserverCapture
    """What it wants."""
    feed: RowFeed
    """Where that goes."""
    named: bool
    """Whether its reader is told of the request before anything of it comes."""
