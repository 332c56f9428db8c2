"""A stored run: rows of one sample at some sites and positions, the same positions at every site.

Invariant: its rows never change; only how long it is kept does, under the lock of its store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rheostat_engine import Site
from rheostat_server.sinks import Labels
from rheostat_server.sinks.tables import NUMPY
from rheostat_server.tensors import FloatType
from rheostat_wire.dtypes import StoredArray


@dataclass(eq=False, slots=True)
class Run:
    """A stored run."""

    id: str
    sites: tuple[Site, ...]
    """Every name under which it holds rows, by layer, then point."""
    dtype: FloatType
    """Element type of its rows."""
    width: int
    """W."""
    positions: Labels
    """Ascending: [positions]."""
    pieces: Sequence[StoredArray]
    """Rows, one piece after the other: each [sites, some of the positions, W]."""
    prompt_token_ids: npt.NDArray[np.int32]
    """[P]."""
    labels: Mapping[str, str]
    size: int
    """Bytes that it takes."""
    number: int
    """Rises from run to run."""
    create_time: float
    """Seconds since the epoch."""
    lease_expire_time: float
    """Seconds since the epoch."""
    users: int = 0
    """How often it is held."""

    def rows(self, site: Site) -> StoredArray:
        """Its rows at a site, under whichever name: [positions, W]; bfloat16 as its bits.

        Raises:
            KeyError: it has none there.
        """
        at = next((i for i, one in enumerate(self.sites) if one.index == site.index), None)
        if at is None:
            raise KeyError(site)
        none = np.empty((0, self.width), NUMPY[self.dtype.value])
        return np.concatenate([none, *(piece[at] for piece in self.pieces)])
