"""Pairs of prompts, and the answers that a sweep grades them by."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rheostat._errors import invalid
from rheostat._fields import utf8_text, whole_number
from rheostat._points import LayersLike, PointsLike, layers_of, points_of, site_set
from rheostat._prompts import Prompt, put_prompt
from rheostat._runs import RunInfo
from rheostat._selectors import SelectorLike, prompt_tokens
from rheostat._steering.replacements import FromRun, Noise, RunMean, Zeros, noise_to_wire
from rheostat_wire.v1 import sweep_pb2

Answer: TypeAlias = str | Sequence[int] | Sequence[str | Sequence[int]]
"""A text, the token ids of a text, or several of these. A leading space of a text counts. The
probability of an answer of several tokens is their product, that of several answers their sum."""


@dataclass(frozen=True)
class NoisyPrompt:
    """The clean prompt with noise on some of its rows, as in causal tracing (Meng et al., 2022)."""

    noise: Noise
    """The noise. Further noises have the next seeds."""
    where: SelectorLike
    """The tokens with noise, usually those of the subject."""
    points: PointsLike = "resid_pre"
    layers: LayersLike = 0
    """By default the noise is on the embeddings."""
    count: int = 10
    """Noises over which each cell is averaged, 1 to 64."""


Corruption: TypeAlias = Prompt | NoisyPrompt | Zeros | RunMean | FromRun
"""A second prompt; noise on the clean one; or `Zeros()`, a `run_mean` or a `from_run`, whose rows
are put in."""

TokenIds: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Pair:
    """A clean prompt, and what its rows are exchanged with.

    Meng et al. (2022) call the prompts clean and corrupted. Choose prompts of equal length in
    tokens, which differ in the subject only.

    Warns if an answer continues the last word of the clean prompt, as "Paris" does after "city of".
    """

    prompt: Prompt
    """The clean prompt, after which ``answer`` is right."""
    corrupt: Corruption
    """The corrupt prompt; or a `NoisyPrompt`; or `Zeros()` or `run_mean(...)`, which ablate the
    clean prompt; or `from_run(...)`, a run of the corrupt prompt."""
    answer: Answer | None = None
    """The right answer. Only the grade "kl" and probes need none."""
    foil: Answer | None = None
    """The wrong answer. The grade "logit_difference" needs it; all others read only ``answer``."""
    groups: Mapping[str, SelectorLike] = field(default_factory=dict)
    """Positions of the clean prompt by the label of their column. Empty: a column for each
    position of ``where``."""
    label: str = ""
    """A name for people."""

    def __post_init__(self) -> None:
        for text in (*_texts(self.answer), *_texts(self.foil)):
            if isinstance(self.prompt, str) and _joins(self.prompt, text):
                warnings.warn(
                    f"the answer {text!r} has no leading space, so it is graded as the rest of the "
                    f"prompt's last word: write {' ' + text!r} for a new word",
                    stacklevel=3,
                )


def _texts(answer: Answer | None) -> list[str]:
    """The texts of an answer; token ids are left out."""
    if isinstance(answer, str):
        return [answer]
    return [one for one in answer if isinstance(one, str)] if isinstance(answer, Sequence) else []


def _joins(prompt: str, answer: str) -> bool:
    """Whether the answer continues the last word of the prompt, as few answers are meant to.

    Only ASCII letters and digits count: other scripts may have no spaces between words.
    """
    return all(end.isascii() and end.isalnum() for end in (prompt[-1:], answer[:1]))


def pair_to_wire(
    pair: Pair, tokens: Mapping[str, TokenIds], labels: Sequence[str], path: str, *, contrasts: bool
) -> sweep_pb2.SweepPair:
    """The message.

    Args:
        pair: the pair.
        tokens: the token ids of each of `answer_texts`.
        labels: the labels of its groups, in the order of the columns.
        path: its path, for errors.
        contrasts: whether a grade is the difference of its answer and its foil.
    """
    message = sweep_pb2.SweepPair(label=utf8_text(pair.label, f"{path}.label", "a label"))
    put_prompt(message.prompt, pair.prompt, f"{path}.prompt")
    if isinstance(pair.corrupt, type):
        name = pair.corrupt.__name__
        raise invalid(f"{path}.corrupt", f"{name} is a class: use {name}()")
    match pair.corrupt:
        case Zeros():
            message.zeros.SetInParent()
        case RunMean(run_id, positions):
            message.mean.run_id = run_id
            if positions is not None:
                message.mean.positions.positions.extend(positions)
        case FromRun(run_id, None, _, None):
            message.run_id = run_id
        case FromRun():
            raise invalid(
                f"{path}.corrupt", "a run stands for the corrupt prompt as a whole: name it alone"
            )
        case RunInfo(id=run_id):
            raise invalid(
                f"{path}.corrupt",
                f"a run stands for the corrupt prompt as rheostat.from_run({run_id!r})",
            )
        case Noise(std=std, embedding_std=factor):
            scale = f"embedding_std={factor}" if std is None else f"std={std}"
            usual = (
                "" if std is None else "; std is absolute, and causal traces use embedding_std=3"
            )
            raise invalid(
                f"{path}.corrupt",
                f"say which tokens get the noise: rheostat.NoisyPrompt(rheostat.Noise({scale}), "
                f'where=rheostat.span("the subject")){usual}',
            )
        case NoisyPrompt(noise=noise) if not isinstance(noise, Noise):
            raise invalid(
                f"{path}.corrupt.noise",
                f"noise is a rheostat.Noise, as rheostat.Noise(embedding_std=3), not {noise!r:.60}",
            )
        case NoisyPrompt() as noisy:
            message.noise.noise.CopyFrom(noise_to_wire(noisy.noise))
            sites = site_set(points_of(noisy.points), layers_of(noisy.layers))
            message.noise.sites.CopyFrom(sites)
            message.noise.where.CopyFrom(prompt_tokens(noisy.where))
            message.noise.noise_count = whole_number(
                noisy.count, f"{path}.corrupt.count", "a count"
            )
        case prompt if isinstance(prompt, Iterable):
            put_prompt(message.corrupt, prompt, f"{path}.corrupt")
        case other:
            raise invalid(
                f"{path}.corrupt",
                "corrupt is a second prompt, a rheostat.NoisyPrompt, rheostat.Zeros(), "
                f"rheostat.run_mean(run) or rheostat.from_run(run), not {other!r:.60}",
            )
    answers = answer_ids(pair.answer, tokens, f"{path}.answer")
    foils = answer_ids(pair.foil, tokens, f"{path}.foil")
    for side, several in ((message.answer, answers), (message.foil, foils)):
        for ids in several:
            side.alternatives.add(ids=ids)
    if contrasts and foils and set(answers) == set(foils):
        raise invalid(f"{path}.foil", "the foil equals the answer, so they never differ")
    if set(pair.groups) != set(labels):
        raise invalid(
            f"{path}.groups", f"every pair has the same groups: {', '.join(labels) or 'none'}"
        )
    message.groups.extend(prompt_tokens(pair.groups[label]) for label in labels)
    return message


def checked_pairs(pairs: Pair | Sequence[Pair]) -> list[Pair]:
    """The pairs of a sweep, one or several."""
    several = [pairs] if isinstance(pairs, Pair | str) else list(pairs)
    if not several:
        raise invalid("pairs", "at least one pair is required", "REASON_MISSING_FIELD")
    for number, pair in enumerate(several):
        if not isinstance(pair, Pair):
            raise invalid(
                f"pairs[{number}]",
                f"a pair is a rheostat.Pair(prompt, corrupt, answer=...), not {pair!r:.60}",
            )
    return several


def answer_texts(pairs: Sequence[Pair]) -> Iterator[str]:
    """Each text of an answer that must be tokenised, once."""
    seen: set[str] = set()
    for number, pair in enumerate(pairs):
        for name, answer in (("answer", pair.answer), ("foil", pair.foil)):
            for alternative in _alternatives(answer, f"pairs[{number}].{name}"):
                if isinstance(alternative, str) and alternative not in seen:
                    seen.add(alternative)
                    yield alternative


def answer_ids(answer: Answer | None, tokens: Mapping[str, TokenIds], path: str) -> list[TokenIds]:
    """The token ids of each alternative; none without an answer. ``tokens`` are those of texts."""
    return [
        tokens[alternative] if isinstance(alternative, str) else alternative
        for alternative in _alternatives(answer, path)
    ]


def _alternatives(answer: Answer | None, path: str) -> list[str | TokenIds]:
    """The texts and token ids of an answer; none without an answer."""
    if answer is None:
        return []
    if isinstance(answer, str):
        several: Sequence[object] = [answer]
    elif not isinstance(answer, Sequence) or not answer:
        raise invalid(path, "an answer is a text, its token ids, or a list of several of these")
    else:
        together = all(not isinstance(part, str | Sequence) for part in answer)
        several = [answer] if together else answer
    return [_alternative(alternative, path) for alternative in several]


def _alternative(answer: object, path: str) -> str | TokenIds:
    if isinstance(answer, str):
        if not answer:
            raise invalid(path, "an answer has at least one token", "REASON_MISSING_FIELD")
        return utf8_text(answer, path, "an answer")
    if not isinstance(answer, Sequence) or not answer:
        raise invalid(path, "an answer is a text, its token ids, or a list of several of these")
    return tuple(whole_number(token, path, "a token id") for token in answer)
