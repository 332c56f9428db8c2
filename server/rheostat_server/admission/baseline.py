"""Baselines: a request is compared with itself without its own steering.

Invariant: a baseline differs from its request only in the request's own steering, patches and
rules. Log-probabilities that only the comparison needs are not sent to the client.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rheostat_engine import Plan
from rheostat_server.engine.sampling import SamplingSettings
from rheostat_wire.v1 import generation_pb2

COMPARED = 20
"""Number of most likely tokens that are compared, unless the model gives fewer log-probabilities or
the request asks for more."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A request's baseline."""

    plan: Plan
    """The plan of the server-wide steering and of the request's captures, under its id."""
    compared: int
    """Number of most likely tokens that are compared."""
    model_tokens: int
    """Context length in tokens."""


def compared_logprobs(sampling: SamplingSettings, limit: int) -> int:
    """Number of most likely tokens that are compared if the model gives at most `limit`."""
    return min(limit, max(COMPARED, sampling.logprobs or 0))


def watched_sampling(sampling: SamplingSettings, baseline: Baseline) -> SamplingSettings:
    """The settings of a request's own samples, with the log-probabilities that are compared."""
    return replace(sampling, logprobs=max(baseline.compared, sampling.logprobs or 0))


def asked_for(
    readings: Sequence[generation_pb2.TokenLogprobs], wanted: int | None
) -> list[generation_pb2.TokenLogprobs]:
    """The log-probabilities that the client asked for."""
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
    """The prompt and the generated tokens that the baseline can score.

    Scoring generates one token, so a text that fills the context is scored without its last token.
    """
    return (*prompt, *tokens)[: baseline.model_tokens - 1]


def scoring_sampling(baseline: Baseline) -> SamplingSettings:
    """The settings of a sequence that only scores its prompt."""
    return SamplingSettings(
        max_tokens=1, temperature=0.0, prompt_logprobs=baseline.compared, ignore_eos=True
    )
