"""The slot of each site in a worker's tables: the stream's sites, then the routers.

Invariants: plans and reports contain site indices; slots never leave the worker. A worker without
a mixture of experts has no slots for routers.
"""

from collections.abc import Sequence

import numpy as np

from rheostat_engine.plan.points import ROUTERS, site_count
from rheostat_engine.plan.tables import SteeringTable
from rheostat_engine.worker.state.position_functions import Int64


class SiteSlots:
    """The slots of a model's sites."""

    def __init__(self, layers: int, *, routers: bool = False) -> None:
        """`layers` is the whole model's; `routers`: whether this worker has mixtures of experts."""
        self._layers = layers
        self._stream = site_count(layers)
        router_indices = np.arange(ROUTERS, ROUTERS + (layers if routers else 0))
        self.numbers: Int64 = np.concatenate([np.arange(self._stream), router_indices])
        """[slots]: site index of each slot."""

    @property
    def count(self) -> int:
        """The number of slots."""
        return len(self.numbers)

    def of(self, site: int) -> int:
        """The slot of a site; `count` or more if this worker has none."""
        return site if site < ROUTERS else self._stream + site - ROUTERS

    def check(self, table: SteeringTable) -> None:
        """Checks the sites of a table of acts.

        Raises:
            ValueError: a site is not a site of the model's stream.
        """
        none = np.zeros(0, np.int32)
        sites = np.concatenate([none, *(act.site_rows.sites for act in table.acts)])
        if sites.min(initial=0) < 0 or sites.max(initial=0) >= self._stream:
            raise ValueError(f"the plan names a site that is not one of the model's {self._stream}")

    def to_slots(self, sites: Sequence[int]) -> Int64:
        """The slots of captured sites, ascending, without sites of other workers.

        Raises:
            ValueError: the model cannot have one of the sites.
        """
        numbers = np.array(sites, np.int64)
        stream = (numbers >= 0) & (numbers < self._stream)
        routers = (numbers >= ROUTERS) & (numbers < ROUTERS + self._layers)
        if not (stream | routers).all():
            raise ValueError(f"the plan names a site that is not one of the model's {self._stream}")
        slots = np.where(stream, numbers, self._stream + numbers - ROUTERS)
        return slots[slots < self.count]
