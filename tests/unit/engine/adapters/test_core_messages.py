"""Requests reach the engine's core in order, through vLLM's own client and sockets."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from rheostat_engine.adapters.core_messages import add_requests_fast
from rheostat_engine.adapters.runner import server_request_id

from .links import ENGINE, iterations_without_requests, make_fast
from .test_logprobs import asked

RELIES = "rheostat_engine.adapters.core_messages relies on it"


def request(*prompt: int, extra: object = None) -> EngineCoreRequest:
    return asked(list(prompt), SamplingParams(extra_args={"x": extra} if extra else None))


async def test_a_request_arrives_as_vllm_sends_it(link) -> None:
    one, stock = request(1, 2, 3), MsgpackEncoder().encode(request(1, 2, 3))
    await link.client.add_request_async(one)
    await iterations_without_requests()
    parts = link.received()
    assert parts == list(stock), RELIES
    assert MsgpackDecoder(EngineCoreRequest).decode(parts).prompt_token_ids == [1, 2, 3]


async def test_no_future_is_made_for_a_small_message(link, monkeypatch) -> None:
    def send(*_: object, **__: object) -> None:
        raise AssertionError(RELIES)

    monkeypatch.setattr(link.client.input_socket, "_add_send_event", send)
    await link.client.add_request_async(request(1))
    await iterations_without_requests()
    assert link.received()


async def test_messages_of_any_size_keep_their_order(link) -> None:
    for number in range(50):
        size = 100_000 if number % 3 == 1 else 3
        await link.client.add_request_async(request(number, *range(size)))
        await iterations_without_requests()
    decoder = MsgpackDecoder(EngineCoreRequest)
    for number in range(50):
        assert decoder.decode(link.received()).prompt_token_ids[0] == number


async def test_no_message_overtakes_one_that_waits(stock, monkeypatch) -> None:
    """The socket is full for a moment, so that the first message waits in `zmq.asyncio`."""
    socket, full = stock.client.input_socket, True
    send = zmq.backend.Socket.send

    def send_unless_full(*arguments: Any, **keywords: Any) -> object:
        if full:
            raise zmq.Again
        return send(*arguments, **keywords)

    def send_all(parts: Sequence[bytes], **_: object) -> None:
        if full:
            raise zmq.Again
        zmq.Socket.send_multipart(socket._shadow_sock, parts)

    monkeypatch.setattr(zmq.backend, "Socket", SimpleNamespace(send=send_unless_full))
    monkeypatch.setattr(socket._shadow_sock, "send_multipart", send_all)
    make_fast(stock)
    first = stock.client._send_input_message((b"\x00", b"first"), ENGINE)
    assert len(socket._send_futures) == 1, RELIES
    full = False
    await stock.client._send_input_message((b"\x00", b"second"), ENGINE)
    await first
    assert [stock.received(), stock.received()] == [[b"first"], [b"second"]]


async def test_a_dead_engine_gets_no_message(link) -> None:
    link.client.resources.engine_dead = True
    with pytest.raises(EngineDeadError):
        await link.client.add_request_async(request(1))


def test_ids_are_unique_and_begin_with_the_given_id() -> None:
    llm = SimpleNamespace(engine_core=None, input_processor=object.__new__(InputProcessor))
    assert callable(InputProcessor.assign_request_id), RELIES
    add_requests_fast(llm)
    requests = [request(1) for _ in range(100)]
    for one in requests:
        one.request_id, one.external_req_id = "same", None
        llm.input_processor.assign_request_id(one)
    assert len({one.request_id for one in requests}) == len(requests)
    for one, other in itertools.pairwise(requests):
        assert one.request_id.startswith("same-")
        assert one.external_req_id == other.external_req_id == "same"
    with pytest.raises(ValueError, match="already"):
        llm.input_processor.assign_request_id(requests[0])


@pytest.mark.parametrize("disabled", ["0", "1"])
def test_workers_find_the_given_id_whether_or_not_vllm_makes_ids_unique(
    disabled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", disabled)
    llm = SimpleNamespace(engine_core=None, input_processor=object.__new__(InputProcessor))
    add_requests_fast(llm)
    one = request(1)
    one.request_id, one.external_req_id = "a-b#0@1", None
    llm.input_processor.assign_request_id(one)
    assert server_request_id(one.request_id) == one.external_req_id == "a-b#0@1"
