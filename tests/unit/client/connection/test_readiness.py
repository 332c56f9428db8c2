"""Waiting until a server is ready, over both clients."""

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

import rheostat
from rheostat._connection import readiness

LOADING = HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
SERVING = HealthCheckResponse(status=HealthCheckResponse.SERVING)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(readiness, "POLL", 0.0)


def test_waiting_ends_when_health_says_serving(client, server):
    server.on("Check", LOADING, LOADING, SERVING)
    client.run(lambda engine: engine.wait_until_ready())
    assert len(server.asked) == 3


def test_a_server_that_does_not_answer_at_first_is_waited_for(client, server, refusal):
    server.on("Check", refusal(grpc.StatusCode.UNAVAILABLE, "not yet"), LOADING, SERVING)
    client.run(lambda engine: engine.wait_until_ready(None))
    assert len(server.asked) == 3


def test_a_server_that_stays_loading_ends_the_wait_with_the_timeout(client, server):
    server.on("Check", LOADING)
    with pytest.raises(rheostat.DeadlineExceeded) as raised:
        client.run(lambda engine: engine.wait_until_ready(0))
    assert str(raised.value) == (
        f"waited 0 s for the server at {server.target} to be ready; its health is NOT_SERVING"
    )


def test_no_server_ends_the_wait_with_the_timeout(client, server):
    server.stop()
    with pytest.raises(rheostat.DeadlineExceeded) as raised:
        client.run(lambda engine: engine.wait_until_ready(0))
    assert str(raised.value) == (
        f"waited 0 s for a server at {server.target}; none answers: nothing listens there"
    )


def test_no_server_for_too_long_is_unavailable(client, server, monkeypatch):
    monkeypatch.setattr(readiness, "UNREACHABLE", 0.0)
    server.stop()
    with pytest.raises(rheostat.Unavailable) as raised:
        client.run(lambda engine: engine.wait_until_ready())
    assert str(raised.value) == (
        f"no server answers at {server.target}: nothing listens there; waited 0 s; "
        "start one with rheostat serve MODEL, or connect to a running one"
    )


def test_a_server_without_health_is_not_waited_for(client, server):
    with pytest.raises(rheostat.Unimplemented):
        client.run(lambda engine: engine.wait_until_ready())
    assert len(server.asked) == 1
