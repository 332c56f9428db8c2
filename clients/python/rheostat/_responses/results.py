"""The results of a generation: events while it runs, and a `Generation` at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, cast

from rheostat._capture.activations import Activations, IntArray, Rows, positions_of
from rheostat._fields import read_word
from rheostat._notebook import passage, table
from rheostat._responses.receipts import Receipt
from rheostat._responses.signals import Signals
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import capture_pb2, types_pb2

FinishReason: TypeAlias = Literal["stop", "length", "aborted", "rule", "error", "watch"]
"""Why a sample ended: end token or stop text; max_tokens; abort; rule; failure; watch."""


def read_finish_reason(number: types_pb2.FinishReason.ValueType) -> FinishReason:
    reason = read_word(types_pb2.FinishReason.DESCRIPTOR, number, "FINISH_REASON_")
    return cast(FinishReason, reason)


class TokenLogprob(NamedTuple):
    """A token's log-probability."""

    token_id: int
    logprob: float
    """ln p, of the model's distribution before temperature and penalties."""
    rank: int
    """1 for the most likely token."""
    text: str
    """The text of the token; empty on servers without a tokenizer."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position."""

    token: TokenLogprob
    """The token at this position."""
    alternatives: tuple[TokenLogprob, ...]
    """The most likely tokens, best first."""

    def of(self, token_id: int) -> float | None:
        """Log-probability of a token; None if it is neither the token nor an alternative."""
        for entry in (self.token, *self.alternatives):
            if entry.token_id == token_id:
                return entry.logprob
        return None


@dataclass(frozen=True)
class Started:
    """First event: the request was admitted."""

    request_id: str
    model_name: str
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the prompt, if requested."""

    tokens: tuple[TokenLogprobs, ...]
    """Entry i belongs to position i + 1; the first token has none."""
    baseline: bool = False
    """Whether they are of the baseline."""


@dataclass(frozen=True)
class Tokens:
    """Newly generated tokens of one sample."""

    sample: int
    """Sample, from 0."""
    text: str
    """Text of the tokens; empty while a character or a possible stop text is incomplete."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One per token, if requested."""
    baseline: bool = False
    """Whether they are of the baseline."""


@dataclass(frozen=True)
class Finished:
    """The end of a sample."""

    sample: int
    """Sample, from 0."""
    reason: FinishReason
    stop: str | int | None
    """The stop text or token, or the name of the rule, if it ended the sample."""
    first_token_after: float
    """Seconds from admission to the first token."""
    finished_after: float
    """Seconds from admission to the end."""
    baseline: bool = False
    """Whether it is a sample of the baseline."""
    label: str = ""
    """Why the rule or the watch ended the sample: the label of `Stop`, or of the watch."""
    policy_version: int = 0
    """The version of the server's policy, if its rule ended the sample; otherwise 0."""


@dataclass(frozen=True, eq=False, repr=False)
class Divergence:
    """Divergence of a sample's distributions from those of the baseline for the same tokens.

    The baseline is the request without its steering. For this comparison it is fed the tokens of
    the sample. If the sample fills the context, its last token is not compared. An aborted sample
    has no divergence.
    """

    sample: int
    """Sample, from 0."""
    kl: FloatArray
    """float32 [tokens]: lower bounds, in nats, of KL(sample's distribution || baseline's), from the
    tokens that either side lists as most likely."""
    compared: FloatArray
    """float32 [tokens], 0 to 1: the sample's probability of the tokens that both sides list. At 1
    the bound is exact."""
    baseline_logprobs: FloatArray
    """float32 [tokens]: ln p of the sample's tokens under the baseline."""
    mean_kl: float
    """Mean of ``kl``, in nats."""

    def __repr__(self) -> str:
        compared = float(self.compared.min()) if len(self.compared) else 1.0
        return (
            f"Divergence(sample={self.sample}, mean_kl={self.mean_kl:.4g} nats over "
            f"{len(self.kl)} tokens, compared at least {compared:.4g})"
        )


