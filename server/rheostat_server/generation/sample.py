"""Turns the output of one sample into messages for the client.

Invariant: no token of a sample is sent before the engine has installed its plan.
"""

import time
from collections.abc import Sequence

from google.protobuf import duration_pb2

from rheostat_engine import Released, Spans
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.admission.baseline import asked_for
from rheostat_server.delivery.byte_budget import ByteCounter
from rheostat_server.engine.backend import Delta, Ending, StoppedBy
from rheostat_server.requests.delta_weight import readings_weight
from rheostat_server.requests.sequence import FINISH_REASONS, EngineSequence, SequenceKind
from rheostat_server.selectors.selection import Selection
from rheostat_wire.v1 import generation_pb2, generation_service_pb2

Response = generation_service_pb2.GenerateResponse


class Sample:
    """A sample of an active request, as its client sees it."""

    def __init__(
        self,
        admitted: AdmittedRequest,
        sequence: EngineSequence,
        admitted_at: float,
        byte_counter: ByteCounter,
    ) -> None:
        """Makes a sample without output.

        Args:
            admitted: the request.
            sequence: the sample in the engine; it may belong to the baseline.
            admitted_at: when the request was admitted, by `time.monotonic`.
            byte_counter: counts the memory of `readings`.
        """
        self.index = sequence.sample
        self.tokens: list[int] = []
        self.readings: list[generation_pb2.TokenLogprobs] = []
        """Log-probabilities, one per token, if the sample is compared with a baseline."""
        self.cached_tokens = 0
        self.ended = False
        self.ending: Ending | None = None
        """How it ended; None while it runs."""
        self.released: Released | None = None
        self.signals_end = 0
        """One past the last position whose signals were sent."""
        self.sequence = sequence
        self._baseline = sequence.kind is SequenceKind.BASELINE
        self._compared = sequence.kind is SequenceKind.OWN and admitted.baseline is not None
        self._admitted = admitted
        self._admitted_at = admitted_at
        self._first_token_at: float | None = None
        self.stopped_by: StoppedBy | None = None
        """The rule or the watch that ended it, if one has."""
        self._logprob_sum = 0.0
        self._byte_counter = byte_counter
        self._readings_weight = 0

    @property
    def done(self) -> bool:
        """Whether no more output or events can come."""
        return self.ended and (self.released is not None or not self.sequence.job.has_plan)

    def gain_at(self, source: tuple[str, int], index: int, position: int) -> float:
        """The gain of an intervention at one of the sample's last positions.

        Args:
            source: `Intervention.source`.
            index: its index in that list.
            position: the position.
        """
        for applied in reversed(self.sequence.gains):
            if applied.source == source and applied.first <= position:
                return applied.gains[index]
        return 1.0

    def last_gain(self, source: tuple[str, int], index: int) -> float | None:
        """The last gain of an intervention; None if none was set. Arguments as in `gain_at`."""
        gains = self.sequence.last_gains.get(source)
        return None if gains is None else gains[index]

    @property
    def row_end(self) -> int:
        """One past the last position that was an input of the model.

        The last token is no input, unless a rule stopped the sample at its row, or its session
        ended after the signals of its row had left.
        """
        end = self.token_end
        if self.ending in (Ending.RULE, Ending.WATCH) and self.sequence.fired_row == end - 1:
            return end
        return max(end - 1, self.signals_end)

    @property
    def token_end(self) -> int:
        """One past the position of the last token."""
        return self._admitted.prompt_len + len(self.tokens)

    def selected(self, selection: Selection, start: int, end: int) -> Spans:
        """The positions in [start, end) that a selection selects in this sample."""
        return selection.selected(self._admitted.prompt_len, self.tokens, start, end)

    def take(self, delta: Delta) -> list[Response]:
        """The messages of a delta."""
        if delta.prompt_logprobs is None and delta.ending is None:  # most deltas
            return [self.message(delta)] if delta.token_ids or delta.text else []
        responses = []
        if delta.prompt_logprobs is not None:
            reading = generation_pb2.PromptLogprobs(
                tokens=delta.prompt_logprobs, baseline=self._baseline
            )
            responses.append(Response(prompt_logprobs=reading))
        if delta.token_ids or delta.text:
            responses.append(self.message(delta))
        if delta.ending is not None:
            self.ended = True
            self.ending = delta.ending
            responses.append(self._finished(delta, delta.ending))
        return responses

    def free_readings(self) -> None:
        """Frees `readings` once the sample has been compared."""
        self.readings = []
        self._byte_counter.add_tokens(-self._readings_weight)
        self._readings_weight = 0

    def message(self, delta: Delta) -> Response:
        """The message of new tokens.

        Fields are set in place, because a constructor that copies a message takes four times as
        long, and there may be such a message for each token.
        """
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()
            self.cached_tokens = delta.cached_tokens
        response = Response()
        message = response.tokens
        if self.index:
            message.sample = self.index
        if self._baseline:
            message.baseline = True
        message.offset = len(self.tokens)
        message.token_ids.extend(delta.token_ids)
        message.text = delta.text
        if delta.logprobs:
            message.logprobs.extend(self._logprobs(delta))
        self.tokens += delta.token_ids
        return response

    def _logprobs(self, delta: Delta) -> Sequence[generation_pb2.TokenLogprobs]:
        """The log-probabilities that the client asked for."""
        readings = delta.logprobs
        self._logprob_sum += sum(reading.token.logprob for reading in readings)
        if not self._compared:
            return readings
        self.readings += readings
        size = readings_weight(readings)
        self._readings_weight += size
        self._byte_counter.add_tokens(size)
        return asked_for(readings, self._admitted.sampling.logprobs)

    def _finished(self, delta: Delta, ending: Ending) -> Response:
        """The message of a sample's end. Its fields are set in place, as in `message`."""
        response = Response()
        message = response.finished
        message.sample = self.index
        message.baseline = self._baseline
        message.reason = FINISH_REASONS[ending]
        message.token_count = len(self.tokens)
        self._set_duration(message.finished_after, time.monotonic())
        stop = delta.stop
        if isinstance(stop, StoppedBy):
            self.stopped_by = stop
            if stop.watch:
                message.watch_label = stop.label
            else:
                message.rule_name = stop.rule_name
                message.rule_label = stop.label
                message.policy_version = stop.policy
        elif ending is Ending.STOP:
            if stop is None and self.tokens:
                stop = self.tokens[-1]
            if isinstance(stop, str):
                message.stop_text = stop
            elif stop is not None:
                message.stop_token_id = stop
        if self._admitted.sampling.logprobs is not None:
            message.cumulative_logprob = self._logprob_sum
        if self._first_token_at is not None:
            self._set_duration(message.first_token_after, self._first_token_at)
        return response

    def _set_duration(self, duration: duration_pb2.Duration, moment: float) -> None:
        """Sets the time from admission to a later moment."""
        nanoseconds = int((moment - self._admitted_at) * 1e9)
        duration.seconds, duration.nanos = divmod(nanoseconds, 1_000_000_000)
