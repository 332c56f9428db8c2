"""Compares a sample with its baseline: the engine scores the sample's tokens without its steering.

Invariant: the baseline gets exactly the prompt and the tokens that the sample generated, under
server-wide steering alone.
"""

from collections.abc import Sequence
from dataclasses import replace

from rheostat_engine import Event, Installed, Released
from rheostat_server.admission.baseline import Baseline, scored_tokens, scoring_sampling
from rheostat_server.engine.backend import Delta, Ending, Job
from rheostat_server.generation.divergence import measure
from rheostat_server.generation.sample import Sample
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.sequence import EngineSequence, SequenceKind
from rheostat_server.tasks.offload import offload
from rheostat_wire.v1 import generation_pb2

_READING_BYTES = 64
"""Bytes that `offload` counts for a log-probability."""


class Score:
    """The comparison of one sample."""

    def __init__(self, sample: Sample, sequence: EngineSequence) -> None:
        """The engine has not scored the sample yet."""
        self.released: Released | None = None
        self._sample = sample
        self._sequence = sequence
        self._installed = not sequence.job.has_plan
        self._ended = False
        self._failed = False
        self._readings: Sequence[generation_pb2.TokenLogprobs] = ()

    @property
    def done(self) -> bool:
        """Whether no more output or events can come."""
        settled = self.released is not None or not self._sequence.job.has_plan
        return self._ended and settled

    def take(self, what: Delta | Event) -> None:
        """Handles output or an event of the scoring sequence."""
        if isinstance(what, Installed):
            self._installed = True
        elif isinstance(what, Released):
            self.released = what
        elif isinstance(what, Delta):
            self._readings = what.prompt_logprobs or self._readings
            self._ended = self._ended or what.ending is not None
            self._failed = self._failed or what.ending is Ending.ABORTED

    async def divergence(self, prompt_len: int) -> generation_pb2.Divergence | None:
        """The divergence, once the comparison is done; None if it was aborted.

        Args:
            prompt_len: tokens of the prompt.
        """
        if self._failed or not self._installed:
            return None
        steered, baseline = self._sample.readings, self._readings[prompt_len - 1 :]
        logprobs = sum(len(reading.alternatives) for reading in steered)
        divergence = await offload(
            logprobs * _READING_BYTES, measure, self._sample.index, steered, baseline
        )
        self._sample.free_readings()
        return divergence


def scoring_sequence(
    active: ActiveRequest, baseline: Baseline, sample: Sample
) -> EngineSequence | None:
    """The sequence that scores an ended sample; None if the sample has no tokens to score."""
    prompt = active.admitted.prompt.token_ids
    tokens = scored_tokens(baseline, prompt, sample.tokens)
    if len(tokens) == len(prompt):
        return None
    plan = replace(
        baseline.plan, request_id=active.plan_id(sample.index, SequenceKind.SCORE), captures=()
    )
    job = Job(plan, tokens, scoring_sampling(baseline), 0, active.admitted.lora)
    return EngineSequence(job, SequenceKind.SCORE, sample.index)
