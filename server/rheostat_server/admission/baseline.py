"""A request beside itself without its steering: what else runs for that, and with which settings.

Invariant: a baseline differs from its request in the request's own steering, patches and rules
alone. Only what the client asked for is sent; what the comparison needs beyond that stays here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rheostat_engine import Plan
from rheostat_server.engine.sampling import SamplingSettings
from rheostat_wire.v1 import generation_pb2

COMPARED = 20
"""Most likely tokens of each side that are compared, if the model gives so many log-probabilities
and the request does not ask for more."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A request's baseline."""

    plan: Plan
    """Server-wide steering and the request's captures, under the request's own id."""
    compared: int
    """Most likely tokens of each side that are compared."""
    model_tokens: int
    """Tokens that the context holds."""


def compared_logprobs(sampling: SamplingSettings, limit: int) -> int:
    """How many of the most likely tokens are compared where a model gives `limit` of them."""
    return min(limit, max(COMPARED, sampling.logprobs or 0))


def watched_sampling(sampling: SamplingSettings, baseline: Baseline) -> SamplingSettings:
    """The settings of a request's own samples, with log-probabilities enough to compare."""
    return replace(sampling, logprobs=max(baseline.compared, sampling.logprobs or 0))


def asked_for(
    readings: Sequence[generation_pb2.TokenLogprobs], wanted: int | None
) -> list[generation_pb2.TokenLogprobs]:
    """Of log-probabilities at some tokens those that the client asked for."""
    if wanted is None:
        return []
    return [
        generation_pb2.TokenLogprobs(
            token=reading.token,
            alternatives=[entry for entry in reading.alternatives if entry.rank <= wanted],
        )
        for reading in readings
    ]


def scored_tokens(
    baseline: Baseline, prompt: tuple[int, ...], tokens: Sequence[int]
) -> tuple[int, ...]:
    """A prompt and the generated tokens behind it whose log-probabilities the baseline can give.

    Scoring generates a token of its own, so what fills the context loses its last token.
    """
    return (*prompt, *tokens)[: baseline.model_tokens - 1]


def scoring_sampling(baseline: Baseline) -> SamplingSettings:
    """The settings of a run that only reads its prompt."""
    return SamplingSettings(
        max_tokens=1, temperature=0.0, prompt_logprobs=baseline.compared, ignore_eos=True
    )
