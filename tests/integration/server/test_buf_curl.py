"""A third-party client that knows the server through reflection alone: `buf curl`.

Every unary and every server-streaming rpc of every service is called. An rpc that is added to the
schemas without a line here fails the first test.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rheostat
from rheostat_wire.v1 import (
    capture_service_pb2,
    engine_service_pb2,
    generation_service_pb2,
    lens_service_pb2,
    monitor_service_pb2,
    run_service_pb2,
    steering_service_pb2,
    sweep_service_pb2,
)

from .conftest import Server

pytestmark = pytest.mark.integration

SERVED: dict[str, tuple[dict[str, Any], str]] = {
    "EngineService/GetModel": ({}, "architecture"),
    "EngineService/GetStats": ({}, "uptime"),
    "GenerationService/Generate": (
        {"text": "The Eiffel Tower is in the city of", "sampling": {"maxTokens": 2}},
        "receipt",
    ),
    "GenerationService/Explain": ({"request": {"text": "My day was"}}, "promptTokenIds"),
    "GenerationService/Tokenize": ({"text": "My day was"}, "tokenIds"),
    "SteeringService/ListVectors": ({}, ""),
    "SteeringService/DeriveVectors": (
        {
            "positive": [{"text": "I am so happy."}],
            "negative": [{"text": "I am so sad."}],
            "sites": {"points": ["POINT_RESID_POST"], "all": {}},
        },
        "vectors",
    ),
    "SteeringService/FitConditions": (
        {
            "positive": [{"text": "I am so happy."}],
            "negative": [{"text": "I am so sad."}],
            "sites": {"points": ["POINT_RESID_POST"], "all": {}},
        },
        "condition",
    ),
    "CaptureService/ListSinks": ({}, ""),
    "LensService/Lens": (
        {"prompt": {"text": "My day was"}, "sites": {"points": ["POINT_RESID_POST"], "all": {}}},
        "topTexts",
    ),
    "LensService/Attribute": (
        {"prompt": {"text": "My day was"}, "direction": {"tokenId": 5}},
        "contributions",
    ),
    "RunService/ListRuns": ({}, "capacityBytes"),
    "RunService/CaptureRun": (
        {"prompt": {"text": "a"}, "sites": {"points": ["POINT_RESID_POST"], "all": {}}},
        "promptTokenIds",
    ),
    "SteeringService/SetGlobal": ({"policy": {}}, "version"),
    "SteeringService/GetGlobal": ({}, "policy"),
}
"""What is called, with what, and a field of the answer."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "SteeringService/GetVector": ({"name": "nobody"}, "not_found"),
    "SteeringService/SetName": ({"name": "joy", "digest": "A" * 43 + "="}, "not_found"),
    "SteeringService/DeleteName": ({"name": "nobody"}, "not_found"),
    "CaptureService/GetArtifacts": ({"requestId": "nobody"}, "not_found"),
    "RunService/GetRun": ({"runId": "nobody"}, "not_found"),
    "RunService/ReadRun": ({"runId": "nobody"}, "not_found"),
    "RunService/DeleteRun": ({"runId": "nobody"}, "not_found"),
    "RunService/RenewLease": ({"runId": "nobody"}, "not_found"),
    "SweepService/Sweep": ({}, "invalid_argument"),
}
"""What is called, with what, and the status it ends with."""

ENDS_THE_SERVER = "EngineService/Drain"

_SERVICES = (
    capture_service_pb2,
    engine_service_pb2,
    generation_service_pb2,
    lens_service_pb2,
    monitor_service_pb2,
    sweep_service_pb2,
    run_service_pb2,
    steering_service_pb2,
)


def buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `buf`, which its PyPI package puts beside Python."""
    found = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    assert found is not None, "buf is not installed; it comes with the dev extra (buf-bin)"
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=False)


def curl(target: str, method: str, message: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Calls one rpc."""
    url = f"http://{target}/rheostat.v1.{method}"
    data = json.dumps(message)
    return buf("curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", data, url)


def test_every_rpc_that_takes_one_message_is_called_here() -> None:
    methods = {
        f"{service.name}/{method.name}"
        for module in _SERVICES
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if not method.client_streaming
    }
    assert methods == {*SERVED, *REFUSED, ENDS_THE_SERVER}


def test_reflection_lists_every_service(server: Server) -> None:
    done = buf(
        "curl",
        "--protocol",
        "grpc",
        "--http2-prior-knowledge",
        "--list-services",
        f"http://{server.target}",
    )
    assert done.returncode == 0, done.stderr
    listed = set(done.stdout.split())
    assert {
        "grpc.health.v1.Health",
        "rheostat.v1.CaptureService",
        "rheostat.v1.EngineService",
        "rheostat.v1.GenerationService",
        "rheostat.v1.LensService",
        "rheostat.v1.MonitorService",
        "rheostat.v1.SweepService",
        "rheostat.v1.RunService",
        "rheostat.v1.SteeringService",
    } <= listed


@pytest.mark.parametrize("method", SERVED)
def test_a_served_rpc_answers(server: Server, engine: rheostat.Engine, method: str) -> None:
    message, field = SERVED[method]
    done = curl(server.target, method, message)
    for run in engine.runs():  # CaptureRun stores a run for an hour
        engine.delete_run(run.id)
    assert done.returncode == 0, done.stderr
    assert field in done.stdout


@pytest.mark.parametrize("method", REFUSED)
def test_an_rpc_that_cannot_says_so_with_its_status(server: Server, method: str) -> None:
    message, status = REFUSED[method]
    done = curl(server.target, method, message)
    assert done.returncode != 0
    assert json.loads(done.stderr)["code"] == status
    assert "NotImplementedError" not in done.stderr


def test_a_request_steered_by_name_and_captured_needs_nothing_but_json(
    server: Server, engine: rheostat.Engine
) -> None:
    engine.vectors.put(np.ones((1, 128), np.float32), name="by-json")
    last = {"include": [{"positions": {"start": -1}}]}
    sites = {"points": ["POINT_RESID_POST"], "list": {"layers": [1]}}
    message = {
        "text": "My day was",
        "sampling": {"maxTokens": 2, "temperature": 0},
        "steering": {
            "interventions": [
                {"sites": sites, "where": last, "normAdd": {"vector": {"name": "by-json"}}}
            ]
        },
        "captures": [{"sites": sites, "where": last, "inline": {}}],
    }
    done = curl(server.target, "GenerationService/Generate", message)
    engine.vectors.delete("by-json")
    assert done.returncode == 0, done.stderr
    assert '"captured"' in done.stdout
    assert '"OP_NORM_ADD"' in done.stdout
    assert '"receipt"' in done.stdout


def test_a_session_needs_nothing_but_json(server: Server) -> None:
    message = {"start": {"text": "My day was", "sampling": {"maxTokens": 2}}}
    done = curl(server.target, "GenerationService/Session", message)
    assert done.returncode == 0, done.stderr
    assert '"receipt"' in done.stdout
