"""What requests do that do not fit beside those that run, over a real channel."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from rheostat_engine import Act, Capture, Kind, Plan
from rheostat_server.engine import admission_queue
from rheostat_server.engine.admission_queue import AdmissionQueue, Reservation
from rheostat_server.errors import BankFull
from rheostat_wire.v1 import (
    engine_service_pb2,
    gate_pb2,
    generation_pb2,
    generation_service_pb2,
    steering_pb2,
    steering_service_pb2,
)

from ..conftest import Refusal, rest
from ..fakes import ScriptedBackend, sites_with
from ..messages import GENERATED, add, capture, probe, request, selector, token_range, window
from ..streams import kinds, settled, until

Code = grpc.StatusCode
WAIT = generation_service_pb2.WHEN_FULL_WAIT
REFUSE = generation_service_pb2.WHEN_FULL_REFUSE


def steered(scale: float, **fields: object) -> generation_service_pb2.GenerateRequest:
    """A request that needs one bank row of its own."""
    return request(steer=[add(scale=scale)], **fields)


async def full(starter, rows: int = 1, **config: object):
    """A server whose bank one request fills, and that request's call."""
    backend = ScriptedBackend(sites=sites_with(bank_rows=rows), hold=asyncio.Event())
    running = await starter(backend, **config)
    first = running.client.generation.Generate(steered(1.0, request_id="first"))
    await first.read()
    return running, first


def started(running) -> list[str]:
    return [job.plan.request_id.split("#")[0] for job in running.backend.jobs]


async def in_line(running, *messages) -> list[asyncio.Future]:
    """Requests that wait, one after the other."""
    calls = []
    for message in messages:
        calls.append(asyncio.ensure_future(running.client.generate(message)))
        await until(lambda: running.manager.admission_queue.waiting == len(calls))
    return calls


@pytest.mark.parametrize("fields", [{}, {"when_full": WAIT}])
async def test_waiting_is_the_default_and_ends_when_room_comes_free(starter, fields) -> None:
    running, first = await full(starter)
    (second,) = await in_line(running, steered(2.0, **fields))
    assert started(running) == ["first"]
    stats = await running.client.engine.GetStats(engine_service_pb2.GetStatsRequest())
    assert stats.waiting_request_count == running.backend.queue_stats().waiting + 1
    running.backend.hold.set()
    assert kinds(await rest(first))[-1] == "receipt"
    receipt = (await second)[-1].receipt
    assert receipt.interventions[0].sites[0].row_count == 4


async def test_requests_enter_in_the_order_in_which_they_came(starter) -> None:
    running, first = await full(starter)
    ids = [f"r{index}" for index in range(4)]
    calls = await in_line(
        running, *(steered(2.0 + index, request_id=name) for index, name in enumerate(ids))
    )
    running.backend.hold.set()
    await rest(first)
    for call in calls:
        await call
    assert started(running) == ["first", *ids]


async def test_one_that_would_fit_does_not_overtake_one_that_waits(starter) -> None:
    running, first = await full(starter, rows=2)
    large = request(
        request_id="large", steer=[add(scale=2.0, where=selector(window(0, 1))), add(scale=3.0)]
    )
    calls = await in_line(running, large, steered(4.0, request_id="small"))
    assert started(running) == ["first"]
    running.backend.hold.set()
    await rest(first)
    for call in calls:
        await call
    assert started(running) == ["first", "large", "small"]


async def test_one_that_needs_nothing_never_waits(starter) -> None:
    running, first = await full(starter)
    await in_line(running, steered(2.0))
    running.backend.hold.set()
    plain = await running.client.generate(request(when_full=REFUSE))
    assert kinds(plain)[-1] == "receipt"
    await rest(first)


