"""Models without weights, by the shape that their cost depends on.

Invariant: a shape is a complete `config.json`; vLLM fills the weights with noise
(`load_format="dummy"`).
"""

import json
from pathlib import Path

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

SHAPES: dict[str, dict[str, object]] = {
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    # The vocabulary of the bundled model, so that the bundled tokenizer serves it.
    "tiny": {
        **_QWEN3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "head_dim": 32,
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "max_window_layers": 4,
        "num_attention_heads": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": 1984,
    },
    # As many layers as Qwen3-8B, next to no arithmetic, and the same vocabulary.
    "tiny-36": {
        **_QWEN3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "head_dim": 32,
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 16384,
        "max_window_layers": 36,
        "num_attention_heads": 1,
        "num_hidden_layers": 36,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": 1984,
    },
}


def write_shape(name: str, root: Path) -> Path:
    """A model directory of that shape under `root`.

    Raises:
        KeyError: there is no such shape.
    """
    path = root / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name]))
    return path