@dataclass(frozen=True, eq=False)
class DroppedRows:
    """Captured rows that were lost under an overload policy that allows it."""

    sequence: int
    """Number of the event in a subscription; 0 in an answer."""
    request_id: str
    capture: int
    """Index of the request's capture; in a subscription as in `CapturedRows`."""
    sample: int
    """Sample, from 0."""
    baseline: bool
    """Whether they are of the baseline."""
    positions: IntArray
    """Absolute positions, int64 [positions], at each of the capture's sites."""
    row_count: int
    """Positions times sites."""


def read_dropped(message: capture_pb2.Dropped, sequence: int, request_id: str) -> DroppedRows:
    return DroppedRows(
        sequence,
        request_id,
        message.capture_index,
        message.sample,
        message.baseline,
        positions_of(message.positions),
        message.row_count,
    )


Event: TypeAlias = (
    Started
    | PromptLogprobs
    | Tokens
    | Rows
    | DroppedRows
    | Signals
    | Finished
    | Divergence
    | Receipt
)
"""The events of a stream. The last one is the `Receipt`."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One continuation of the prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...]
    """One per token; empty if not requested."""
    activations: Activations
    """Captured rows."""
    stop: str | int | None = None
    """The stop text or token, or the name of the rule, if it ended the sample."""
    first_token_after: float = 0.0
    """Seconds from admission to the first token."""
    finished_after: float = 0.0
    """Seconds from admission to the end."""
    divergence: Divergence | None = None
    """Divergence from the baseline, if requested."""
    signals: Signals = field(default_factory=Signals)
    """What probes read, and where rules fired."""
    label: str = ""
    """As `Finished.label`."""
    policy_version: int = 0
    """As `Finished.policy_version`."""

    def __repr__(self) -> str:
        return (
            f"Sample(text={self.text!r}, tokens={len(self.token_ids)}, "
            f"finish_reason={self.finish_reason!r}, activations={len(self.activations)} sites)"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Samples:
    """The samples of a prompt. Text, tokens and activations are those of the first sample."""

    samples: tuple[Sample, ...]
    """All samples, as many as ``n``."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = field(default=())
    """Entry i belongs to position i + 1; empty if not requested."""

    @property
    def text(self) -> str:
        """The generated text."""
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens."""
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the sample ended."""
        return self.samples[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One per generated token; empty if not requested."""
        return self.samples[0].logprobs

    @property
    def activations(self) -> Activations:
        """Captured rows."""
        return self.samples[0].activations

    @property
    def signals(self) -> Signals:
        """What probes read, and where rules fired."""
        return self.samples[0].signals

    def __repr__(self) -> str:
        return f"Samples({', '.join(map(repr, self.samples))})"


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Generation(Samples):
    """The result of a request."""

    request_id: str
    model_name: str
    prompt_token_ids: tuple[int, ...]
    receipt: Receipt
    """A record of the interventions and captures that were carried out, without the baseline."""
    baseline: Samples | None = None
    """The same request without its steering; None unless requested by ``with_baseline``."""

    @property
    def divergence(self) -> Divergence | None:
        """Divergence of the first sample from the baseline, if requested."""
        return self.samples[0].divergence

    def __repr__(self) -> str:
        parts = [repr(self.request_id), *map(repr, self.samples)]
        parts += [] if self.baseline is None else [f"baseline={self.baseline!r}"]
        return f"Generation({', '.join(parts)})"

    def _repr_html_(self) -> str:
        rows = [
            ("finish reason", ", ".join(sample.finish_reason for sample in self.samples)),
            ("tokens", f"{len(self.prompt_token_ids)} + {self.receipt.generated_token_count}"),
        ]
        if self.activations:
            rows.append(("activations", repr(self.activations)))
        if self.baseline is not None:
            rows += [("baseline", sample.text) for sample in self.baseline.samples]
        rows += [
            ("divergence", f"sample {divergence.sample}: mean KL {divergence.mean_kl:.4g} nats")
            for divergence in (sample.divergence for sample in self.samples)
            if divergence is not None
        ]
        texts = "".join(passage(sample.text) for sample in self.samples)
        return texts + table(("generation", self.request_id), rows) + self.receipt._repr_html_()
