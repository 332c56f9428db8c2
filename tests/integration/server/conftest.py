"""Real servers on the bundled model, each in a process of its own, for all tests here."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import rheostat

from ..controller_plugins import install
from ..engine.reference import HfReference
from .adapters import write_adapter
from .forked_servers import ForkedServer, Order

STARTUP = 240
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Runs vLLM's worker in the process of its engine core.

On a CPU, vLLM's default is a process for each. The core then spins on a core of the machine while
the worker computes.
"""
MODEL = Path(__file__).parents[3] / "server" / "rheostat_server" / "demo_model"


class Server(NamedTuple):
    """A server that serves."""

    target: str
    process: ForkedServer
    log: Path


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def arguments(model: str, port: int, *options: str) -> list[str]:
    """The arguments of `rheostat` that serve a model."""
    return ["serve", model, "--port", str(port), *options]


def command(model: str, port: int, *options: str) -> list[str]:
    """The command line that serves a model."""
    return [sys.executable, "-m", "rheostat", *arguments(model, port, *options)]


def wait_until_serving(
    target: str, process: subprocess.Popen[bytes] | ForkedServer, log: Path
) -> None:
    """Returns once health says SERVING."""
    deadline = time.monotonic() + STARTUP
    with grpc.insecure_channel(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=2)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.2)
    raise AssertionError(f"not serving after {STARTUP} s: {log.read_text()[-4000:]}")


@contextmanager
def serving(
    folder: Path, *options: str, eager: bool = True, own_group: bool = False
) -> Iterator[Server]:
    """A server in float32, so that everything can be compared with Hugging Face's.

    Args:
        folder: for its log.
        *options: more of the command line.
        eager: whether it compiles nothing.
        own_group: whether it leads a process group.
    """
    log = folder / "log"
    port = free_port()
    numbers = ["--dtype", "float32", "--max-model-len", "512"]
    numbers += ["--enforce-eager"] if eager else []
    room = ["--max-num-seqs", "32", "--kv-cache-memory-mib", "128"]
    line = arguments("demo", port, *numbers, *room, *options)
    process = ForkedServer(Order(line, dict(os.environ), str(log), own_group))
    target = f"127.0.0.1:{port}"
    try:
        wait_until_serving(target, process, log)
        yield Server(target, process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()


@pytest.fixture(scope="session")
def sink_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the sink `disk` of `server` keeps its files."""
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="session")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where rows that wait on disk lie, of `server`."""
    return tmp_path_factory.mktemp("spool")


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, sink_root: Path, spool: Path
) -> Iterator[Server]:
    """The server of nearly all tests. It leads a process group, to which a test sends a signal.

    Its engine runs in one process. The engines of all other servers run in two, as vLLM chooses.
    """
    folders = [f"--sink=disk=filesystem:root={sink_root}", f"--spool={spool}"]
    options = ["--capture-mib", "64", "--resume-window", "15", "--front-ends", "0", *folders]
    options += ["--distributed-executor-backend", ONE_PROCESS]
    with serving(tmp_path_factory.mktemp("server"), *options, own_group=True) as one:
        yield one


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two small adapters, by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, seed) for seed, name in enumerate(("ada", "bob"))}


@pytest.fixture(scope="session")
def small_server(
    tmp_path_factory: pytest.TempPathFactory, adapters: dict[str, Path]
) -> Iterator[Server]:
    """A server with the smallest bank that can be asked for, little KV, and two adapters.

    Its steps take so few tokens that longer prompts are cut in pieces. Two front ends speak gRPC
    for it; `server` speaks gRPC itself. It leads a process group too.
    """
    options = [f"--lora={name}={path}" for name, path in adapters.items()]
    folder = tmp_path_factory.mktemp("small")
    memory = ["--bank-mib=1", "--capture-mib=16", "--kv-cache-memory-mib=6"]
    memory += ["--max-num-batched-tokens=160", "--capacity-wait=600"]  # on a slow machine too
    with serving(folder, *memory, *options, "--front-ends=2", own_group=True) as one:
        yield one


@pytest.fixture(scope="session")
def tight_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a sink and controllers, and without device memory for encodings.

    The budget of the controllers is large, because other tests run at the same time. Watches are
    lost half a second after their connection, while long requests still run.
    """
    folder = tmp_path_factory.mktemp("tight")
    install(folder)
    options = ["--capture-mib", "16", "--encode-mib", "0", "--resume-window", "0.5"]
    options.append(f"--sink=disk=filesystem:root={folder}/rows")
    options += [f"--controller={name}" for name in ("hold", "fails", "alsofails")]
    options += ["--controller-budget-ms", "500"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        with serving(folder, *options) as one:
            yield one


@pytest.fixture(scope="session")
def compiled_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that compiles its model."""
    with serving(tmp_path_factory.mktemp("compiled"), eager=False) as one:
        yield one


@pytest.fixture(scope="session")
def reference() -> HfReference:
    """Hugging Face's model."""
    return HfReference("llama", MODEL)


def watched(server: Server) -> Iterator[rheostat.Engine]:
    """A client; afterwards the server holds nothing and still serves."""
    with rheostat.connect(server.target) as client:
        yield client
        assert_empty(client)
        assert client.generate("The capital of France is", max_tokens=1, temperature=0).text


@pytest.fixture
def engine(server: Server) -> Iterator[rheostat.Engine]:
    """A client of `server`; see `watched`."""
    yield from watched(server)


@pytest.fixture
def small(small_server: Server) -> Iterator[rheostat.Engine]:
    """A client of `small_server`; see `watched`."""
    yield from watched(small_server)


def assert_empty(client: rheostat.Engine) -> None:
    """No request, row or slot is left; what ends asynchronously gets some seconds."""
    deadline = time.monotonic() + 20
    while True:
        stats = client.stats()
        held = (
            stats.running_request_count,
            stats.waiting_request_count,
            stats.used_bank_row_count,
            stats.leaked_count,
        )
        if held == (0, 0, 0, 0):
            return
        assert time.monotonic() < deadline, stats
        time.sleep(0.1)
