"""The request of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, SupportsIndex, TypedDict, cast

from rheostat._errors import invalid
from rheostat._fields import builds_message, flag, utf8_text, whole_number, word
from rheostat._points import LayersLike, PointsLike, layers_of, points_of, site_set
from rheostat._runs import lease_duration
from rheostat._selectors import SelectorLike, selector_of, to_wire
from rheostat._steering.interventions import fraction
from rheostat._steering.replacements import ALIGNMENTS
from rheostat._steering.steering import SteeringLike, steering_to_wire
from rheostat._sweeps.grades import NamedGrade
from rheostat._sweeps.pairs import Pair, TokenIds, pair_to_wire
from rheostat_wire.v1 import sweep_pb2, sweep_service_pb2

_DIRECTIONS = {
    "denoise": sweep_pb2.SWEEP_DIRECTION_DENOISE,
    "noise": sweep_pb2.SWEEP_DIRECTION_NOISE,
}
_PRIORITIES = {
    "background": sweep_pb2.SWEEP_PRIORITY_BACKGROUND,
    "normal": sweep_pb2.SWEEP_PRIORITY_NORMAL,
}


class Zoom(TypedDict, total=False):
    """A grid that is run coarse to fine.

    First every ``layer_stride``-th row and ``column_stride``-th column, then every cell around the
    largest effects.
    """

    layer_stride: int
    column_stride: int
    layer_radius: int
    """Default: 3."""
    column_radius: int
    """Default: 3."""
    peak_count: int
    """Largest effects to zoom on, 1 to 16. Default: 1."""


class SweepOptions(TypedDict, total=False):
    """Options of `Engine.sweep`. The server chooses those that are omitted."""

    where: SelectorLike
    """Positions of the clean prompt: a column for each. Default: all. Not with groups."""
    window: int
    """Number of layers that a cell replaces, around its own. Default: 1."""
    direction: Literal["denoise", "noise"]
    """"denoise" runs the corrupt prompt with clean rows, and shows what is enough to restore the
    answer. "noise" runs the clean prompt with corrupt rows, and shows what the answer needs.
    Default: "denoise"; with `Zeros()` and `run_mean` "noise"."""
    alpha: float
    """Weight of the other row, 0 to 1. Default: 1, which gives exactly the other row."""
    align: Literal["identity", "affixes"]
    """How positions correspond. Default: "identity" for prompts of equal length, else
    "affixes": by the longest common beginning, then the longest common end. Columns with other
    positions are skipped."""
    steering: SteeringLike
    """Steering of all runs. The cell's replacement acts after it."""
    lora: str
    """An adapter."""
    zoom: Zoom
    """Runs the grid coarse to fine."""
    baselines: int
    """Runs of each unchanged prompt, which measure the noise of batching. 1 to 64; default 8."""
    concurrency: int
    """Requests that run at a time. Default: 64."""
    priority: Literal["background", "normal"]
    """"background": cells wait while requests wait. Default."""
    pair_values: bool
    """Whether the result has the values of every pair. Default: False."""
    keep_runs: float
    """Seconds for which the captured runs are kept; `SweepResult.run_ids` names them."""


@builds_message
def sweep_request(
    pairs: Sequence[Pair],
    tokens: Mapping[str, TokenIds],
    *,
    points: PointsLike,
    layers: LayersLike,
    grades: Sequence[NamedGrade],
    options: SweepOptions,
) -> sweep_service_pb2.SweepRequest:
    """The message.

    Args:
        pairs: the pairs.
        tokens: the token ids of each text of their answers.
        points: points of the grid.
        layers: layers of the grid.
        grades: the grades.
        options: the rest.
    """
    labels = list(pairs[0].groups)
    contrasts = any(grade.contrasts for grade in grades)
    request = sweep_service_pb2.SweepRequest(
        pairs=[
            pair_to_wire(pair, tokens, labels, f"pairs[{number}]", contrasts=contrasts)
            for number, pair in enumerate(pairs)
        ],
        sites=site_set(points_of(points), layers_of(layers)),
        group_labels=[utf8_text(label, "groups", "a label") for label in labels],
        grades=[grade.message for grade in grades],
        steering=steering_to_wire(options.get("steering")),
        lora_name=utf8_text(options.get("lora", ""), "lora", "an adapter's name"),
        pair_values=flag(options.get("pair_values"), "pair_values", "pair_values"),
        where=to_wire(selector_of(options.get("where"))),
    )
    if "alpha" in options:
        request.alpha = fraction(options["alpha"], "alpha", "alpha")
    numbers: list[tuple[str, str, SupportsIndex | None]] = [
        ("layer_window", "window", options.get("window")),
        ("baseline_count", "baselines", options.get("baselines")),
        ("max_concurrent_cells", "concurrency", options.get("concurrency")),
    ]
    for field, name, given in numbers:
        if given is not None:
            setattr(request, field, whole_number(given, name, name))
    if "direction" in options:
        request.direction = word(options["direction"], _DIRECTIONS, "direction")
    if "align" in options:
        request.alignment = word(options["align"], ALIGNMENTS, "align")
    if "priority" in options:
        request.priority = word(options["priority"], _PRIORITIES, "priority")
    if "keep_runs" in options:
        request.keep_runs.CopyFrom(lease_duration(options["keep_runs"], "keep_runs"))
    zoom: object = options.get("zoom", {})
    if not isinstance(zoom, Mapping):
        raise invalid("zoom", f"zoom is a dict of {', '.join(Zoom.__annotations__)}, not {zoom!r}")
    for name, value in zoom.items():
        if name not in Zoom.__annotations__:
            raise invalid("zoom", f"zoom has {', '.join(Zoom.__annotations__)}, not {name!r}")
        number = whole_number(cast(SupportsIndex, value), f"zoom.{name}", name)
        setattr(request.zoom, name, number)
    return request
