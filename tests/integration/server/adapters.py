"""Tiny LoRA adapters of the bundled model."""

from pathlib import Path

from .. import adapters
from ..adapters import merged

__all__ = ["merged", "write_adapter"]

TARGETS = {
    "self_attn.q_proj": (128, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.up_proj": (128, 352),
}


def write_adapter(path: Path, seed: int) -> Path:
    """A random adapter of every layer."""
    return adapters.write_adapter(path, seed, layers=6, targets=TARGETS, scale=0.1)
