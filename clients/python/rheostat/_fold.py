"""Folding of a response stream: messages in; events out, and one result at the end.

A fold never does I/O, so the sync and the asyncio client share it whole. It checks what the
contract promises: a generation ends with its receipt, and every row that the receipt counts came.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import cast

from rheostat._activations import Activations, Rows, read_captured
from rheostat._errors import DataLoss, ServerError
from rheostat._points import Site
from rheostat._proto.v1 import (
    generation_pb2,
    generation_service_pb2,
    steering_service_pb2,
    types_pb2,
)
from rheostat._receipts import Receipt, read_receipt, read_word
from rheostat._results import (
    Event,
    Finished,
    FinishReason,
    Generation,
    PromptLogprobs,
    Sample,
    Started,
    TokenLogprob,
    TokenLogprobs,
    Tokens,
)
from rheostat._vectors import Vector, read_vector


@dataclass
class _Sample:
    """A sample while it grows."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    rows: dict[Site, list[Rows]] = field(default_factory=dict)
    end: Finished | None = None

    def closed(self, captures: bool) -> Sample:
        if self.end is None:
            raise ServerError("the stream ended with a sample that never finished")
        return Sample(
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=self.end.reason,
            logprobs=tuple(self.logprobs),
            activations=Activations(self.rows, asked=captures),
            stop=self.end.stop,
            first_token_after=self.end.first_token_after,
            finished_after=self.end.finished_after,
        )


class GenerationFold:
    """From `GenerateResponse` messages to events and a `Generation`."""

    def __init__(self, captures: bool = True) -> None:
        """An empty one, of a request with or without captures."""
        self._captures = captures
        self._started = Started("", "", ())
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._samples: dict[int, _Sample] = {}
        self._received: Counter[tuple[int, Site]] = Counter()
        self._receipt: Receipt | None = None

    def feed(self, message: generation_service_pb2.GenerateResponse) -> list[Event]:
        """The message's events; none for kinds of event that this client does not know."""
        match message.WhichOneof("event"):
            case "started":
                one = message.started
                ids = tuple(one.prompt_token_ids.ids)
                self._started = Started(one.request_id, one.model, ids)
                return [self._started]
            case "prompt_logprobs":
                tokens = tuple(_read_logprobs(one) for one in message.prompt_logprobs.tokens)
                self._prompt_logprobs = tokens
                return [PromptLogprobs(tokens)]
            case "tokens":
                return [self._tokens(message.tokens)]
            case "captured":
                rows = read_captured(message.captured)
                for part in rows:
                    site = Site(part.point, part.layer)
                    self._received[message.captured.spec, site] += len(part.positions)
                    self._sample(part.sample).rows.setdefault(site, []).append(part)
                return list(rows)
            case "finished":
                end = _read_finished(message.finished)
                self._sample(end.sample).end = end
                return [end]
            case "receipt":
                self._receipt = read_receipt(message.receipt)
                return [self._receipt]
        return []

    def result(self) -> Generation:
        """The whole, once the stream has ended with OK.

        Raises ServerError where the receipt or a sample's end is missing, DataLoss where fewer rows
        came than the receipt counts.
        """
        if self._receipt is None:
            raise ServerError("the stream ended without a receipt")
        self._check_rows(self._receipt)
        return Generation(
            request_id=self._started.request_id,
            model=self._started.model,
            prompt_token_ids=self._started.prompt_token_ids,
            samples=tuple(
                self._samples[number].closed(self._captures) for number in sorted(self._samples)
            ),
            receipt=self._receipt,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _check_rows(self, receipt: Receipt) -> None:
        for capture in receipt.captures:
            for one in capture.sites:
                came = self._received[capture.index, one.site]
                if came != one.rows:
                    raise DataLoss(
                        f"{came} rows of {one.site} came, the receipt counts {one.rows}",
                        reason="REASON_ROWS_LOST",
                        metadata={"rows": str(one.rows - came)},
                    )

    def _sample(self, number: int) -> _Sample:
        return self._samples.setdefault(number, _Sample())

    def _tokens(self, message: generation_pb2.Tokens) -> Tokens:
        logprobs = tuple(_read_logprobs(one) for one in message.logprobs)
        sample = self._sample(message.sample)
        sample.text.append(message.text)
        sample.token_ids.extend(message.token_ids)
        sample.logprobs.extend(logprobs)
        return Tokens(message.sample, message.text, tuple(message.token_ids), logprobs)


def _read_logprobs(message: generation_pb2.TokenLogprobs) -> TokenLogprobs:
    token, *others = (
        TokenLogprob(one.token_id, one.logprob, one.rank, one.text)
        for one in (message.token, *message.alternatives)
    )
    return TokenLogprobs(token, tuple(others))


def _read_finished(message: generation_pb2.Finished) -> Finished:
    stop: str | int | None = None
    match message.WhichOneof("stop"):
        case "stop_text":
            stop = message.stop_text
        case "stop_token_id":
            stop = message.stop_token_id
        case "rule":
            stop = message.rule
    reason = read_word(types_pb2.FinishReason.Name(message.reason), "FINISH_REASON_")
    return Finished(
        sample=message.sample,
        reason=cast(FinishReason, reason),
        stop=stop,
        first_token_after=message.first_token_after.ToTimedelta().total_seconds(),
        finished_after=message.finished_after.ToTimedelta().total_seconds(),
    )


class DownloadFold:
    """From `GetVectorsResponse` messages to a `Vector` that holds its numbers."""

    def __init__(self) -> None:
        """An empty one."""
        self._info: steering_service_pb2.VectorInfo | None = None
        self._chunks: list[bytes] = []

    def feed(self, message: steering_service_pb2.GetVectorsResponse) -> list[None]:
        """Take the next piece."""
        if message.WhichOneof("part") == "info":
            self._info = message.info
        else:
            self._chunks.append(message.chunk)
        return []

    def result(self) -> Vector:
        """The vector. Raises DataLoss where its bytes do not have its digest."""
        if self._info is None:
            raise ServerError("the server sent a vector without a header")
        vector = read_vector(self._info, b"".join(self._chunks))
        if vector.rows is not None and vector.rows.digest.hex() != vector.digest:
            raise DataLoss(
                f"the bytes that came are not those of {vector.label}",
                reason="REASON_DIGEST_MISMATCH",
            )
        return vector
