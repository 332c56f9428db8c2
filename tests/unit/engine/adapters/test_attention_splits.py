"""Steps in which vLLM fixes into how many parts FlashAttention 3 may split keys."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from rheostat_engine.adapters.attention_splits import fix_splits_for_full_graphs_only

FIXED = 32
"""The most parts in a step that a full graph may replay."""


def manager(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], samples: int, mode: CUDAGraphMode
) -> CudaGraphManager:
    """vLLM's own choice of graphs to capture."""
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)
    compilation = SimpleNamespace(
        cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]
    )
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=samples),
        compilation_config=compilation,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=None,
    )
    return CudaGraphManager(config, torch.device("cpu"), mode, decode_query_len=1)


def builder(largest: int) -> FlashAttentionMetadataBuilder:
    """vLLM's builder of attention's metadata, without what a device is needed for."""
    made = FlashAttentionMetadataBuilder.__new__(FlashAttentionMetadataBuilder)
    vars(made).update(
        aot_schedule=False,
        aot_sliding_window=(-1, -1),
        dcp_world_size=1,
        max_cudagraph_size=largest,
        max_num_splits=FIXED,
        mm_prefix_query_ranges_np=None,
        rswa_window=None,
        use_full_cuda_graph=True,
    )
    return made


def most_splits(made: FlashAttentionMetadataBuilder, tokens: int) -> int:
    """The most parts in a step of `tokens`; 0 if FlashAttention chooses."""
    step: Any = SimpleNamespace(
        num_reqs=1,
        num_actual_tokens=tokens,
        max_query_len=tokens,
        max_seq_len=tokens,
        query_start_loc=torch.tensor([0, tokens]),
        seq_lens=torch.tensor([tokens]),
        block_table_tensor=None,
        slot_mapping=None,
        causal=True,
        mm_req_doc_ranges=None,
        rswa_prefix_lens=None,
    )
    return made.build(0, step).max_num_splits


SIZES = [1, 2, 4, 8, 16, 32, 64, 512, 4096]


@pytest.mark.parametrize(
    ("mode", "samples", "largest"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, 64, 64),
        (CUDAGraphMode.FULL_AND_PIECEWISE, 1024, 512),
        (CUDAGraphMode.FULL_DECODE_ONLY, 64, 64),
        (CUDAGraphMode.FULL, 64, 4096),
        (CUDAGraphMode.PIECEWISE, 64, 0),
    ],
)
def test_splits_are_fixed_only_where_a_full_graph_may_replay_the_step(
    monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode, samples: int, largest: int
) -> None:
    made = builder(SIZES[-1])
    assert most_splits(made, 4096) == FIXED  # as vLLM has it
    other = SimpleNamespace(max_cudagraph_size=SIZES[-1])  # of another kind of attention
    groups: Any = [[SimpleNamespace(metadata_builders=[made])], [], [
        SimpleNamespace(metadata_builders=[other])
    ]]  # fmt: skip
    fix_splits_for_full_graphs_only(manager(monkeypatch, SIZES, samples, mode), groups)
    for tokens in SIZES:
        assert most_splits(made, tokens) == (FIXED if tokens <= largest else 0)
    assert most_splits(made, largest + 1) == 0
    assert other.max_cudagraph_size == SIZES[-1]


def test_without_graphs_nothing_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = builder(SIZES[-1])
    groups: Any = [[SimpleNamespace(metadata_builders=[made])]]
    none = manager(monkeypatch, SIZES, 64, CUDAGraphMode.NONE)
    fix_splits_for_full_graphs_only(none, groups)
    assert most_splits(made, 1) == 0
