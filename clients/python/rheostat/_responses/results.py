"""What a generation gives: events while it runs, and a `Generation` of all of them at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from rheostat._capture.activations import Activations, IntArray, Rows
from rheostat._notebook import passage, table
from rheostat._responses.receipts import Receipt
from rheostat_wire.dtypes import FloatArray

FinishReason: TypeAlias = Literal["stop", "length", "aborted", "rule", "error", "watch"]
"""Why a sample ended: an end token or stop text, max_tokens, from outside, a rule, a failure."""


class TokenLogprob(NamedTuple):
    """A token's log-probability."""

    token_id: int
    """The token."""
    logprob: float
    """ln p, of the model's distribution before temperature and penalties."""
    rank: int
    """1 for the most likely token."""
    text: str
    """The token as text; empty on servers without a tokenizer."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one token."""

    token: TokenLogprob
    """The token at this position."""
    alternatives: tuple[TokenLogprob, ...]
    """The most likely ones, best first."""

    def of(self, token_id: int) -> float | None:
        """Log-probability of a token; None if it is neither the token nor an alternative."""
        for entry in (self.token, *self.alternatives):
            if entry.token_id == token_id:
                return entry.logprob
        return None


@dataclass(frozen=True)
class Started:
    """The request is admitted. First event."""

    request_id: str
    """The id, given or made."""
    model_name: str
    """The model's name."""
    prompt_token_ids: tuple[int, ...]
    """The prompt's tokens."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the prompt, if asked for."""

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
    """The text that they add; empty while a character or stop text is not complete."""
    token_ids: tuple[int, ...]
    """The tokens."""
    logprobs: tuple[TokenLogprobs, ...]
    """One per token, if asked for."""
    baseline: bool = False
    """Whether they are of the baseline."""


@dataclass(frozen=True)
class Finished:
    """A sample ended."""

    sample: int
    """Sample, from 0."""
    reason: FinishReason
    """Why."""
    stop: str | int | None
    """The stop text or token that ended it, if one did."""
    first_token_after: float
    """Seconds from admission to the first token."""
    finished_after: float
    """Seconds from admission to the end."""
    baseline: bool = False
    """Whether it is one of the baseline."""


@dataclass(frozen=True, eq=False, repr=False)
class Divergence:
    """How far a sample's distributions lie from those that the baseline has for the same tokens.

    The baseline, which is the request without its steering, reads the sample's own tokens here. A
    sample that fills the context lacks its last one; an aborted sample has no divergence.
    """

    sample: int
    """Sample, from 0."""
    kl: FloatArray
    """Float32 [tokens]: lower bounds, in nats, of KL(sample's distribution || baseline's). Each is
    the least that it can be, given the tokens that either side lists as most likely."""
    compared: FloatArray
    """Float32 [tokens], 0 to 1: the sample's probability of the tokens that both sides list. At 1
    the bound is exact."""
    baseline_logprobs: FloatArray
    """Float32 [tokens]: ln p of the sample's tokens under the baseline."""
    mean_kl: float
    """Mean of ``kl``, in nats."""

    def __repr__(self) -> str:
        """The mean, and how much of it is exact."""
        compared = float(self.compared.min()) if len(self.compared) else 1.0
        return (
            f"Divergence(sample={self.sample}, mean_kl={self.mean_kl:.4g} nats over "
            f"{len(self.kl)} tokens, compared at least {compared:.4g})"
        )


@dataclass(frozen=True, eq=False)
class DroppedRows:
    """Captured rows that are lost, under a policy that allows it."""

    sequence: int
    """Number of the event in a subscription; 0 in an answer."""
    request_id: str
    """The request."""
    capture: int
    """Which of the request's captures; of a subscription's, as in `CapturedRows`."""
    sample: int
    """Sample, from 0."""
    baseline: bool
    """Whether they are of the baseline."""
    positions: IntArray
    """Absolute positions, int64 [positions], at each of the capture's sites."""
    row_count: int
    """How many: positions times sites."""


Event: TypeAlias = (
    Started | PromptLogprobs | Tokens | Rows | DroppedRows | Finished | Divergence | Receipt
)
"""What a stream yields. The `Receipt` comes last."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One continuation of the prompt."""

    text: str
    """The generated text."""
    token_ids: tuple[int, ...]
    """Its tokens."""
    finish_reason: FinishReason
    """Why it ended."""
    logprobs: tuple[TokenLogprobs, ...]
    """One per token; empty if not asked for."""
    activations: Activations
    """Captured rows."""
    stop: str | int | None = None
    """The stop text or token that ended it, if one did."""
    first_token_after: float = 0.0
    """Seconds from admission to the first token."""
    finished_after: float = 0.0
    """Seconds from admission to the end."""
    divergence: Divergence | None = None
    """How far it lies from the baseline, if that was asked for."""

    def __repr__(self) -> str:
        """Text, tokens and how it ended."""
        return (
            f"Sample(text={self.text!r}, tokens={len(self.token_ids)}, "
            f"finish_reason={self.finish_reason!r}, activations={len(self.activations)} sites)"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Samples:
    """What came of a prompt. Text, tokens and activations are those of the first sample."""

    samples: tuple[Sample, ...]
    """All samples, as many as ``n``."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = field(default=())
    """Entry i belongs to position i + 1; empty if not asked for."""

    @property
    def text(self) -> str:
        """The generated text."""
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its tokens."""
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.samples[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One per generated token; empty if not asked for."""
        return self.samples[0].logprobs

    @property
    def activations(self) -> Activations:
        """Captured rows."""
        return self.samples[0].activations

    def __repr__(self) -> str:
        """The samples."""
        return f"Samples({', '.join(map(repr, self.samples))})"


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Generation(Samples):
    """The whole result of a request."""

    request_id: str
    """The request."""
    model_name: str
    """The model's name."""
    prompt_token_ids: tuple[int, ...]
    """The prompt's tokens."""
    receipt: Receipt
    """A record of the interventions and captures that were carried out, without the baseline."""
    baseline: Samples | None = None
    """The same request without its steering; None unless asked for ``with_baseline``."""

    @property
    def divergence(self) -> Divergence | None:
        """How far the first sample lies from the baseline, if that was asked for."""
        return self.samples[0].divergence

    def __repr__(self) -> str:
        """Id, samples and baseline."""
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
