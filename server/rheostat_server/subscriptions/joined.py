"""What a request knows of a subscription that takes part in it."""

from typing import NamedTuple

from rheostat_server.capture.taps import Tap
from rheostat_server.subscriptions.wishes import Wish


class Joined(NamedTuple):
    """A subscription that takes part in a request which began before it."""

    wish: Wish
    """What it wants."""
    tap: Tap
    """Where that goes."""
    named: bool
    """Whether its reader is told of the request before anything of it comes."""
