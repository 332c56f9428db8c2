"""Requests that are added together share a message, and arrive as if each had come alone."""

import asyncio
import time

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.exceptions import EngineDeadError

from rheostat_engine import EXTRA_ARG, Act, Kind, Plan, Window
from rheostat_engine.adapters import request_batches
from rheostat_engine.adapters.request_batches import receive_batches
from rheostat_engine.adapters.request_copies import RequestCopy, receive_copies, with_copies

from .links import Link, iterations_without_requests
from .receiving_core import Core
from .test_logprobs import asked

RELIES = "rheostat_engine.adapters.request_batches relies on it"
WAIT = 10.0
UNLUCKY = "r3"
"""The id of a request that the core fails to process."""


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    def preprocess(_: object, request: EngineCoreRequest) -> tuple[EngineCoreRequest, int]:
        if request.request_id == UNLUCKY:
            raise ValueError("unlucky")
        return request, 0

    monkeypatch.setattr(EngineCore, "preprocess_add_request", preprocess)
    receive_copies()
    receive_batches()
    return Core()


def request(number: int, **extra: object) -> EngineCoreRequest:
    made = asked([number, 5, 6], SamplingParams(seed=number, extra_args=extra or None))
    made.request_id = made.external_req_id = f"r{number}"
    return made


async def add(sender: Link, *requests: EngineCoreRequest) -> None:
    for one in requests:
        await sender.client.add_request_async(one)


async def test_an_idle_engine_gets_requests_of_a_burst_together(link: Link, core: Core) -> None:
    for number in (1, 2, 4):
        await add(link, request(number))
        for _ in range(request_batches._QUIET - 1):
            await asyncio.sleep(0)
    assert not link.core.poll(20), "the requests were sent before a few iterations added none"
    await iterations_without_requests()
    assert [one.request_id for one in core.receive(link.received())] == ["r1", "r2", "r4"]


