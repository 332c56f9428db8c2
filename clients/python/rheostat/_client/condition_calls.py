"""The calls that fit conditions, as values of `rheostat._connection.calls`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from rheostat._client.vector_calls import prompts_to_wire
from rheostat._connection.calls import DownloadCall
from rheostat._errors import invalid
from rheostat._fields import Number, builds_message, utf8_text, vector_name, with_paths, word
from rheostat._points import LayersLike, PointsLike, layers_of, points_of, site_set
from rheostat._prompts import Prompt
from rheostat._selectors import SelectorLike, prompt_tokens
from rheostat._steering.condition_fits import (
    FIT_DIRECTIONS,
    ConditionFits,
    ConditionFitsAccumulator,
    FitDirection,
    PromptCounts,
)
from rheostat._steering.gates import POOLS, PROBE_ROWS, Pool, ProbeRows
from rheostat._steering.readouts import NORMALISATIONS, Normalise
from rheostat._steering.transfers import Progress
from rheostat._steering.vectors import Intervention, Vector, VectorSource, refuse_dose, row_ref
from rheostat_wire.v1 import steering_service_pb2


@builds_message
def fit_conditions(
    positive: Iterable[Prompt],
    negative: Iterable[Prompt],
    *,
    points: PointsLike,
    layers: LayersLike,
    where: SelectorLike,
    rows: ProbeRows | Iterable[ProbeRows],
    pools: Pool | Iterable[Pool] | None,
    directions: FitDirection | Iterable[FitDirection] | None,
    vectors: Vector | Iterable[Vector],
    normalises: Normalise | Iterable[Normalise],
    name: str | None,
    description: str,
    lora: str | None,
    progress: Progress | None,
) -> DownloadCall[steering_service_pb2.FitConditionsResponse, None, ConditionFits]:
    at_layers = layers_of(layers)
    given = (
        [vectors] if isinstance(vectors, Vector | Intervention | VectorSource) else list(vectors)
    )
    for vector, path in with_paths(given, "vectors"):
        refuse_dose(vector, path)
        if not isinstance(vector, Vector):
            raise invalid(
                path,
                f"a direction is a vector, not {type(vector).__name__}: give vectors, e.g. "
                "rheostat.named(name) or rheostat.inline(array)",
            )
    tried_rows = tuple(_words(rows))
    if pools is not None and set(tried_rows) == {"prompt_mean"}:
        raise invalid(
            "pools",
            'rows="prompt_mean" has one reading of each prompt: leave pools out, or give '
            'rows=("each", "prompt_mean")',
        )
    tried_pools = ("last", "mean") if pools is None else pools
    request = steering_service_pb2.FitConditionsRequest(
        positive=prompts_to_wire(positive, "positive"),
        negative=prompts_to_wire(negative, "negative"),
        sites=site_set(points_of(points), at_layers),
        pools=_to_wire(tried_pools, POOLS, "pools"),
        directions=_to_wire(directions or (), FIT_DIRECTIONS, "directions"),
        vectors=[row_ref(vector, at_layers, path) for vector, path in with_paths(given, "vectors")],
        normalises=_to_wire(normalises, NORMALISATIONS, "normalises"),
        name="" if name is None else vector_name(name),
        description=utf8_text(description, "description", "a description"),
        lora_name="" if lora is None else utf8_text(lora, "lora", "an adapter's name"),
        where=None if where is None else prompt_tokens(where),
    )
    read = _to_wire(tried_rows, PROBE_ROWS, "rows")
    if read != [PROBE_ROWS["each"]]:  # the default, which servers of earlier versions know too
        request.rows.extend(read)
    return DownloadCall(
        "/rheostat.v1.SteeringService/FitConditions",
        request,
        steering_service_pb2.FitConditionsResponse,
        partial(
            ConditionFitsAccumulator,
            name,
            given,
            PromptCounts(len(request.positive), len(request.negative)),
            progress,
        ),
    )


def _to_wire(words: Iterable[str], values: Mapping[str, Number], path: str) -> list[Number]:
    """The enum values of a word, or of several."""
    return [word(given, values, at) for given, at in with_paths(_words(words), path)]


def _words(given: Iterable[str]) -> Iterable[str]:
    """Makes a tuple of a single word, which is iterable itself."""
    return (given,) if isinstance(given, str) else given
