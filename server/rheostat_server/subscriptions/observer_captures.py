"""The captures that subscriptions ask of a request.

Why costs are bounded
    An observer's captures are resolved while another client's request is admitted, and become a
    part of that request's plan. So every observer has a cost, which is known when it opens. A
    request takes the cheapest observers, up to `OBSERVERS_COST`. The others miss the request.

Invariant: an observer neither delays nor refuses a request. The end of a request says why an
observer missed it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.limits import OBSERVER_SPANS, OBSERVERS_COST
from rheostat_server.selectors.prepared_selection import TooFragmented
from rheostat_server.selectors.selection import SelectionContext
from rheostat_server.subscriptions.subscription import Subscription

FRAGMENTED = (
    f"what is captured of it is too fragmented: use fewer, longer spans, at most {OBSERVER_SPANS}"
)
CROWDED = (
    "too many subscriptions observe it, and cheaper ones come first: capture fewer sites, or "
    "select with fewer ranges"
)


@dataclass(frozen=True, slots=True)
class ObserverCapture:
    """The captures that a subscription asks of a request."""

    subscription: Subscription
    captures: Mapping[int, ResolvedCapture]
    """The captures, by their number in the subscription's messages."""
    own: frozenset[int] = frozenset()
    """Captures that the request itself sends. If there are any, the request fails when the
    subscription overflows."""
    missed: str = ""
    """Why the subscription misses the request; empty if it gets its rows."""

    @property
    def observed(self) -> bool:
        """Whether the subscription has captures that the request does not send itself."""
        return len(self.captures) > len(self.own)

    @property
    def beside(self) -> list[ResolvedCapture]:
        """The captures that the request does not send itself."""
        return [capture for number, capture in self.captures.items() if number not in self.own]

    def unobserved(self, reason: str) -> "ObserverCapture":
        """The captures that the request itself sends."""
        own = {number: self.captures[number] for number in self.own}
        return ObserverCapture(self.subscription, own, self.own, reason)


class Attachment(NamedTuple):
    """A subscription that was attached to a request while the request ran."""

    observer_capture: ObserverCapture
    """Its captures of the request."""
    feed: RowFeed
    """Takes the rows."""
    named: bool
    """Whether `SubscribeOpened` names the request, so that its end must follow."""


def merged(observer_captures: Sequence[ObserverCapture]) -> tuple[ObserverCapture, ...]:
    """One entry per subscription, so that the request ends once for each."""
    by_name: dict[str, ObserverCapture] = {}
    for observer_capture in observer_captures:
        name = observer_capture.subscription.name
        if (other := by_name.get(name)) is not None:
            observer_capture = ObserverCapture(
                observer_capture.subscription,
                {**other.captures, **observer_capture.captures},
                other.own or observer_capture.own,
                other.missed or observer_capture.missed,
            )
        by_name[name] = observer_capture
    return tuple(by_name.values())


def observer_captures(
    observers: Sequence[Subscription], context: SelectionContext, spent: int = 0
) -> list[ObserverCapture]:
    """The captures of the observers of a request, in their order.

    Args:
        observers: subscriptions that select the request.
        context: the request.
        spent: the cost of other observers of the request.
    """
    left = OBSERVERS_COST - spent
    by_name: dict[str, ObserverCapture] = {}
    for subscription in sorted(observers, key=lambda subscription: subscription.captures.cost):
        left -= subscription.captures.cost
        by_name[subscription.name] = (
            _observer_capture(subscription, context)
            if left >= 0
            else ObserverCapture(subscription, {}, missed=CROWDED)
        )
    return [by_name[subscription.name] for subscription in observers]


def _observer_capture(subscription: Subscription, context: SelectionContext) -> ObserverCapture:
    try:
        captures = dict(enumerate(subscription.captures.resolve(context)))
    except TooFragmented:
        return ObserverCapture(subscription, {}, missed=FRAGMENTED)
    return ObserverCapture(subscription, captures)