async def test_one_that_refuses_to_wait_is_told_when_to_come_again(starter) -> None:
    running, first = await full(starter)
    refusal = await running.client.refusal(steered(2.0, when_full=REFUSE))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_BANK_FULL", "steering")
    assert refusal.retry
    assert refusal.message.startswith("the request needs 1 more bank rows; 0 are free")
    assert started(running) == ["first"]
    running.backend.hold.set()
    await rest(first)
    again = await running.client.generate(steered(2.0, when_full=REFUSE))
    assert kinds(again)[-1] == "receipt"


async def test_means_of_prompts_wait_for_sums_of_rows(starter) -> None:
    def reading(count: int, **fields: object) -> generation_service_pb2.GenerateRequest:
        found = [probe(f"p{one}", rows=gate_pb2.PROBE_ROWS_PROMPT_MEAN) for one in range(count)]
        for one in found:
            one.signals = True
        return request(probes=found, **fields)

    backend = ScriptedBackend(sites=sites_with(row_sums=2), hold=asyncio.Event())
    running = await starter(backend)
    first = running.client.generation.Generate(reading(2, request_id="first"))
    await first.read()
    refusal = await running.client.refusal(reading(1, when_full=REFUSE))
    assert (refusal.reason, refusal.retry) == ("REASON_BANK_FULL", True)
    assert refusal.message.startswith("the request needs 1 more row sums; 0 are free")
    never = await running.client.refusal(reading(3))
    assert (never.reason, never.retry) == ("REASON_BANK_FULL", False)
    (second,) = await in_line(running, reading(1, request_id="second"))
    assert started(running) == ["first"]
    running.backend.hold.set()
    await rest(first)
    assert kinds(await second)[-1] == "receipt"
    assert (await settled(running)).leaked_count == 0


async def test_one_that_refuses_to_wait_does_not_overtake_one_that_waits(starter) -> None:
    running, first = await full(starter)
    (waiting,) = await in_line(running, steered(2.0))
    refusal = await running.client.refusal(steered(1.0, when_full=REFUSE))
    assert (refusal.reason, refusal.retry) == ("REASON_BANK_FULL", True)
    assert refusal.message == "other requests wait for capacity and come first; try again"
    running.backend.hold.set()
    await rest(first)
    assert kinds(await waiting)[-1] == "receipt"


@pytest.mark.parametrize("when_full", [WAIT, REFUSE])
@pytest.mark.parametrize("others_wait", [False, True])
async def test_what_can_never_fit_is_refused_at_once(starter, when_full, others_wait) -> None:
    running, first = await full(starter)
    waiting = await in_line(running, steered(2.0)) if others_wait else []
    many = [add(), add(scale=2.0, where=selector(window(0, 1)))]
    refusal = await running.client.refusal(request(steer=many, when_full=when_full))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_BANK_FULL", "steering")
    assert not refusal.retry
    running.backend.hold.set()
    await rest(first)
    for call in waiting:
        await call


async def test_samples_that_never_fit_together_are_refused_at_once(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(capture_rows=7)))
    sampling = generation_pb2.Sampling(max_tokens=2, n=3)
    refusal = await running.client.refusal(request(captures=[capture()], sampling=sampling))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_CAPTURE_OVERFLOW", "captures")
    assert not refusal.retry


async def test_one_that_leaves_the_line_holds_nothing_and_lets_the_next_one_up(starter) -> None:
    running, first = await full(starter, rows=2)
    both = request(steer=[add(scale=2.0, where=selector(window(0, 1))), add(scale=3.0)])
    leaving = running.client.generation.Generate(both)
    reading = asyncio.ensure_future(leaving.read())
    await until(lambda: running.manager.admission_queue.waiting == 1)
    second = running.client.generation.Generate(steered(4.0, request_id="second"))
    entered = asyncio.ensure_future(second.read())
    await until(lambda: running.manager.admission_queue.waiting == 2)
    leaving.cancel()
    assert (await entered).HasField("started")
    assert (running.manager.ledger.requests, running.manager.ledger.used("bank_rows")) == (2, 2)
    with pytest.raises(asyncio.CancelledError):
        await reading
    running.backend.hold.set()
    await rest(first)
    await rest(second)
    stats = await settled(running)
    assert (stats.leaked_count, running.manager.ledger.requests, running.manager.store.pins) == (
        0,
        0,
        0,
    )
    assert stats.requests == engine_service_pb2.RequestCounts(admitted_count=2, completed_count=2)


