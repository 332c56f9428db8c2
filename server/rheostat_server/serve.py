"""A server, from its start to its end.

It listens before the model is loaded, so that clients can check its health. It ends by draining:
new requests are refused, running requests have a grace period, remaining requests are aborted, and
then the engine ends.
"""

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from importlib.metadata import entry_points
from pathlib import Path

from rheostat_engine import CONTROLLERS_GROUP
from rheostat_engine.process_end import skip_last_collection
from rheostat_server.admission.policy_file import put_in_force, read_policy
from rheostat_server.api.capture import CaptureService
from rheostat_server.api.engine import EngineService
from rheostat_server.api.generation import GenerationService
from rheostat_server.api.incoming import Calls
from rheostat_server.api.lens import LensService
from rheostat_server.api.monitor import MonitorService
from rheostat_server.api.readiness import Readiness
from rheostat_server.api.rpc import Rpcs
from rheostat_server.api.runs import RunService
from rheostat_server.api.steering import SteeringService
from rheostat_server.api.sweeps import SweepService
from rheostat_server.config import ServerConfig, check_config
from rheostat_server.delivery.spill_directory import SpillDirectory
from rheostat_server.engine.backend import Backend
from rheostat_server.engine.loras import read_loras
from rheostat_server.engine.vllm_backend import start_backend
from rheostat_server.engine.vllm_engine import model_path
from rheostat_server.errors import EngineDied, InvalidConfig, PortInUse, ServerFailed, SinksFailed
from rheostat_server.front_ends.core_server import grpc_address
from rheostat_server.front_ends.grpc_server import GrpcServer
from rheostat_server.front_ends.supervisor import FrontEnds
from rheostat_server.generation import responses
from rheostat_server.prompts.prompts import Prompts
from rheostat_server.requests.manager import RequestManager
from rheostat_server.sinks import SinkSettingsError
from rheostat_server.sinks.registry import Sinks
from rheostat_server.sinks.settings import parse_sink
from rheostat_server.subscriptions.shared_memory import sweep
from rheostat_server.tasks.garbage import collect_in_time, collect_rarely
from rheostat_server.tasks.open_files import raise_descriptor_limit
from rheostat_server.vectors.files import VectorFiles
from rheostat_wire.v1.capture_service_pb2_grpc import add_CaptureServiceServicer_to_server
from rheostat_wire.v1.engine_service_pb2_grpc import add_EngineServiceServicer_to_server
from rheostat_wire.v1.generation_service_pb2_grpc import add_GenerationServiceServicer_to_server
from rheostat_wire.v1.lens_service_pb2_grpc import add_LensServiceServicer_to_server
from rheostat_wire.v1.monitor_service_pb2_grpc import add_MonitorServiceServicer_to_server
from rheostat_wire.v1.run_service_pb2_grpc import add_RunServiceServicer_to_server
from rheostat_wire.v1.steering_service_pb2_grpc import add_SteeringServiceServicer_to_server
from rheostat_wire.v1.sweep_service_pb2_grpc import add_SweepServiceServicer_to_server

_LOG = logging.getLogger(__name__)

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

SWITCH_INTERVAL = 0.0005
"""Seconds after which a Python thread releases the GIL to another thread that waits.

The event loop releases the GIL at each socket call. If another thread resolves or tokenises a long
request, the loop then waits for this interval. On two busy cores, a health check beside 16 clients
that reconnect took up to 98 ms with Python's default of 5 ms. With this interval it takes 42 ms,
and a token costs the same.
"""

_FRONT_END_CORES = 8
"""Without `--front-ends`, a server on a machine with fewer cores speaks gRPC itself. With this many
or more it has one front end, because the server's main thread is the first to be busy; see
docs/front-ends.md."""

_LAST_CALLS = 5.0
"""Seconds that calls have to finish after the engine has drained."""

_LAST_WORDS = 0.5
"""Seconds to send the last statuses. After that, idle connections are closed."""


BackendFactory = Callable[[ServerConfig], Awaitable[Backend]]
"""Starts an engine."""


