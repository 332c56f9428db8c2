"""Small random models of every architecture that is proven, written to disk as HF checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

VOCAB = 128
WIDTH = 64
LAYERS = 4
EXPERTS = 4

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 1, "head_dim": 32}

CONFIGS: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**_GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**_GROUPED),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_GROUPED, sliding_window=16, query_pre_attn_scalar=32, sliding_window_pattern=2
    ),
    "mistral": lambda: hf.MistralConfig(**_GROUPED, sliding_window=16),
    "mixtral": lambda: hf.MixtralConfig(
        **_GROUPED, num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **_GROUPED,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    ),
    "phi3": lambda: hf.Phi3Config(**{**_COMMON, "num_key_value_heads": 1}),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_COMMON, rotary_pct=0.5, use_parallel_residual=True),
    "phi": lambda: hf.PhiConfig(**_COMMON, partial_rotary_factor=0.5),
    "cohere": lambda: hf.CohereConfig(
        **{**_COMMON, "num_key_value_heads": 1, "tie_word_embeddings": True}
    ),
    "stablelm": lambda: hf.StableLmConfig(**{**_COMMON, "num_key_value_heads": 1}),
    "granite": lambda: hf.GraniteConfig(
        **{**_COMMON, "num_key_value_heads": 1},
        residual_multiplier=0.22,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        attention_multiplier=0.2,
    ),
    "olmo2": lambda: hf.Olmo2Config(**{**_COMMON, "num_key_value_heads": 1}),
}

MIXTURES = frozenset({"mixtral", "qwen3_moe"})
"""Architectures with a mixture of experts in every layer."""

NO_MID = frozenset({"cohere", "gpt_neox", "phi"})
"""Architectures without `resid_mid`."""


def build(name: str, root: Path) -> Path:
    """The checkpoint directory of a model, made at first use. Weights are float32 and seeded."""
    path = root / name
    if not (path / "model.safetensors").exists():
        torch.manual_seed(0)
        config = CONFIGS[name]()
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.15)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(path, safe_serialization=True)
    return path
