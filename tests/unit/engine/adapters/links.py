"""vLLM's client of an engine's core, with a socket in the core's place."""

import asyncio
from types import SimpleNamespace
from typing import Any

import zmq
import zmq.asyncio
from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources
from vllm.v1.serial_utils import MsgpackEncoder

from rheostat_engine.adapters import request_batches
from rheostat_engine.adapters.core_messages import add_requests_fast

ENGINE = b"\x00\x00"
_WAIT_MS = 5000


class Link:
    """vLLM's client, and the socket of an engine's core, which may connect late."""

    def __init__(self, folder: Any) -> None:
        self.running = 0
        """How many requests the engine computes."""
        self.context = zmq.asyncio.Context()
        self.address = f"ipc://{folder}/core"
        client: Any = object.__new__(AsyncMPClient)
        client.resources = BackgroundResources(ctx=self.context)
        client.resources.output_queue_task = SimpleNamespace()
        client.encoder = MsgpackEncoder()
        client.client_index, client.core_engine = 0, ENGINE
        client.input_socket = self.context.socket(zmq.ROUTER)
        client.input_socket.setsockopt(zmq.SNDHWM, 0)
        client.input_socket.bind(self.address)
        client._finalizer = lambda: None
        self.client = client
        self.core = zmq.Socket(zmq.Context.shadow(self.context), zmq.DEALER)
        self.core.setsockopt(zmq.IDENTITY, ENGINE)
        self.core.setsockopt(zmq.RCVHWM, 0)

    def connect(self) -> None:
        """The core says that it is ready, as vLLM's does."""
        self.core.connect(self.address)
        self.core.send(b"ready")
        ready = zmq.Socket.shadow(self.client.input_socket)
        assert ready.poll(_WAIT_MS)
        assert ready.recv_multipart() == [ENGINE, b"ready"]

    def received(self) -> list[Any]:
        """The next message, but for its type."""
        assert self.core.poll(_WAIT_MS), "the message was not sent"
        kind, *parts = self.core.recv_multipart()
        assert kind == b"\x00"
        return parts


async def iterations_without_requests() -> None:
    """As many as an idle engine waits for before it gets the requests that wait."""
    for _ in range(request_batches._QUIET):
        await asyncio.sleep(0)


def make_fast(link: Link) -> None:
    """Makes the client send requests as the server's does."""
    processor = SimpleNamespace(get_num_unfinished_requests=lambda: link.running + 1)
    add_requests_fast(
        SimpleNamespace(
            engine_core=link.client, input_processor=SimpleNamespace(), output_processor=processor
        )
    )
