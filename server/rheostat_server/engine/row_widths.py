"""Rows of routers as wide as their routers say: the engine's rows are all as wide as the stream."""

from collections.abc import Callable
from dataclasses import replace

from rheostat_engine import ROUTERS, Event, ModelSites, Rows

Deliver = Callable[[Event], None]


def trimming(deliver: Deliver, sites: ModelSites) -> Deliver:
    """Delivers events whose rows have the width of their site."""

    def trimmed(event: Event) -> None:
        if not isinstance(event, Rows) or max(event.sites) < ROUTERS:
            deliver(event)
            return
        stream = [i for i, site in enumerate(event.sites) if site < ROUTERS]
        if stream:
            indices = tuple(event.sites[i] for i in stream)
            deliver(replace(event, sites=indices, data=event.data[stream]))
        for site, data in zip(event.sites, event.data, strict=True):
            if site >= ROUTERS:
                narrow = data[None, :, : sites.experts[site - ROUTERS]]
                deliver(replace(event, sites=(site,), data=narrow.copy()))

    return trimmed
