"""GetModel's answer: which ops and captures each site supports, and why others are refused."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from google.protobuf import duration

from rheostat_engine import ModelSites, Point, Site
from rheostat_server import limits
from rheostat_server.config import ModelInfo
from rheostat_server.requests.manager import RequestManager
from rheostat_server.selectors.sites import ENGINE_POINTS, NO_STREAM
from rheostat_server.steering.ops import SERVED
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import engine_service_pb2, types_pb2

_pb = engine_service_pb2

_ALWAYS_SERVED = (
    _pb.FEATURE_STEERING,
    _pb.FEATURE_GLOBAL_STEERING,
    _pb.FEATURE_SESSIONS,
    _pb.FEATURE_BASELINES,
    _pb.FEATURE_CAPTURE,
    _pb.FEATURE_PROJECTIONS,
    _pb.FEATURE_SUBSCRIPTIONS,
    _pb.FEATURE_RUNS,
    _pb.FEATURE_DERIVATION,
    _pb.FEATURE_REPLACE,
    _pb.FEATURE_READOUTS,
    _pb.FEATURE_GAINS,
    _pb.FEATURE_RUN_TRANSFER,
    _pb.FEATURE_SWEEPS,
)


def report_model(manager: RequestManager) -> engine_service_pb2.GetModelResponse:
    """The model that a manager serves."""
    info, sites = manager.info, manager.sites
    return _pb.GetModelResponse(
        model_name=info.name,
        architecture=sites.architecture,
        layer_count=sites.num_layers,
        width=sites.width,
        vocabulary_size=info.vocabulary,
        lora_names=info.loras,
        dtype=FloatType(sites.dtype).wire,
        sites=_groups(sites, info.no_gates),
        has_tokenizer=manager.prompts.has_tokenizer,
        has_chat_template=manager.prompts.has_chat_template,
        engine=_engine(info, sites),
        limits=_limits(manager),
        build_version=build_version(),
        api_version="rheostat.v1",
        features=_features(manager),
        embedding_std=sites.embedding_std or None,
        controller_names=manager.controllers.names,
    )


def build_version() -> str:
    """Version of the installed distribution; "unknown" where there is none."""
    try:
        return version("rheostat")
    except PackageNotFoundError:
        return "unknown"


def _features(manager: RequestManager) -> list[engine_service_pb2.Feature.ValueType]:
    """The features that are always served, and those that the configuration enables."""
    optional = {
        _pb.FEATURE_SINKS: bool(manager.sinks.listed()),
        _pb.FEATURE_SPILL: manager.spill_manager is not None,
        _pb.FEATURE_LORA: bool(manager.info.loras),
        _pb.FEATURE_GATES: not manager.info.no_gates,
        _pb.FEATURE_RULES: not manager.info.no_gates,
        _pb.FEATURE_SIGNALS: not manager.info.no_gates,
        _pb.FEATURE_CONDITIONS: not manager.info.no_gates,
        _pb.FEATURE_WATCHES: not manager.info.no_gates,
        _pb.FEATURE_CONTROLLERS: bool(manager.controllers.names) and not manager.info.no_gates,
        _pb.FEATURE_LENS: not manager.sites.no_lens,
        _pb.FEATURE_TOKEN_DIRECTIONS: not manager.sites.no_directions,
    }
    return sorted([*_ALWAYS_SERVED, *(feature for feature, there in optional.items() if there)])


def _groups(sites: ModelSites, no_gate: str) -> list[engine_service_pb2.SiteGroup]:
    groups = []
    for wire, point in ENGINE_POINTS.items():
        if point is Point.ROUTER_LOGITS and not (sites.experts or sites.unrouted):
            continue
        for alike, layers in _alike(sites, point).items():
            groups.append(_group(wire, layers, alike, no_gate))
    return groups


class _Alike(NamedTuple):
    """The properties that the layers of a group share."""

    refusal: str
    """Why they are refused; empty if they are served."""
    width: int
    """Values of a row; 0 for a router that is refused."""
    form: str
    """How the stream is held."""


def _alike(sites: ModelSites, point: Point) -> dict[_Alike, list[int]]:
    """The layers of a point, grouped by their properties."""
    found: dict[_Alike, list[int]] = {}
    for layer in range(sites.num_layers):
        site = Site(point, layer)
        refusal = sites.supports(site) or ""
        width = 0 if point is Point.ROUTER_LOGITS and refusal else sites.width_of(site)
        found.setdefault(_Alike(refusal, width, sites.layout_of(site)), []).append(layer)
    return found


def _group(
    point: types_pb2.Point.ValueType, layers: Sequence[int], alike: _Alike, no_gate: str
) -> engine_service_pb2.SiteGroup:
    def ability(why_not: str) -> engine_service_pb2.Ability:
        return _pb.Ability(served=not why_not, why_not=why_not)

    no_stream = NO_STREAM if point == types_pb2.POINT_ROUTER_LOGITS else ""
    ops = dict.fromkeys(SERVED.values(), alike.refusal or no_stream)
    return _pb.SiteGroup(
        point=point,
        layers=layers,
        width=alike.width,
        capture=ability(alike.refusal),
        ops=[
            _pb.OpAbility(op=op, ability=ability(why_not), gate=ability(why_not or no_gate))
            for op, why_not in ops.items()
        ],
        form=alike.form,
    )


def _engine(info: ModelInfo, sites: ModelSites) -> engine_service_pb2.Engine:
    runners = {"V1": _pb.RUNNER_V1, "V2": _pb.RUNNER_V2}
    return _pb.Engine(
        vllm_version=info.vllm_version,
        runner=runners[sites.runner],
        tensor_parallel_size=info.tensor_parallel,
        pipeline_parallel_size=info.pipeline_parallel,
        device=info.device,
        compiled=info.compiled,
        prefix_caching=info.prefix_caching,
        torch_version=info.torch_version,
        variants=sites.variants,
    )


def _limits(manager: RequestManager) -> engine_service_pb2.Limits:
    info, sites = manager.info, manager.sites
    return _pb.Limits(
        model_tokens=info.model_tokens,
        running_requests=info.running_samples,
        waiting_requests=limits.WAITING_REQUESTS,
        bank_rows=sites.capacity.bank_rows,
        capture_rows_per_step=sites.capacity.capture_rows,
        control_message_bytes=limits.CONTROL_MESSAGE_BYTES,
        tensor_message_bytes=limits.TENSOR_MESSAGE_BYTES,
        vector_bytes=limits.VECTOR_BYTES,
        inline_vector_bytes=limits.INLINE_VECTOR_BYTES,
        samples=limits.SAMPLES,
        logprobs=info.logprobs,
        subscription_buffer_bytes=manager.subscriptions.buffer_bytes,
        resume_window=duration.from_milliseconds(int(manager.subscriptions.resume_window * 1000)),
        run_bytes=manager.runs.capacity,
        capacity_wait=duration.from_milliseconds(int(manager.admission_queue.timeout * 1000)),
        request_buffer_bytes=manager.budget.request_limit,
        buffer_bytes=manager.budget.limit,
        step_tokens=info.step_tokens,
    )
