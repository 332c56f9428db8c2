"""LoRA adapters that a server is started with.

Invariant: if an adapter cannot be read, the server does not start, and the error names the adapter.
Configs and the weights' header are read here, because the engine takes long to load. vLLM reads the
weights once its engine runs; see `vllm_backend`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rheostat_server.errors import InvalidConfig, ModelNotFound

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Files that vLLM reads. It takes the first that is there."""
_HEAD = "lm_head"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `max_lora_rank`."""


@dataclass(frozen=True, slots=True)
class Lora:
    """One adapter."""

    name: str
    """Name that requests use."""
    number: int
    """Its number in vLLM, from 1."""
    path: str
    """Its folder, in PEFT's format."""
    rank: int
    """Its rank."""
    changes_head: bool = False
    """Whether it adapts the unembedding, as far as its files say."""


def read_loras(named: Sequence[tuple[str, str]]) -> tuple[Lora, ...]:
    """Reads the configs of adapters, and checks that their weights are there.

    Args:
        named: (name, folder) of each.

    Raises:
        ModelNotFound: a folder holds no adapter that vLLM serves.
        InvalidConfig: two adapters have one name.
    """
    names = [name for name, _ in named]
    for name in names:
        if names.count(name) > 1:
            raise InvalidConfig(f"two adapters are named {name}")
    return tuple(
        _read(name, number, Path(folder).expanduser())
        for number, (name, folder) in enumerate(named, start=1)
    )


def lora_arguments(loras: Sequence[Lora], *, cpu: bool) -> dict[str, object]:
    """vLLM's arguments for these adapters; empty if there are none.

    On a CPU, vLLM reads the last slot (index -1) for tokens without an adapter. So one more slot is
    requested, which stays empty.
    """
    if not loras:
        return {}
    widest = max(lora.rank for lora in loras)
    return {
        "enable_lora": True,
        "max_loras": len(loras) + cpu,
        "max_lora_rank": next(rank for rank in _RANKS if rank >= widest),
    }


def _read(name: str, number: int, folder: Path) -> Lora:
    config = _config(name, folder)
    weights = _check_weights(name, folder)
    # PEFT takes a list of names of modules, or one regular expression.
    adapted = weights or (str(config.get("target_modules")),)
    changes_head = any(_HEAD in module for module in adapted)
    return Lora(name, number, str(folder), config["r"], changes_head)


def _check_weights(name: str, folder: Path) -> tuple[str, ...]:
    """Returns the names of the weights; empty if only vLLM may read them."""
    weights = next((folder / file for file in _WEIGHTS if (folder / file).is_file()), None)
    if weights is None:
        raise ModelNotFound(f"the adapter {name}: {folder} holds none of {', '.join(_WEIGHTS)}")
    if weights.suffix != ".safetensors":
        return ()  # a pickle, which only vLLM may load
    try:
        with safe_open(weights, framework="np") as opened:
            return tuple(opened.keys())
    except (OSError, SafetensorError) as error:
        raise ModelNotFound(f"the adapter {name}: cannot read {weights}: {error}") from error


def _config(name: str, folder: Path) -> dict[str, Any]:  # Any: JSON
    """The config of an adapter, whose rank `r` is checked."""
    try:
        config: dict[str, Any] = json.loads((folder / _CONFIG).read_text())
        rank = config["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelNotFound(
            f"the adapter {name}: {folder} holds no {_CONFIG} that names a rank r"
        ) from error
    if not isinstance(rank, int) or not 1 <= rank <= _RANKS[-1]:
        raise ModelNotFound(f"the adapter {name} has rank {rank}; vLLM serves 1 to {_RANKS[-1]}")
    return config
