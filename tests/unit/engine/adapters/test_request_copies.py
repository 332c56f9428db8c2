"""Requests that share a message arrive as vLLM's core would receive each of them alone."""

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder

from rheostat_engine import EXTRA_ARG, Act, Kind, Plan, Window
from rheostat_engine.adapters.request_copies import RequestCopy, receive_copies, with_copies
from rheostat_engine.plan.plan import ReceivedPlan, read_plan

from .receiving_core import Core

RELIES = "rheostat_engine.adapters.request_copies relies on it"
ACT = Act(kind=Kind.ADD, vectors=(b"v" * 16,), rows=((3, (0,)),), spans=((0, 9),))
PLAN = Plan("r0", (ACT,), measured=False, window=Window(0, 1, 0)).pack()
UNLUCKY = "x2-2"
"""The id of a request that the core fails to process."""


@pytest.fixture
def core(monkeypatch) -> Core:
    def preprocess(_: object, request: EngineCoreRequest) -> tuple[EngineCoreRequest, int]:
        if request.request_id == UNLUCKY:
            raise ValueError("unlucky")
        return request, 0

    monkeypatch.setattr(EngineCore, "preprocess_add_request", preprocess)
    receive_copies()
    return Core()


def request(number: int, plan: Plan | None = PLAN) -> EngineCoreRequest:
    """A request whose id in the core is x{n}-{n}, with the plan as that of r{n} at [n, n + 1)."""
    extra: dict[str, Any] = {"other": 7}
    if plan is not None:
        own = plan.for_request(f"r{number}", plan.epoch, Window(number, number + 1, 0))
        extra[EXTRA_ARG] = own.to_wire()
    return EngineCoreRequest(
        request_id=f"x{number}-{number}",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, extra_args=extra),
        pooling_params=None,
        arrival_time=1.5,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=f"r{number}",
        priority=1,
    )


def copies(*numbers: int) -> list[RequestCopy]:
    return [RequestCopy(f"x{n}-{n}", f"r{n}", n, n + 1) for n in numbers]


def sent(message: EngineCoreRequest) -> Sequence[Any]:
    return MsgpackEncoder().encode(message)


def plan_of(request: EngineCoreRequest) -> ReceivedPlan:
    assert request.sampling_params is not None
    assert request.sampling_params.extra_args is not None
    return read_plan(request.sampling_params.extra_args[EXTRA_ARG])


def test_each_copy_is_the_request_that_would_have_come_alone(core: Core) -> None:
    received = core.receive(sent(with_copies(request(0), copies(1, 5))))
    assert {each.request_id for each in received} == {"x0-0", "x1-1", "x5-5"}
    for each in received:
        number = int(each.request_id.partition("-")[2])
        (alone,) = core.receive(sent(request(number)))
        assert plan_of(each) == plan_of(alone)
        assert plan_of(each).window == (number, number + 1, 0)
        for one in (each, alone):  # compared above
            del one.sampling_params.extra_args[EXTRA_ARG]
        for field in EngineCoreRequest.__struct_fields__:
            assert getattr(each, field) == getattr(alone, field), (field, RELIES)


def test_a_message_without_copies_arrives_as_vllm_sends_it(core: Core) -> None:
    (alone,) = core.receive(sent(request(0, plan=None)))
    assert alone.sampling_params.extra_args == {"other": 7}


def test_a_message_with_copies_is_little_longer() -> None:
    alone, together = (
        sum(map(len, sent(each)))
        for each in (request(0), with_copies(request(0), copies(*range(1, 16))))
    )
    assert together - alone < 16 * 30


def test_a_request_that_the_core_cannot_process_fails_alone(core: Core) -> None:
    received = core.receive(sent(with_copies(request(0), copies(1, 2, 3))))
    assert {each.request_id for each in received} == {"x0-0", "x1-1", "x3-3"}
    assert core.failed == [UNLUCKY]


def test_a_plan_that_cannot_be_read_fails_the_request_and_all_copies(core: Core) -> None:
    damaged = request(0)
    assert damaged.sampling_params is not None
    damaged.sampling_params.extra_args = {EXTRA_ARG: b"no plan"}
    with pytest.raises(ValueError, match="this is no plan"):  # vLLM then fails the first request
        core.receive(sent(with_copies(damaged, copies(1, 2))))
    assert core.failed == ["x1-1", "x2-2"]


def test_a_core_makes_copies_once(core: Core) -> None:
    patched = EngineCore.preprocess_add_request
    receive_copies()
    assert EngineCore.preprocess_add_request is patched, RELIES


def test_vllm_still_reports_requests_that_its_thread_could_not_prepare() -> None:
    assert callable(getattr(EngineCoreProc, "_handle_request_preproc_error", None)), RELIES


def test_requests_do_not_change_the_prompt_that_copies_share() -> None:
    source = inspect.getsource(Request)
    assert "self._all_token_ids = self.prompt_token_ids.copy()" in source, RELIES
    assert "self.prompt_token_ids.append" not in source, RELIES
    assert "self.prompt_token_ids.extend" not in source, RELIES