class RunningServer:
    """A server: `bind` makes it listen, `load` makes it serve, `stop` ends it."""

    def __init__(self, config: ServerConfig) -> None:
        """The server does not listen yet."""
        self.port = config.port
        self._config = config
        self._calls = Calls(config.maximum_concurrent_rpcs)
        self._rpcs = Rpcs(self._calls)
        count = front_end_count(config)
        self.grpc: GrpcServer | FrontEnds = (
            FrontEnds(count, self._rpcs.answer) if count else GrpcServer(self._rpcs.answer)
        )
        """Speaks gRPC with clients, in this process or in others."""
        self.readiness = Readiness(self.grpc.set_health)
        self._add_services()
        self._manager: RequestManager | None = None
        self._loaded = contextlib.AsyncExitStack()
        """Closes the resources that `load` opened, in reverse order."""

    async def bind(self) -> None:
        """Listens. Health reports NOT_SERVING, and rpcs fail because the model is being loaded.

        Raises:
            PortInUse: the address cannot be listened on.
        """
        _check_address(self._config.host, self._config.port)
        await self.readiness.warm_up()
        self.port = await self.grpc.start(self._config.host, self._config.port)
        _LOG.info(
            "listening on %s, loading %s",
            grpc_address(self._config.host, self.port),
            self._config.model,
        )

    def _add_services(self) -> None:
        readiness, add = self.readiness, self._rpcs.add_service
        add(add_CaptureServiceServicer_to_server, CaptureService(readiness))
        add(add_EngineServiceServicer_to_server, EngineService(readiness))
        add(add_GenerationServiceServicer_to_server, GenerationService(readiness))
        add(add_LensServiceServicer_to_server, LensService(readiness))
        add(add_MonitorServiceServicer_to_server, MonitorService(readiness))
        add(add_RunServiceServicer_to_server, RunService(readiness))
        add(add_SteeringServiceServicer_to_server, SteeringService(readiness))
        add(add_SweepServiceServicer_to_server, SweepService(readiness))

    async def load(self, bring_up: BackendFactory) -> None:
        """Loads the model and serves.

        Raises:
            StartupError: there is no such model, or the engine does not start. Or a sink, the
                folder of vectors, the spool or the policy cannot be used.
        """
        policy = None if self._config.policy is None else read_policy(self._config.policy)
        files, spool, end = None, None, self._loaded
        if self._config.vector_dir is not None:
            files = VectorFiles(Path(self._config.vector_dir))
            end.callback(files.close)
        sinks = await asyncio.to_thread(_make_sinks, self._config)
        end.push_async_callback(asyncio.to_thread, sinks.close)
        await asyncio.to_thread(sweep)
        if self._config.spool is not None:
            folder = Path(self._config.spool)
            spool = await asyncio.to_thread(SpillDirectory, folder, self._config.spool_bytes)
            end.push_async_callback(asyncio.to_thread, spool.close)
        backend = await bring_up(self._config)
        end.push_async_callback(backend.close)
        prompts = Prompts(
            backend.tokenizer(),
            vocabulary=backend.info.vocabulary,
            model_tokens=backend.info.model_tokens,
        )
        end.callback(prompts.close)
        manager = self._manager = RequestManager(backend, prompts, self._config, sinks, spool)
        end.push_async_callback(manager.preparations.close)
        end.push_async_callback(manager.persistent_vectors.settle)
        end.callback(manager.subscriptions.remove_shared_memory)
        if files is not None:
            await manager.persistent_vectors.restore(files, backend.sites.width)
        if policy is not None:
            await put_in_force(policy, manager.server_wide)
        await self.readiness.serve(manager)

    @property
    def idle(self) -> bool:
        """Whether the model is loaded, and no request runs."""
        return self._manager is not None and not self._manager.open_requests

    async def stop(self, grace: float | None = None) -> None:
        """Drains for `grace` seconds (default: the config's), then ends everything."""
        seconds = self._config.drain_grace if grace is None else grace
        await self.readiness.drain(seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_CALLS):
                await self._calls.until_none()
        await self.grpc.stop(_LAST_WORDS)
        await self._loaded.aclose()
        _LOG.info("ended")


def _check_address(host: str, port: int) -> None:
    """Checks that the server can listen on the address.

    gRPC would find the same error, but prints its own lines to stderr first.

    Raises:
        PortInUse: the server cannot listen on it.
    """
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family is socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        raise PortInUse.of(grpc_address(host, port), error) from error


