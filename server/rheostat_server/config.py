"""How a server is configured: one frozen object, complete before anything starts."""

import math
import os
from dataclasses import dataclass
from typing import NamedTuple

from rheostat_server.errors import InvalidConfig

_MIB = 1 << 20

_MOST_BYTES = 1 << 44
"""16 TiB: more memory than any machine that this runs on has."""


class _Bounds(NamedTuple):
    """What a number may be, both ends included."""

    least: float
    most: float = math.inf


_BYTES = _Bounds(1, _MOST_BYTES)
_COUNT = _Bounds(1, 1 << 31)
_SECONDS = _Bounds(0, 7 * 24 * 3600)

_BOUNDS = {
    "port": _Bounds(0, 65535),
    "front_ends": _Bounds(0, 256),
    "maximum_concurrent_rpcs": _COUNT,
    "max_model_len": _COUNT,
    "max_num_seqs": _COUNT,
    "max_num_batched_tokens": _COUNT,
    "gpu_memory_utilization": _Bounds(0.01, 1.0),
    "kv_cache_memory_bytes": _BYTES,
    "block_size": _COUNT,
    "tensor_parallel_size": _Bounds(1, 1024),
    "seed": _Bounds(0, (1 << 63) - 1),
    "bank_bytes": _BYTES,
    "capture_bytes": _BYTES,
    "encode_bytes": _Bounds(0, _MOST_BYTES),
    "staging_bytes": _Bounds(0, _MOST_BYTES),
    "vector_store_bytes": _BYTES,
    "runs_bytes": _BYTES,
    "request_buffer_bytes": _BYTES,
    "buffers_bytes": _BYTES,
    "spool_bytes": _BYTES,
    "subscriptions_bytes": _BYTES,
    "resume_window": _SECONDS,
    "heartbeat": _Bounds(0.001, 3600),
    "capacity_wait": _SECONDS,
    "drain_grace": _SECONDS,
}
"""Of every field that is a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything that a server is told before it starts."""

    model: str
    """A folder with a model, a name on the Hugging Face hub, or "demo" for the bundled model."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 50051
    """Port to listen on; 0 lets the system choose."""

    front_ends: int | None = None
    """Processes that speak gRPC with clients; 0: the server's own process does. None: by cores, see
    `serve.front_end_count`."""

    maximum_concurrent_rpcs: int = 2048
    """Calls that run at a time, those of EngineService apart. More are refused unread."""

    enable_log_requests: bool = False
    """Logs a line for each request that has ended."""

    dtype: str = "auto"
    """Element type of weights and stream: "auto", "float32", "bfloat16" or "float16"."""

    max_model_len: int | None = None
    """Tokens of prompt and generation together. None: what the model allows."""

    max_num_seqs: int | None = None
    """Samples that run at once. None: vLLM's choice."""

    max_num_batched_tokens: int | None = None
    """Tokens that one step computes at most. None: vLLM's choice."""

    enforce_eager: bool = False
    """Runs the model uncompiled and without graphs."""

    gpu_memory_utilization: float | None = None
    """Fraction of the device's memory that vLLM may take. None: vLLM's choice."""

    kv_cache_memory_bytes: int | None = None
    """Bytes of the KV cache; goes before `gpu_memory_utilization`. None: vLLM's choice on a GPU, up
    to 4 GiB on a CPU."""

    block_size: int | None = None
    """Tokens per block of the KV cache. None: vLLM's choice."""

    tensor_parallel_size: int = 1
    """Devices that share each layer."""

    distributed_executor_backend: str | None = None
    """How vLLM runs its workers: "mp", "ray", "uni", or the import path of a subclass of vLLM's
    `Executor`. None: vLLM's choice."""

    seed: int = 0
    """Seed of the engine, for samples that bring none."""

    load_format: str = "auto"
    """How weights are read; "dummy" makes random ones from the model's config alone."""

    skip_tokenizer_init: bool = False
    """Loads no tokenizer: token ids in, token ids out."""

    bank_bytes: int = 256 * _MIB
    """Device memory for what steering adds and acts along: three quarters hold rows that are added,
    a quarter the float32 directions of `norm_add`, `ablate`, `clamp` and `scale`."""

    capture_bytes: int = 512 * _MIB
    """Device memory for the ring that captured rows pass through."""

    encode_bytes: int = 128 * _MIB
    """Device memory for making captured rows smaller before they leave it: up to three quarters are
    for what rows are projected on, a quarter for the work. Without room, rows leave whole."""

    staging_bytes: int = 1024 * _MIB
    """Host memory of each worker, pinned on CUDA, in which captured rows wait for the server; never
    less than `capture_bytes`. What finds no room is lost and counted."""

    loras: tuple[tuple[str, str], ...] = ()
    """(name, folder) of each LoRA adapter that requests may name."""

    vector_store_bytes: int = 1024 * _MIB
    """Memory of the server for stored vectors."""

    vector_dir: str | None = None
    """Folder that keeps stored vectors and their names over restarts, of this server alone. None:
    they go with the server."""

    runs_bytes: int = 1024 * _MIB
    """Memory of the server for stored runs, those being made included."""

    request_buffer_bytes: int = 512 * _MIB
    """Memory of the server for what waits of one request for slow readers: captured rows on their
    way into its response, its sinks and its runs, tokens and log-probabilities. Beyond, rows are
    lost or spilled as their policies say, or the request fails."""

    buffers_bytes: int = 2048 * _MIB
    """The same of all requests together. When it is full, those that hold most give way."""

    sinks: tuple[str, ...] = ()
    """Sinks for captured rows, each as "name=plugin:key=value,key=value"."""

    spool: str | None = None
    """Folder in which captured rows wait that find no room in memory and may not be lost, of this
    server alone. None: no request and no subscription may ask for that."""

    spool_bytes: int = 16384 * _MIB
    """Bytes of disk that they may take there."""

    subscriptions_bytes: int = 2048 * _MIB
    """Memory of the server for captured rows on their way to subscribers, all together; what a
    subscriber has not acknowledged counts."""

    resume_window: float = 60.0
    """Seconds that a subscription waits for a reader whose connection broke."""

    heartbeat: float = 5.0
    """Seconds after which a subscription that has nothing to say gives a sign of life."""

    capacity_wait: float = 30.0
    """Seconds that a request waits for what others hold before it is refused: bank rows,
    directions, slots, steps, token rules, ruled intervals, captured rows per step."""

    drain_grace: float = 30.0
    """Seconds that running requests get to finish when the server is told to end."""


def check_config(config: ServerConfig) -> None:
    """Checks every number of a configuration, before anything is loaded.

    Raises:
        InvalidConfig: one is outside its bounds. The message names the flag.
    """
    for name, bounds in _BOUNDS.items():
        value: float | None = getattr(config, name)
        if value is not None and not bounds.least <= value <= bounds.most:
            raise InvalidConfig(_out_of_bounds(name, value, bounds))
    held = max(config.staging_bytes, config.capture_bytes)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if held > there:
        raise InvalidConfig(
            f"--staging-mib and --capture-mib ask for {held // _MIB} MiB of host memory in each "
            f"worker; this machine has {there // _MIB} MiB"
        )


def _out_of_bounds(name: str, value: float, bounds: _Bounds) -> str:
    flag, unit = f"--{name.replace('_', '-')}", 1
    if name.endswith("_bytes"):
        flag, unit = f"{flag.removesuffix('-bytes')}-mib", _MIB
    least, most, given = (_number(one, unit) for one in (*bounds, value))
    return f"{flag} must be {least} to {most}, not {given}"


def _number(value: float, unit: int) -> str:
    whole = value if unit == 1 else math.ceil(value / unit)
    return f"{whole:d}" if isinstance(whole, int) else f"{whole:g}"
