"""Whatever a client sends: a typed error, nothing lost, and the server goes on.

The `engine` fixture checks after each test that nothing is held and that a request is still served.
"""

import hashlib
import subprocess
import threading
import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

import rheostat
from rheostat_wire.v1 import (
    generation_service_pb2,
    generation_service_pb2_grpc,
    steering_service_pb2,
    steering_service_pb2_grpc,
    tensor_pb2,
)

from .conftest import Server, command, free_port

pytestmark = pytest.mark.integration

WIDTH = 128
Where = rheostat.Selector | str
GOOD = np.ones((1, WIDTH), np.float32)


def steer(array: np.ndarray = GOOD, *, layers: int = 2, where: Where = "all") -> rheostat.Add:
    """An inline vector at one site."""
    return rheostat.inline(array, points="resid_post", layers=layers).at(where=where)


def refused(engine: rheostat.Engine, **options: object) -> rheostat.RheostatError:
    """The error that a request ends with."""
    with pytest.raises(rheostat.RheostatError) as caught:
        engine.generate("My day was", **{"max_tokens": 4, "temperature": 0, **options})
    return caught.value


def test_a_vector_of_the_wrong_width(engine: rheostat.Engine) -> None:
    error = refused(engine, steering=[steer(np.ones((1, 7), np.float32))])
    assert isinstance(error, rheostat.InvalidRequest)
    assert error.reason == "REASON_VECTOR_SHAPE"
    assert error.path.startswith("steering.interventions[0].add.vector")


def test_a_vector_with_a_nan(server: Server, engine: rheostat.Engine) -> None:
    payload = np.full((1, WIDTH), np.nan, "<f4").tobytes()
    request = generation_service_pb2.GenerateRequest(text="My day was")
    add = request.steering.interventions.add()
    add.sites.points.append(3)  # type: ignore[arg-type]  # POINT_RESID_POST
    add.sites.list.layers.append(2)
    tensor = add.add.vector.inline
    tensor.dtype, tensor.encoding = tensor_pb2.DTYPE_FLOAT32, tensor_pb2.ENCODING_RAW
    tensor.shape.extend([1, WIDTH])
    tensor.inline = payload
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert b"REASON_NON_FINITE" in dict(caught.value.trailing_metadata())["grpc-status-details-bin"]


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"steering": [steer(layers=99)]}, rheostat.InvalidRequest, "REASON_UNKNOWN_LAYER"),
        (
            {"steering": [rheostat.named("nobody", points="resid_post", layers=1)]},
            rheostat.NotFound,
            "REASON_NAME_NOT_FOUND",
        ),
        (
            {"steering": [steer(where=rheostat.positions(-90))]},
            rheostat.InvalidRequest,
            "REASON_INVALID_POSITION",
        ),
        (
            {"steering": [steer(where=rheostat.window(400, 420))]},
            rheostat.InvalidRequest,
            "REASON_INVALID_POSITION",
        ),
        ({"max_tokens": 100_000}, rheostat.InvalidRequest, None),
        ({"temperature": -1.0}, rheostat.InvalidRequest, None),
        ({"steering": [steer(10 * GOOD) * 1e38]}, rheostat.InvalidRequest, None),
    ],
    ids=["layer", "name", "position", "window", "tokens", "temperature", "overflow"],
)
def test_a_request_that_makes_no_sense_here(
    engine: rheostat.Engine,
    options: dict[str, object],
    kind: type[rheostat.RheostatError],
    reason: str | None,
) -> None:
    error = refused(engine, **options)
    assert isinstance(error, kind), repr(error)
    assert reason is None or error.reason == reason


def test_an_empty_selector(server: Server, engine: rheostat.Engine) -> None:
    request = generation_service_pb2.GenerateRequest(text="My day was")
    spec = request.captures.add()
    spec.sites.points.append(3)  # type: ignore[arg-type]  # POINT_RESID_POST
    spec.sites.all.SetInParent()
    spec.where.SetInParent()
    spec.inline.SetInParent()
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
    assert b"REASON_EMPTY_SELECTOR" in details
    assert b"captures[0].where" in details


