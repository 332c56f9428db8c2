"""What a server says about itself: its model and what can be done there, and its counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from rheostat._fields import equal_fields, read_word
from rheostat._notebook import table
from rheostat._points import Point, Site, knows_point, read_point, show_layers
from rheostat_wire.v1 import engine_service_pb2, receipt_pb2, tensor_pb2


@dataclass(frozen=True)
class Ability:
    """Whether something can be done."""

    served: bool
    """Whether it can."""
    why_not: str = ""
    """Where not: why, and what can be done instead."""


@dataclass(frozen=True)
class SiteGroup:
    """Layers of one point at which the same can be done."""

    point: Point
    """The point."""
    layers: tuple[int, ...]
    """Layers, ascending."""
    capture: Ability
    """Whether rows can be captured here."""
    ops: Mapping[str, Ability]
    """By op ("add", ...), whether it can be done."""
    form: str
    """How the stream is held here: "pair" (branch and residual not yet added) or "single"."""
    width: int = 0
    """Values per row here; the number of experts if the point is ``router_logits``."""


@dataclass(frozen=True)
class EngineInfo:
    """How the model runs."""

    vllm_version: str
    """vLLM's version."""
    torch_version: str
    """torch's version."""
    runner: str
    """Which of vLLM's model runners: "v1", "v2"."""
    device: str
    """"cpu", "cuda"."""
    tensor_parallel_size: int
    """Tensor-parallel ranks."""
    pipeline_parallel_size: int
    """Pipeline-parallel stages."""
    compiled: bool
    """Whether the model is compiled."""
    variants: tuple[str, ...]
    """Graph variants."""
    prefix_caching: bool
    """Whether prefix caching is on."""


@dataclass(frozen=True)
class Limits:
    """What may be asked for."""

    model_tokens: int
    """Tokens of prompt and generation together."""
    running_requests: int
    """Requests that run at once."""
    waiting_requests: int
    """Requests that may wait."""
    bank_rows: int
    """Distinct configurations at work at one site at once."""
    capture_rows_per_step: int
    """Rows that one step can capture at each site."""
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
    """Seconds that a request waits for bank rows at most, see ``when_full``."""
    run_bytes: int
    """Bytes that all runs together may take."""
    request_buffer_bytes: int
    """Bytes of one request that may wait for slow readers, sinks and runs."""
    buffer_bytes: int
    """Bytes that may wait of all requests together; beyond, those that hold most give way."""


@dataclass(frozen=True, repr=False)
class ModelInfo:
    """The model that a server runs. ``print`` shows it in words."""

    name: str
    """Name under which it was loaded."""
    architecture: str
    """Class of the model, e.g. "LlamaForCausalLM"."""
    layer_count: int
    """Number of decoder blocks."""
    width: int
    """Values per row of the residual stream."""
    vocabulary_size: int
    """Number of token ids."""
    dtype: str
    """Element type of the stream."""
    sites: tuple[SiteGroup, ...]
    """Every point, grouped by what can be done there."""
    has_tokenizer: bool
    """Whether text can be tokenised."""
    has_chat_template: bool
    """Whether messages can be rendered."""
    lora_names: tuple[str, ...]
    """Names of loaded adapters."""
    engine: EngineInfo
    """How it runs."""
    limits: Limits
    """What may be asked for."""
    build_version: str
    """The server's version."""
    api_version: str
    """The contract's package, "rheostat.v1"."""
    features: tuple[str, ...] = ()
    """What the server serves: "steering", "capture", "sinks", ... It refuses the rest."""

    def captured(self, point: Point) -> tuple[int, ...]:
        """Layers at which rows of this point can be captured, ascending."""
        served = (group for group in self.sites if group.point is point and group.capture.served)
        return tuple(sorted(layer for group in served for layer in group.layers))

    def can_capture(self, site: Site) -> bool:
        """Whether rows can be captured at a site."""
        return site.layer in self.captured(site.point)

    def __repr__(self) -> str:
        """Name and size."""
        return f"ModelInfo({self.name!r}, {self.layer_count} layers, width {self.width})"

    def __str__(self) -> str:
        """One line per fact."""
        return "\n".join([self.name, *(f"  {what}: {how}" for what, how in _rows(self))])

    def _repr_html_(self) -> str:
        return table(("model", self.name), _rows(self))


def _rows(model: ModelInfo) -> list[tuple[str, str]]:
    engine = model.engine
    rows = [
        (
            "model",
            f"{model.architecture}, {model.layer_count} layers, width {model.width}, "
            f"{model.vocabulary_size} tokens, {model.dtype}",
        ),
        (
            "engine",
            f"vLLM {engine.vllm_version} on {engine.device}, runner {engine.runner}, "
            f"{'compiled' if engine.compiled else 'eager'}, "
            f"{engine.tensor_parallel_size * engine.pipeline_parallel_size} ranks",
        ),
        (
            "limits",
            f"{model.limits.model_tokens} tokens, {model.limits.running_requests} requests, "
            f"{model.limits.bank_rows} bank rows, {model.limits.logprobs} logprobs",
        ),
        ("adapters", ", ".join(model.lora_names) or "none"),
        ("server", f"{model.build_version}, {model.api_version}"),
        (
            "features",
            ", ".join(feature.replace("_", " ") for feature in model.features) or "not told",
        ),
    ]
    for group in model.sites:
        served = [op for op, ability in group.ops.items() if ability.served]
        served += ["capture"] if group.capture.served else []
        abilities = ", ".join(served) or f"nothing: {group.capture.why_not}"
        rows.append((f"{group.point} {show_layers(group.layers)}", abilities))
    return rows


