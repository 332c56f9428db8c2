"""What the loaded model offers: its sites, and for those that it lacks, why.

Invariant: a site is served on every rank that holds its layer or refused by name; no rank may
disagree about the model's shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from rheostat_engine.capacity import Capacity
from rheostat_engine.points import Point, Site

NO_MIXTURE = "the layer has no mixture of experts"


@dataclass(frozen=True)
class ModelSites:
    """The model's sites and the extension's limits."""

    architecture: str
    """vLLM's name of the architecture."""
    num_layers: int
    """Decoder blocks."""
    width: int
    """W: width of the residual stream."""
    dtype: str
    """"float32", "bfloat16" or "float16"."""
    runner: str
    """vLLM's model runner: "V1" or "V2"."""
    refused: Mapping[Point, str]
    """Points of the stream that this model lacks, with the reason."""
    capacity: Capacity
    """What the engine can hold at the same time."""
    world_size: int
    """Worker processes that report."""
    experts: Mapping[int, int] = field(default_factory=dict)
    """From how many experts a layer's router chooses, by layer; only where that can be read."""
    unrouted: Mapping[int, str] = field(default_factory=dict)
    """Why the router of a layer with a mixture of experts can't be read."""
    block_forms: Mapping[int, str] = field(default_factory=dict)
    """How the block of each layer holds the stream: "pair" or "single"."""
    variants: tuple[str, ...] = ()
    """Names by which the workers count their steps."""

    def width_of(self, site: Site) -> int:
        """How many values a row of a served site has."""
        return self.experts[site.layer] if site.point is Point.ROUTER_LOGITS else self.width

    def supports(self, site: Site) -> str | None:
        """None where the site is served, otherwise why it isn't."""
        if not 0 <= site.layer < self.num_layers:
            return f"layer {site.layer} is not one of the model's {self.num_layers} layers"
        if site.point is Point.ROUTER_LOGITS:
            if site.layer in self.experts:
                return None
            return self.unrouted.get(site.layer, NO_MIXTURE)
        return self.refused.get(site.point)

    def form_of(self, site: Site) -> str:
        """How the stream is held at a site; empty for a router, which holds no stream."""
        return "" if site.point is Point.ROUTER_LOGITS else self.block_forms.get(site.layer, "")

    @classmethod
    def from_reports(cls, reports: Sequence[Mapping[str, object]]) -> "ModelSites":
        """Merges what each worker says of itself.

        Raises:
            ValueError: the workers don't speak of the same model.
        """
        first = reports[0]
        for key in ("architecture", "num_layers", "width", "dtype", "runner"):
            if any(report[key] != first[key] for report in reports):
                raise ValueError(f"workers disagree about the model's {key}: {reports}")
        refused: dict[Point, str] = {}
        for report in reports:
            for point, reason in cast(Mapping[str, str], report["refused"]).items():
                refused.setdefault(Point(point), reason)
        return cls(
            architecture=str(first["architecture"]),
            num_layers=cast(int, first["num_layers"]),
            width=cast(int, first["width"]),
            dtype=str(first["dtype"]),
            runner=str(first["runner"]),
            refused=refused,
            capacity=_least([cast(Mapping[str, int], r["capacity"]) for r in reports]),
            world_size=sum(1 for r in reports if r["reports"]),
            experts=cast(dict[int, int], _by_layer(reports, "experts")),
            unrouted=cast(dict[int, str], _by_layer(reports, "unrouted")),
            block_forms=cast(dict[int, str], _by_layer(reports, "block_forms")),
            variants=tuple(cast(Sequence[str], first["variants"])),
        )


def _by_layer(reports: Sequence[Mapping[str, object]], key: str) -> dict[int, object]:
    found: dict[int, object] = {}
    for report in reports:
        values = cast(Mapping[int, object], report[key])
        found |= {int(layer): value for layer, value in values.items()}
    return dict(sorted(found.items()))


def _least(capacities: Sequence[Mapping[str, int]]) -> Capacity:
    return Capacity(**{key: min(one[key] for one in capacities) for key in capacities[0]})
