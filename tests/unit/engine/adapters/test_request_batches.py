"""Requests that share a message arrive as vLLM's core would receive each of them alone."""

import asyncio
import queue
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder

from rheostat_engine import requests_together
from rheostat_engine.adapters.request_batches import receive_batches

from .test_core_messages import Link, link, request, stock  # noqa: F401  # fixtures

RELIES = "rheostat_engine.adapters.request_batches relies on it"


class Core(EngineCoreProc):
    """vLLM's core, of which only the receiving thread's part is run."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.failed: list[str] = []

    def receive(self, parts: list[bytes]) -> list[EngineCoreRequest]:
        """The requests of a message, in the order in which the core handles them."""
        decoded = MsgpackDecoder(EngineCoreRequest).decode(parts)
        self.input_queue.put_nowait(
            (EngineCoreRequestType.ADD, self.preprocess_add_request(decoded))
        )
        requests = []
        while not self.input_queue.empty():
            kind, (made, _) = self.input_queue.get_nowait()
            assert kind == EngineCoreRequestType.ADD
            requests.append(made)
        return requests

    def _handle_request_preproc_error(self, request: EngineCoreRequest) -> None:
        self.failed.append(request.request_id)


@pytest.fixture
def core(monkeypatch) -> Core:
    def preprocess(_: object, request: EngineCoreRequest) -> tuple[EngineCoreRequest, int]:
        if request.prompt_token_ids == [13]:
            raise ValueError("unlucky")
        return request, 0

    monkeypatch.setattr(EngineCore, "preprocess_add_request", preprocess)
    receive_batches()
    return Core()


def messages(link: Link) -> list[tuple[bytes, list[bytes]]]:  # noqa: F811
    """All messages that have been sent, each with its type."""
    found = []
    while link.core.poll(200):
        kind, *parts = link.core.recv_multipart()
        found.append((kind, parts))
    return found


def prompts(requests: list[EngineCoreRequest]) -> list[Any]:
    return [each.prompt_token_ids for each in requests]


async def add(link: Link, *numbers: int) -> None:  # noqa: F811
    with requests_together():
        async with asyncio.TaskGroup() as group:
            for number in numbers:
                group.create_task(link.client.add_request_async(request(number, extra=number + 1)))
    await asyncio.sleep(0)


async def test_requests_of_an_iteration_share_a_message(link, core) -> None:  # noqa: F811
    await add(link, 1, 2, 3)
    ((kind, parts),) = messages(link)
    assert kind == b"\x00"
    received = core.receive(parts)
    assert prompts(received) == [[1], [2], [3]]
    extras = [each.sampling_params.extra_args for each in received]
    assert extras == [{"x": 2}, {"x": 3}, {"x": 4}]


async def test_a_request_alone_arrives_as_vllm_sends_it(link) -> None:  # noqa: F811
    await link.client.add_request_async(request(1))
    ((_, stock_parts),) = messages(link)
    with requests_together():
        await link.client.add_request_async(request(1))
        await asyncio.sleep(0)
    ((_, parts),) = messages(link)
    assert parts == stock_parts


async def test_many_requests_take_several_messages(link, core) -> None:  # noqa: F811
    await add(link, *range(20, 60))
    found = messages(link)
    assert len(found) == 3
    received = [each for _, parts in found for each in core.receive(parts)]
    assert prompts(received) == [[number] for number in range(20, 60)]


async def test_no_message_overtakes_requests_that_wait(link, core) -> None:  # noqa: F811
    with requests_together():
        await link.client.add_request_async(request(1))
        await link.client.add_request_async(request(2))
    await link.client.add_request_async(request(3))
    with requests_together():
        await link.client.add_request_async(request(4))
        await link.client.abort_requests_async(["4"])
    kinds, contents = zip(*messages(link), strict=True)
    assert kinds == (b"\x00", b"\x00", b"\x00", b"\x01")
    assert [prompts(core.receive(parts)) for parts in contents[:3]] == [[[1], [2]], [[3]], [[4]]]


async def test_a_request_that_the_core_cannot_process_fails_alone(link, core) -> None:  # noqa: F811
    await add(link, 1, 13, 3)
    ((_, parts),) = messages(link)
    assert prompts(core.receive(parts)) == [[1], [3]]
    assert len(core.failed) == 1


async def test_requests_for_a_dead_engine_are_refused(link) -> None:  # noqa: F811
    link.client.resources.engine_dead = True
    with requests_together(), pytest.raises(EngineDeadError):
        await link.client.add_request_async(request(1))


def test_a_message_is_taken_apart_once_in_a_process(core) -> None:
    patched = EngineCore.preprocess_add_request
    receive_batches()
    assert EngineCore.preprocess_add_request is patched, RELIES


def test_vllm_still_reports_requests_that_its_thread_could_not_prepare() -> None:
    assert callable(getattr(EngineCoreProc, "_handle_request_preproc_error", None)), RELIES


def test_a_request_with_a_large_plan_has_one_part(link) -> None:  # noqa: F811
    assert len(link.client.encoder.encode(request(1, extra=b"x" * 1_000_000))) == 1, RELIES