def read_model(message: engine_service_pb2.GetModelResponse) -> ModelInfo:
    """The model of a wire message."""
    engine, limits = message.engine, message.limits
    return ModelInfo(
        **{
            **equal_fields(ModelInfo, message),
            "dtype": read_word(tensor_pb2.Dtype.DESCRIPTOR, message.dtype, "DTYPE_"),
        },
        name=message.model_name,
        sites=tuple(_read_group(group) for group in message.sites if knows_point(group.point)),
        lora_names=tuple(message.lora_names),
        engine=EngineInfo(
            **{
                **equal_fields(EngineInfo, engine),
                "runner": read_word(engine_service_pb2.Runner.DESCRIPTOR, engine.runner, "RUNNER_"),
                "variants": tuple(engine.variants),
            }
        ),
        limits=Limits(
            **equal_fields(Limits, limits),
            capacity_wait=limits.capacity_wait.ToTimedelta().total_seconds(),
        ),
        features=tuple(
            read_word(engine_service_pb2.Feature.DESCRIPTOR, feature, "FEATURE_")
            for feature in message.features
        ),
    )


def _read_group(message: engine_service_pb2.SiteGroup) -> SiteGroup:
    return SiteGroup(
        point=read_point(message.point),
        layers=tuple(message.layers),
        capture=Ability(message.capture.served, message.capture.why_not),
        ops={
            read_word(receipt_pb2.Op.DESCRIPTOR, op.op, "OP_"): Ability(
                op.ability.served, op.ability.why_not
            )
            for op in message.ops
        },
        form=message.form,
        width=message.width,
    )


@dataclass(frozen=True, repr=False)
class Stats:
    """A server's counters since its start, and gauges of now."""

    running_request_count: int
    """Requests that run now."""
    waiting_request_count: int
    """Requests that wait now."""
    admitted_count: int
    """Requests admitted."""
    completed_count: int
    """Requests that ended with a receipt."""
    aborted_count: int
    """Requests ended from outside."""
    refused_count: int
    """Requests refused before admission."""
    failed_count: int
    """Requests that failed after admission."""
    steps: Mapping[str, int]
    """Steps by graph variant."""
    used_bank_row_count: int
    """Bank rows in use now, at the fullest site."""
    bank_row_count: int
    """Bank rows of each site."""
    captured_row_count: int
    """Rows captured."""
    captured_bytes: int
    """Bytes captured, as they are in the stream."""
    dropped_row_count: int
    """Rows that readers have lost, one for each that lost it."""
    prefix_queried_token_count: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hit_token_count: int
    """Prompt tokens found there."""
    vector_count: int
    """Stored vectors."""
    uptime: float
    """Seconds since the start."""
    leaked_count: int
    """Held by no request; anything but 0 is a defect."""
    global_version: int
    """Version of the server-wide steering; 0: never set."""
    left_bytes: int
    """Bytes of captured rows that have left the device: fewer than `captured_bytes` where they were
    made smaller there."""
    plain_row_count: int
    """Rows that left the device whole, since its memory for making them smaller did not suffice."""
    ring_bytes: int
    """Device memory of the ring that captured rows pass through."""
    encode_bytes: int
    """Device memory for making captured rows smaller."""
    spooled_row_count: int
    """Captured rows that wait on the server's disk now."""
    overrun_row_count: int
    """Captured rows for which a worker had no room, on the device or on their way to the server."""
    staging_bytes: int
    """Host memory of the workers in which captured rows wait for the server."""
    run_count: int
    """Stored runs."""
    run_bytes: int
    """Bytes that they take, and those that are being made."""
    request_buffer_bytes: int
    """Memory of what waits for slow readers of requests, for sinks and for runs."""
    subscription_buffer_bytes: int
    """Memory of captured rows that subscribers have not read and acknowledged."""

    def __repr__(self) -> str:
        """The counters of requests."""
        text = (
            f"{self.running_request_count} running, {self.waiting_request_count} waiting, "
            f"{self.completed_count} completed, {self.failed_count} failed, up {self.uptime:.0f} s"
        )
        return f"Stats({text}{f', {self.leaked_count} LEAKED' if self.leaked_count else ''})"

    def __str__(self) -> str:
        """One line per counter."""
        return "\n".join(f"{field.name}: {getattr(self, field.name)}" for field in fields(self))


def read_stats(message: engine_service_pb2.GetStatsResponse) -> Stats:
    """The counters of a wire message."""
    return Stats(
        **equal_fields(Stats, message),
        **equal_fields(Stats, message.requests),
        steps={variant.variant: variant.step_count for variant in message.steps},
        uptime=message.uptime.ToTimedelta().total_seconds(),
    )
