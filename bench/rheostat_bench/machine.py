"""What a benchmark runs on: the model, the device, and vLLM's arguments for both kinds of engine.

Invariant: stock vLLM and the engine with sites are given the same arguments; what differs is the
extension alone. On a CPU they run eager, without the compiler.
"""

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from rheostat_bench.shapes import SHAPES, write_shape
from rheostat_server.config import ServerConfig

BLOCK = 32
"""Tokens per block of the KV cache on a CPU, the fewest that vLLM's attention takes there."""

MAX_MODEL_LEN = 2048
"""Tokens of a request that all models here can take."""

_CPU_KV_BYTES = 256 << 20
_CUDA_KV_BYTES = 8 << 30
"""Of an engine that starts while another one does: neither can measure what is free. 58,000 tokens
of an 8B model."""
_BLOCKS = 1.1
"""KV memory for this many times the tokens, because the last block of a request is not full."""


class Model(NamedTuple):
    """What the engines load."""

    name: str
    """What the results call it."""
    path: Path
    """Its folder."""
    dtype: str
    """Element type of its weights."""
    load_format: str
    """"dummy" for a shape, whose weights are noise."""


def add_model_arguments(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Adds `--shape` and `--model`, of which one can be given.

    Args:
        parser: gets them.
        default: a shape; None: the demo model.
    """
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", choices=sorted(SHAPES), default=default, help="without weights")
    which.add_argument("--model", help="a folder with weights, or demo")


def chosen(arguments: argparse.Namespace, scratch: Path) -> Model:
    """The model that was asked for; a shape is written to `scratch`.

    Raises:
        ModelNotFound: there is no such folder.
    """
    if arguments.model is None and arguments.shape is not None:
        shape = str(arguments.shape)
        path = write_shape(shape, scratch)
        return Model(shape, path, str(SHAPES[shape]["torch_dtype"]), "dummy")
    from rheostat_server.engine.vllm_engine import model_path

    path = Path(model_path(arguments.model or "demo"))
    return Model(path.name, path, _dtype(path), "auto")


def _dtype(path: Path) -> str:
    config = json.loads((path / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")


def device() -> Literal["cpu", "cuda"]:
    """Where vLLM runs."""
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else "cuda"


def engine_options(model: Model, *, engines: int, requests: int, **more: Any) -> dict[str, Any]:
    """vLLM's arguments.

    Args:
        model: what is loaded.
        engines: how many share the device.
        requests: how many run at once.
        more: what this benchmark wants besides.
    """
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "load_format": model.load_format,
        "dtype": model.dtype,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": requests,
        "seed": 0,
        "disable_log_stats": True,
    }
    if device() == "cuda":
        options["gpu_memory_utilization"] = 0.8 / engines
    else:
        options |= {
            "enforce_eager": True,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": _CPU_KV_BYTES,
        }
    return options | more


def kv_bytes(path: Path, tokens: int) -> int:
    """The KV memory of so many tokens, by a model's `config.json`."""
    config: dict[str, int] = json.loads((path / "config.json").read_text())
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    row = width * config.get("num_key_value_heads", heads)  # of keys, or of values
    each = 4 if "float32" in _dtype(path) else 2
    return 2 * each * row * config["num_hidden_layers"] * tokens


def server_config(
    model: Model, *, engines: int, requests: int, tokens: int = 0, **more: Any
) -> ServerConfig:
    """A server whose engine gets `engine_options`, on a port that the system chooses.

    Engines whose servers start at the same time can share a device. A shape has no tokenizer.

    Args:
        model: what is loaded.
        engines: how many share the device.
        requests: how many run at once.
        tokens: how many they hold together, so that none is preempted.
        more: what this benchmark wants besides.
    """
    options = engine_options(model, engines=engines, requests=requests)
    del options["disable_log_stats"]
    options["skip_tokenizer_init"] = model.load_format == "dummy"
    if device() == "cuda":
        wanted = int(_BLOCKS * kv_bytes(model.path, tokens))
        options["kv_cache_memory_bytes"] = max(_CUDA_KV_BYTES, wanted)
    return ServerConfig(model=str(model.path), port=0, **options | more)


def described(model: Model, runner: str) -> dict[str, object]:
    """What the results say about where they come from."""
    import torch
    import vllm

    cuda = device() == "cuda"
    return {
        "shape": model.name,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {platform.machine()}",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "runner": runner,
        **circumstances(),
    }


def circumstances() -> dict[str, object]:
    """What every result names: the code's commit, the cores it may use, and the time."""
    return {
        "commit": commit(Path(__file__).parent),
        "cores": len(os.sched_getaffinity(0)),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit(folder: Path) -> str | None:
    """The commit that a folder of the sources is of, with "-dirty" if tracked files differ from it.

    None without git, and for a folder that no commit has: that of an installed wheel may lie within
    another repository.
    """
    git = ["git", "-C", str(folder)]
    try:
        tracked = subprocess.run([*git, "ls-files"], capture_output=True, check=True).stdout
        if not tracked:
            return None
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(describe, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def leave() -> NoReturn:
    """Ends the process and every engine: vLLM has no public way to stop several cleanly."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)