async def test_a_request_waits_for_others_for_a_limited_time(
    link: Link, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 0.05
    monkeypatch.setattr(request_batches, "_LONGEST", longest)
    for name in ("_MOST", "_TOGETHER"):
        monkeypatch.setattr(request_batches, name, 1 << 30)
    began = time.monotonic()
    number = 10
    while not link.core.poll(0):
        assert time.monotonic() - began < WAIT
        await add(link, request(number))
        await asyncio.sleep(0)
        number += 1
    assert time.monotonic() - began >= longest
    assert core.receive(link.received())[0].request_id == "r10"


async def test_an_idle_engine_gets_few_requests_at_once(
    link: Link, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_batches, "_TOGETHER", 2)
    await add(link, request(1), request(2))
    assert [one.request_id for one in core.receive(link.received())] == ["r1", "r2"]


async def test_a_busy_engine_gets_the_requests_of_each_iteration(link: Link, core: Core) -> None:
    link.running = 1
    for number in (1, 2, 4):
        await add(link, request(number))
        await asyncio.sleep(0)
        assert [one.request_id for one in core.receive(link.received())] == [f"r{number}"]


async def test_requests_wait_no_longer_once_the_engine_has_some(link: Link, core: Core) -> None:
    await add(link, request(1))
    link.client._send_input(EngineCoreRequestType.ABORT, ["r9"])
    assert [one.request_id for one in core.receive(link.received())] == ["r1"]
    link.core.recv_multipart()
    link.running = 1
    await add(link, request(2))
    await asyncio.sleep(0)
    assert [one.request_id for one in core.receive(link.received())] == ["r2"]


async def test_requests_of_an_iteration_share_a_message(link: Link, core: Core) -> None:
    await add(link, *(request(number, x=number) for number in (1, 2, 4)))
    await iterations_without_requests()
    received = core.receive(link.received())
    assert [one.request_id for one in received] == ["r1", "r2", "r4"]
    for one in received:
        number = int(one.request_id[1:])
        await add(link, request(number, x=number))
        await iterations_without_requests()
        (alone,) = core.receive(link.received())
        for field in EngineCoreRequest.__struct_fields__:
            assert getattr(one, field) == getattr(alone, field), (field, RELIES)


async def test_no_extra_argument_is_left_in_a_request(link: Link, core: Core) -> None:
    await add(link, request(1), request(2))
    await iterations_without_requests()
    assert [one.sampling_params.extra_args or {} for one in core.receive(link.received())] == [
        {},
        {},
    ]


async def test_another_message_does_not_overtake_requests_that_wait(link: Link) -> None:
    await add(link, request(1), request(2))
    link.client._send_input(EngineCoreRequestType.ABORT, ["r1"])
    first, second = (link.core.recv_multipart() for _ in range(2))
    assert first[0] == EngineCoreRequestType.ADD.value
    assert second[0] == EngineCoreRequestType.ABORT.value


async def test_a_message_has_a_limited_number_of_requests(
    link: Link,
    core: Core,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link.running = 1
    monkeypatch.setattr(request_batches, "_MOST", 2)
    await add(link, *(request(number) for number in (1, 2, 4, 5, 6)))
    await iterations_without_requests()
    ids = [[one.request_id for one in core.receive(link.received())] for _ in range(3)]
    assert ids == [["r1", "r2"], ["r4", "r5"], ["r6"]]


async def test_a_long_request_is_sent_alone_and_in_order(link: Link, core: Core) -> None:
    long = request(4)
    long.prompt_token_ids = list(range(20_000))
    await add(link, request(1), request(2), long, request(5))
    await iterations_without_requests()
    ids = [[one.request_id for one in core.receive(link.received())] for _ in range(3)]
    assert ids == [["r1", "r2"], ["r4"], ["r5"]]


async def test_a_request_that_the_core_cannot_process_fails_alone(link: Link, core: Core) -> None:
    await add(link, *(request(number) for number in (1, 2, 3, 4)))
    await iterations_without_requests()
    assert [one.request_id for one in core.receive(link.received())] == ["r1", "r2", "r4"]
    assert core.failed == [UNLUCKY]


async def test_a_request_that_the_core_cannot_decode_fails_alone(link: Link, core: Core) -> None:
    damaged = request(2)
    setattr(damaged, "prompt_token_ids", "no tokens")  # noqa: B010  (mypy forbids the assignment)
    await add(link, request(1), damaged, request(4))
    await iterations_without_requests()
    assert [one.request_id for one in core.receive(link.received())] == ["r1", "r4"]
    assert core.failed == ["r2"]


async def test_a_request_that_cannot_be_encoded_fails_alone(link: Link, core: Core) -> None:
    await add(link, request(1))
    with pytest.raises(TypeError):
        await add(link, request(2, x=object.__new__(type("NoEncoding", (), {"__slots__": ()}))))
    await add(link, request(4))
    await iterations_without_requests()
    assert [one.request_id for one in core.receive(link.received())] == ["r1", "r4"]


async def test_requests_of_a_batch_may_carry_copies(link: Link, core: Core) -> None:
    act = Act(kind=Kind.ADD, vectors=(b"v" * 16,), rows=((3, (0,)),), spans=((0, 9),))
    plan = Plan("p1", (act,), measured=False, window=Window(0, 1, 0)).pack()

    def grouped(number: int) -> EngineCoreRequest:
        made = request(number, **{EXTRA_ARG: plan.to_wire()})
        return with_copies(made, [RequestCopy(f"c{number}", f"p{number}", 1, 2)])

    await add(link, grouped(1), grouped(2))
    await iterations_without_requests()
    assert [one.request_id for one in core.receive(link.received())] == ["c1", "r1", "c2", "r2"]


async def test_an_engine_that_dies_before_the_message_is_sent_raises_nothing(link: Link) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    await add(link, request(1))
    link.client.resources.engine_dead = True
    await iterations_without_requests()
    assert not errors
    with pytest.raises(EngineDeadError):
        await add(link, request(2))


def test_a_core_receives_batches_once(core: Core) -> None:
    patched = EngineCore.preprocess_add_request
    receive_batches()
    receive_copies()
    assert EngineCore.preprocess_add_request is patched, RELIES
