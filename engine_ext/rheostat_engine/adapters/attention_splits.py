"""Lets FlashAttention 3 choose its splits freely in steps that no full CUDA graph replays.

It may split the keys of a query into parts (splits), and add up their results. A full CUDA graph
includes attention, so it needs room for a number of splits that is fixed before it is captured.
vLLM fixes this number, by default 32, in every step that has no more tokens than the largest CUDA
graph. But in a step with a piecewise graph, attention runs outside of the graph. There a fixed
number brings nothing, and costs a buffer of 32 float32 outputs of attention: 2 GiB for 4,096 tokens
of 32 heads of 128. vLLM's own graphs mostly have at most 512 tokens, but the server's have more.
"""

from itertools import chain
from typing import TYPE_CHECKING

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.utils import AttentionGroup


def fix_splits_for_full_graphs_only(
    manager: "CudaGraphManager", groups: "list[list[AttentionGroup]]"
) -> None:
    """Makes vLLM fix the splits only in steps with no more tokens than the largest full graph.

    Args:
        manager: the graphs that are about to be captured.
        groups: the model's layers with attention, whose metadata builders fix the splits.
    """
    full = manager._capture_descs.get(CUDAGraphMode.FULL, ())
    largest = max((graph.num_tokens for graph in full), default=0)
    for group in chain.from_iterable(groups):
        for builder in group.metadata_builders:
            if isinstance(builder, FlashAttentionMetadataBuilder):
                builder.max_cudagraph_size = largest
