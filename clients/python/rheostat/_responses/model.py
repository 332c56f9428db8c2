"""The model that a server runs, with the abilities of its sites, and the server's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from rheostat._fields import read_word, same_fields
from rheostat._notebook import table
from rheostat._points import Point, Site, knows_point, read_point, show_layers
from rheostat_wire.v1 import engine_service_pb2, receipt_pb2, tensor_pb2


@dataclass(frozen=True)
class Ability:
    """Whether a site supports an op or capture."""

    served: bool
    why_not: str = ""
    """If not served: the reason, and an alternative."""


@dataclass(frozen=True)
class SiteGroup:
    """Layers of one point that have the same abilities."""

    point: Point
    layers: tuple[int, ...]
    """Layers, ascending."""
    capture: Ability
    """Whether rows can be captured here."""
    ops: Mapping[str, Ability]
    """The ability of each op ("add", ...)."""
    form: str
    """How the model's code holds the stream: "pair" (last branch and residual, not yet added) or
    "single" (one tensor)."""
    width: int = 0
    """Values per row here; the number of experts if the point is ``router_logits``."""


@dataclass(frozen=True)
class EngineInfo:
    """The engine that runs the model."""

    vllm_version: str
    torch_version: str
    runner: str
    """vLLM's model runner: "v1" or "v2"."""
    device: str
    """"cpu" or "cuda"."""
    tensor_parallel_size: int
    pipeline_parallel_size: int
    compiled: bool
    variants: tuple[str, ...]
    """The names by which `Stats.steps` counts steps."""
    prefix_caching: bool


@dataclass(frozen=True)
class Limits:
    """The server's limits."""

    model_tokens: int
    """Tokens of prompt and generation together."""
    running_requests: int
    """Samples that run at the same time. A request with ``n`` samples counts n times."""
    waiting_requests: int
    """Samples that may wait."""
    bank_rows: int
    """Distinct sums of added vectors that the engine holds at a time, for all sites together."""
    capture_rows_per_step: int
    """Rows that one engine step can capture, all sites together."""
    tensor_message_bytes: int
    """Largest message."""
    vector_bytes: int
    """Largest vector of an upload."""
    inline_vector_bytes: int
    """Largest vector inside a request."""
    samples: int
    """Largest ``n``."""
    logprobs: int
    """Largest ``logprobs`` and ``prompt_logprobs``."""
    capacity_wait: float
    """Longest time that a request waits for bank rows, in seconds; see ``when_full``."""
    run_bytes: int
    """Bytes of all runs together."""
    request_buffer_bytes: int
    """Bytes of one request that may wait for slow readers, sinks and runs."""
    buffer_bytes: int
    """Bytes of all requests that may wait. Above it, the requests with most bytes lose rows or
    fail."""
    step_tokens: int
    """The most tokens that one step of the engine computes; a longer prompt takes several steps. 0:
    an older server, which does not say it."""


@dataclass(frozen=True, repr=False)
class ModelInfo:
    """The model that a server runs. ``print`` shows it in words."""

    name: str
    """Name with which it was loaded."""
    architecture: str
    layer_count: int
    width: int
    """Values per row of the residual stream."""
    vocabulary_size: int
    dtype: str
    """Element type of the stream."""
    sites: tuple[SiteGroup, ...]
    """Every point and layer, grouped by abilities."""
    has_tokenizer: bool
    has_chat_template: bool
    """Whether messages can be rendered."""
    lora_names: tuple[str, ...]
    engine: EngineInfo
    limits: Limits
    build_version: str
    api_version: str
    """Protobuf package of the services, "rheostat.v1"."""
    features: tuple[str, ...] = ()
    """Features that the server serves: "steering", "capture", "sinks", ..."""
    embedding_std: float | None = None
    """Standard deviation of the token embedding's elements, as they enter the stream; see `Noise`.
    None: the server could not measure it."""
    controller_names: tuple[str, ...] = ()
    """Controllers that requests may name; see `GenerateOptions.controller`."""

    def captured(self, point: Point) -> tuple[int, ...]:
        """Layers at which rows of this point can be captured, ascending."""
        served = (group for group in self.sites if group.point is point and group.capture.served)
        return tuple(sorted(layer for group in served for layer in group.layers))

    def can_capture(self, site: Site) -> bool:
        """Whether rows can be captured at a site."""
        return site.layer in self.captured(site.point)

    def __repr__(self) -> str:
        return f"ModelInfo({self.name!r}, {self.layer_count} layers, width {self.width})"

    def __str__(self) -> str:
        return "\n".join([self.name, *(f"  {what}: {how}" for what, how in _rows(self))])

    def _repr_html_(self) -> str:
        return table(("model", self.name), _rows(self))


