"""What float32 serves, bfloat16 and float16 serve too: a worker's sites, without an engine."""

import gc
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rheostat_engine import EngineSettings, Point, engine_kwargs

from .forked import forks, inspect_models_here
from .groups import FORKED
from .models import CONFIGS, EXPERTS, LAYERS, MIXTURES, NO_MID, build

pytestmark = [pytest.mark.integration, FORKED]

RETURNS = ("o_proj", "down_proj", "dense", "dense_4h_to_h", "fc2", "w2")
"""Projections that return what attention and the MLP add to the stream, in any architecture."""

CASES = [
    *((name, "bfloat16", "auto") for name in sorted(CONFIGS)),
    *((name, "float16", "auto") for name in sorted(CONFIGS) if name != "gemma3"),  # vLLM refuses it
    *((name, "bfloat16", "dummy") for name in ("llama", "olmo2")),
]


def as_trained(path: Path) -> Path:
    """A copy of a model whose first block adds far more to the stream than the embedding holds.

    Trained models are like this, and what is added to a small stream is then rounded coarsely.
    """
    copy = path.with_name(f"{path.name}-as-trained")
    if not copy.exists():
        tensors = load_file(path / "model.safetensors")
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight").rpartition(".")[2]
            if module.startswith("embed"):
                tensor *= 0.01
            elif module in RETURNS:
                tensor *= 3.0
        copy.mkdir()
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        (copy / "config.json").write_text((path / "config.json").read_text())
    return copy


def describe(path: Path, dtype: str, load_format: str, channel: str) -> Mapping[str, object]:
    """What a worker reports of a model."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.network_utils import get_distributed_init_method, get_open_port

    from rheostat_engine.adapters.worker_cpu import CpuSiteWorker

    # vLLM collects garbage five times. It need not go through all that is imported each time.
    gc.freeze()
    settings = EngineSettings(channel=channel, bank_bytes=4 << 20, capture_bytes=4 << 20)
    config = EngineArgs(
        model=str(path),
        dtype=dtype,
        load_format=load_format,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 20,
        enforce_eager=True,
        skip_tokenizer_init=True,
        **engine_kwargs(settings, device="cpu"),
    ).create_engine_config()
    method = get_distributed_init_method("127.0.0.1", get_open_port())
    try:
        with set_current_vllm_config(config):
            worker = CpuSiteWorker(config, local_rank=0, rank=0, distributed_init_method=method)
            worker.init_device()
            worker.load_model()
            report = worker.rheostat_describe()
            worker.shutdown()
            return report
    finally:
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def other_process() -> Iterator[Executor]:
    """A process for workers: vLLM's Transformers backend changes Hugging Face's classes."""
    with ProcessPoolExecutor(1, forks(), inspect_models_here) as executor:
        yield executor


@pytest.mark.parametrize(("name", "dtype", "load_format"), CASES)
def test_a_point_that_float32_serves_is_served_in_every_dtype(
    name: str,
    dtype: str,
    load_format: str,
    models_root: Path,
    tmp_path: Path,
    other_process: Executor,
) -> None:
    path, channel = as_trained(build(name, models_root)), f"ipc://{tmp_path}/channel"
    report = other_process.submit(describe, path, dtype, load_format, channel).result(timeout=120)
    parallel = "attention and MLP run in parallel on the same stream"
    assert report["refused"] == ({Point.RESID_MID: parallel} if name in NO_MID else {})
    assert report["experts"] == dict.fromkeys(range(LAYERS if name in MIXTURES else 0), EXPERTS)
    assert report["unrouted"] == {}
