"""All calls except those about vectors and runs, as values of `rheostat._connection.calls`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Unpack

from grpc_health.v1 import health_pb2

from rheostat._capture.artifacts import Artifact, SinkInfo, read_artifacts, read_sinks
from rheostat._client import requests
from rheostat._client.requests import GenerateOptions
from rheostat._connection.calls import PAGE, DownloadCall, PagedCall, Result, UnaryCall
from rheostat._fields import UINT64, builds_message, utf8_text, whole_number
from rheostat._prompts import Prompt, put_prompt
from rheostat._responses.accumulator import GenerationAccumulator
from rheostat._responses.explanations import (
    Explanation,
    Tokenized,
    read_explanation,
    read_tokenized,
)
from rheostat._responses.model import ModelInfo, Stats, read_model, read_stats
from rheostat._responses.results import Event, Generation
from rheostat._steering.rules import RulesLike, probes_to_wire, rules_of
from rheostat._steering.steering import SteeringLike, interventions_of, steering_to_wire
from rheostat._sweeps.accumulator import SweepAccumulator
from rheostat._sweeps.result import SweepResult
from rheostat_wire.v1 import (
    capture_service_pb2,
    engine_service_pb2,
    generation_service_pb2,
    steering_pb2,
    steering_service_pb2,
    sweep_service_pb2,
)


def generate(
    prompt: Prompt, **options: Unpack[GenerateOptions]
) -> DownloadCall[generation_service_pb2.GenerateResponse, Event, Generation]:
    request = requests.generate_request(prompt, **options)
    request.batches = bool(request.probes)  # without signals, no two events come together
    return DownloadCall(
        "/rheostat.v1.GenerationService/Generate",
        request,
        generation_service_pb2.GenerateResponse,
        partial(GenerationAccumulator, request),
    )


def explain(
    prompt: Prompt, **options: Unpack[GenerateOptions]
) -> UnaryCall[generation_service_pb2.ExplainResponse, Explanation]:
    return UnaryCall(
        "/rheostat.v1.GenerationService/Explain",
        generation_service_pb2.ExplainRequest(request=requests.generate_request(prompt, **options)),
        generation_service_pb2.ExplainResponse,
        read_explanation,
    )


@builds_message
def tokenize(
    prompt: Prompt, *, special_tokens: bool
) -> UnaryCall[generation_service_pb2.TokenizeResponse, Tokenized]:
    request = generation_service_pb2.TokenizeRequest()
    if not special_tokens:
        request.add_special_tokens = False
    put_prompt(request, prompt)
    return UnaryCall(
        "/rheostat.v1.GenerationService/Tokenize",
        request,
        generation_service_pb2.TokenizeResponse,
        read_tokenized,
    )


def sweep(
    request: sweep_service_pb2.SweepRequest, found: SweepAccumulator
) -> DownloadCall[sweep_service_pb2.SweepResponse, None, SweepResult]:
    return DownloadCall(
        "/rheostat.v1.SweepService/Sweep",
        request,
        sweep_service_pb2.SweepResponse,
        lambda: found,
    )


def model() -> UnaryCall[engine_service_pb2.GetModelResponse, ModelInfo]:
    return UnaryCall(
        "/rheostat.v1.EngineService/GetModel",
        engine_service_pb2.GetModelRequest(),
        engine_service_pb2.GetModelResponse,
        read_model,
    )


def stats() -> UnaryCall[engine_service_pb2.GetStatsResponse, Stats]:
    return UnaryCall(
        "/rheostat.v1.EngineService/GetStats",
        engine_service_pb2.GetStatsRequest(),
        engine_service_pb2.GetStatsResponse,
        read_stats,
    )


def sinks() -> PagedCall[capture_service_pb2.ListSinksResponse, SinkInfo]:
    return PagedCall(
        "/rheostat.v1.CaptureService/ListSinks",
        lambda token: capture_service_pb2.ListSinksRequest(page_size=PAGE, page_token=token),
        capture_service_pb2.ListSinksResponse,
        read_sinks,
    )


def artifacts(
    request_id: str, sink_name: str
) -> PagedCall[capture_service_pb2.GetArtifactsResponse, Artifact]:
    utf8_text(request_id, "request_id", "a request's id")
    utf8_text(sink_name, "sink_name", "a sink's name")
    return PagedCall(
        "/rheostat.v1.CaptureService/GetArtifacts",
        lambda token: capture_service_pb2.GetArtifactsRequest(
            request_id=request_id, sink_name=sink_name, page_size=PAGE, page_token=token
        ),
        capture_service_pb2.GetArtifactsResponse,
        read_artifacts,
    )


def health() -> UnaryCall[health_pb2.HealthCheckResponse, str]:
    """The health of the server: "SERVING", or the name of another status."""
    return UnaryCall(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest(),
        health_pb2.HealthCheckResponse,
        lambda answer: health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status),
    )


@builds_message
def set_global(
    steering: SteeringLike, expected_version: int | None, rules: RulesLike
) -> UnaryCall[steering_service_pb2.SetGlobalResponse, int]:
    """Its result is the new version."""
    if expected_version is not None:
        whole_number(expected_version, "expected_version", "a version", most=UINT64)
    interventions, listed = interventions_of(steering), rules_of(rules)
    return UnaryCall(
        "/rheostat.v1.SteeringService/SetGlobal",
        steering_service_pb2.SetGlobalRequest(
            policy=steering_service_pb2.Policy(
                steering=steering_to_wire(interventions) or steering_pb2.Steering(),
                probes=probes_to_wire(interventions, None, listed),
                rules=[rule.to_wire(f"rules[{number}]") for number, rule in enumerate(listed)],
            ),
            expected_version=expected_version,
        ),
        steering_service_pb2.SetGlobalResponse,
        lambda answer: answer.version,
    )


def get_global(
    read: Callable[[steering_service_pb2.GetGlobalResponse], Result],
) -> UnaryCall[steering_service_pb2.GetGlobalResponse, Result]:
    return UnaryCall(
        "/rheostat.v1.SteeringService/GetGlobal",
        steering_service_pb2.GetGlobalRequest(),
        steering_service_pb2.GetGlobalResponse,
        read,
    )
