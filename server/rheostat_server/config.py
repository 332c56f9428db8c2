"""How a server is configured, and the model that it has loaded: two frozen objects.

The configuration is complete before anything starts.

A field that a flag of `rheostat serve` sets describes the flag too, with the words of its help.
"""

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from rheostat_server.errors import InvalidConfig

_MIB = 1 << 20

_MOST_BYTES = 1 << 44
"""16 TiB: more memory than any machine that this runs on has."""


class Bounds(NamedTuple):
    """The smallest and the largest allowed value of a number."""

    least: float
    most: float = math.inf


_BYTES = Bounds(1, _MOST_BYTES)
_BYTES_OR_NONE = Bounds(0, _MOST_BYTES)
_COUNT = Bounds(1, 1 << 31)
_SECONDS = Bounds(0, 7 * 24 * 3600)

_VLLM = "vLLM's choice"
_VLLM_SERVE = "what vllm serve takes for this model and device"

_BASE_STEP_TOKENS = 2048
_BASE_RING = 512 * _MIB
"""The default size of the ring for steps of `_BASE_STEP_TOKENS` or fewer. It grows with the step,
so that it holds as many layers of a larger one: 31 of a model with rows of 8 KiB."""
_LARGEST_RING = 2048 * _MIB

_RINGS_STAGED = 2
"""Full rings for which the default staging area has room: the server reads one while the next one
is copied."""
_LEAST_STAGING = 1024 * _MIB
_MOST_STAGING = 4096 * _MIB
"""The smallest and the largest default size of the staging area, if the ring is not larger."""

_LEAST_REQUEST_LIMIT = 512 * _MIB


class Flag(NamedTuple):
    """The flag that sets a field: `--max-num-seqs` sets `max_num_seqs`."""

    help: str
    metavar: str | None
    default: str
    """The default in words; empty: the help shows the default itself."""
    group: str
    """The title of the group that starts with this flag; empty: the previous group continues."""
    choices: tuple[str, ...] | None
    name: str
    """The flag's name, if it differs from the field's. Such a flag may be repeated."""


def _flag(  # the default of a field of any type
    default: Any,
    help: str,
    metavar: str | None = None,
    bounds: Bounds | None = None,
    words: str = "",
    *,
    group: str = "",
    choices: tuple[str, ...] | None = None,
    name: str = "",
) -> Any:
    """A field that a flag sets; see `Flag`."""
    flag = Flag(help, metavar, words, group, choices, name)
    return field(default=default, metadata={"flag": flag, "bounds": bounds})


def _mib(
    default: int | None, help: str, bounds: Bounds = _BYTES, words: str = "", *, group: str = ""
) -> Any:  # as for `_flag`
    """A field in bytes, `bank_bytes`, that a flag in MiB sets, `--bank-mib`."""
    size = None if default is None else default * _MIB
    return _flag(size, help, "MIB", bounds, words, group=group)


