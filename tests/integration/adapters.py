"""Tiny random LoRA adapters in PEFT's format, and the models that they amount to."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

RANK = 4


def write_adapter(
    path: Path, seed: int, *, layers: int, targets: Mapping[str, tuple[int, int]], scale: float
) -> Path:
    """An adapter of every layer.

    Args:
        path: its folder, which is made.
        seed: another seed, another adapter.
        layers: how many the model has.
        targets: input and output width of each linear layer that it changes, by name in a block.
        scale: standard deviation of both factors.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, (width, out) in targets.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = scale * torch.randn(RANK, width, generator=generator)
            tensors[f"{key}.lora_B.weight"] = scale * torch.randn(out, RANK, generator=generator)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": [name.rpartition(".")[2] for name in targets],
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
