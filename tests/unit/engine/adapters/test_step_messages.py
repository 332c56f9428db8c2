"""A step's message to the workers holds each table once, whatever samples it starts."""

import inspect
import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.msgpack import encode
from msgspec.structs import astuple
from vllm import SamplingParams
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from rheostat_engine import EXTRA_ARG, OPEN_END, Act, Capture, Kind, Plan
from rheostat_engine.adapters.step_messages import share_tables
from rheostat_engine.plan.gates import Combine, Form, Gate, GateCondition, Hold, Pool
from rheostat_engine.plan.plan import (
    CACHED_TOKENS_RECOMPUTED_ARG,
    EncodedTable,
    ReceivedControl,
    ReceivedPlan,
    SignalsWait,
    Window,
    read_plan,
    read_request_id,
)

from ..cpu_worker import NOTHING, Worker
from ..strategies import DIGESTS, EVERYWHERE, add

RELIES = "rheostat_engine.adapters.step_messages relies on it"
ROWS = tuple((site, (0,)) for site in range(180))
ACTS = tuple(Act(Kind.ADD, DIGESTS[:1], ROWS, ((n, OPEN_END),), 1.0 + n) for n in range(20))
CAPTURES = (Capture(tuple(range(180)), tuple((2 * n, 2 * n + 1) for n in range(5000))),)


def new(wire: object, name: str = "v", **extra: object) -> NewRequestData:
    """A request that is scheduled for the first time."""
    params = SamplingParams(max_tokens=9, extra_args={EXTRA_ARG: wire, **extra})
    return NewRequestData(name, [1, 2], [], params, None, ([1],), 0, None)


def scheduled(*steps: list[NewRequestData]) -> list[list[NewRequestData]]:
    """The new requests in the outputs of a scheduler that starts these requests step by step."""
    outputs = iter([SimpleNamespace(scheduled_new_reqs=step) for step in steps])
    scheduler: Any = SimpleNamespace(schedule=lambda throttle_prefills: next(outputs))
    share_tables(scheduler)
    return [scheduler.schedule().scheduled_new_reqs for _ in steps]


def plan_of(one: NewRequestData) -> object:
    """The plan of a request, as the scheduler sends it."""
    assert one.sampling_params is not None
    assert one.sampling_params.extra_args is not None
    return one.sampling_params.extra_args[EXTRA_ARG]


def test_vllm_schedules_and_sends_as_before() -> None:
    for scheduler in (Scheduler, AsyncScheduler):
        parameters = list(inspect.signature(scheduler.schedule).parameters)
        assert parameters == ["self", "throttle_prefills"], RELIES
    assert "scheduled_new_reqs" in SchedulerOutput.__dataclass_fields__, RELIES
    assert "sampling_params" in NewRequestData.__dataclass_fields__, RELIES
    assert "pickle.Pickler(" in inspect.getsource(MessageQueue.enqueue), RELIES


def test_samples_that_start_in_a_step_send_their_tables_once() -> None:
    plan = Plan("r", ACTS, CAPTURES).pack()
    wires = [Plan(f"r{n}", plan.acts, plan.captures).to_wire() for n in range(64)]
    (alone,) = scheduled([new(wires[0])])
    (step,) = scheduled([new(wire, f"v{n}") for n, wire in enumerate(wires)])
    one, all_of_them = (len(pickle.dumps(part)) for part in (alone, step))
    assert one > len(wires[0])
    assert all_of_them < one + 64 * 1000
    arrived = pickle.loads(pickle.dumps(step))
    for name, wire, request in zip((f"r{n}" for n in range(64)), wires, arrived, strict=True):
        assert read_request_id(plan_of(request)) == name
        assert read_plan(plan_of(request)) == read_plan(wire)


def test_requests_with_different_tables_keep_their_own() -> None:
    wires = [Plan("r", (add(1, scale=1.0 + n),), epoch=n).to_wire() for n in range(3)]
    (step,) = scheduled([new(wire) for wire in wires])
    assert [read_plan(plan_of(one)) for one in step] == [read_plan(wire) for wire in wires]


def test_a_request_that_is_scheduled_again_brings_what_it_brought() -> None:
    plan = Plan("r", (add(1),), (Capture((1,), EVERYWHERE),), private_from=3)
    one, other = new(plan.to_wire(), **{CACHED_TOKENS_RECOMPUTED_ARG: 5}), new(plan.to_wire())
    scheduled([one], [other])
    (again,) = scheduled([one, other])
    assert [read_plan(plan_of(request)) for request in again] == [read_plan(plan.to_wire())] * 2
    assert one.sampling_params is not None
    assert (one.sampling_params.extra_args or {})[CACHED_TOKENS_RECOMPUTED_ARG] == 5


def test_every_part_of_a_plan_arrives() -> None:
    table = EncodedTable(b"t" * 16, b"table")
    control = ReceivedControl("c", table, (0, 1), 1, 3)
    condition = GateCondition((0,), Pool.LAST, Combine.ANY, 0.0, math.inf)
    gate = Gate((condition,), Combine.ALL, Form.STEP, 0.5, 0.0, Hold.TOKEN)
    gates = encode([gate])
    wait, window = SignalsWait.MANY_STEPS, Window(1, 2, 0)
    # No part is as it is by default.
    plan = ReceivedPlan(
        "r", 1, 2, table, table, False, window, table, True, control, wait, gates
    )  # fmt: skip
    fields = zip(astuple(plan), astuple(ReceivedPlan("")), strict=True)
    assert all(one != other for one, other in fields)
    (step,) = scheduled([new(plan)])
    assert plan_of(step[0]) == plan


@pytest.mark.parametrize("wire", ["text", 5, b"1", {"id": "r"}])
def test_a_plan_that_cannot_be_read_stays_as_it_is(wire: object) -> None:
    (step,) = scheduled([new(wire)])
    assert plan_of(step[0]) == wire


def test_requests_without_a_plan_stay_as_they_are() -> None:
    plain = NewRequestData("v", [1], [], SamplingParams(), None, ([1],), 0, None)
    pooled = NewRequestData("w", [1], [], None, None, ([1],), 0, None)
    (step,) = scheduled([plain, pooled])
    assert plain.sampling_params == SamplingParams()
    assert step == [plain, pooled]


def test_a_worker_takes_up_what_a_step_brings() -> None:
    worker = Worker()
    wires = [Plan(f"r{n}", (add(1),)).to_wire() for n in range(2)]
    (step,) = scheduled([new(wire, f"v{n}") for n, wire in enumerate(wires)])
    for request in step:
        worker.runtime.add_request(request.req_id, plan_of(request))
    assert worker.runtime.requests == 2
    assert worker.bank.slots_used == 1
    for request in step:
        worker.finish(request.req_id)
    assert worker.held() == NOTHING