async def test_a_deadline_ends_the_wait(starter) -> None:
    running, first = await full(starter)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.client.generate(steered(2.0), timeout=0.2)
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    await until(lambda: running.manager.open_requests == 1)
    assert (running.manager.admission_queue.waiting, running.manager.ledger.requests) == (0, 1)
    running.backend.hold.set()
    await rest(first)
    assert started(running) == ["first"]


async def test_nobody_waits_longer_than_the_server_allows(starter) -> None:
    running, first = await full(starter, capacity_wait=0.05)
    calls = [running.client.generate(steered(scale)) for scale in (2.0, 3.0)]
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        refusal = Refusal.of(outcome)
        assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_BANK_FULL", "steering")
        assert refusal.retry
        assert " after 0.05 s, the server's --capacity-wait" in refusal.message
    model = await running.client.engine.GetModel(engine_service_pb2.GetModelRequest())
    assert model.limits.capacity_wait.ToMilliseconds() == 50
    running.backend.hold.set()
    await rest(first)


async def test_those_who_wait_are_refused_when_the_server_ends(starter) -> None:
    running, first = await full(starter)
    (waiting,) = await in_line(running, steered(2.0))
    drain = asyncio.ensure_future(running.manager.drain(None))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await waiting
    assert Refusal.of(caught.value).reason == "REASON_DRAINING"
    running.backend.hold.set()
    assert kinds(await rest(first))[-1] == "receipt"
    await drain


async def test_those_who_wait_are_refused_when_the_engine_is_lost(starter) -> None:
    running, first = await full(starter)
    (waiting,) = await in_line(running, steered(2.0))
    running.backend.die()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await waiting
    assert Refusal.of(caught.value).brief == (Code.UNAVAILABLE, "REASON_ENGINE_LOST", "")
    with pytest.raises(grpc.aio.AioRpcError):
        await rest(first)


async def test_nothing_ever_runs_without_the_steering_that_it_asked_for(starter) -> None:
    running, first = await full(starter)
    calls = await in_line(running, *(steered(2.0 + index) for index in range(3)))
    running.backend.hold.set()
    await rest(first)
    for call in calls:
        receipt = (await call)[-1].receipt
        assert receipt.interventions[0].sites[0].row_count == 4
    assert [[act.scale for act in job.plan.acts] for job in running.backend.jobs] == [
        [1.0],
        [2.0],
        [3.0],
        [4.0],
    ]


async def test_samples_share_the_room_that_their_steering_takes(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(bank_rows=1), hold=asyncio.Event()))
    sampling = generation_pb2.Sampling(max_tokens=2, n=3)
    call = running.client.generation.Generate(steered(2.0, sampling=sampling))
    await until(lambda: len(running.backend.jobs) == 3)
    assert running.manager.ledger.used("bank_rows") == 1
    running.backend.hold.set()
    assert kinds(await rest(call))[-1] == "receipt"