def _rows(model: ModelInfo) -> list[tuple[str, str]]:
    engine = model.engine
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    step_tokens = model.limits.step_tokens
    steps = f"steps of {step_tokens} tokens, " if step_tokens else ""
    rows = [
        (
            "model",
            f"{model.architecture}, {model.layer_count} layers, width {model.width}, "
            f"vocabulary {model.vocabulary_size}, {model.dtype}",
        ),
        (
            "engine",
            f"vLLM {engine.vllm_version} on {engine.device}, runner {engine.runner}, "
            f"{'compiled' if engine.compiled else 'eager'}, {ranks} rank{'s' * (ranks > 1)}",
        ),
        (
            "limits",
            f"context {model.limits.model_tokens} tokens, "
            f"{steps}{model.limits.running_requests} requests, {model.limits.bank_rows} bank rows, "
            f"{model.limits.logprobs} logprobs",
        ),
        ("adapters", ", ".join(model.lora_names) or "none"),
        ("server", f"{model.build_version}, {model.api_version}"),
        (
            "features",
            ", ".join(feature.replace("_", " ") for feature in model.features) or "unknown",
        ),
    ]
    for group in model.sites:
        served = [op for op, ability in group.ops.items() if ability.served]
        served += ["capture"] if group.capture.served else []
        abilities = ", ".join(served) or f"nothing: {group.capture.why_not}"
        rows.append((f"{group.point} {show_layers(group.layers)}", abilities))
    return rows


def read_model(message: engine_service_pb2.GetModelResponse) -> ModelInfo:
    engine, limits = message.engine, message.limits
    return ModelInfo(
        **{
            **same_fields(ModelInfo, message),
            "dtype": read_word(tensor_pb2.Dtype.DESCRIPTOR, message.dtype, "DTYPE_"),
            "embedding_std": message.embedding_std if message.HasField("embedding_std") else None,
        },
        name=message.model_name,
        sites=tuple(_read_group(group) for group in message.sites if knows_point(group.point)),
        lora_names=tuple(message.lora_names),
        controller_names=tuple(message.controller_names),
        engine=EngineInfo(
            **{
                **same_fields(EngineInfo, engine),
                "runner": read_word(engine_service_pb2.Runner.DESCRIPTOR, engine.runner, "RUNNER_"),
                "variants": tuple(engine.variants),
            }
        ),
        limits=Limits(
            **same_fields(Limits, limits),
            capacity_wait=limits.capacity_wait.ToTimedelta().total_seconds(),
        ),
        features=tuple(
            read_word(engine_service_pb2.Feature.DESCRIPTOR, feature, "FEATURE_")
            for feature in message.features
        ),
    )


def _read_ability(message: engine_service_pb2.Ability) -> Ability:
    return Ability(message.served, message.why_not)


def _read_group(message: engine_service_pb2.SiteGroup) -> SiteGroup:
    return SiteGroup(
        point=read_point(message.point),
        layers=tuple(message.layers),
        capture=_read_ability(message.capture),
        ops={
            read_word(receipt_pb2.Op.DESCRIPTOR, op.op, "OP_"): _read_ability(op.ability)
            for op in message.ops
        },
        form=message.form,
        width=message.width,
    )