def front_end_count(config: ServerConfig) -> int:
    """The number of processes that speak gRPC for the server; 0: the server does it itself."""
    if config.front_ends is not None:
        return config.front_ends
    cores = len(os.sched_getaffinity(0))
    return 1 if cores >= _FRONT_END_CORES else 0


def check_start(config: ServerConfig) -> None:
    """Checks what can be checked before the server listens.

    Raises:
        InvalidConfig: a number is outside its bounds, or a sink is not written as sinks are.
        ModelNotFound: there is no such model or adapter.
        PolicyFailed: the policy file cannot be read.
    """
    check_config(config)
    try:
        for text in config.sinks:
            parse_sink(text)
    except SinkSettingsError as error:
        raise InvalidConfig(f"--sink: {error}") from error
    for name in config.controllers:
        if not entry_points(group=CONTROLLERS_GROUP, name=name):
            raise InvalidConfig(
                f"--controller: no installed package has a controller {name!r}; controllers are "
                f"entry points in the group {CONTROLLERS_GROUP}"
            )
    model_path(config.model)
    read_loras(config.loras)
    if config.policy is not None:
        read_policy(config.policy)


def _make_sinks(config: ServerConfig) -> Sinks:
    """The sinks of a server.

    Raises:
        SinksFailed: a sink cannot be made.
    """
    try:
        return Sinks([parse_sink(text) for text in config.sinks])
    except SinkSettingsError as error:
        raise SinksFailed(str(error)) from error


async def start(config: ServerConfig, bring_up: BackendFactory = start_backend) -> RunningServer:
    """Starts a server, and returns it once it serves.

    Raises:
        StartupError: a setting cannot be used, the address is taken, there is no such model, or the
            engine fails.
    """
    check_start(config)
    server = RunningServer(config)
    await server.bind()
    try:
        await server.load(bring_up)
    except BaseException:
        await server.stop(0)
        raise
    return server


def run(config: ServerConfig) -> int:
    """Serves until a signal, the Drain rpc or the engine's end. Returns the exit status.

    The status is 0 after a signal or a drain. Otherwise it is the `exit_code` of a `ServerFailed`,
    whose text is printed.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    skip_last_collection(own_process=True)
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
    log_requests(config)
    _LOG.debug("up to %d descriptors", raise_descriptor_limit())
    try:
        asyncio.run(_serve(config))
    except ServerFailed as error:
        _LOG.debug("the server failed", exc_info=error)
        print(f"rheostat: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def log_requests(config: ServerConfig) -> None:
    """Logs a line for each request that ends, if the config says so."""
    if config.enable_log_requests:
        responses.LOG.setLevel(logging.DEBUG)


async def _serve(config: ServerConfig) -> None:
    """Serves until a signal, the Drain rpc or the engine's end ends it.

    Raises:
        StartupError: the server cannot start.
        EngineDied: the engine was lost.
    """
    check_start(config)
    server = RunningServer(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.readiness.end)
    await server.bind()
    loading = asyncio.create_task(server.load(bring_up))
    ending = asyncio.create_task(server.readiness.ended.wait())
    collecting = asyncio.create_task(collect_in_time(lambda: server.idle))
    try:
        await asyncio.wait({loading, ending}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            await ending
        else:
            await _abandon(loading)
    finally:
        ending.cancel()
        collecting.cancel()
        gc.unfreeze()  # otherwise vLLM's objects are never collected, nor their finalizers run
        await server.stop()
    if server.readiness.lost:
        raise EngineDied(f"the server has ended: {server.readiness.lost}")


async def bring_up(config: ServerConfig) -> Backend:
    """Starts the backend, and excludes all objects that then exist from garbage collections.

    vLLM and its imports leave about a million objects.
    """
    backend = await start_backend(config)
    collect_rarely()
    return backend


async def _abandon(loading: asyncio.Task[None]) -> None:
    """Ends a load by killing its processes, because the server has to end meanwhile."""
    _LOG.info("the server must end while the model is being loaded")
    while not loading.done():
        for child in multiprocessing.active_children():
            child.kill()
        await asyncio.wait({loading}, timeout=0.5)
    if loading.exception() is not None:
        _LOG.info("the load was given up")
