"""Adds requests to the engine's core: with less work on the event loop, and bursts together.

Why less work
    vLLM makes a future and three tracked frames for each message to the core, which takes about
    nine times as long as sending the bytes. It also reads random bytes from the kernel for each
    request's id. When hundreds of requests arrive together, the last prefill waits for all of this.
How
    A message of a few small parts is copied into the socket at once. Other messages are sent as
    vLLM sends them, and so are all messages while an earlier one waits, so that none overtakes it.
    Ids of requests end with a number in place of random characters. The number is unique, because
    the engine has only one client.
Why together
    An idle engine begins a step with the first request that it gets. When hundreds arrive, all
    others wait for this step, and an 8B model on a fast GPU needs 15 to 40 ms of the host for it,
    however small it is. So while an engine is idle, requests wait here until no more follow, for at
    most `_GATHER_SECONDS`. A request that comes alone waits for a few empty iterations of the event
    loop.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import Protocol

import zmq
import zmq.asyncio
import zmq.backend
from vllm import envs
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

Engine = AsyncLLM

_ASSIGN = "assign_request_id"
_SEND = "_send_input_message"

_SMALL_BYTES = 64 << 10
"""Parts of more bytes are not copied."""

_GATHER_SECONDS = 0.01
"""Seconds that a request waits for others at most while the engine is idle."""

_QUIET_ITERATIONS = 3
"""Iterations of the event loop without a request after which no more follow. The loop receives a
call that has arrived in the next iteration, and runs its task in the one after that."""

_ADD: bytes = EngineCoreRequestType.ADD.value

_LAST = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


class _Waiting(Protocol):
    """The futures of a socket of `zmq.asyncio`."""

    _send_futures: object
    _recv_futures: object
    _shadow_sock: zmq.Socket[bytes]


def add_requests_fast(llm: Engine) -> None:
    """Makes an engine add requests with less work on the event loop."""
    # If vLLM leaves ids as they are, workers take an id for the server's; see `server_request_id`.
    if not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        setattr(llm.input_processor, _ASSIGN, _Numbered())
    if isinstance(llm.engine_core, AsyncMPClient):
        processor = llm.output_processor
        # The request that is being added is counted already.
        sender = _Sender(llm.engine_core, lambda: processor.get_num_unfinished_requests() <= 1)
        setattr(llm.engine_core, _SEND, sender.send)


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


class _Sender:
    """Sends the messages of a client; see the module's docstring."""

    def __init__(self, client: AsyncMPClient, alone: Callable[[], bool]) -> None:
        """`alone` returns whether the engine has no request but the one that is being added."""
        self._client = client
        self._stock = client._send_input_message
        self._socket: _Waiting = client.input_socket  # type: ignore[assignment]  # vLLM has either
        self._alone = alone
        self._gathered: list[tuple[tuple[bytes, ...], bytes]] = []
        """Requests that wait for others, each with its engine."""
        self._came = False
        """Whether a request came since the last look."""
        self._looks = False
        """Whether `_look` will be called."""
        self._quiet = 0
        """Looks in a row that found no new request."""
        self._end = 0.0
        """When the requests are sent, on the clock of the event loop."""

    def send(self, message: tuple[bytes, ...], engine: bytes) -> Awaitable[object]:
        """As `AsyncMPClient._send_input_message`."""
        small = all(map(_is_small, message))
        if small and message[0] == _ADD and (self._gathered or self._alone()):
            self._client.ensure_alive()
            self._gather(message, engine)
            return _SENT
        self._send_gathered()
        return self._send_small(message, engine) if small else self._stock(message, engine)

    def _send_small(self, message: tuple[bytes, ...], engine: bytes) -> Awaitable[object]:
        """Sends a small message, without a future if no earlier one waits."""
        if self._socket._send_futures or self._socket._recv_futures:
            return self._stock(message, engine)
        self._client.ensure_alive()
        shadow, send = self._socket._shadow_sock, zmq.backend.Socket.send
        try:
            send(shadow, engine, _MORE)
        except zmq.Again:
            return self._stock(message, engine)
        for part in message[:-1]:
            send(shadow, part, _MORE)
        send(shadow, message[-1], _LAST)
        return _SENT

    def _gather(self, message: tuple[bytes, ...], engine: bytes) -> None:
        self._gathered.append((message, engine))
        self._came = True
        if len(self._gathered) == 1:
            loop = asyncio.get_running_loop()
            self._quiet, self._end = 0, loop.time() + _GATHER_SECONDS
            if not self._looks:
                self._looks = True
                loop.call_soon(self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sends the gathered requests, or looks again in the next iteration."""
        self._looks = False
        if not self._gathered:
            return
        self._quiet = 0 if self._came else self._quiet + 1
        self._came = False
        if self._quiet >= _QUIET_ITERATIONS or loop.time() >= self._end:
            with suppress(EngineDeadError):  # every request of a dead engine fails
                self._send_gathered()
        else:
            self._looks = True
            loop.call_soon(self._look, loop)

    def _send_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        for message, engine in gathered:
            self._send_small(message, engine)


def _is_small(part: object) -> bool:
    """Whether a part of a message can be copied at once. Parts of other types belong to tensors."""
    return type(part) is bytes and len(part) <= _SMALL_BYTES


class _Sent:
    """An awaitable that is already done."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


_SENT = _Sent()
