"""A subscription that was attached to a request while the request ran."""

from typing import NamedTuple

from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.subscriptions.observer_captures import ObserverCapture


class Attachment(NamedTuple):
    """A subscription that was attached to a request while the request ran."""

    observer_capture: ObserverCapture
    """Its captures of the request."""
    feed: RowFeed
    """Takes the rows."""
    named: bool
    """Whether `SubscribeOpened` names the request, so that its end must follow."""
