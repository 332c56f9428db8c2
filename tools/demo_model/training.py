"""Training: a small Llama on packed documents, the same on every run of one machine.

Each row begins with a document and is filled with further ones. Most rows are short, and in them
a document sees itself alone and counts its positions from 0, as in use. Some are long and a few as
long as the model allows; in these all documents see each other, so that far positions mean
something too.
"""

import math
import time
from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo_model import corpus, vocabulary

SHORT = 128
"""Tokens of a short row."""


@dataclass(frozen=True)
class Shape:
    """Size of the decoder."""

    layers: int = 6
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 32
    mlp_width: int = 352


@dataclass(frozen=True)
class Schedule:
    """How long and how fast the decoder learns."""

    steps: int = 520
    tokens_per_step: int = 4096
    warmup: int = 50
    peak_rate: float = 3e-3
    weight_decay: float = 0.05

    def rate(self, step: int) -> float:
        """Learning rate at ``step``: linear warm-up, then a cosine down to zero."""
        if step < self.warmup:
            return self.peak_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / (self.steps - self.warmup)
        return self.peak_rate * 0.5 * (1 + math.cos(math.pi * done))

    def row_length(self, step: int) -> int:
        """Tokens per row at ``step``."""
        if step % 40 == 39:
            return vocabulary.MAX_POSITIONS
        return 512 if step % 8 == 3 else SHORT


def _rows(tokenizer: PreTrainedTokenizerFast, seed: int) -> Generator[list[int], int, None]:
    """Endless token rows of whole documents, each of the length that is sent in."""
    documents = corpus.documents(seed)
    row: list[int] = []
    length = yield row
    while True:
        row = []
        while len(row) < length:
            row += tokenizer.encode(next(documents), add_special_tokens=False)
        length = yield row[:length]


def _positions(tokens: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Positions counted from each begin mark, [rows, length].

    Transformers lets a token attend only to its own run of positions.
    """
    place = torch.arange(tokens.shape[1]).expand_as(tokens)
    begins = torch.where(tokens == tokenizer.bos_token_id, place, 0)
    return place - begins.cummax(dim=1).values


def new_model(shape: Shape, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A decoder of ``shape`` with seeded random weights, float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_width,
        max_position_embeddings=vocabulary.MAX_POSITIONS,
        initializer_range=0.04,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]  # untyped in transformers


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    schedule: Schedule,
    seed: int,
) -> float:
    """Train ``model`` in place, printing progress; returns the mean loss of the last 20 steps."""
    decayed = [p for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "embed" in name]
    groups: list[dict[str, object]] = [
        {"params": decayed, "weight_decay": schedule.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(
        groups,
        lr=schedule.peak_rate,
        betas=(0.9, 0.95),
    )
    rows = _rows(tokenizer, seed)
    next(rows)
    losses: list[float] = []
    started = time.monotonic()
    model.train()
    for step in range(schedule.steps):
        length = schedule.row_length(step)
        count = schedule.tokens_per_step // length
        tokens = torch.tensor([rows.send(length) for _ in range(count)])  # [count, length]
        positions = _positions(tokens, tokenizer) if length == SHORT else None
        for group in optimiser.param_groups:
            group["lr"] = schedule.rate(step)
        loss = model(input_ids=tokens, position_ids=positions, labels=tokens, use_cache=False).loss
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        if step % 20 == 19:
            spent = time.monotonic() - started
            left = spent / (step + 1) * (schedule.steps - step - 1)
            mean = sum(losses[-20:]) / 20
            print(
                f"step {step + 1:4d}/{schedule.steps}  loss {mean:.3f}  "
                f"{spent:4.0f} s spent, {left:4.0f} s left",
                flush=True,
            )
    model.train(False)
    return sum(losses[-20:]) / 20


def scale_stream(model: LlamaForCausalLM, factor: float) -> None:
    """Multiply the residual stream by ``factor``, leaving the logits as they are.

    Everything that writes to the stream is scaled; what reads it stands behind an RMS norm and
    sees no change. The final norm takes the scale of the tied output embedding back out. Exact for
    a power of two, up to the norms' epsilon.
    """
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(factor)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(factor)
            layer.mlp.down_proj.weight.mul_(factor)
        model.model.norm.weight.div_(factor)


def losses_by_position(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, edges: tuple[int, ...], seed: int
) -> list[float]:
    """Mean nats per token of full-length rows of unseen documents, between successive ``edges``."""
    rows = _rows(tokenizer, seed)
    next(rows)
    tokens = torch.tensor([rows.send(vocabulary.MAX_POSITIONS) for _ in range(8)])
    with torch.no_grad():
        scores = model(input_ids=tokens).logits[:, :-1].float().log_softmax(dim=-1)
    nats = -scores.gather(2, tokens[:, 1:, None]).squeeze(2).mean(dim=0)  # [positions]
    return [float(nats[low:high].mean()) for low, high in pairwise(edges)]
