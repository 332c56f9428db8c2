"""A server with a scripted engine, on a loopback port."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Self

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc

from rheostat_server.config import ServerConfig
from rheostat_server.engine.backend import Backend
from rheostat_server.requests.manager import RequestManager
from rheostat_server.serve import RunningServer, start
from rheostat_wire.v1 import (
    capture_service_pb2_grpc,
    engine_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    lens_service_pb2_grpc,
    monitor_service_pb2_grpc,
    run_service_pb2_grpc,
    steering_service_pb2_grpc,
    sweep_service_pb2_grpc,
)

from .fakes import ScriptedBackend

FRONT_ENDS = int(os.environ.get("RHEOSTAT_TEST_FRONT_ENDS", "0"))
"""Front ends of every server. All tests pass with any number, but one start takes a second."""


@dataclass(frozen=True)
class Refusal:
    """How a call ended, as a client sees it."""

    code: grpc.StatusCode
    reason: str
    field: str = ""
    message: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    resource: str = ""
    retry: bool = False
    precondition: bool = False

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> "Refusal":
        # A tuple, because the keys of `Metadata` in grpcio 1.76 are pairs, which `dict` looks up.
        metadata = tuple(error.trailing_metadata() or ())
        packed = dict(metadata).get("grpc-status-details-bin", b"")
        assert isinstance(packed, bytes)
        status = status_pb2.Status.FromString(packed)
        return cls.of_status(status, error.code(), error.details() or "")

    @classmethod
    def of_status(cls, status: status_pb2.Status, code: grpc.StatusCode, message: str) -> Self:
        details = status.details
        info = _unpacked(details, error_details_pb2.ErrorInfo())
        bad = _unpacked(details, error_details_pb2.BadRequest())
        resource = _unpacked(details, error_details_pb2.ResourceInfo())
        return cls(
            code=code,
            reason=info.reason,
            field=bad.field_violations[0].field if bad.field_violations else "",
            message=message,
            metadata=tuple(sorted(info.metadata.items())),
            resource=resource.resource_name,
            retry=_holds(details, error_details_pb2.RetryInfo()),
            precondition=_holds(details, error_details_pb2.PreconditionFailure()),
        )

    @property
    def brief(self) -> tuple[grpc.StatusCode, str, str]:
        return self.code, self.reason, self.field


def _unpacked(details, message):
    for detail in details:
        if detail.Is(message.DESCRIPTOR):
            detail.Unpack(message)
    return message


def _holds(details: list[any_pb2.Any], message) -> bool:
    return any(detail.Is(message.DESCRIPTOR) for detail in details)


class Client:
    """Stubs of every service on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.engine = engine_service_pb2_grpc.EngineServiceStub(channel)
        self.generation = generation_service_pb2_grpc.GenerationServiceStub(channel)
        self.steering = steering_service_pb2_grpc.SteeringServiceStub(channel)
        self.capture = capture_service_pb2_grpc.CaptureServiceStub(channel)
        self.lens = lens_service_pb2_grpc.LensServiceStub(channel)
        self.sweep = sweep_service_pb2_grpc.SweepServiceStub(channel)
        self.runs = run_service_pb2_grpc.RunServiceStub(channel)
        self.monitor = monitor_service_pb2_grpc.MonitorServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.kept: list[grpc.aio.Call] = []
        """Calls that go on though their test has no reference to them. gRPC cancels others."""

    async def generate(
        self, request: generation_service_pb2.GenerateRequest, **call: object
    ) -> list[generation_service_pb2.GenerateResponse]:
        return [event async for event in self.generation.Generate(request, **call)]

    async def refusal(self, request: generation_service_pb2.GenerateRequest) -> Refusal:
        """How a request fails."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.generate(request, timeout=10)
        return Refusal.of(caught.value)


@asynccontextmanager
async def narrow(running: "Running") -> AsyncIterator[Client]:
    """A client whose connection holds little that is not read, so that the server must keep it."""
    options = [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 4 << 10),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    address = f"127.0.0.1:{running.server.port}"
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield Client(channel)


@dataclass
class Running:
    """A running server and a client of it."""

    server: RunningServer
    backend: ScriptedBackend
    client: Client

    @property
    def manager(self) -> RequestManager:
        return self.server.readiness.manager()


Events = list[generation_service_pb2.GenerateResponse]


async def rest(call, events: Events | None = None) -> Events:
    """What is left of a stream; put into `events`, if given, as far as it comes."""
    events = [] if events is None else events
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


Starter = Callable[..., object]


@pytest.fixture
async def starter() -> AsyncIterator[Starter]:
    """Starts servers, each with a backend and fields of the config."""
    async with AsyncExitStack() as stack:

        async def begin(backend: ScriptedBackend | None = None, **config: object) -> Running:
            backend = backend or ScriptedBackend()

            async def bring_up(_: ServerConfig) -> Backend:
                return backend

            defaults = {"model": "toy", "port": 0, "drain_grace": 5.0, "front_ends": FRONT_ENDS}
            settings = ServerConfig(**{**defaults, **config})
            server = await start(settings, bring_up)
            stack.push_async_callback(server.stop, 0)
            channel = grpc.aio.insecure_channel(
                f"127.0.0.1:{server.port}",
                options=[
                    ("grpc.max_receive_message_length", -1),
                    ("grpc.max_send_message_length", -1),
                    ("grpc.use_local_subchannel_pool", 1),
                ],
            )
            await stack.enter_async_context(channel)
            return Running(server, backend, Client(channel))

        yield begin


@pytest.fixture
async def running(starter: Starter) -> Running:
    """A server with the default script."""
    return await starter()
