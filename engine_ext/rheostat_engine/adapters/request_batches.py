"""Sends requests that are added together to the engine's core with one message.

Why
    The core receives messages in a thread, beside the main thread, which launches steps. For each
    message the thread acquires the GIL several times, and both threads wait for each other. On an
    H200 with an 8B model, the launch of a prefill took about 30 ms, and 39 to 46 ms while requests
    came in a message each. In a prototype of this module it took 35 to 41 ms then.
    An idle engine also begins a step with the first requests that it gets. Of 32 that began
    together, 4 were in the first step there. The others waited until it was launched.
How
    A request waits until the next iteration of the event loop. If the engine has no other request,
    it waits until `_QUIET` iterations in a row have added none, until the first iteration after
    `_LONGEST`, or until `_TOGETHER` wait. Longer ones than `_LONG_BYTES` never wait.
    The message of the last request that waits also carries the others, as vLLM encodes them. The
    core's thread puts all of them into the core's input queue, in order.

Invariants: a request that cannot be encoded fails alone, and so does one that the core cannot
process. Any other message to the core is sent after the requests that wait.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from copy import copy

from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, bytestr

from rheostat_engine.adapters.request_copies import with_extra

_OTHERS = "rheostat_others"
"""The key of the other requests in `SamplingParams.extra_args`: a list of [id, bytes]."""

_MOST = 64
"""Requests in a message."""

_TOGETHER = 32
"""Requests that an idle engine gets in a message at most. A larger first step takes longer, and
more requests wait for the second one."""

_LONG_BYTES = 16 << 10
"""Bytes of an encoded request above which it is sent alone, because it would be copied again."""

_QUIET = 3
"""Iterations without another request after which an idle engine gets those that wait. A gRPC call
adds its request two iterations after it arrived, so fewer would split a burst."""

_LONGEST = 0.012
"""Seconds after which an idle engine gets the requests that wait in any case."""


def send_in_batches(client: AsyncMPClient, unfinished: Callable[[], int]) -> None:
    """Makes a client send requests that are added together with one message.

    Args:
        client: the client.
        unfinished: returns the number of unfinished requests, with one that is being added.
    """
    batches = _Batches(client, unfinished)
    client.add_request_async = batches.add
    client._send_input_message = batches.send


class _Batches:
    """The requests that wait to be sent."""

    def __init__(self, client: AsyncMPClient, unfinished: Callable[[], int]) -> None:
        self._client = client
        self._unfinished = unfinished
        self._send = client._send_input_message
        self._waiting: list[tuple[EngineCoreRequest, Sequence[bytestr]]] = []
        """Each with its encoding."""
        self._end = 0.0
        """When they are sent at the latest, by the event loop's clock; 0: in the next iteration."""
        self._quiet = 0
        """Iterations that have passed since the last one was added."""
        self._looks = False
        """Whether a call of `_look` is scheduled."""

    async def add(self, request: EngineCoreRequest) -> None:
        """As `AsyncMPClient.add_request_async`, but mostly returns before the request is sent."""
        client = self._client
        client.ensure_alive()
        request.client_index = client.client_index
        parts = client.encoder.encode(request)
        if len(parts) > 1 or len(parts[0]) > _LONG_BYTES:
            await self.send((EngineCoreRequestType.ADD.value, *parts), client.core_engine)
        else:
            if not self._waiting:
                self._end = self._latest()
                self._look_later()
            self._waiting.append((request, parts))
            self._quiet = 0
            if len(self._waiting) == (_TOGETHER if self._end else _MOST):
                self._send_waiting()
        client._ensure_output_queue_task()

    def send(self, message: tuple[bytestr, ...], engine: bytes) -> Awaitable[object]:
        """As `AsyncMPClient._send_input_message`."""
        self._send_waiting()
        return self._send(message, engine)

    def _latest(self) -> float:
        """The `_end` of requests that wait, when the first of them is added."""
        if self._unfinished() > 1:  # the engine is not idle
            return 0.0
        return asyncio.get_running_loop().time() + _LONGEST

    def _look_later(self) -> None:
        """Calls `_look` in the next iteration."""
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Sends the requests that wait, or lets them wait for another iteration."""
        self._looks = False
        self._quiet += 1
        late = asyncio.get_running_loop().time() >= self._end
        if self._waiting and self._quiet < _QUIET and not late:
            self._look_later()
        else:
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Sends the requests that wait. If the engine is dead, vLLM reports that to all of them."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        *others, (last, parts) = waiting
        if others:
            encoded = [(other.request_id, own_parts[0]) for other, own_parts in others]
            parts = self._client.encoder.encode(with_extra(last, _OTHERS, encoded))
        with suppress(EngineDeadError):
            self._send((EngineCoreRequestType.ADD.value, *parts), self._client.core_engine)


def receive_batches() -> None:
    """Makes the engine's core in this process receive the requests that a message carries.

    To be called after `receive_copies`, because a request of a batch may carry copies.
    """
    before = EngineCore.preprocess_add_request
    if getattr(before, "receives_batches", False):
        return
    decoder = MsgpackDecoder(EngineCoreRequest)

    def preprocess(core: EngineCore, request: EngineCoreRequest) -> tuple[Request, int]:
        params = request.sampling_params
        if params is not None and params.extra_args and _OTHERS in params.extra_args:
            assert isinstance(core, EngineCoreProc)  # only this class receives messages
            for request_id, encoded in params.extra_args.pop(_OTHERS):
                _put(core, request, request_id, encoded)
        return before(core, request)

    def _put(
        core: EngineCoreProc, last: EngineCoreRequest, request_id: str, encoded: bytes
    ) -> None:
        request = copy(last)  # reported if the other request cannot be decoded
        request.request_id = request_id
        try:
            request = decoder.decode(encoded)
            core.input_queue.put_nowait((EngineCoreRequestType.ADD, before(core, request)))
        except Exception:  # any error, as in vLLM's own input thread
            core._handle_request_preproc_error(request)

    for mark in ("receives_batches", "is_rheostat"):  # so that neither is installed twice
        setattr(preprocess, mark, True)
    EngineCore.preprocess_add_request = preprocess  # type: ignore[assignment]  # becomes a method
