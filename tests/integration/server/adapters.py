"""Tiny LoRA adapters of the bundled model, in PEFT's format, and the models that they amount to."""

import json
from pathlib import Path

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

RANK = 4
TARGETS = {
    "self_attn.q_proj": (128, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.up_proj": (128, 352),
}
"""Input and output width of each linear layer that the adapters change."""


def write_adapter(path: Path, seed: int) -> Path:
    """A random adapter of every layer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(6):
        for name, (width, out) in TARGETS.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = 0.1 * torch.randn(RANK, width, generator=generator)
            tensors[f"{key}.lora_B.weight"] = 0.1 * torch.randn(out, RANK, generator=generator)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": [name.rpartition(".")[2] for name in TARGETS],
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def merged(base: Path, adapter: Path, into: Path) -> Path:
    """The model with the adapter's products, times alpha / rank, added to its weights."""
    model = hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for key, a in tensors.items():
            if key.endswith("lora_A.weight"):
                b = tensors[key.replace("lora_A", "lora_B")]
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                model.get_submodule(name).weight += 2.0 * b @ a
    model.save_pretrained(into, safe_serialization=True)
    return into
