"""Where a worker keeps a site in its tables: the stream's sites at their numbers, routers behind.

Invariant: numbers travel, places never leave the worker. A worker whose part of the model has no
mixture of experts has no places for routers.
"""

from collections.abc import Sequence

import numpy as np

from rheostat_engine.core.segments import Int64
from rheostat_engine.points import ROUTERS, site_count
from rheostat_engine.tables import SteeringTable


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

    def check(self, table: SteeringTable) -> None:
        """Checks the sites of a table of acts.

        Raises:
            ValueError: a site does not exist in the model, or is no site of the stream.
        """
        sites = [act.site_rows.sites for act in table.acts]
        if any(((one < 0) | (one >= self._stream)).any() for one in sites):
            raise ValueError(f"the plan names a site that is not one of the model's {self._stream}")

    def captured(self, sites: Sequence[int]) -> Int64:
        """The places of captured sites, ascending, without other workers' routers.

        Raises:
            ValueError: one is a site that the model cannot have.
        """
        numbers = np.array(sites, np.int64)
        stream = (numbers >= 0) & (numbers < self._stream)
        routers = (numbers >= ROUTERS) & (numbers < ROUTERS + self._layers)
        if not (stream | routers).all():
            raise ValueError(f"the plan names a site that is not one of the model's {self._stream}")
        places = np.where(stream, numbers, self._stream + numbers - ROUTERS)
        return places[places < self.count]
