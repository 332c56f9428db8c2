"""Starts vLLM with the extension, and explains in one sentence why it did not start.

Only modules whose name begins with `vllm_` import vLLM, and only inside functions.
"""

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rheostat_engine import EngineSettings, adapt_async_llm, engine_kwargs, prepare_async_llm
from rheostat_server.config import ServerConfig
from rheostat_server.engine.backend import QueueStats
from rheostat_server.engine.loras import Lora, lora_arguments, read_loras
from rheostat_server.engine.memory import (
    Sizes,
    available_memory,
    check_device_memory,
    check_host_memory,
    check_kv_cache,
)
from rheostat_server.errors import EngineFailed, ModelNotFound, StartupError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import SchedulerStats

_LOG = logging.getLogger(__name__)

_CPU_KV_BYTES = 4 << 30
"""Size of the KV cache on a CPU, unless it is configured or memory is short."""

_CPU_KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's environment variable for this size, in GiB."""

_OPENMP_VARIABLE = "OMP_NUM_THREADS"
"""The environment variable with the number of OpenMP threads."""

_ONE_PROCESS = "UniProcExecutor"
"""End of the name of the executor that runs the worker in the engine's process."""

_STEP_TOKENS = 4096
"""The most tokens of a step on a GPU, and of a CUDA graph, by default. An H200 computes them in
about 0.1 s for an 8B model, and the host launches 2,048 in 14 ms as graphs. Streams that begin
meanwhile wait for the next step. Limiting steps to 60 ms cost 3 to 6 % of the tokens per second."""

_VLLM_GRAPH_TOKENS = 512
"""Tokens of vLLM's largest CUDA graph by default, on most devices."""

_IPC = "ipc://"

_SEE_LOG = "See root cause above"
"""Part of vLLM's error if the cause is only in the log."""

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
"""The bundled model."""


class QueueCounter:
    """Adds up the reports of vLLM's scheduler."""

    def __init__(self) -> None:
        """Nothing has been reported."""
        self.stats = QueueStats()

    def add(self, report: "SchedulerStats") -> None:
        """Takes the report of a step."""
        cache = report.prefix_cache_stats
        self.stats = QueueStats(
            report.num_running_reqs,
            report.num_waiting_reqs,
            report.num_skipped_waiting_reqs,
            self.stats.prefix_queried_token_count + cache.queries,
            self.stats.prefix_hit_token_count + cache.hits,
        )


@dataclass
class LoadedEngine:
    """An engine of vLLM with a model in it, and the only reference to it.

    The engine must be freed before Python ends, because its finaliser needs vLLM's modules. Failed
    imports of vLLM keep our frames alive, so a local variable would never free it.
    """

    llm: "AsyncLLM"
    """The engine."""
    settings: EngineSettings
    """The settings of the workers."""
    counter: QueueCounter
    """Counts the scheduler's reports."""
    device: str
    """"cpu" or "cuda"."""
    loras: Mapping[str, Lora]
    """Its adapters, by name."""


def model_path(model: str) -> str:
    """The folder or the name that vLLM should load for a configured model.

    Raises:
        ModelNotFound: the model is a path and there is no such folder, or it is a misspelt `demo`.
    """
    folder = DEMO_MODEL if model == "demo" else Path(model).expanduser()
    named_by_path = model == "demo" or model.startswith(("/", ".", "~")) or model.count("/") > 1
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"{folder} holds no model: it has no config.json")
        return str(folder)
    if named_by_path:
        raise ModelNotFound(f"there is no model folder {folder}")
    if get_close_matches(model, ["demo"], 1, 0.7):  # before the hub is asked, which may take long
        raise ModelNotFound(f"there is no model {model}: did you mean 'demo'?")
    return model