def _bounded(default: float | None, bounds: Bounds) -> Any:  # as for `_flag`
    """A number that no flag sets."""
    return field(default=default, metadata={"bounds": bounds})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All settings of a server."""

    model: str
    """A folder with a model, a name on the Hugging Face hub, or "demo" for the bundled model."""

    host: str = _flag("127.0.0.1", "address to listen on", "ADDRESS", group="where it listens")
    port: int = _flag(50051, "port to listen on; 0 takes any free port", "PORT", Bounds(0, 65535))
    front_ends: int | None = _flag(
        None,
        "processes that speak gRPC with clients; 0: the server's own process does",
        "PROCESSES",
        Bounds(0, 256),
        "1; 0 on fewer than 8 cores",
    )
    """`serve.front_end_count` chooses if it is None."""
    maximum_concurrent_rpcs: int = _flag(
        2048, "calls that run at the same time; more are refused", "RPCS", _COUNT
    )
    """Calls of EngineService have a limit of their own."""
    enable_log_requests: bool = _flag(
        False, "log a line for each request that has ended", words="off"
    )

    dtype: str = _flag(
        "auto",
        "element type of weights and activations",
        choices=("auto", "float32", "bfloat16", "float16"),
        group="how the model runs",
    )
    max_model_len: int | None = _flag(
        None,
        "longest prompt and generation together, in tokens",
        "TOKENS",
        _COUNT,
        "what the model allows",
    )
    max_num_seqs: int | None = _flag(
        None, "samples that run at the same time", "SAMPLES", _COUNT, _VLLM_SERVE
    )
    max_num_batched_tokens: int | None = _flag(
        None,
        "tokens that one step computes",
        "TOKENS",
        _COUNT,
        f"{_VLLM_SERVE}, or 4096 on a GPU if that is less",
    )
    enforce_eager: bool = _flag(
        False, "run the model uncompiled and without CUDA graphs", words="off"
    )
    max_cudagraph_capture_size: int | None = _flag(
        None,
        "steps of at most so many tokens run as CUDA graphs",
        "TOKENS",
        _COUNT,
        "4096, or --max-num-batched-tokens if that is less",
    )
    gpu_memory_utilization: float | None = _flag(
        None,
        "fraction of the device's memory that vLLM may take",
        "FRACTION",
        Bounds(0.01, 1.0),
        _VLLM,
    )
    tensor_parallel_size: int = _flag(
        1, "devices that share each layer", "DEVICES", Bounds(1, 1024)
    )
    distributed_executor_backend: str | None = _flag(
        None,
        "how vLLM runs its workers: mp, ray, uni or the import path of an executor class",
        "BACKEND",
        words=_VLLM,
    )
    """The class is a subclass of vLLM's `Executor`."""
    seed: int = _flag(0, "seed for requests that give none", "SEED", Bounds(0, (1 << 63) - 1))
    loras: tuple[tuple[str, str], ...] = _flag(
        (),
        "an adapter that requests may name; may be repeated",
        "NAME=FOLDER",
        words="none",
        name="lora",
    )
    """(name, folder) of each LoRA adapter."""
    load_format: str = _flag("auto", 'how to read weights; "dummy" makes random ones', "FORMAT")
    """"dummy" needs the model's config alone."""
    block_size: int | None = _bounded(None, _COUNT)
    """Tokens per block of the KV cache. None: vLLM's choice."""
    skip_tokenizer_init: bool = False
    """Loads no tokenizer: token ids in, token ids out."""

    kv_cache_memory_bytes: int | None = _mib(
        None,
        "KV cache",
        words="vLLM's choice on a GPU, up to 4096 on a CPU",
        group="memory, in MiB",
    )
    """If set, it overrides `gpu_memory_utilization`."""
    bank_bytes: int = _mib(256, "device memory for steering vectors")
    """Three quarters hold rows that are added, a quarter the float32 directions of `norm_add`,
    `ablate`, `clamp` and `scale`."""
    capture_bytes: int | None = _mib(
        None,
        "device memory for the ring of captured rows",
        words="512 for every 2048 tokens of a step, at least 512, at most 2048",
    )
    """None: `ring_bytes` computes it."""
    encode_bytes: int = _mib(
        128, "device memory to encode and project captured rows", _BYTES_OR_NONE
    )
    """Up to three quarters hold the directions that rows are projected on; a quarter is work space.
    If it is too small, rows are sent whole."""
    staging_bytes: int | None = _mib(
        None,
        "host memory of each worker in which captured rows wait for the server",
        _BYTES_OR_NONE,
        "twice --capture-mib, at least 1024, at most 4096",
    )
    """Pinned on CUDA; never less than the ring. Rows beyond it are lost and counted. None:
    `staging_area_bytes` computes it."""
    request_buffer_bytes: int | None = _mib(
        None,
        "memory in which one request's rows, tokens and log-probabilities wait for slow readers",
        words="as much as --capture-mib, at least 512, at most --buffers-mib",
    )
    """Readers are its response, its sinks and its runs. If it is full, rows are lost or spilled
    by the policy of their capture, or the request fails. None: `request_limit_bytes` computes
    it."""
    buffers_bytes: int = _mib(2048, "the same for all requests together")
    """If it is full, the policies apply first to the requests that hold most."""
    subscriptions_bytes: int = _mib(
        2048,
        "captured rows that subscribers have not acknowledged, for all subscriptions together",
    )
    vector_store_bytes: int = _mib(1024, "memory for stored vectors")
    runs_bytes: int = _mib(1024, "memory for stored runs")
    """Unfinished runs count too."""

    sinks: tuple[str, ...] = _flag(
        (),
        'a sink that requests may name, e.g. "disk=filesystem:root=/data"; may be repeated',
        "NAME=PLUGIN:KEY=VALUE,...",
        words="none",
        group="files for captured rows",
        name="sink",
    )

    controllers: tuple[str, ...] = _flag(
        (),
        "an installed controller that requests may use; may be repeated",
        "NAME",
        words="none",
        group="plugins that set gains",
        name="controller",
    )
    """Names of entry points in the group `rheostat.controllers`."""
    controller_budget_ms: float = _flag(
        2.0,
        "how long a call of a controller may compute; one that often exceeds it is disabled",
        "MILLISECONDS",
        Bounds(0.01, 1000),
    )

    capacity_wait: float = _flag(
        30.0,
        "how long a request waits for resources of other requests before it is refused",
        "SECONDS",
        _SECONDS,
        group="waiting",
    )
    """The resources are bank rows, directions, slots, steps, token rules, ruled intervals, captured
    rows per step."""
    resume_window: float = _flag(
        60.0,
        "how long a subscription or watch waits for its client to reconnect",
        "SECONDS",
        _SECONDS,
    )
    heartbeat: float = _bounded(5.0, Bounds(0.001, 3600))
    """Seconds without an event after which a subscription sends a heartbeat."""

    spool: str | None = _flag(
        None,
        "folder in which captured rows wait under the policy spill; one server per folder",
        "FOLDER",
        words="none",
        group="folders",
    )
    """None: requests and subscriptions with this policy are refused."""
    spool_bytes: int = _mib(16384, "largest size of that folder")
    vector_dir: str | None = _flag(
        None,
        "folder that keeps stored vectors and their names over restarts; one server per folder",
        "FOLDER",
        words="none",
    )

    policy: str | None = _flag(
        None,
        "JSON file with the server-wide policy, which is in force before the first request; "
        "rheostat global export writes one",
        "FILE",
        words="none",
        group="policy",
    )
    """See `admission/policy_file.py`."""

    drain_grace: float = _bounded(30.0, _SECONDS)
    """Seconds that running requests get to finish when the server shuts down."""

    @property
    def client_bytes(self) -> int:
        """The most bytes of the server's memory that clients fill, as far as flags limit them."""
        stores = self.vector_store_bytes + self.runs_bytes
        return self.buffers_bytes + self.subscriptions_bytes + stores

    def ring_bytes(self, step_tokens: int) -> int:
        """Bytes of the ring of captured rows, if a step computes at most `step_tokens` tokens."""
        if self.capture_bytes is not None:
            return self.capture_bytes
        ring = _BASE_RING * step_tokens // _BASE_STEP_TOKENS
        return min(max(ring, _BASE_RING), _LARGEST_RING)

    def staging_area_bytes(self, step_tokens: int) -> int:
        """Bytes of the host memory in which captured rows wait; `step_tokens` as above."""
        if self.staging_bytes is not None:
            return self.staging_bytes
        ring = self.ring_bytes(step_tokens)
        return max(ring, min(max(_RINGS_STAGED * ring, _LEAST_STAGING), _MOST_STAGING))

    def request_limit_bytes(self, step_tokens: int) -> int:
        """Bytes that may wait for the readers of one request; `step_tokens` as above.

        By default the rows of a step fit, which come together.
        """
        if self.request_buffer_bytes is not None:
            return self.request_buffer_bytes
        return max(_LEAST_REQUEST_LIMIT, min(self.ring_bytes(step_tokens), self.buffers_bytes))


