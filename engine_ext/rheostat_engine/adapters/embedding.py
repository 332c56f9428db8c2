"""Measures the standard deviation of the model's token embedding, in units of the stream.

Each rank sums over its own part of the vocabulary. The server adds the sums up, so that all users
have the same number (`ModelSites.embedding_std`).

Invariant: the number is that of the rows which the model adds to the stream. If the model does more
to a row than multiply it (as Gemma does) and add something that does not depend on the token (as
GPT-2's positions), or if the matrix is quantised, the embedding is refused with a reason.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from rheostat_engine.sites.block_layout import Block
from rheostat_engine.sites.module_calls import stream_tensors

_ROWS = 4096
"""Rows that are widened to float64 at once."""

_TOLERANCE = 0.02
"""The largest part of the stream that rounding to its dtype may change."""

MISSING = "the model has no token embedding of the stream's width"
QUANTISED = "the token embedding is quantised"
NOT_LINEAR = "the model changes its token embeddings before they enter the stream"


@dataclass(frozen=True, slots=True)
class EmbeddingPart:
    """A rank's part of the token embedding."""

    refused: str = ""
    """Why it can't be measured; empty if it can."""
    first: int = 0
    """The first token id of the part. Ranks with the same one have the same part."""
    count: int = 0
    """Elements."""
    total: float = 0.0
    """Their sum, in float64, as they enter the stream."""
    squares: float = 0.0
    """The sum of their squares."""


def measure_embedding(
    model: nn.Module,
    first_block: Block,
    width: int,
    run_model: Callable[[torch.Tensor], object],
    tokens: torch.Tensor,
) -> EmbeddingPart:
    """Measures this rank's part; called on the ranks of the first pipeline stage alone.

    Args:
        model: loaded, not compiled, without sites.
        first_block: the model's first block.
        width: W.
        run_model: runs the model once on some token ids.
        tokens: different token ids to run it on.
    """
    embeddings = {
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding)
        and not isinstance(module, ParallelLMHead)
        and module.embedding_dim == width
    }
    if len(embeddings) != 1:
        return EmbeddingPart(MISSING)
    (embedding,) = embeddings
    weight = getattr(embedding, "weight", None)
    if (
        not isinstance(embedding.quant_method, UnquantizedEmbeddingMethod)
        or not isinstance(weight, torch.Tensor)
        or not weight.is_floating_point()
    ):
        return EmbeddingPart(QUANTISED)
    factor = _factor(embedding, first_block, width, run_model, tokens)
    if factor is None:
        return EmbeddingPart(NOT_LINEAR)
    own = embedding.shard_indices
    total = squares = 0.0
    for rows in weight.detach()[: own.num_org_elements].split(_ROWS):
        values = rows.double() * factor
        total += float(values.sum())
        squares += float(values.square().sum())
    count = own.num_org_elements * width
    return EmbeddingPart("", own.org_vocab_start_index, count, total, squares)


def _factor(
    embedding: nn.Module,
    first_block: Block,
    width: int,
    run_model: Callable[[torch.Tensor], object],
    tokens: torch.Tensor,
) -> float | None:
    """The number by which the model multiplies its embeddings; None if it does something else.

    Two runs with other tokens at the same positions differ by the embeddings alone.
    """
    streams: list[torch.Tensor] = []

    def record(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        streams.append(stream_tensors(args, kwargs, width)[0].detach().double())

    orders = (tokens, tokens.roll(1))
    with first_block.module.register_forward_pre_hook(record, with_kwargs=True):
        for order in orders:
            run_model(order)
    with torch.inference_mode():
        rows, others = (embedding(order).double() for order in orders)
    change, expected = streams[1] - streams[0], others - rows
    size = float(expected.square().sum())
    if not size:
        return None
    factor = float((change * expected).sum()) / size
    rounding = _TOLERANCE * float(streams[0].norm() + streams[1].norm())
    close = float((change - factor * expected).norm()) <= rounding
    return factor if close and factor else None