async def test_every_sample_has_room_for_what_it_decides_by_its_tokens(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    ruled = add(where=selector(GENERATED, exclude=[token_range(5)]))
    server_wide = steering_pb2.Steering(interventions=[ruled])
    await running.client.steering.SetGlobal(
        steering_service_pb2.SetGlobalRequest(policy={"steering": server_wide})
    )
    sampling = generation_pb2.Sampling(max_tokens=2, n=3)
    both = request(steer=[ruled], sampling=sampling, with_baseline=True)
    call = running.client.generation.Generate(both)
    await until(lambda: len(running.backend.jobs) == 6)
    # Three samples, three baselines, and the three that compare them.
    assert running.manager.ledger.used("ruled_intervals") == 9
    assert running.manager.ledger.used("token_rules") == 1
    running.backend.hold.set()
    assert kinds(await rest(call))[-1] == "receipt"
    await settled(running)
    assert running.manager.ledger.used("ruled_intervals") == 0


async def test_the_first_in_line_is_weighed_again_only_when_enough_came_free(starter) -> None:
    backend = ScriptedBackend(sites=sites_with(bank_rows=3), hold=asyncio.Event())
    running = await starter(backend)
    calls = [running.client.generation.Generate(steered(float(s))) for s in (1, 2, 3)]
    for call in calls:
        await call.read()
    two = [add(scale=4.0, where=selector(window(0, 1))), add(scale=5.0)]
    (waiting,) = await in_line(running, request(steer=two))
    weighed = []
    admit = running.manager.admission_queue._admit
    running.manager.admission_queue._admit = lambda *args: weighed.append(args) or admit(*args)
    calls[0].cancel()
    await until(lambda: running.manager.ledger.requests == 2)
    assert (running.manager.admission_queue.waiting, weighed) == (1, [])
    calls[1].cancel()
    await until(lambda: running.manager.admission_queue.waiting == 0)
    assert len(weighed) == 1
    running.backend.hold.set()
    assert kinds(await waiting)[-1] == "receipt"
    await rest(calls[2])


class Crowd:
    """A line, and requests that enter it with so many rows of their own each."""

    def __init__(self, rows: int, patience: float = 60) -> None:
        self.line = AdmissionQueue(
            sites_with(bank_rows=rows).capacity, step_tokens=16, timeout=patience
        )
        self.held: dict[str, list[str]] = {}

    def enter(self, name: str, *vectors: int, background: bool = False) -> asyncio.Task[None]:
        acts = tuple(
            Act(Kind.ADD, (bytes([vector]) * 32,), ((0, (0,)),), ((vector, vector + 1),))
            for vector in vectors
        )
        rooms, held = [Reservation(Plan(name, acts))], self.held.setdefault(name, [])
        reserve = self.line.reserve(
            rooms, prompt_len=3, wait=True, reserved=held, background=background
        )
        return asyncio.create_task(reserve)

    async def wait_in_line(
        self, name: str, *vectors: int, background: bool = False
    ) -> asyncio.Task[None]:
        waiting = self.line.waiting
        task = self.enter(name, *vectors, background=background)
        await until(lambda: self.line.waiting == waiting + 1)
        return task


async def test_captures_enter_once_no_step_can_overflow_the_ring() -> None:
    def room(name: str, sites: int, *positions: int) -> Reservation:
        return Reservation(Plan(name, (), (Capture(tuple(range(sites)), (positions,)),)))

    async def enter(one: Reservation, held: list[str]) -> None:
        await line.reserve([one], prompt_len=100, wait=True, reserved=held)

    capacity = replace(sites_with().capacity, capture_rows=1000)
    line = AdmissionQueue(capacity, step_tokens=100, timeout=60)
    wide: list[str] = []
    await enter(room("wide", 20, 0, 1), wide)
    await enter(room("dense", 5, 0, 100), [])
    third = asyncio.create_task(enter(room("third", 8, 0, 100), []))
    await until(lambda: line.waiting == 1)
    line.release(wide)
    assert line.waiting == 0
    await third


async def test_the_line_moves_up_when_its_first_one_leaves() -> None:
    crowd = Crowd(rows=2)
    await crowd.enter("first", 1)
    large = await crowd.wait_in_line("large", 2, 3)
    small = await crowd.wait_in_line("small", 4)
    large.cancel()
    await asyncio.wait_for(small, 10)
    assert crowd.held == {"first": ["first"], "large": [], "small": ["small"]}
    assert crowd.line.ledger.used("bank_rows") == 2


async def test_who_gave_up_in_the_same_moment_takes_no_room() -> None:
    crowd = Crowd(rows=1)
    await crowd.enter("first", 1)
    gone = await crowd.wait_in_line("gone", 2)
    next_one = await crowd.wait_in_line("next", 3)
    gone.cancel()
    crowd.line.release(crowd.held["first"])
    await asyncio.wait_for(next_one, 10)
    assert crowd.held == {"first": [], "gone": [], "next": ["next"]}
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_all_whose_patience_ends_at_once_hear_why() -> None:
    crowd = Crowd(rows=1, patience=0.05)
    await crowd.enter("first", 1)
    tasks = [crowd.enter(f"{number}", number) for number in range(2, 6)]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in outcomes] == [BankFull] * 4
    assert crowd.line.waiting == 0


