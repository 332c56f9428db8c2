"""From bind to end."""

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rheostat_server import serve
from rheostat_server.api import readiness
from rheostat_server.config import ServerConfig
from rheostat_server.engine import vllm_engine
from rheostat_server.engine.vllm_engine import engine_arguments, model_path
from rheostat_server.errors import (
    EngineDied,
    EngineFailed,
    ModelNotFound,
    PortInUse,
    StartupError,
)
from rheostat_server.generation import responses
from rheostat_server.serve import RunningServer, log_requests, run, start
from rheostat_wire.v1 import engine_service_pb2, types_pb2

from .conftest import Client, Refusal, narrow, rest
from .fakes import ScriptedBackend
from .messages import add, request
from .streams import kinds

Code = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ALL = ("", *(f"rheostat.v1.{s}Service" for s in ("Engine", "Generation", "Steering", "Capture")))


async def health(client: Client) -> set[int]:
    answers = [
        await client.health.Check(health_pb2.HealthCheckRequest(service=name)) for name in ALL
    ]
    return {answer.status for answer in answers}


def config(**fields: object) -> ServerConfig:
    return ServerConfig(**{"model": "toy", "port": 0, **fields})


async def test_health_answers_while_the_model_is_being_loaded() -> None:
    server = RunningServer(config())
    await server.bind()
    loaded = asyncio.Event()

    async def bring_up(_: ServerConfig) -> ScriptedBackend:
        await loaded.wait()
        return ScriptedBackend()

    loading = asyncio.create_task(server.load(bring_up))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        client = Client(channel)
        assert await health(client) == {NOT_SERVING}
        refusal = await client.refusal(request())
        assert (refusal.brief, refusal.retry) == (
            (Code.UNAVAILABLE, "REASON_WARMING_UP", ""),
            True,
        )
        loaded.set()
        await loading
        assert await health(client) == {SERVING}
        assert (await client.generate(request()))[-1].HasField("receipt")
    await server.stop(0)


