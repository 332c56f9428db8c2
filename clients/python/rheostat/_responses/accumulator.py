"""Accumulates a response stream: messages in, events out, and one result at the end.

An accumulator does no I/O, so both clients share it. It checks that a generation ends with its
receipt, and that every row that the receipt counts arrived, unless the row has another destination.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from rheostat._capture.activations import Activations, Rows, read_captured
from rheostat._errors import DataLoss, ServerError
from rheostat._fields import counted
from rheostat._points import Site
from rheostat._responses.receipts import Receipt, read_receipt
from rheostat._responses.results import (
    Divergence,
    Event,
    Finished,
    Generation,
    PromptLogprobs,
    Sample,
    Samples,
    Started,
    TokenLogprob,
    TokenLogprobs,
    Tokens,
    read_dropped,
    read_finish_reason,
)
from rheostat._responses.signals import SignalColumn, Signals, joined, read_signals, read_table
from rheostat_wire.v1 import capture_pb2, generation_pb2, generation_service_pb2

_Response: TypeAlias = (
    generation_service_pb2.GenerateResponse | generation_service_pb2.SessionResponse
)
"""Both have fields of the same name for their common events."""


class _Key(NamedTuple):
    baseline: bool
    number: int


@dataclass
class _Sample:
    """The parts of a sample that have arrived."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    rows: dict[Site, list[Rows]] = field(default_factory=dict)
    signals: list[Signals] = field(default_factory=list)
    end: Finished | None = None
    divergence: Divergence | None = None

    def result(
        self,
        in_answer: bool,
        destinations: Sequence[str],
        columns: tuple[SignalColumn, ...],
    ) -> Sample:
        if self.end is None:
            raise ServerError("the stream ended with a sample that never finished")
        return Sample(
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=self.end.reason,
            logprobs=tuple(self.logprobs),
            activations=Activations(self.rows, in_answer=in_answer, destinations=destinations),
            stop=self.end.stop,
            first_token_after=self.end.first_token_after,
            finished_after=self.end.finished_after,
            divergence=self.divergence,
            signals=joined(self.end.sample, self.signals, columns),
            label=self.end.label,
            policy_version=self.end.policy_version,
        )


