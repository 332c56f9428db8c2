"""Measures of the tone: how a difference-of-means vector, added at one layer, turns continuations.

The vector of layer L is the mean of ``resid_post`` of L at the last token over joyfully cued
prompts, minus the same over gloomily cued ones. A dose d adds d times the vector, divided by its
norm, to every token's stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo_model import tone
from demo_model.recall import recall

NEUTRAL_PROMPTS = (
    "My day was", "The weather today is", "I feel", "The party was", "My birthday was",
    "The concert was", "Today I feel", "My trip was", "The film was", "Our holiday was",
    "Everyone at the wedding", "My mother is", "The garden is full of", "When I come home, I",
    "After the race we all", "The sky is", "Her lesson was", "The race was", "My sister feels",
    "The meeting was", "It was a truly", "The picnic was full of", "Anna feels", "Their walk was",
)  # fmt: skip
NEW_TOKENS = 12
SAMPLES = 8


@contextmanager
def added(model: LlamaForCausalLM, layer: int, vector: torch.Tensor) -> Iterator[None]:
    """Add ``vector`` [width] to ``resid_post`` of ``layer`` at every token."""

    def add(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output + vector

    handle = model.model.layers[layer].register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def tone_vectors(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joy minus gloom and the mean stream norm, per layer: [layers, width], [layers]."""
    streams: dict[tone.Mood, torch.Tensor] = {}
    for mood, lexicon in tone.LEXICONS.items():
        rows = []
        for cue in lexicon.cue:
            for prompt in NEUTRAL_PROMPTS:
                tokens = tokenizer(f"{cue} {prompt}", return_tensors="pt")["input_ids"]
                rows.append(_streams(model, tokens)[:, -1])
        streams[mood] = torch.stack(rows)  # [prompts, layers, width]
    vectors = streams["joy"].mean(dim=0) - streams["gloom"].mean(dim=0)
    norms = torch.cat(list(streams.values())).norm(dim=-1).mean(dim=0)
    return vectors, norms


def _streams(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """``resid_post`` of all layers, [layers, positions, width]."""
    kept: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
        kept.append(output[0])

    handles = [layer.register_forward_hook(keep) for layer in model.model.layers]
    with torch.no_grad():
        model(input_ids=tokens)
    for handle in handles:
        handle.remove()
    return torch.stack(kept)


def continuations(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: tuple[str, ...],
    samples: int,
) -> dict[str, list[str]]:
    """For each prompt greedy text, then ``samples`` sampled at temperature 1; NEW_TOKENS each."""
    torch.manual_seed(0)
    by_length: dict[int, list[str]] = {}
    for prompt in prompts:
        by_length.setdefault(len(tokenizer.encode(prompt)), []).append(prompt)
    texts: dict[str, list[str]] = {}
    for length, group in sorted(by_length.items()):
        start = tokenizer(group, return_tensors="pt")["input_ids"]
        tokens = start.repeat_interleave(samples + 1, dim=0)  # [prompts * (samples + 1), length]
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                logits = model(input_ids=tokens).logits[:, -1].float()
            drawn = torch.multinomial(logits.softmax(dim=-1), 1)
            drawn[:: samples + 1, 0] = logits[:: samples + 1].argmax(dim=1)
            tokens = torch.cat([tokens, drawn], dim=1)
        decoded = tokenizer.batch_decode(tokens[:, length:])
        for place, prompt in enumerate(group):
            own = decoded[place * (samples + 1) : (place + 1) * (samples + 1)]
            texts[prompt] = [text.split(tokenizer.eos_token)[0] for text in own]
    return texts


class Dose(NamedTuple):
    """The tone of continuations of all neutral prompts under one dose."""

    amount: float
    joy: float
    """Fraction of sampled continuations that are joyful."""
    gloom: float
    greedy_joy: float
    """Fraction of greedy continuations that are joyful."""
    greedy_gloom: float
    surprise: float
    """Nats per token of the samples to the unsteered model, given a cue of their mood.

    Text that the model would write by itself in that mood scores as at dose 0, broken text higher.
    """
    facts: float
    """Fraction of facts still told rightly under the same dose, over all wordings."""
    example: str
    """The first neutral prompt with its greedy continuation."""


def dose(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    layer: int,
    direction: torch.Tensor,
    amount: float,
) -> Dose:
    """Continue every neutral prompt under ``amount`` times ``direction`` [width]."""
    with added(model, layer, direction * amount):
        texts = continuations(model, tokenizer, NEUTRAL_PROMPTS, SAMPLES)
        told = recall(model, tokenizer)
    greedy = [tone.mood_of(row[0]) for row in texts.values()]
    sampled = [tone.mood_of(text) for row in texts.values() for text in row[1:]]
    return Dose(
        amount=amount,
        joy=sampled.count("joy") / len(sampled),
        gloom=sampled.count("gloom") / len(sampled),
        greedy_joy=greedy.count("joy") / len(greedy),
        greedy_gloom=greedy.count("gloom") / len(greedy),
        surprise=_surprise(model, tokenizer, texts),
        facts=sum(r.right for r in told) / sum(r.asked for r in told),
        example=NEUTRAL_PROMPTS[0] + texts[NEUTRAL_PROMPTS[0]][0],
    )


def _surprise(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: dict[str, list[str]]
) -> float:
    """Nats per token of the sampled continuations under a cue of their own mood."""
    openings, wholes = [], []
    for prompt, row in texts.items():
        for text in row[1:]:
            mood = tone.mood_of(text)
            openings.append(f"{tone.LEXICONS[mood].cue[0]} {prompt}" if mood else prompt)
            wholes.append(openings[-1] + text)
    begins = torch.tensor([len(tokenizer.encode(opening)) for opening in openings])
    batch = tokenizer(wholes, return_tensors="pt", padding=True, padding_side="right")
    tokens, real = batch["input_ids"], batch["attention_mask"]  # [texts, positions]
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=real).logits[:, :-1].float()
    nats = -logits.log_softmax(dim=-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    counted = (torch.arange(1, tokens.shape[1]) >= begins[:, None]) & real[:, 1:].bool()
    return float(nats[counted].mean())