@dataclass(frozen=True)
class ControllerStats:
    """Calls of a controller, and how long they took, in seconds."""

    controller_name: str
    call_count: int
    """Calls: one for each step with a request that it controls."""
    overrun_count: int
    """Calls whose CPU time exceeded the server's budget, or whose time exceeded it by 100 ms."""
    p50: float
    """Median of the last 4,096 calls."""
    p99: float
    """99th percentile of the last 4,096 calls."""
    longest: float
    """The longest call."""
    disabled_reason: str
    """Why it is disabled; empty: it is not."""


@dataclass(frozen=True, repr=False)
class Stats:
    """Counters since the start of a server, and gauges."""

    running_request_count: int
    waiting_request_count: int
    admitted_count: int
    completed_count: int
    """Requests that ended with a receipt."""
    aborted_count: int
    """Requests that were cancelled or stopped."""
    refused_count: int
    """Requests refused before admission."""
    failed_count: int
    """Requests that failed after admission."""
    steps: Mapping[str, int]
    """Steps by variant: "active" if a site was steered, read or captured, else "plain"."""
    used_bank_row_count: int
    """Bank rows in use, in the worker that uses most."""
    bank_row_count: int
    """As `Limits.bank_rows`."""
    captured_row_count: int
    """Rows captured."""
    captured_bytes: int
    """Bytes of these rows in the model's element type."""
    dropped_row_count: int
    """Lost rows; a row that several readers lost counts once for each."""
    prefix_queried_token_count: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hit_token_count: int
    """Prompt tokens found there."""
    vector_count: int
    uptime: float
    """Seconds since the start."""
    leaked_count: int
    """Resources that are reserved although no request runs: any number but 0 is a defect. Not
    counted while requests run."""
    global_version: int
    """Version of the server-wide steering; 0: never set."""
    left_bytes: int
    """Bytes of captured rows copied from the device; fewer than `captured_bytes` if the device
    encoded rows."""
    plain_row_count: int
    """Rows copied from the device without encoding, because it lacked memory for the encoding."""
    ring_bytes: int
    """Device memory of the ring buffer for captured rows."""
    encode_bytes: int
    """Device memory for encoding captured rows."""
    spooled_row_count: int
    """Captured rows that wait on the server's disk."""
    overrun_row_count: int
    """Captured rows lost in a worker: a buffer was full, or the copy failed."""
    staging_bytes: int
    """Host memory of the workers in which captured rows wait for the server."""
    run_count: int
    """Stored runs."""
    run_bytes: int
    """Bytes of stored runs, and of runs that are being stored."""
    request_buffer_bytes: int
    """Bytes that wait for slow readers of requests, for sinks and for runs."""
    subscription_buffer_bytes: int
    """Bytes of captured rows that subscribers have not read and acknowledged."""
    controllers: tuple[ControllerStats, ...] = ()
    """Controllers, by name."""

    def __repr__(self) -> str:
        text = (
            f"{self.running_request_count} running, {self.waiting_request_count} waiting, "
            f"{self.completed_count} completed, {self.failed_count} failed, up {self.uptime:.0f} s"
        )
        return f"Stats({text}{f', {self.leaked_count} LEAKED' if self.leaked_count else ''})"

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self._rows())

    def _repr_html_(self) -> str:
        return table(("counters", ""), self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        return [(field.name, str(getattr(self, field.name))) for field in fields(self)]


def read_stats(message: engine_service_pb2.GetStatsResponse) -> Stats:
    return Stats(
        **same_fields(Stats, message),
        **same_fields(Stats, message.requests),
        steps={variant.variant: variant.step_count for variant in message.steps},
        uptime=message.uptime.ToTimedelta().total_seconds(),
        controllers=tuple(
            ControllerStats(
                **same_fields(ControllerStats, controller),
                p50=controller.p50.ToNanoseconds() / 1e9,
                p99=controller.p99.ToNanoseconds() / 1e9,
                longest=controller.longest.ToNanoseconds() / 1e9,
            )
            for controller in message.controllers
        ),
    )