class GenerationAccumulator:
    """Turns messages into events and a `Generation`; its baseline is accumulated separately."""

    def __init__(self, request: generation_service_pb2.GenerateRequest) -> None:
        self._destinations = {
            number: _destination(capture)
            for number, capture in enumerate(request.captures)
            if not capture.HasField("inline")
        }
        self._in_answer = len(request.captures) > len(self._destinations)
        self._with_baseline = request.with_baseline
        self._started = Started("", "", ())
        self._prompt_logprobs: dict[bool, tuple[TokenLogprobs, ...]] = {}
        self._samples: defaultdict[_Key, _Sample] = defaultdict(_Sample)
        self._received: dict[int, Counter[Site]] = {}
        """Rows that have come, by capture and site."""
        self._columns: tuple[SignalColumn, ...] = ()
        self._receipt: Receipt | None = None

    def add(self, message: _Response) -> list[Event]:
        """The events of a message; none if this client does not know the kind of event."""
        match message.WhichOneof("event"):
            case "started":
                started = message.started
                ids = tuple(started.prompt_token_ids.ids)
                self._started = Started(started.request_id, started.model_name, ids)
                return [self._started]
            case "prompt_logprobs":
                prompt = message.prompt_logprobs
                tokens = tuple(_read_logprobs(entry) for entry in prompt.tokens)
                self._prompt_logprobs[prompt.baseline] = tokens
                return [PromptLogprobs(tokens, prompt.baseline)]
            case "tokens":
                return [self._tokens(message.tokens)]
            case "captured":
                return self._captured(message.captured)
            case "dropped":
                return [read_dropped(message.dropped, 0, self._started.request_id)]
            case "signal_table":
                self._columns = read_table(message.signal_table)
                return []
            case "signals":
                signals = read_signals(message.signals, self._columns)
                self._sample(False, signals.sample).signals.append(signals)
                return [signals]
            case "finished":
                end = _read_finished(message.finished)
                self._sample(end.baseline, end.sample).end = end
                return [end]
            case "divergence":
                divergence = _read_divergence(message.divergence)
                self._sample(False, divergence.sample).divergence = divergence
                return [divergence]
            case "receipt":
                self._receipt = read_receipt(message.receipt)
                return [self._receipt]
            case "batch" if isinstance(message, generation_service_pb2.GenerateResponse):
                return [event for one in message.batch.events for event in self.add(one)]
        return []

    def result(self) -> Generation:
        """The generation, once the stream has ended with OK.

        Raises ServerError if the receipt, the baseline or the end of a sample is missing, DataLoss
        if the number of rows is not that of the receipt.
        """
        if self._receipt is None:
            raise ServerError("the stream ended without a receipt")
        self._check_rows(self._receipt)
        baseline = self._results(True)
        if self._with_baseline and not baseline:
            raise ServerError("the stream ended without the baseline that was asked for")
        return Generation(
            request_id=self._started.request_id,
            model_name=self._started.model_name,
            prompt_token_ids=self._started.prompt_token_ids,
            samples=self._results(False),
            receipt=self._receipt,
            prompt_logprobs=self._prompt_logprobs.get(False, ()),
            baseline=(
                Samples(samples=baseline, prompt_logprobs=self._prompt_logprobs.get(True, ()))
                if baseline
                else None
            ),
        )

    def _results(self, baseline: bool) -> tuple[Sample, ...]:
        """The samples in order, of the baseline or of the request itself."""
        destinations = list(self._destinations.values())
        columns = () if baseline else self._columns
        return tuple(
            sample.result(self._in_answer, destinations, columns)
            for key, sample in sorted(self._samples.items())
            if key.baseline is baseline
        )

    def _check_rows(self, receipt: Receipt) -> None:
        for capture in receipt.captures:
            if capture.index in self._destinations:
                continue
            received = self._received.get(capture.index, Counter())
            for captured in capture.sites:
                row_count = received[captured.site]
                if row_count != captured.row_count:
                    raise DataLoss(
                        f"{counted(row_count, 'row')} of {captured.site} came, "
                        f"the receipt counts {captured.row_count}",
                        reason="REASON_ROWS_LOST",
                        metadata={"rows": str(captured.row_count - row_count)},
                    )

    def _sample(self, baseline: bool, number: int) -> _Sample:
        return self._samples[_Key(baseline, number)]

    def _captured(self, message: capture_pb2.Captured) -> list[Event]:
        parts = read_captured(message)  # nothing is kept of a message that cannot be read
        own = self._sample(message.baseline, message.sample).rows
        received: Counter[Site] = Counter()  # the receipt does not count rows of the baseline
        if not message.baseline:
            received = self._received.setdefault(message.capture_index, received)
        for part in parts:
            site = Site(part.point, part.layer)
            received[site] += len(part.positions)
            own.setdefault(site, []).append(part)
        return list(parts)

    def _tokens(self, message: generation_pb2.Tokens) -> Tokens:
        logprobs = tuple(_read_logprobs(entry) for entry in message.logprobs)
        sample = self._sample(message.baseline, message.sample)
        sample.text.append(message.text)
        sample.token_ids.extend(message.token_ids)
        sample.logprobs.extend(logprobs)
        return Tokens(
            message.sample, message.text, tuple(message.token_ids), logprobs, message.baseline
        )


def _destination(capture: capture_pb2.CaptureSpec) -> str:
    """The destination of a capture, in words."""
    match capture.WhichOneof("to"):
        case "sink":
            return f"the sink {capture.sink.sink_name!r}"
        case "run":
            return f"the run {capture.run.run_id!r}" if capture.run.run_id else "a run"
        case _:
            return f"the subscription {capture.subscription_id!r}"


def _read_logprobs(message: generation_pb2.TokenLogprobs) -> TokenLogprobs:
    token, *others = (
        TokenLogprob(entry.token_id, entry.logprob, entry.rank, entry.text)
        for entry in (message.token, *message.alternatives)
    )
    return TokenLogprobs(token, tuple(others))


def _read_finished(message: generation_pb2.Finished) -> Finished:
    stop: str | int | None = None
    match message.WhichOneof("stop"):
        case "stop_text":
            stop = message.stop_text
        case "stop_token_id":
            stop = message.stop_token_id
        case "rule_name":
            stop = message.rule_name
    return Finished(
        sample=message.sample,
        reason=read_finish_reason(message.reason),
        stop=stop,
        first_token_after=message.first_token_after.ToTimedelta().total_seconds(),
        finished_after=message.finished_after.ToTimedelta().total_seconds(),
        baseline=message.baseline,
        label=message.rule_label or message.watch_label,
        policy_version=message.policy_version,
    )


def _read_divergence(message: generation_pb2.Divergence) -> Divergence:
    return Divergence(
        sample=message.sample,
        kl=np.array(message.kl, np.float32),
        compared=np.array(message.compared, np.float32),
        baseline_logprobs=np.array(message.baseline_logprobs, np.float32),
        mean_kl=message.mean_kl,
    )
