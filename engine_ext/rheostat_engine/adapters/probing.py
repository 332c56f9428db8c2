"""An uncompiled forward pass of a loaded model without KV, for the probe."""

from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.interfaces import SupportsPP

PROBE_TOKENS = 8
"""Tokens of the forward pass."""


def probe_tokens(device: torch.device) -> torch.Tensor:
    """The token ids of the forward pass, all different."""
    return torch.arange(1, PROBE_TOKENS + 1, device=device, dtype=torch.int32)


def run_once(
    model: nn.Module,
    config: VllmConfig,
    device: torch.device,
    tokens: torch.Tensor | None = None,
) -> object:
    """Runs the model on `PROBE_TOKENS` tokens, by default those of `probe_tokens`; its output.

    Attention has no metadata, so it computes nothing.
    """
    model_config = config.model_config
    positions = torch.arange(PROBE_TOKENS, device=device)
    if model_config.uses_mrope:
        positions = positions.expand(3, -1)
    first = get_pp_group().is_first_rank
    between = None
    if not first:
        make = cast(SupportsPP, model).make_empty_intermediate_tensors
        dtype = cast(torch.dtype, model_config.dtype)
        between = make(batch_size=PROBE_TOKENS, dtype=dtype, device=device)
        generator = torch.Generator().manual_seed(0)
        for name, tensor in between.tensors.items():
            noise = torch.randn(tensor.shape, generator=generator)
            between.tensors[name] = noise.to(device=device, dtype=tensor.dtype)
    with torch.inference_mode(), forward_context(config):
        output: object = model(
            input_ids=(probe_tokens(device) if tokens is None else tokens) if first else None,
            positions=positions,
            intermediate_tensors=between,
            inputs_embeds=None,
        )
    return output


def forward_context(config: VllmConfig, tokens: int = PROBE_TOKENS) -> AbstractContextManager[None]:
    """vLLM's forward context, in which single modules of the model can run on some tokens."""
    return set_forward_context(None, config, num_tokens=tokens, skip_compiled=True)
