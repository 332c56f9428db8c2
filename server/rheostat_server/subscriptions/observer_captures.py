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

from rheostat_server.capture.specs import ResolvedCapture
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
        return [one for number, one in self.captures.items() if number not in self.own]

    def unobserved(self, reason: str) -> "ObserverCapture":
        """The captures that the request itself sends."""
        own = {number: self.captures[number] for number in self.own}
        return ObserverCapture(self.subscription, own, self.own, reason)


def merged(observer_captures: Sequence[ObserverCapture]) -> tuple[ObserverCapture, ...]:
    """One entry per subscription, so that the request ends once for each."""
    found: dict[str, ObserverCapture] = {}
    for observer_capture in observer_captures:
        name = observer_capture.subscription.name
        other = found.get(name)
        if other is None:
            found[name] = observer_capture
        else:
            found[name] = ObserverCapture(
                observer_capture.subscription,
                {**other.captures, **observer_capture.captures},
                other.own or observer_capture.own,
                other.missed or observer_capture.missed,
            )
    return tuple(found.values())


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
    found: dict[str, ObserverCapture] = {}
    for one in sorted(observers, key=lambda one: one.captures.cost):
        left -= one.captures.cost
        found[one.name] = (
            _observer_capture(one, context)
            if left >= 0
            else ObserverCapture(one, {}, missed=CROWDED)
        )
    return [found[one.name] for one in observers]


def _observer_capture(one: Subscription, context: SelectionContext) -> ObserverCapture:
    try:
        return ObserverCapture(one, dict(enumerate(one.captures.resolve(context))))
    except TooFragmented:
        return ObserverCapture(one, {}, missed=FRAGMENTED)
