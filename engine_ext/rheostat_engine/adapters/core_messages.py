"""Adds requests to the engine's core with less work on the event loop.

Why
    vLLM makes a future and three tracked frames for each message to the core, which takes about
    nine times as long as sending the bytes. It also reads random bytes from the kernel for each
    request's id. When hundreds of requests arrive together, the last prefill waits for all of this.
How
    A message of a few small parts is copied into the socket at once. Other messages are sent as
    vLLM sends them, and so are all messages while an earlier one waits, so that none overtakes it.
    Ids of requests end with a number in place of random characters. The number is unique, because
    the engine has only one client.
"""

import itertools
from collections.abc import Awaitable, Generator
from typing import Protocol

import zmq
import zmq.asyncio
import zmq.backend
from vllm import envs
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.serial_utils import bytestr

from rheostat_engine.adapters.request_batches import send_in_batches

_SMALL_BYTES = 64 << 10
"""Parts of more bytes are not copied."""

_LAST = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


class _Waiting(Protocol):
    """The futures of a socket of `zmq.asyncio`."""

    _send_futures: object
    _recv_futures: object
    _shadow_sock: zmq.Socket[bytes]


def add_requests_fast(llm: AsyncLLM) -> None:
    """Makes an engine add requests with less work on the event loop."""
    # If vLLM leaves ids as they are, workers take an id for the server's; see `server_request_id`.
    if not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        llm.input_processor.assign_request_id = _Numbered()
    if isinstance(llm.engine_core, AsyncMPClient):
        send_small_messages_at_once(llm.engine_core)
        send_in_batches(llm.engine_core, llm.output_processor.get_num_unfinished_requests)


class _Numbered:
    """Gives requests ids that end with a number."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __call__(self, request: EngineCoreRequest) -> None:
        """As `InputProcessor.assign_request_id`."""
        if request.external_req_id is not None:
            raise ValueError("the id of the request was assigned already")
        request.external_req_id = request.request_id
        request.request_id = f"{request.request_id}-{next(self._numbers):x}"


def send_small_messages_at_once(client: AsyncMPClient) -> None:
    """Makes a client send small messages without a future for each."""
    stock = client._send_input_message
    socket: _Waiting = client.input_socket  # type: ignore[assignment]  # vLLM has either kind
    shadow, send = socket._shadow_sock, zmq.backend.Socket.send

    def send_message(message: tuple[bytestr, ...], engine: bytes) -> Awaitable[object]:
        if socket._send_futures or socket._recv_futures or not all(map(_is_small, message)):
            return stock(message, engine)
        client.ensure_alive()
        try:
            send(shadow, engine, _MORE)
        except zmq.Again:
            return stock(message, engine)
        for part in message[:-1]:
            send(shadow, part, _MORE)
        send(shadow, message[-1], _LAST)
        return _SENT

    client._send_input_message = send_message


def _is_small(part: object) -> bool:
    """Whether a part of a message can be copied at once. Parts of other types belong to tensors."""
    return type(part) is bytes and len(part) <= _SMALL_BYTES


class _Sent:
    """An awaitable that is already done."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


_SENT = _Sent()
