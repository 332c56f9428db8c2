"""What subscriptions want of a request.

Why costs are bounded: an observer is resolved while somebody else's request is admitted, and what
it captures becomes a part of that request's plan. So an observer has a cost, known when it is
opened. A request takes the cheapest observers first, up to `OBSERVERS_COST`; the others miss it.

Invariant: an observer neither delays nor refuses a request. One that misses a request is told so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.limits import OBSERVER_SPANS, OBSERVERS_COST
from rheostat_server.selectors.prepared_selection import TooFragmented
from rheostat_server.selectors.selection import SelectionContext
from rheostat_server.subscriptions.subscription import Subscription

_COST_BYTES = 64
"""What `offload` counts for a unit of cost."""

FRAGMENTED = (
    f"what is captured of it is too fragmented: use fewer, longer spans, at most {OBSERVER_SPANS}"
)
CROWDED = (
    "too many subscriptions observe it, and cheaper ones come first: capture fewer sites, or "
    "select with fewer ranges"
)


@dataclass(frozen=True, slots=True)
class ObserverCapture:
    """What a subscription wants of a request."""

    subscription: Subscription
    captures: Mapping[int, ResolvedCapture]
    """By the number under which its rows go out."""
    own: frozenset[int] = frozenset()
    """Those that the request itself sends; with any, it fails where the subscription overflows."""
    missed: str = ""
    """Why it gets nothing of what it observes; empty: it gets that."""

    @property
    def observed(self) -> bool:
        """Whether the subscription wants something that the request does not know of."""
        return len(self.captures) > len(self.own)

    @property
    def beside(self) -> list[ResolvedCapture]:
        """What it wants that the request does not know of."""
        return [one for number, one in self.captures.items() if number not in self.own]

    def unobserved(self, reason: str) -> "ObserverCapture":
        """The same without what the request does not know of."""
        own = {number: self.captures[number] for number in self.own}
        return ObserverCapture(self.subscription, own, self.own, reason)


def merged(observer_captures: Sequence[ObserverCapture]) -> tuple[ObserverCapture, ...]:
    """Wishes of which each subscription has one, so that the request ends there once."""
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
    """What observers want of a request that does not know of them, in their order.

    Args:
        observers: subscriptions that select the request.
        context: the request.
        spent: what other observers cost it.
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


def observer_captures_work(observers: Sequence[Subscription], prompt_len: int) -> int:
    """Bytes that `observer_captures` counts for; see `offload`."""
    cost = min(OBSERVERS_COST, sum(one.captures.cost for one in observers))
    return cost * _COST_BYTES + len(observers) * prompt_len


def _observer_capture(one: Subscription, context: SelectionContext) -> ObserverCapture:
    try:
        return ObserverCapture(one, dict(enumerate(one.captures.resolve(context))))
    except TooFragmented:
        return ObserverCapture(one, {}, missed=FRAGMENTED)
