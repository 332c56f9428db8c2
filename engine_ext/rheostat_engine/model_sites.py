"""The sites of the loaded model, and the reasons for missing sites.

Invariant: a site is served on every rank with its layer, or refused with a reason. All ranks must
agree about the model's shape.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from rheostat_engine.plan.capacity import Capacity
from rheostat_engine.plan.points import Point, Site

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
    world_size: int
    """The number of worker processes that report."""
    experts: Mapping[int, int] = field(default_factory=dict)
    """The number of experts by layer, for routers that are served."""
    unrouted: Mapping[int, str] = field(default_factory=dict)
    """By layer: why the router of a mixture of experts is not served."""
    block_layouts: Mapping[int, str] = field(default_factory=dict)
    """By layer: the stream layout of the block, "pair" or "single"."""
    variants: tuple[str, ...] = ()
    """Names of the step counters of the workers."""
    no_lens: str = ""
    """Why rows can't be read with the model's unembedding; empty if they can."""
    no_directions: str = ""
    """Why tokens have no directions; empty if they have."""
    embedding_std: float = 0.0
    """Standard deviation of all elements of the token embedding, as they enter the stream; 0 if
    it can't be measured."""
    embedding_refused: str = ""
    """Why it can't be measured; empty if it can."""

    def width_of(self, site: Site) -> int:
        """The width of a served site's rows."""
        return self.experts[site.layer] if site.point is Point.ROUTER_LOGITS else self.width

    def supports(self, site: Site) -> str | None:
        """The reason why a site is not served; None if it is."""
        if not 0 <= site.layer < self.num_layers:
            return f"layer {site.layer} is not one of the model's {self.num_layers} layers"
        if site.point is Point.ROUTER_LOGITS:
            if site.layer in self.experts:
                return None
            return self.unrouted.get(site.layer, NO_MIXTURE)
        return self.refused.get(site.point)

    def layout_of(self, site: Site) -> str:
        """The stream layout at a site; empty for router logits."""
        return "" if site.point is Point.ROUTER_LOGITS else self.block_layouts.get(site.layer, "")

    @classmethod
    def from_reports(cls, reports: Sequence[Mapping[str, object]]) -> "ModelSites":
        """Merges the results of `rheostat_describe` from all workers.

        Raises:
            ValueError: the workers describe different models.
        """
        first = reports[0]
        for key in ("architecture", "num_layers", "width", "dtype", "runner"):
            if any(report[key] != first[key] for report in reports):
                raise ValueError(f"workers disagree about the model's {key}: {reports}")
        refused: dict[Point, str] = {}
        for report in reports:
            for point, reason in cast(Mapping[str, str], report["refused"]).items():
                refused.setdefault(Point(point), reason)
        embedding = _embedding(reports)
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
            block_layouts=cast(dict[int, str], _by_layer(reports, "block_layouts")),
            variants=tuple(cast(Sequence[str], first["variants"])),
            no_lens=next((str(r["no_lens"]) for r in reports if r["no_lens"]), ""),
            no_directions=next(
                (str(r["no_directions"]) for r in reports if r["no_directions"]), ""
            ),
            embedding_std=embedding.std,
            embedding_refused=embedding.refused,
        )


class _Embedding(NamedTuple):
    std: float
    refused: str


def _embedding(reports: Sequence[Mapping[str, object]]) -> _Embedding:
    """Adds up the ranks' parts of the token embedding."""
    reported = [cast(Mapping[str, object], r["embedding"]) for r in reports if r["embedding"]]
    for part in reported:
        if part["refused"]:
            return _Embedding(0.0, str(part["refused"]))
    # Ranks whose parts begin at the same token have the same part.
    parts = {cast(int, part["first"]): part for part in reported}
    count, total, squares = (
        math.fsum(cast(float, part[key]) for _, part in sorted(parts.items()))
        for key in ("count", "total", "squares")
    )
    if not count:
        return _Embedding(0.0, "no worker has the token embedding")
    variance = squares / count - (total / count) ** 2
    std = math.sqrt(variance) if variance > 0 else variance
    if not std > 0 or math.isinf(std):
        return _Embedding(0.0, f"the token embedding's standard deviation is {std:g}")
    return _Embedding(std, "")


def _by_layer(reports: Sequence[Mapping[str, object]], key: str) -> dict[int, object]:
    merged: dict[int, object] = {}
    for report in reports:
        values = cast(Mapping[int, object], report[key])
        merged |= {int(layer): value for layer, value in values.items()}
    return dict(sorted(merged.items()))


def _least(capacities: Sequence[Mapping[str, int]]) -> Capacity:
    return Capacity(**{key: min(capacity[key] for capacity in capacities) for key in capacities[0]})
