"""Cuts rows of router logits to the number of experts.

The engine sends all rows with the width of the stream.
"""

from collections.abc import Callable
from dataclasses import replace

from rheostat_engine import ROUTERS, Event, ModelSites, Rows

Deliver = Callable[[Event], None]


def cutting_expert_rows(deliver: Deliver, sites: ModelSites) -> Deliver:
    """Returns a function that delivers events after cutting the rows of their routers."""

    def deliver_cut(event: Event) -> None:
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

    return deliver_cut
