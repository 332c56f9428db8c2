"""Where a worker keeps a site in its tables: the stream's sites at their numbers, routers behind.

Invariant: numbers travel, places never leave the worker. A worker whose part of the model has no
mixture of experts has no places for routers.
"""

from dataclasses import replace

import numpy as np

from rheostat_engine.core.segments import Int64
from rheostat_engine.plan import Plan
from rheostat_engine.points import ROUTERS, site_count


class Places:
    """The places of a model's sites."""

    def __init__(self, layers: int, *, routers: bool = False) -> None:
        """Of a model of so many layers; `routers`: whether this worker has any."""
        self._layers = layers
        self._stream = site_count(layers)
        behind = np.arange(ROUTERS, ROUTERS + (layers if routers else 0))
        self.numbers: Int64 = np.concatenate([np.arange(self._stream), behind])
        """[places]: the number of the site at each."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.numbers)

    def of(self, site: int) -> int:
        """The place of a site; `count` or beyond where this worker has none for it."""
        return site if site < ROUTERS else self._stream + site - ROUTERS

    def placed(self, plan: Plan) -> Plan:
        """A plan in terms of places, without the captures of other workers' routers.

        Raises:
            ValueError: it names a site that the model cannot have, or steers what is no stream.
        """
        if any(not 0 <= site < self._stream for act in plan.acts for site, _ in act.rows):
            raise ValueError(f"the plan names a site that is not one of the model's {self._stream}")
        captured = {site for capture in plan.captures for site in capture.sites}
        if any(not self._known(site) for site in captured):
            raise ValueError(f"the plan names a site that is not one of the model's {self._stream}")
        if all(site < self._stream for site in captured):
            return plan
        return replace(
            plan,
            captures=tuple(
                replace(one, sites=tuple(p for p in map(self.of, one.sites) if p < self.count))
                for one in plan.captures
            ),
        )

    def _known(self, site: int) -> bool:
        return 0 <= site < self._stream or 0 <= site - ROUTERS < self._layers
