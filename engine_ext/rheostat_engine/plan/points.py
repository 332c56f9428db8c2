"""Points, layers and sites, and the one number that stands for a site inside the engine.

Invariant: two names of the same tensor have the same index, and indices ascend as a sequential
block comes to its sites. `resid_post` of layer L and `resid_pre` of layer L+1 are one site,
4 * (L + 1). 4 * L + 1, 2 and 3 are `attn_out`, `resid_mid` and `mlp_out` of layer L. A model of N
layers has the sites 0 ... 4N. Beside them, `router_logits` of layer L is `ROUTERS` + L: it is no
part of the stream, can only be captured, and few models have it.
"""

from enum import StrEnum
from typing import NamedTuple


class Point(StrEnum):
    """A point in a decoder block, by its name in TransformerLens."""

    RESID_PRE = "resid_pre"
    """The stream that enters the block."""

    RESID_MID = "resid_mid"
    """The stream after attention is added; parallel blocks have none."""

    RESID_POST = "resid_post"
    """The stream that leaves the block."""

    ATTN_OUT = "attn_out"
    """The output of attention as it is added to the stream: normed and scaled."""

    MLP_OUT = "mlp_out"
    """The output of the MLP or mixture as it is added to the stream."""

    ROUTER_LOGITS = "router_logits"
    """The logit of each expert from a mixture's router, before any softmax."""


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
        """The site's number, equal for both names of one tensor."""
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
    """How many sites the stream of `num_layers` decoder blocks has."""
    return _PER_LAYER * num_layers + 1