def check_config(config: ServerConfig) -> None:
    """Checks every number of a configuration, before anything is loaded.

    Raises:
        InvalidConfig: a number is outside its bounds. The message names the flag.
    """
    for setting in fields(config):
        bounds, value = setting.metadata.get("bounds"), getattr(config, setting.name)
        if bounds and value is not None and not bounds.least <= value <= bounds.most:
            raise InvalidConfig(_out_of_bounds(setting.name, value, bounds))
    needed = max(config.staging_bytes or 0, config.capture_bytes or 0)
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > installed:
        raise InvalidConfig(
            f"--staging-mib and --capture-mib ask for {needed // _MIB} MiB of host memory in each "
            f"worker; this machine has {installed // _MIB} MiB"
        )


def _out_of_bounds(name: str, value: float, bounds: Bounds) -> str:
    flag, unit = f"--{name.replace('_', '-')}", 1
    if name.endswith("_bytes"):
        flag, unit = f"{flag.removesuffix('-bytes')}-mib", _MIB
    least, most, actual = (_number(number, unit) for number in (*bounds, value))
    return f"{flag} must be {least} to {most}, not {actual}"


def _number(value: float, unit: int) -> str:
    whole = value if unit == 1 else math.ceil(value / unit)
    return f"{whole:d}" if isinstance(whole, int) else f"{whole:g}"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The loaded model and how it runs."""

    name: str
    """Name under which it was loaded."""
    vocabulary: int
    """Number of token ids."""
    model_tokens: int
    """Tokens of prompt and generation together."""
    step_tokens: int
    """The most tokens that one step computes."""
    running_samples: int
    """Samples that run at once; more wait."""
    logprobs: int
    """Most log-probabilities per token."""
    device: str
    """"cpu" or "cuda"."""
    compiled: bool
    """Whether the model is compiled."""
    prefix_caching: bool
    """Whether prefix caching is on."""
    loras: tuple[str, ...]
    """Names of its adapters."""
    tensor_parallel: int
    """Tensor-parallel ranks."""
    pipeline_parallel: int
    """Pipeline-parallel stages."""
    vllm_version: str
    """Version of vLLM."""
    torch_version: str
    """Version of torch."""
    head_loras: tuple[str, ...] = ()
    """Names of the adapters that change the unembedding."""

    @property
    def no_gates(self) -> str:
        """Why probes and gates are not served; empty if they are."""
        if self.pipeline_parallel > 1:
            return (
                "probes and gates are not served with pipeline parallelism, because a gate would "
                "need what another stage reads"
            )
        return ""