async def test_reflection_lists_every_service(running) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(running.client.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([asked]))
    answer = await call.read()
    assert {service.name for service in answer.list_services_response.service} == {
        *(f"rheostat.v1.{name}Service" for name in ("Engine", "Generation", "Steering")),
        *(f"rheostat.v1.{name}Service" for name in ("Capture", "Monitor", "Run")),
        *(f"rheostat.v1.{name}Service" for name in ("Lens", "Sweep")),
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_a_method_whose_name_is_not_utf8_does_not_end_the_server(running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.client.channel.unary_unary(b"/rheostat\xff")(b"", timeout=5)
    assert caught.value.code() is Code.UNIMPLEMENTED
    async with narrow(running) as other:  # a new connection
        assert (await other.generate(request(), timeout=5))[-1].HasField("receipt")


async def test_a_lost_engine_turns_health_not_serving(running) -> None:
    running.backend.die()
    watch = running.client.health.Watch(health_pb2.HealthCheckRequest())
    async for answer in watch:
        if answer.status == NOT_SERVING:
            break
    watch.cancel()


async def test_a_lost_server_ends_once_its_clients_had_time_to_read_why(
    starter, monkeypatch
) -> None:
    monkeypatch.setattr(readiness, "LOST_GRACE", 0.2)
    running = await starter()
    running.backend.die()
    refusal = await running.client.refusal(request())
    assert refusal.brief == (Code.UNAVAILABLE, "REASON_ENGINE_LOST", "")
    await asyncio.wait_for(running.server.readiness.ended.wait(), 10)


async def test_a_drain_ends_a_lost_server_at_once(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    call = running.client.generation.Generate(request(steer=[add()]))
    await call.read()
    running.backend.die()
    assert await drain(running.client) in (
        engine_service_pb2.DrainResponse(finished_request_count=1),
        engine_service_pb2.DrainResponse(),
    )
    assert running.server.readiness.ended.is_set()


def test_the_process_of_a_lost_server_ends_with_a_status_of_its_own(monkeypatch, capsys) -> None:
    monkeypatch.setattr(readiness, "LOST_GRACE", 0.01)

    async def bring_up(_: ServerConfig) -> ScriptedBackend:
        backend = ScriptedBackend()
        asyncio.get_running_loop().call_later(0.1, backend.die)
        return backend

    monkeypatch.setattr(serve, "start_backend", bring_up)
    assert run(config()) == EngineDied.exit_code == 9
    assert capsys.readouterr().err.endswith("rheostat: the server has ended: the engine died\n")


def test_garbage_collections_leave_out_what_a_server_loaded(monkeypatch) -> None:
    monkeypatch.setattr(readiness, "LOST_GRACE", 0.01)
    examined: list[bool] = []

    async def bring_up(_: ServerConfig) -> ScriptedBackend:
        backend = ScriptedBackend()

        def look() -> None:
            examined.append(any(one is backend for one in gc.get_objects()))
            backend.die()

        asyncio.get_running_loop().call_later(0.1, look)
        return backend

    monkeypatch.setattr(serve, "start_backend", bring_up)
    assert run(config()) == EngineDied.exit_code
    assert examined == [False]
    assert gc.get_freeze_count() == 0, "its objects are never freed"


async def drain(client: Client, **fields: object) -> engine_service_pb2.DrainResponse:
    return await client.engine.Drain(engine_service_pb2.DrainRequest(**fields))


async def test_a_drain_lets_requests_finish_and_admits_none(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    call = running.client.generation.Generate(request(steer=[add()]))
    await call.read()
    draining = asyncio.ensure_future(drain(running.client))
    watch = running.client.health.Watch(health_pb2.HealthCheckRequest())
    async for answer in watch:
        if answer.status == NOT_SERVING:
            break
    watch.cancel()
    refusal = await running.client.refusal(request())
    assert refusal.brief == (Code.UNAVAILABLE, "REASON_DRAINING", "")
    running.backend.hold.set()
    assert (await rest(call))[-1].HasField("receipt")
    assert await draining == engine_service_pb2.DrainResponse(finished_request_count=1)
    assert running.server.readiness.ended.is_set()


async def test_a_drain_with_a_timeout_aborts_the_rest_with_a_receipt(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    call = running.client.generation.Generate(request(steer=[add()]))
    await call.read()
    await call.read()
    answer = await drain(running.client, timeout=duration_pb2.Duration(nanos=10_000_000))
    assert answer == engine_service_pb2.DrainResponse(aborted_request_count=1)
    events = await rest(call)
    assert [e.WhichOneof("event") for e in events] == ["finished", "receipt"]
    assert events[0].finished.reason == types_pb2.FINISH_REASON_ABORTED
    assert events[1].receipt.generated_token_count == 1


async def test_a_drain_whose_caller_leaves_goes_on_to_the_end(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    call = running.client.generation.Generate(request(steer=[add()]))
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.client.engine.Drain(engine_service_pb2.DrainRequest(), timeout=0.2)
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    running.backend.hold.set()
    assert (await rest(call))[-1].HasField("receipt")
    await asyncio.wait_for(running.server.readiness.ended.wait(), 10)


async def test_an_idle_server_drains_at_once(running) -> None:
    assert await drain(running.client) == engine_service_pb2.DrainResponse()


async def test_a_negative_drain_timeout_is_refused(running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(running.client, timeout=duration_pb2.Duration(seconds=-1))
    assert Refusal.of(caught.value).field == "timeout"
    assert not running.server.readiness.ended.is_set()


async def test_stopping_ends_the_engine(starter) -> None:
    running = await starter()
    await running.server.stop(0)
    assert running.backend.closed


async def test_two_servers_cannot_share_a_port(running) -> None:
    taken = config(port=running.server.port)
    with pytest.raises(PortInUse, match=str(running.server.port)):
        await start(taken, ScriptedBackend)


async def test_a_failed_load_ends_the_server_and_frees_the_port() -> None:
    ports = []

    async def bring_up(given: ServerConfig) -> ScriptedBackend:
        raise EngineFailed("no memory")

    with pytest.raises(EngineFailed):
        await start(config(), bring_up)
    server = RunningServer(config())
    await server.bind()
    ports.append(server.port)
    await server.stop(0)
    again = RunningServer(config(port=ports[0]))
    await again.bind()
    await again.stop(0)


@pytest.mark.parametrize("missing", ["/nowhere/model", "./nowhere", "~/nowhere", "a/b/c"])
def test_a_model_that_does_not_exist_is_named(missing: str) -> None:
    with pytest.raises(ModelNotFound, match="there is no model folder"):
        model_path(missing)


@pytest.mark.parametrize("model", ["dmeo", "Demo", "demos"])
def test_a_misspelt_demo_is_not_looked_for_on_the_hub(model: str) -> None:
    with pytest.raises(ModelNotFound, match="did you mean 'demo'"):
        model_path(model)
    assert model_path("gpt2") == "gpt2"


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (OSError("no network"), "gpt22 .there is no such folder"),
        (RuntimeError("operator torchvision::nms does not exist"), "pip uninstall torchvision"),
        (RuntimeError("it failed. See root cause above."), "change --kv-cache-memory-mib"),
    ],
)
def test_an_engine_that_cannot_start_says_what_to_do(
    raised: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(vllm_engine, "_load", fail)
    with pytest.raises(StartupError, match=said):
        vllm_engine.load_engine(config(model="gpt22"))


def test_a_folder_without_a_model_is_named(tmp_path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        model_path(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert model_path(str(tmp_path)) == str(tmp_path)


def test_the_demo_model_is_the_bundled_one(tmp_path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(vllm_engine, "DEMO_MODEL", tmp_path)
    assert model_path("demo") == str(tmp_path)
    assert model_path("org/model") == "org/model"


@pytest.fixture
def _switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_switch_interval")
def test_the_event_loop_waits_less_than_a_millisecond_for_a_thread_to_yield() -> None:
    assert run(config(model="/nowhere/model")) == ModelNotFound.exit_code
    assert sys.getswitchinterval() < 0.001


def test_a_failed_start_is_said_in_one_line_with_its_exit_status(capsys) -> None:
    assert run(config(model="/nowhere/model")) == ModelNotFound.exit_code == 4
    assert capsys.readouterr().err == "rheostat: there is no model folder /nowhere/model\n"


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"sinks": ("disk",)}, 2, '--sink: "disk" is not of the form name=plugin:key=value'),
        ({"sinks": ("disk=filesystem:root",)}, 2, "--sink: "),
        (
            {"kv_cache_memory_bytes": -4 << 20},
            2,
            "--kv-cache-memory-mib must be 1 to 16777216, not -4",
        ),
        ({"bank_bytes": 0}, 2, "--bank-mib must be 1 to 16777216, not 0"),
        ({"subscriptions_bytes": 1 << 50}, 2, "--subscriptions-mib must be"),
        ({"staging_bytes": 1 << 43}, 2, "--staging-mib and --capture-mib ask for"),
        ({"max_num_seqs": 0}, 2, "--max-num-seqs must be 1 to"),
        ({"gpu_memory_utilization": 1.5}, 2, "--gpu-memory-utilization must be 0.01 to 1, not 1.5"),
        ({"resume_window": -1.0}, 2, "--resume-window must be 0 to 604800, not -1"),
        ({"seed": -1}, 2, "--seed must be 0 to 9223372036854775807, not -1"),
        (
            {"loras": (("poet", "/nope"),)},
            4,
            "the adapter poet: /nope holds no adapter_config.json",
        ),
        ({"loras": (("poet", "/a"), ("poet", "/b"))}, 2, "two adapters are named poet"),
    ],
)
def test_what_is_wrong_in_a_configuration_is_said_before_the_server_listens(
    fields, code, words, capsys
) -> None:
    assert run(config(**fields)) == code
    said = capsys.readouterr().err
    assert said.startswith(f"rheostat: {words}")
    assert said.count("\n") == 1


def test_a_port_in_use_is_said_in_one_line(capfd) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(config(port=port)) == PortInUse.exit_code == 3
    assert capfd.readouterr().err == (
        f"rheostat: cannot listen on 127.0.0.1:{port}: address already in use, perhaps by "
        "another rheostat serve: end it, or choose --port\n"
    )


def test_a_host_that_is_none_is_said_in_one_line(capfd) -> None:
    assert run(config(host="203.0.113.7", port=1)) == PortInUse.exit_code
    assert capfd.readouterr().err.startswith("rheostat: cannot listen on 203.0.113.7:1: ")


@pytest.mark.parametrize("enabled", [False, True])
async def test_a_line_for_each_request_is_logged_only_if_asked_for(
    starter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    monkeypatch.setattr(responses.LOG, "level", logging.NOTSET)
    caplog.set_level(logging.INFO, "rheostat_server")
    caplog.handler.setLevel(logging.DEBUG)  # decides nothing, so that the loggers' levels do
    log_requests(config(enable_log_requests=enabled))
    running = await starter()
    assert kinds(await running.client.generate(request(request_id="a")))[-1] == "receipt"
    assert kinds(await running.client.generate(request(request_id="b")))[-1] == "receipt"
    lines = [one.getMessage() for one in caplog.records if "request a:" in one.getMessage()]
    said = "request a: 3 prompt tokens, 2 generated, 0 interventions, 0 captures"
    assert lines == enabled * [said]


def test_what_the_config_leaves_open_is_left_to_vllm() -> None:
    assert engine_arguments(config(), "/m") == {
        "model": "/m",
        "dtype": "auto",
        "enforce_eager": False,
        "tensor_parallel_size": 1,
        "seed": 0,
        "load_format": "auto",
        "skip_tokenizer_init": False,
        "shutdown_timeout": 31,
    }
    chosen = {"max_num_seqs": 3, "distributed_executor_backend": "mp"}
    assert engine_arguments(config(**chosen), "/m").items() >= chosen.items()


@pytest.fixture(autouse=True)
def quiet_root() -> object:
    """`run` configures logging where nothing else has."""
    before = list(logging.root.handlers)
    yield
    logging.root.handlers[:] = before