def test_a_request_id_that_is_already_running(engine: rheostat.Engine) -> None:
    with engine.stream("My day was", request_id="twice", max_tokens=400, ignore_eos=True) as first:
        next(first)
        error = refused(engine, request_id="twice")
    assert isinstance(error, rheostat.AlreadyExists)
    assert error.reason == "REASON_DUPLICATE_REQUEST"


def test_a_message_that_is_too_large(engine: rheostat.Engine) -> None:
    error = refused(engine, steering=[steer(np.ones((60_000, WIDTH), np.float32))])
    assert isinstance(error, rheostat.ResourceExhausted | rheostat.InvalidRequest)


def upload(server: Server, *parts: steering_service_pb2.PutVectorRequest) -> grpc.RpcError:
    """The error that an upload ends with."""

    def send() -> Iterator[steering_service_pb2.PutVectorRequest]:
        yield from parts

    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as caught:
        steering_service_pb2_grpc.SteeringServiceStub(channel).PutVector(send())
    return caught.value


def header(**fields: object) -> steering_service_pb2.PutVectorRequest:
    """The first message of an upload."""
    request = steering_service_pb2.PutVectorRequest()
    request.header.dtype = tensor_pb2.DTYPE_FLOAT32
    request.header.shape.extend([1, WIDTH])
    request.header.total_bytes = GOOD.nbytes
    for name, value in fields.items():
        setattr(request.header, name, value)
    return request


def test_an_upload_that_stops_too_early(server: Server, engine: rheostat.Engine) -> None:
    before = engine.stats().vector_count
    half = steering_service_pb2.PutVectorRequest(chunk=GOOD.tobytes()[:100])
    assert upload(server, header(), half).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert engine.stats().vector_count == before


def test_an_upload_whose_digest_is_wrong(server: Server, engine: rheostat.Engine) -> None:
    before = engine.stats().vector_count
    whole = steering_service_pb2.PutVectorRequest(chunk=GOOD.tobytes())
    wrong = header(digest=hashlib.sha256(b"something else").digest())
    error = upload(server, wrong, whole)
    assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS)
    assert engine.stats().vector_count == before


def test_a_client_that_vanishes_in_the_middle(server: Server, engine: rheostat.Engine) -> None:
    vector = engine.vectors.put(GOOD, points="resid_post", layers=2)
    gone = rheostat.connect(server.target)
    stream = gone.stream(
        "My day was",
        steering=[vector],
        capture=rheostat.Capture("resid_post"),
        max_tokens=480,
        ignore_eos=True,
    )
    next(event for event in stream if isinstance(event, rheostat.Tokens))
    assert engine.stats().running_request_count == 1
    gone.close()


def test_a_deadline_that_passes(engine: rheostat.Engine) -> None:
    vector = engine.vectors.put(GOOD, points="resid_post", layers=2)
    error = refused(engine, steering=[vector], max_tokens=500, ignore_eos=True, timeout=0.3)
    assert isinstance(error, rheostat.DeadlineExceeded)


def test_many_clients_that_cancel_at_random_leave_nothing_behind(
    server: Server, engine: rheostat.Engine
) -> None:
    rng = np.random.default_rng(0)
    delays = rng.uniform(0, 0.4, 24)

    def one(delay: float) -> None:
        with rheostat.connect(server.target) as client:
            stream = client.stream(
                "My day was",
                steering=[steer() * float(delay)],
                capture=rheostat.Capture("resid_mid"),
                max_tokens=300,
                ignore_eos=True,
            )
            time.sleep(delay)
            stream.cancel()

    threads = [threading.Thread(target=one, args=(delay,)) for delay in delays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_model_that_does_not_exist() -> None:
    done = subprocess.run(
        command("/nowhere/at/all", free_port()), capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "/nowhere/at/all" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_port_that_is_in_use(server: Server) -> None:
    port = int(server.target.rpartition(":")[2])
    done = subprocess.run(command("demo", port), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"127.0.0.1:{port}" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
