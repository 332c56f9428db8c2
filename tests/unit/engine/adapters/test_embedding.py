"""The token embedding is measured as it enters the stream, part by part."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from rheostat_engine.adapters.embedding import (
    MISSING,
    NOT_LINEAR,
    QUANTISED,
    EmbeddingPart,
    measure_embedding,
)
from rheostat_engine.sites.block_layout import Block

WIDTH, VOCABULARY, PADDED = 16, 60, 64
TOKENS = torch.arange(1, 9)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Change = Callable[[torch.Tensor], torch.Tensor]


def matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The embedding's rows; those after the vocabulary are padding."""
    rows = 0.02 * torch.randn(PADDED, WIDTH, generator=torch.Generator().manual_seed(0)) + 0.01
    rows[VOCABULARY:] = 100.0
    return rows.to(dtype)


class Embedding(VocabParallelEmbedding):
    """One of vLLM's embeddings, without its distributed state."""

    def __init__(self, rows: torch.Tensor, first: int = 0, count: int = VOCABULARY) -> None:
        nn.Module.__init__(self)
        self.embedding_dim = rows.shape[1]
        self.quant_method: Any = UnquantizedEmbeddingMethod()
        self.weight = nn.Parameter(rows[first:].clone(), requires_grad=False)
        self.shard_indices: Any = SimpleNamespace(
            org_vocab_start_index=first, num_org_elements=count
        )
        self.rows = rows

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """As after the sum over the ranks."""
        return self.rows[tokens]


class Model(nn.Module):
    """An embedding, a change of its rows, and a block."""

    def __init__(self, change: Change, *embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(embeddings)
        self.change = change
        self.block = nn.Identity()

    def run(self, tokens: torch.Tensor) -> None:
        """A forward pass."""
        self.block(self.change(self.embeddings[0](tokens)))


def measured(change: Change, *embeddings: nn.Module, width: int = WIDTH) -> EmbeddingPart:
    model = Model(change, *embeddings)
    return measure_embedding(model, Block(0, model.block, ()), width, model.run, TOKENS)


def std_of(part: EmbeddingPart) -> float:
    assert not part.refused
    mean = part.total / part.count
    return float(np.sqrt(part.squares / part.count - mean**2))


def positions(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype) / 50


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_vocabulary_alone_counts_as_the_model_scales_it(dtype: torch.dtype) -> None:
    rows = matrix(dtype)
    want = float(rows[:VOCABULARY].double().std(correction=0))
    for change, factor in (
        (lambda x: x, 1.0),
        (lambda x: x * 8.0, 8.0),
        (lambda x: x + positions(dtype), 1.0),
        (lambda x: x * 4.0 + positions(dtype), 4.0),
    ):
        assert std_of(measured(change, Embedding(rows))) == pytest.approx(factor * want, rel=0.01)


def test_a_plain_embedding_is_measured_to_float64() -> None:
    want = float(matrix()[:VOCABULARY].double().std(correction=0))
    assert std_of(measured(lambda x: x, Embedding(matrix()))) == pytest.approx(want, rel=1e-12)


def test_each_rank_measures_its_own_part() -> None:
    rows = matrix()
    parts = [measured(lambda x: x, Embedding(rows, first, 20)) for first in (0, 20, 40)]
    whole = measured(lambda x: x, Embedding(rows))
    assert [part.first for part in parts] == [0, 20, 40]
    assert sum(part.count for part in parts) == whole.count == VOCABULARY * WIDTH
    assert sum(part.squares for part in parts) == pytest.approx(whole.squares, rel=1e-12)


def test_what_can_not_be_measured_is_refused() -> None:
    def normed(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (WIDTH,))

    rows = matrix()
    assert measured(normed, Embedding(rows)).refused == NOT_LINEAR
    assert measured(torch.zeros_like, Embedding(rows)).refused == NOT_LINEAR
    assert measured(lambda x: x, Embedding(torch.ones(PADDED, WIDTH))).refused == NOT_LINEAR
    plain = nn.Embedding(VOCABULARY, WIDTH)
    assert measured(lambda x: x, plain).refused == MISSING
    assert measured(lambda x: x, Embedding(rows), Embedding(rows)).refused == MISSING
    assert measured(lambda x: x, Embedding(rows), width=WIDTH // 2).refused == MISSING
    packed = Embedding(rows)
    packed.quant_method = object()
    assert measured(lambda x: x, packed).refused == QUANTISED
    packed = Embedding(rows)
    packed.weight = nn.Parameter(torch.ones(PADDED, WIDTH, dtype=torch.int8), requires_grad=False)
    assert measured(lambda x: x, packed).refused == QUANTISED
