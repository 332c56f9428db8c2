"""A scripted gRPC server on loopback, and the two clients behind one face."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest
from google.protobuf import any_pb2, message_factory
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

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

from ..server.fakes import ScriptedBackend
from .rows_server import AioSubscriber, RowsServer, SyncSubscriber


class Refusal(Exception):
    """A scripted end of a call, with details as the contract has them."""

    def __init__(self, code: grpc.StatusCode, message: str, *details: Message) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    @classmethod
    def of(cls, code: grpc.StatusCode, message: str, reason: str, **metadata: str) -> "Refusal":
        info = error_details_pb2.ErrorInfo(reason=reason, domain="rheostat.dev", metadata=metadata)
        return cls(code, message, info)

    def end(self, context: grpc.ServicerContext) -> None:
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        if self.details:
            trailer = ("grpc-status-details-bin", status.SerializeToString())
            context.set_trailing_metadata((trailer,))
        context.abort(self.code, self.message)


class FakeServer:
    """Answers each rpc with what a test scripted, and keeps what it was asked."""

    def __init__(self) -> None:
        self.script: dict[str, list[object]] = {}
        self.asked: list[Message] = []
        self.metadata: list[dict[str, str]] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=24))
        files = (
            capture_service_pb2,
            engine_service_pb2,
            generation_service_pb2,
            lens_service_pb2,
            monitor_service_pb2,
            sweep_service_pb2,
            run_service_pb2,
            steering_service_pb2,
            health_pb2,
        )
        for file in files:
            for service in file.DESCRIPTOR.services_by_name.values():
                handlers = {method.name: self._handler(method) for method in service.methods}
                self._server.add_generic_rpc_handlers(
                    (grpc.method_handlers_generic_handler(service.full_name, handlers),)
                )
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.target = f"127.0.0.1:{port}"
        self._server.start()

    def on(self, rpc: str, *answers: object) -> None:
        """Answer calls of ``rpc`` with these in turn; the last one repeats.

        Each is a message, a list of messages and refusals for a stream, a Refusal, or a function
        of request and context that gives one of those. For a call with streams both ways it is one
        function of the iterator of requests and the context that yields messages and refusals.
        """
        self.script[rpc] = list(answers)

    def stop(self) -> None:
        self._server.stop(None).wait()

    def _answer(self, rpc: str, request: Message, context: grpc.ServicerContext) -> object:
        self.asked.append(request)
        answers = self.script.get(rpc)
        if not answers:
            Refusal.of(grpc.StatusCode.UNIMPLEMENTED, rpc, "REASON_UNIMPLEMENTED").end(context)
            raise AssertionError("unreachable")
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if callable(answer):
            answer = answer(request, context)
        if isinstance(answer, Refusal):
            answer.end(context)
        return answer

    def _handler(self, method: object) -> grpc.RpcMethodHandler:
        request_type = message_factory.GetMessageClass(method.input_type)
        answer_type = message_factory.GetMessageClass(method.output_type)
        serializers = {
            "request_deserializer": request_type.FromString,
            "response_serializer": answer_type.SerializeToString,
        }
        if method.client_streaming and method.server_streaming:

            def converse(requests: Iterator[Message], context: grpc.ServicerContext) -> object:
                def heard() -> Iterator[Message]:
                    for request in requests:
                        self.asked.append(request)
                        yield request

                (answer,) = self.script[method.name]
                for one in answer(heard(), context):
                    if isinstance(one, Refusal):
                        one.end(context)
                    yield one

            return grpc.stream_stream_rpc_method_handler(converse, **serializers)
        if method.client_streaming and not method.server_streaming:

            def upload(requests: Iterator[Message], context: grpc.ServicerContext) -> object:
                for request in requests:
                    self.asked.append(request)
                del self.asked[-1]
                return self._answer(method.name, request, context)

            return grpc.stream_unary_rpc_method_handler(upload, **serializers)
        if method.server_streaming:

            def stream(request: Message, context: grpc.ServicerContext) -> Iterator[object]:
                for answer in self._answer(method.name, request, context):
                    if isinstance(answer, Refusal):
                        answer.end(context)
                    yield answer

            return grpc.unary_stream_rpc_method_handler(stream, **serializers)
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self._answer(method.name, request, context), **serializers
        )


class SyncClient:
    """The synchronous client."""

    def __init__(self, target: str) -> None:
        self.engine = rheostat.connect(target, timeout=10)

    def run(self, use: Callable) -> object:
        return use(self.engine)

    def stream(self, prompt: str, **options: object) -> tuple[list, object]:
        """Every event, and the result or the error that came after them."""
        events: list[object] = []
        with self.engine.stream(prompt, **options) as stream:
            try:
                events.extend(stream)
                return events, stream.result()
            except rheostat.RheostatError as error:
                return events, error

    def session(self, prompt: str, act: Callable, **options: object) -> tuple[list, object]:
        """As `stream`, of a session; ``act`` is called with it and each event."""
        events: list[object] = []
        with self.engine.session(prompt, **options) as session:
            try:
                for event in session:
                    events.append(event)
                    act(session, event)
                return events, session.result()
            except rheostat.RheostatError as error:
                act(session, error)
                return events, error

    def cancelled(self, prompt: str) -> object:
        """Read one event, cancel, and give the error of reading on."""
        with self.engine.stream(prompt) as stream:
            next(stream)
            stream.cancel()
            try:
                return stream.result()
            except rheostat.RheostatError as error:
                return error

    def closed_during(self, use: Callable, begun: threading.Event) -> object:
        """Close the client once ``begun`` is set, and give the error of ``use``."""
        with futures.ThreadPoolExecutor(1) as threads:
            call = threads.submit(use, self.engine)
            assert begun.wait(30)
            self.engine.close()
            return call.exception(30)

    def close(self) -> None:
        self.engine.close()


class AioClient:
    """The asyncio client, driven to the end of each call."""

    def __init__(self, target: str) -> None:
        self.runner = asyncio.Runner()
        self.engine = rheostat.aio.connect(target, timeout=10)

    def run(self, use: Callable) -> object:
        async def go() -> object:
            return await use(self.engine)

        return self.runner.run(go())

    def stream(self, prompt: str, **options: object) -> tuple[list, object]:
        async def go() -> tuple[list, object]:
            events: list[object] = []
            async with self.engine.stream(prompt, **options) as stream:
                try:
                    async for event in stream:
                        events.append(event)
                    return events, await stream.result()
                except rheostat.RheostatError as error:
                    return events, error

        return self.runner.run(go())

    def session(self, prompt: str, act: Callable, **options: object) -> tuple[list, object]:
        async def go() -> tuple[list, object]:
            events: list[object] = []
            async with self.engine.session(prompt, **options) as session:
                try:
                    async for event in session:
                        events.append(event)
                        act(session, event)
                    return events, await session.result()
                except rheostat.RheostatError as error:
                    act(session, error)
                    return events, error

        return self.runner.run(go())

    def cancelled(self, prompt: str) -> object:
        async def go() -> object:
            async with self.engine.stream(prompt) as stream:
                await anext(stream)
                stream.cancel()
                try:
                    return await stream.result()
                except rheostat.RheostatError as error:
                    return error

        return self.runner.run(go())

    def closed_during(self, use: Callable, begun: threading.Event) -> object:
        async def go() -> object:
            call = asyncio.create_task(use(self.engine))
            assert await asyncio.to_thread(begun.wait, 30)
            await self.engine.close()
            (error,) = await asyncio.gather(call, return_exceptions=True)
            return error

        return self.runner.run(go())

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture(params=[SyncClient, AioClient], ids=["sync", "aio"])
def client(request: pytest.FixtureRequest, server: FakeServer) -> Iterator[SyncClient | AioClient]:
    client = request.param(server.target)
    yield client
    client.close()


@pytest.fixture
def refusal() -> type[Refusal]:
    return Refusal


@pytest.fixture
def starter() -> Iterator[Callable[..., RowsServer]]:
    """Starts servers, each with a backend and fields of the config."""
    servers = []

    def begin(backend: ScriptedBackend | None = None, **config: object) -> RowsServer:
        servers.append(RowsServer(backend, **{"heartbeat": 0.05, **config}))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


@pytest.fixture
def running(starter) -> RowsServer:
    return starter()


@pytest.fixture(params=[SyncSubscriber, AioSubscriber], ids=["sync", "aio"])
def kind(request: pytest.FixtureRequest) -> Iterator[Callable]:
    """Makes clients of one kind."""
    made = []

    def make(target: str) -> SyncSubscriber | AioSubscriber:
        made.append(request.param(target))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def subscriber(kind, running):
    return kind(running.target)
