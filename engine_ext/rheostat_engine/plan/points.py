"""Points, layers and sites, and the index of a site.

Invariant: two names of the same tensor have one index, and indices ascend in the order in which a
sequential block computes its sites.

| site                                          | index         |
|-----------------------------------------------|---------------|
| `resid_pre` of layer L, `resid_post` of L - 1 | 4 * L         |
| `attn_out`, `resid_mid`, `mlp_out` of layer L | 4 * L + 1 ... 3 |
| `router_logits` of layer L                    | `ROUTERS` + L |

A stream of N layers has the sites 0 ... 4N. Router logits are no part of the stream, can only be
captured, and exist in few models.
"""

from enum import StrEnum
from typing import NamedTuple


class Point(StrEnum):
    """A point in a decoder block, by its name in TransformerLens."""

    RESID_PRE = "resid_pre"
    """The stream that enters the block."""

    RESID_MID = "resid_mid"
    """The stream after attention is added. Parallel blocks have none."""

    RESID_POST = "resid_post"
    """The stream that leaves the block."""

    ATTN_OUT = "attn_out"
    """Attention's output as it is added to the stream, after any norm and scaling."""

    MLP_OUT = "mlp_out"
    """The MLP's or mixture of experts' output as it is added to the stream."""

    ROUTER_LOGITS = "router_logits"
    """The router's logit of each expert, before any softmax."""


ROUTERS = 1 << 20
"""`router_logits` of layer 0."""

_PER_LAYER = 4
_OFFSET = {
    Point.RESID_PRE: 0,
    Point.ATTN_OUT: 1,
    Point.RESID_MID: 2,
    Point.MLP_OUT: 3,
    Point.RESID_POST: 4,
}
_INSIDE = {offset: point for point, offset in _OFFSET.items() if 0 < offset < _PER_LAYER}


class Site(NamedTuple):
    """A point at one layer."""

    point: Point
    layer: int

    @property
    def index(self) -> int:  # type: ignore[override]  # a site is no sequence to search
        """The site's index, equal for both names of a tensor."""
        if self.point is Point.ROUTER_LOGITS:
            return ROUTERS + self.layer
        return _PER_LAYER * self.layer + _OFFSET[self.point]

    @staticmethod
    def names(index: int, num_layers: int) -> tuple["Site", ...]:
        """Every name of a site in a model of `num_layers`, `resid_post` first where it has one."""
        if 0 <= index - ROUTERS < num_layers:
            return (Site(Point.ROUTER_LOGITS, index - ROUTERS),)
        if not 0 <= index < site_count(num_layers):
            raise ValueError(f"site {index} is not one of the {site_count(num_layers)} sites")
        layer, offset = divmod(index, _PER_LAYER)
        if offset in _INSIDE:
            return (Site(_INSIDE[offset], layer),)
        names = []
        if layer > 0:
            names.append(Site(Point.RESID_POST, layer - 1))
        if layer < num_layers:
            names.append(Site(Point.RESID_PRE, layer))
        return tuple(names)


def site_count(num_layers: int) -> int:
    """The number of sites in the stream of `num_layers` decoder blocks."""
    return _PER_LAYER * num_layers + 1