def load_engine(config: ServerConfig) -> LoadedEngine:
    """Loads the model; takes seconds to minutes and blocks.

    Raises:
        ModelNotFound: there is no such model.
        InvalidConfig: the machine has too little memory for the buffers of the workers.
        EngineFailed: vLLM did not come up.
    """
    path = model_path(config.model)
    loras = read_loras(config.loras)
    # Ctrl-C sends SIGINT to every process of the terminal. The engine's processes must not get it,
    # so that the server can drain them. Processes inherit blocked signals. The tracker of
    # multiprocessing is started first, because its start would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # The server has threads by now, and forking a process with threads is not safe.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    try:
        return _load(config, path, loras)
    except StartupError:
        raise
    except OSError as error:
        named = (
            ""
            if Path(path).exists()
            else " (there is no such folder, so it was looked for on the Hugging Face hub)"
        )
        raise ModelNotFound(
            f"cannot read the model {config.model}{named}: {what_happened(error)}"
        ) from error
    except Exception as error:  # vLLM and torch raise many types of errors
        text = str(error)
        if "Invalid repository ID or local directory" in text:
            raise ModelNotFound(f"there is no model {config.model}") from error
        if "torchvision::nms" in text:  # a torchvision for CUDA beside a torch for CPUs
            raise EngineFailed(
                "torchvision was built for another torch. The server needs none of these: "
                "pip uninstall torchvision torchaudio torchcodec"
            ) from error
        what = what_happened(error)
        if _SEE_LOG in text:  # it has no cause of its own
            what += (
                " The cause is in the log above. If the KV cache is too small or too large, change "
                "--kv-cache-memory-mib or --max-model-len."
            )
        raise EngineFailed(f"vLLM could not start with the model {config.model}: {what}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _load(config: ServerConfig, path: str, loras: tuple[Lora, ...]) -> LoadedEngine:
    from vllm.platforms import current_platform

    device: Literal["cpu", "cuda"] = "cpu" if current_platform.is_cpu() else "cuda"
    settings = EngineSettings(
        channel=f"{_IPC}{tempfile.mkdtemp(prefix='rheostat-')}/events",
        bank_bytes=config.bank_bytes,
        encode_bytes=config.encode_bytes,
        controllers=config.controllers,
        controller_budget=config.controller_budget_ms / 1000,
    )
    try:
        return _start(config, path, settings, device, loras)
    except BaseException as error:
        reason = ""
        with suppress(OSError):
            reason = settings.failure_file.read_text(encoding="utf-8")
        remove_channel(settings)
        if reason and isinstance(error, RuntimeError):  # vLLM's, which only refers to the log
            raise RuntimeError(reason) from error
        raise


def remove_channel(settings: EngineSettings) -> None:
    """Removes the folder of the side channel."""
    shutil.rmtree(os.path.dirname(settings.channel.removeprefix(_IPC)), ignore_errors=True)


def _start(
    config: ServerConfig,
    path: str,
    settings: EngineSettings,
    device: Literal["cpu", "cuda"],
    loras: tuple[Lora, ...],
) -> LoadedEngine:
    from vllm.v1.engine.async_llm import AsyncLLM

    prepare_async_llm()
    vllm_config = make_config(config, path, settings, device, loras)
    compiled = bool(vllm_config.compilation_config.mode)
    _LOG.info("starting the engine%s", " with a compiled model" if compiled else "")
    # No variable here may refer to the `AsyncLLM`: see `prepare_async_llm`.
    with core_left_to_server(config, device):
        loaded = LoadedEngine(
            AsyncLLM.from_vllm_config(vllm_config),  # logs statistics, which GetStats needs
            EngineSettings.from_config(vllm_config.additional_config),
            QueueCounter(),
            device,
            {lora.name: lora for lora in loras},
        )
    adapt_async_llm(loaded.llm, loaded.counter.add)
    return loaded


def make_config(
    config: ServerConfig,
    path: str,
    settings: EngineSettings,
    device: Literal["cpu", "cuda"],
    loras: tuple[Lora, ...],
) -> "VllmConfig":
    """vLLM's configuration, with the defaults of `vllm serve` but for `step_arguments`.

    Args:
        config: the server's configuration.
        path: the model, as `model_path` returns it.
        settings: the settings of the workers. The buffers of captured rows get their sizes here,
            because these depend on the tokens of a step.
        device: the device of the model.
        loras: the adapters.

    Raises:
        InvalidConfig: the machine has too little memory for these buffers.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    arguments: dict[str, Any] = {
        **(cpu_memory(config) if device == "cpu" else {}),
        **engine_arguments(config, path),
        **engine_kwargs(settings, device=device),
        **lora_arguments(loras, cpu=device == "cpu"),
    }
    # vLLM's defaults for tokens and samples of a step depend on who uses it. An `AsyncLLM` without
    # this context takes a quarter of the tokens on a large GPU, and an eighth of the samples.
    context = UsageContext.OPENAI_API_SERVER
    made = AsyncEngineArgs(**arguments).create_engine_config(context)
    if chosen := step_arguments(config, made, device):
        made = AsyncEngineArgs(**arguments | chosen).create_engine_config(context)
    step_tokens = made.scheduler_config.max_num_batched_tokens
    sized = replace(
        settings,
        capture_bytes=config.ring_bytes(step_tokens),
        staging_bytes=config.staging_area_bytes(step_tokens),
    )
    _check_memory(config, made, sized, device)
    made.additional_config = sized
    _LOG.info(
        "a step computes at most %d tokens of %d samples; %d MiB for the ring of captured rows",
        step_tokens,
        made.scheduler_config.max_num_seqs,
        sized.capture_bytes >> 20,
    )
    return made


def step_arguments(
    config: ServerConfig, made: "VllmConfig", device: Literal["cpu", "cuda"]
) -> dict[str, object]:
    """The most tokens of a step, and the sizes of the CUDA graphs, where vLLM's defaults differ.

    Warns of `--max-cudagraph-capture-size` if there are no CUDA graphs.

    Args:
        config: the server's configuration, which takes precedence.
        made: vLLM's configuration with vLLM's defaults.
        device: the device of the model.

    Returns:
        Arguments of vLLM.
    """
    scheduler = made.scheduler_config
    tokens = scheduler.max_num_batched_tokens
    chosen: dict[str, object] = {}
    # Without chunks a step has room for the longest prompt. vLLM never splits an image either, and
    # checks the room for one although the server refuses images.
    splits = scheduler.enable_chunked_prefill and not made.model_config.is_multimodal_model
    limit = max(_STEP_TOKENS, scheduler.max_num_seqs)  # every sample has a token in a step
    if device == "cuda" and config.max_num_batched_tokens is None and splits and limit < tokens:
        chosen["max_num_batched_tokens"] = tokens = limit
    sizes = made.compilation_config.cudagraph_capture_sizes
    asked = config.max_cudagraph_capture_size
    if sizes and asked is None:
        larger = graph_sizes(min(_STEP_TOKENS, tokens))
        chosen["cudagraph_capture_sizes"] = [*sizes, *(one for one in larger if one > sizes[-1])]
    elif sizes and asked is not None:
        chosen["cudagraph_capture_sizes"] = graph_sizes(min(asked, tokens))
    elif asked is not None:
        _LOG.warning("--max-cudagraph-capture-size has no effect: there are no CUDA graphs")
    return chosen


def _check_memory(
    config: ServerConfig,
    made: "VllmConfig",
    settings: EngineSettings,
    device: Literal["cpu", "cuda"],
) -> None:
    """Checks that the machine has the memory for the buffers of all workers.

    It only warns if clients may fill more than is left, because most never do.

    Raises:
        InvalidConfig: it has too little.
    """
    from vllm.platforms import current_platform

    parallel, cache = made.parallel_config, made.cache_config
    sizes = Sizes(settings, parallel.world_size, parallel.pipeline_parallel_size)
    available = available_memory()
    left = available - check_host_memory(sizes, cpu=device == "cpu", available=available)
    caches = config.kv_cache_memory_bytes or 0
    if device == "cpu":
        check_kv_cache(sizes.ranks * caches, available=left)
    if device == "cuda":
        total = current_platform.get_device_total_memory()
        given = cache.kv_cache_memory_bytes is not None  # vLLM then takes no fraction
        fraction = 1.0 if given else cache.gpu_memory_utilization
        check_device_memory(settings, available=int(total * fraction))
        check_kv_cache(caches, available=total)
    if config.client_bytes > left:
        _LOG.warning(
            "clients may fill %d MiB of host memory (--buffers-mib, --subscriptions-mib, "
            "--vector-store-mib, --runs-mib), but only %d MiB are left for that and the model: "
            "lower these flags",
            config.client_bytes >> 20,
            left >> 20,
        )


def cpu_memory(config: ServerConfig) -> dict[str, object]:
    """The size of the KV cache on a CPU. By default, vLLM would take 92 % of the machine's memory.

    The configuration takes precedence. vLLM alone would let its environment variable override it.
    """
    if config.kv_cache_memory_bytes is not None:
        if os.environ.pop(_CPU_KV_VARIABLE, ""):
            _LOG.warning("%s is ignored: the size of the KV cache was given", _CPU_KV_VARIABLE)
        return {}
    if os.environ.get(_CPU_KV_VARIABLE):
        return {}
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"kv_cache_memory_bytes": min(_CPU_KV_BYTES, free // 4)}


@contextmanager
def core_left_to_server(config: ServerConfig, device: str) -> Iterator[None]:
    """Limits OpenMP to one thread fewer than there are cores, in processes started within.

    This applies to a worker on a CPU in the engine's process. For a worker process, vLLM reserves a
    core itself. By default OpenMP starts a thread for each core that the process may use. These
    threads synchronise many times in each step. If the server occupies one core, all threads wait
    for the one that has none. `OMP_NUM_THREADS` takes precedence.
    """
    backend = config.distributed_executor_backend or ""
    if device != "cpu" or not backend.endswith(_ONE_PROCESS) or _OPENMP_VARIABLE in os.environ:
        yield
        return
    os.environ[_OPENMP_VARIABLE] = str(max(1, len(os.sched_getaffinity(0)) - 1))
    try:
        yield
    finally:
        os.environ.pop(_OPENMP_VARIABLE, None)


def engine_arguments(config: ServerConfig, path: str) -> dict[str, object]:
    """Arguments of vLLM. Settings that are None are left to vLLM."""
    wanted: dict[str, object] = {
        "model": path,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enforce_eager": config.enforce_eager,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "block_size": config.block_size,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": config.distributed_executor_backend,
        "seed": config.seed,
        "load_format": config.load_format,
        "skip_tokenizer_init": config.skip_tokenizer_init,
        # If all processes get the signal to end at once, the engine must outlive the drain.
        "shutdown_timeout": int(config.drain_grace) + 1,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def graph_sizes(most: int) -> list[int]:
    """Tokens of the CUDA graphs for steps of at most `most` tokens.

    vLLM itself would capture a graph for every 16 tokens above 256, and each takes time and memory.
    Above `_VLLM_GRAPH_TOKENS` they are further apart here.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, _VLLM_GRAPH_TOKENS, 16)]  # as vLLM's
    sizes += [*range(_VLLM_GRAPH_TOKENS, 1024, 64), *range(1024, most, 128)]
    return [*(size for size in sizes if size < most), most]


def what_happened(error: Exception) -> str:
    """An error of vLLM in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # Pydantic's first line counts the problems; the next lines describe them.
    text = " ".join(lines[1:3]) if "validation error" in lines[0] else lines[0]
    return text[:400]
