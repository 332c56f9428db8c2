"""Sends the requests that a sweep starts in one iteration of the event loop as one message.

Why
    The engine's core receives messages in a thread of its own, which gives up Python's lock several
    times for each. Beside a main thread that calls PyTorch, receiving a request of 3 kB took 76 µs
    of CPU, and 37 µs if four shared a message (on two CPU cores). A sweep has a request for each
    cell, and the core's process is what limits its speed.
How
    A request waits until the other callbacks of this iteration have run. Then the last request is
    sent as vLLM sends it, with the bytes of the earlier ones in its `extra_args`. The core's thread
    takes these out, and puts the requests into the core's queue as if each had come alone.

Invariants: requests, aborts and calls reach the core in the order in which they were sent. Only
requests within `requests_together` wait. A request that the core can't process fails alone.
"""

import asyncio
from collections.abc import Awaitable, Generator
from contextlib import suppress
from copy import copy
from typing import cast

from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder

from rheostat_engine.together import may_share_message

_EARLIER = "rheostat_earlier_requests"
"""The key of the earlier requests in `SamplingParams.extra_args`."""

_MOST = 16
"""The most requests of a message."""

_SEND_INPUT, _SEND_MESSAGE = "_send_input", "_send_input_message"
_PREPROCESS = "preprocess_add_request"


class _Added:
    """An awaitable that is already done."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


_ADDED = _Added()


def send_batches(client: AsyncMPClient) -> None:
    """Makes a client send requests within `requests_together` in few messages."""
    _Sender(client)


class _Sender:
    """Sends the messages of a client."""

    def __init__(self, client: AsyncMPClient) -> None:
        self._client = client
        self._send_input = client._send_input
        self._send_message = client._send_input_message
        self._waiting: list[EngineCoreRequest] = []
        """Requests that share the next message."""
        setattr(client, _SEND_INPUT, self.send_input)
        setattr(client, _SEND_MESSAGE, self.send_message)

    def send_input(
        self, kind: EngineCoreRequestType, content: object, engine: bytes | None = None
    ) -> Awaitable[object]:
        """As `AsyncMPClient._send_input`."""
        if kind != EngineCoreRequestType.ADD or engine is not None or not may_share_message():
            return self._send_input(kind, content, engine)
        request = cast(EngineCoreRequest, content)
        tensors = request.mm_features or request.prompt_embeds is not None
        if tensors or request.sampling_params is None:  # tensors are parts of their own
            return self._send_input(kind, content, engine)
        self._client.ensure_alive()
        self._waiting.append(request)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._flush)
        elif len(self._waiting) == _MOST:
            self._flush()
        return _ADDED

    def send_message(self, message: tuple[bytes, ...], engine: bytes) -> Awaitable[object]:
        """As `AsyncMPClient._send_input_message`. No message overtakes requests that wait."""
        self._flush()
        return self._send_message(message, engine)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        *earlier, last = waiting
        encode = self._client.encoder.encode
        if earlier:
            last, params = copy(last), copy(last.sampling_params)
            assert params is not None
            parts = [part for request in earlier for part in encode(request)]  # one of each
            params.extra_args = {**(params.extra_args or {}), _EARLIER: parts}
            last.sampling_params = params
        with suppress(EngineDeadError):  # every request of a dead engine fails
            message = (EngineCoreRequestType.ADD.value, *encode(last))
            self._send_message(message, self._client.core_engine)


def receive_batches() -> None:
    """Makes the engine's core in this process take the requests of a message apart."""
    stock = EngineCore.preprocess_add_request
    if getattr(stock, "is_rheostat", False):
        return
    decoder = MsgpackDecoder(EngineCoreRequest)  # one thread receives all messages

    def preprocess(core: EngineCore, request: EngineCoreRequest) -> tuple[Request, int]:
        params = request.sampling_params
        if params is None or not params.extra_args or _EARLIER not in params.extra_args:
            return stock(core, request)
        earlier = params.extra_args.pop(_EARLIER)
        assert isinstance(core, EngineCoreProc)  # others have no messages
        for part in earlier:
            _put(core, decoder.decode(part))
        return stock(core, request)

    def _put(core: EngineCoreProc, request: EngineCoreRequest) -> None:
        try:
            core.input_queue.put_nowait((EngineCoreRequestType.ADD, stock(core, request)))
        except Exception:  # as vLLM's thread does
            core._handle_request_preproc_error(request)

    preprocess.is_rheostat = True  # type: ignore[attr-defined]  # detects a second call
    setattr(EngineCore, _PREPROCESS, preprocess)
