"""Rows of routers as wide as their routers say: the engine's rows are all as wide as the stream."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rheostat_engine import ROUTERS, Event, ModelSites, Rows

Deliver = Callable[[Event], None]


def trimming(deliver: Deliver, sites: ModelSites) -> Deliver:
    """Delivers events whose rows have the width of their site."""

    def trimmed(event: Event) -> None:
        if isinstance(event, Rows) and event.site >= ROUTERS:
            width = sites.experts[event.site - ROUTERS]
            event = replace(event, data=np.ascontiguousarray(event.data[:, :width]))
        deliver(event)

    return trimmed