async def test_those_in_the_background_come_after_those_who_came_later() -> None:
    crowd = Crowd(rows=2)
    await crowd.enter("first", 1)
    cells = [await crowd.wait_in_line("wide cell", 2, 3, background=True)]
    cells.append(await crowd.wait_in_line("cell", 4, background=True))
    await asyncio.wait_for(crowd.enter("fits", 5), 10)
    late = await crowd.wait_in_line("late", 6)
    crowd.line.release(crowd.held["fits"])
    await asyncio.wait_for(late, 10)
    crowd.line.release(crowd.held["first"])
    assert crowd.line.waiting == 2
    crowd.line.release(crowd.held["late"])
    await asyncio.wait_for(cells[0], 10)
    assert not cells[1].done()
    crowd.line.release(crowd.held["wide cell"])
    await asyncio.wait_for(cells[1], 10)


@pytest.mark.parametrize("in_line", [False, True])
async def test_those_in_the_background_are_overtaken_so_many_times_and_no_more(in_line) -> None:
    crowd = Crowd(rows=2)
    await crowd.enter("first", 1)
    await crowd.enter("second", 2)
    cells = [await crowd.wait_in_line(f"cell {n}", 3, 4, background=True) for n in range(2)]
    before = "second"
    for number in range(admission_queue._OVERTAKING + 1):
        name = f"ordinary {number}"
        if in_line:
            task = await crowd.wait_in_line(name, 5 + number)
            crowd.line.release(crowd.held[before])
        else:
            crowd.line.release(crowd.held[before])
            task = crowd.enter(name, 5 + number)
        if number < admission_queue._OVERTAKING:
            await asyncio.wait_for(task, 10)
        before = name
    await until(lambda: crowd.line.waiting == 3)
    crowd.line.release(crowd.held["first"])
    await asyncio.wait_for(cells[0], 10)
    crowd.line.release(crowd.held["cell 0"])
    await asyncio.wait_for(task, 10)
    assert not cells[1].done()
    cells[1].cancel()


async def test_one_in_the_background_does_not_inherit_the_turn_of_one_that_left() -> None:
    crowd = Crowd(rows=3)
    await crowd.enter("first", 1)
    await crowd.enter("second", 2)
    cell = await crowd.wait_in_line("cell", 3, 4, background=True)
    for number in range(admission_queue._OVERTAKING):
        name = f"ordinary {number}"
        await asyncio.wait_for(crowd.enter(name, 5), 10)
        crowd.line.release(crowd.held[name])
    cell.cancel()
    await until(lambda: crowd.line.waiting == 0)
    cell = await crowd.wait_in_line("next cell", 3, 4, background=True)
    await asyncio.wait_for(crowd.enter("ordinary", 5), 10)
    cell.cancel()


async def test_one_that_is_overtaken_enters_when_it_shares_what_came_before_it() -> None:
    crowd = Crowd(rows=2)
    await crowd.enter("first", 1)
    await crowd.enter("second", 2)
    cell = await crowd.wait_in_line("cell", 3, background=True)
    ordinary = await crowd.wait_in_line("ordinary", 3)
    crowd.line.release(crowd.held["second"])
    await asyncio.wait_for(ordinary, 10)
    await asyncio.wait_for(cell, 10)
    assert crowd.line.ledger.used("bank_rows") == 2
