"""Estimates the work that subscriptions and watches add to a request; see `steering.estimates`."""

from collections.abc import Sequence

from rheostat_server.limits import OBSERVER_SPANS, OBSERVERS_COST
from rheostat_server.monitors.watch import Watch
from rheostat_server.steering.estimates import SITE_BYTES, SPAN_BYTES
from rheostat_server.subscriptions.subscription import Subscription

_COST_BYTES = 64
"""Bytes that are counted for a unit of an observer's cost; see `OBSERVERS_COST`."""


def estimate_observers(observers: Sequence[Subscription], prompt_len: int) -> int:
    """Bytes that `offload` counts for adding the captures of observers."""
    if not observers:
        return 0
    spans = sum(
        min(OBSERVER_SPANS, observer.captures.most_spans(prompt_len)) for observer in observers
    )
    cost = min(OBSERVERS_COST, sum(observer.captures.cost for observer in observers))
    return _COST_BYTES * cost + len(observers) * prompt_len + SPAN_BYTES * spans


def estimate_watches(watches: Sequence[Watch]) -> int:
    """Bytes that `offload` counts for adding what the rules of watches steer."""
    ops = [
        intervention.op
        for watch in watches
        for steered in watch.settings.readings.steered
        for intervention in steered
    ]
    return sum(SPAN_BYTES + SITE_BYTES * len(op.sites) for op in ops)
