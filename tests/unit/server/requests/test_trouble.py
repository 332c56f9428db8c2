"""What goes wrong with a running request, over a real channel."""

import asyncio
import logging

import grpc
import pytest

from rheostat_engine import Dropped, Installed, Released, Rows
from rheostat_server import errors
from rheostat_server.admission import waiting
from rheostat_server.engine.backend import Delta
from rheostat_server.errors import EngineLost
from rheostat_server.generation import responses as generation
from rheostat_server.requests import sequence as sequences
from rheostat_server.requests.sequence import EngineSequence
from rheostat_wire.v1 import (
    engine_service_pb2,
    generation_pb2,
    generation_service_pb2,
    types_pb2,
    vector_pb2,
)

from ..conftest import Refusal, rest
from ..fakes import WIDTH, ScriptedBackend, sites_with
from ..messages import add, capture, request, selector, site_set, window
from ..streams import kinds, settled, tokens, until

POST = types_pb2.POINT_RESID_POST
Code = grpc.StatusCode


@pytest.mark.parametrize("steer", [[], [add()]])
async def test_a_client_that_leaves_aborts_its_request_and_frees_everything(starter, steer) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    call = running.client.generation.Generate(request(request_id="r", steer=steer))
    await call.read()
    await call.read()
    call.cancel()
    stats = await settled(running)
    assert [plan_id.split("@")[0] for plan_id in running.backend.aborted] == ["r#0"]
    assert stats.requests == engine_service_pb2.RequestCounts(admitted_count=1, aborted_count=1)
    assert (stats.leaked_count, running.manager.ledger.requests) == (0, 0)


class TokenFirst(ScriptedBackend):
    """A token comes before the engine's word that it could not take up the plan."""

    async def add_request(self, job, receive, fail) -> None:
        plan_id = job.plan.request_id
        receive(Delta(token_ids=(1,), text="x"))
        self.deliver(Installed(plan_id, "no such vector"))
        self.deliver(
            Released(
                request_id=plan_id,
                doses=(),
                measured=True,
                captured={},
                lost_rows=0,
                preemptions=0,
                computed=(0, 1),
            )
        )


async def test_no_token_of_a_plan_that_is_not_in_force_is_sent(starter) -> None:
    running = await starter(TokenFirst())
    call = running.client.generation.Generate(request(steer=[add()]), timeout=10)
    events: list[generation_service_pb2.GenerateResponse] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call, events)
    assert caught.value.code() is Code.INTERNAL
    assert kinds(events) == ["started"]
    await settled(running)


async def test_a_deadline_aborts_the_request(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.client.generate(request(request_id="r"), timeout=0.5)
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    stats = await settled(running)
    assert [plan_id.split("@")[0] for plan_id in running.backend.aborted] == ["r#0"]
    assert stats.requests.aborted_count == 1


async def test_an_aborted_request_that_was_never_scheduled_is_freed(starter, monkeypatch) -> None:
    monkeypatch.setattr(sequences, "UNSCHEDULED_GRACE", 0.01)
    running = await starter(ScriptedBackend(silent=True))
    call = running.client.generation.Generate(request(steer=[add()]))
    await call.read()
    call.cancel()
    await settled(running)
    assert (running.manager.ledger.requests, running.manager.store.pins) == (0, 0)


@pytest.mark.parametrize("kind", [Installed, Rows, Released])
async def test_a_request_one_of_whose_events_is_lost_fails_at_once_and_alone(starter, kind) -> None:
    class Lossy(ScriptedBackend):
        """Cannot bring one kind of event of one request to the server."""

        def start(self, deliver, lost) -> None:
            def lossily(event) -> None:
                victim = event.request_id.startswith("victim") and isinstance(event, kind)
                deliver(Dropped(event) if victim else event)

            super().start(lossily, lost)

    running = await starter(Lossy())
    names = ["before", "victim", "after"]
    asked = [request(request_id=n, steer=[add()], captures=[capture()]) for n in names]
    calls = [asyncio.ensure_future(running.client.generate(one)) for one in asked]
    before, victim, after = await asyncio.wait_for(
        asyncio.gather(*calls, return_exceptions=True), timeout=10
    )
    assert kinds(before)[-1] == kinds(after)[-1] == "receipt"
    assert Refusal.of(victim).brief == (Code.INTERNAL, "REASON_INTERNAL", "")
    await settled(running)
    assert (running.manager.ledger.requests, running.manager.store.pins) == (0, 0)


async def test_a_busy_engine_is_not_taken_for_one_that_never_had_a_request(
    starter, monkeypatch
) -> None:
    asked, free = asyncio.Event(), asyncio.Event()

    class Busy(ScriptedBackend):
        """Answers nothing for a while; then it reports what it had begun before the abort."""

        async def worker_stats(self):
            asked.set()
            await free.wait()
            self.deliver(Installed(self.jobs[0].plan.request_id, ""))
            return await super().worker_stats()

    monkeypatch.setattr(sequences, "UNSCHEDULED_GRACE", 0.01)
    running = await starter(Busy(silent=True))
    call = running.client.generation.Generate(request(steer=[add()]))
    await call.read()
    call.cancel()
    await until(asked.is_set)
    assert running.manager.ledger.requests == 1
    free.set()
    (job,) = running.backend.jobs
    _, sequence = running.manager._routes[job.plan.request_id]
    await until(lambda: sequence.installed)
    assert running.manager.ledger.requests == 1
    running.backend._release(job, len(job.prompt))
    await until(lambda: not running.manager.open_requests)
    assert (running.manager.ledger.requests, running.manager.store.pins) == (0, 0)


async def test_a_request_that_the_engine_cannot_take_up_fails_alone(starter) -> None:
    running = await starter(ScriptedBackend(install_error="no such vector"))
    refusal = await running.client.refusal(request(steer=[add()]))
    assert refusal.brief == (Code.INTERNAL, "REASON_INTERNAL", "")
    assert "no such vector" not in refusal.message
    assert kinds(await running.client.generate(request()))[-1] == "receipt"
    stats = await settled(running)
    assert (stats.requests.failed_count, stats.requests.completed_count) == (1, 1)


async def test_no_token_goes_out_before_the_plan_is_in_force(starter) -> None:
    class Late(ScriptedBackend):
        async def generate(self, job):
            events = []
            deliver, self.deliver = self.deliver, events.append
            async for delta in super().generate(job):
                yield delta
            self.deliver = deliver
            held.append(events)
            done.set()

    held, done = [], asyncio.Event()
    running = await starter(Late())
    call = running.client.generation.Generate(request(steer=[add()]))
    assert (await call.read()).HasField("started")
    next_event = asyncio.ensure_future(call.read())
    await done.wait()
    await running.client.engine.GetStats(engine_service_pb2.GetStatsRequest())
    assert not next_event.done()
    for event in held[0]:
        running.backend.deliver(event)
    events = [await next_event, *await rest(call)]
    assert tokens(events) == [13, 14]
    assert kinds(events)[-2:] == ["finished", "receipt"]


async def test_lost_rows_are_named_and_the_call_fails(starter) -> None:
    running = await starter(ScriptedBackend(lost_positions=frozenset({1, 2})))
    call = running.client.generation.Generate(
        request(captures=[capture(site_set(POST, layers=[0, 1]))])
    )
    events = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call, events)
    refusal = Refusal.of(caught.value)
    assert refusal.brief == (Code.DATA_LOSS, "REASON_ROWS_LOST", "")
    assert refusal.metadata == (("rows", "4"),)
    assert "--capture-mib" in refusal.message
    (dropped,) = [e.dropped for e in events if e.WhichOneof("event") == "dropped"]
    assert (dropped.row_count, list(dropped.positions)) == (
        4,
        [types_pb2.PositionRun(start=1, count=2)],
    )
    assert "receipt" not in kinds(events)


async def test_a_reader_that_is_too_slow_fails_with_its_captures(starter) -> None:
    running = await starter(request_buffer_bytes=WIDTH * 4 * 2)
    refusal = await running.client.refusal(request(captures=[capture()]))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_CAPTURE_OVERFLOW", "")
    assert "--request-buffer-mib" in refusal.message
    await settled(running)


def narrow(rows: int, **fields: object) -> ScriptedBackend:
    """An engine with few bank rows."""
    return ScriptedBackend(sites=sites_with(bank_rows=rows), **fields)


async def test_a_full_bank_makes_requests_wait_their_turn(starter) -> None:
    running = await starter(narrow(1, hold=asyncio.Event()))
    first = running.client.generation.Generate(request(steer=[add()]))
    await first.read()
    second = asyncio.ensure_future(running.client.generate(request(steer=[add(scale=2.0)])))
    await until(lambda: running.manager.admission_queue.waiting == 1)
    assert len(running.backend.jobs) == 1
    running.backend.hold.set()
    assert (await rest(first))[-1].HasField("receipt")
    assert kinds(await second)[-1] == "receipt"


async def test_equal_configurations_share_their_rows(starter) -> None:
    running = await starter(narrow(1, hold=asyncio.Event()))
    calls = [running.client.generation.Generate(request(steer=[add()])) for _ in range(3)]
    for call in calls:
        await call.read()
    assert running.manager.ledger.used("bank_rows") == 1
    running.backend.hold.set()
    for call in calls:
        assert (await rest(call))[-1].HasField("receipt")


async def test_what_can_never_fit_is_refused_at_once(starter) -> None:
    running = await starter(narrow(1))
    many = request(steer=[add(), add(scale=2.0, where=selector(window(0, 1)))])
    refusal = await running.client.refusal(many)
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_BANK_FULL", "steering")
    assert not refusal.retry
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.client.generation.Explain(generation_service_pb2.ExplainRequest(request=many))
    assert Refusal.of(caught.value).reason == "REASON_BANK_FULL"


async def test_a_capture_that_never_fits_a_step_is_refused_at_once(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(capture_rows=2)))
    refusal = await running.client.refusal(request(captures=[capture()]))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_CAPTURE_OVERFLOW", "captures")


async def test_room_that_does_not_come_in_time_is_refused_with_advice_to_retry(starter) -> None:
    running = await starter(narrow(1, hold=asyncio.Event()), capacity_wait=0.01)
    first = running.client.generation.Generate(request(steer=[add()]))
    await first.read()
    refusal = await running.client.refusal(request(steer=[add(scale=2.0)]))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_BANK_FULL", "steering")
    assert refusal.retry
    first.cancel()
    await settled(running)


async def test_too_many_requests_are_refused_with_advice_to_retry(starter, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "WAITING_REQUESTS", -3)
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    first = running.client.generation.Generate(request())
    await first.read()
    refusal = await running.client.refusal(request())
    assert (refusal.code, refusal.reason, refusal.retry) == (
        Code.RESOURCE_EXHAUSTED,
        "REASON_QUEUE_FULL",
        True,
    )
    running.backend.hold.set()
    assert (await rest(first))[-1].HasField("receipt")


async def test_the_prompts_of_all_that_runs_or_waits_are_limited_in_tokens(
    starter, monkeypatch
) -> None:
    monkeypatch.setattr(waiting, "QUEUED_PROMPT_TOKENS", 8)
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    twice = generation_pb2.Sampling(max_tokens=2, n=2)
    first = running.client.generation.Generate(request(sampling=twice))
    await first.read()
    refusal = await running.client.refusal(request())
    assert (refusal.code, refusal.reason, refusal.retry) == (
        Code.RESOURCE_EXHAUSTED,
        "REASON_QUEUE_FULL",
        True,
    )
    assert "6 tokens" in refusal.message
    assert "at most 8" in refusal.message
    running.backend.hold.set()
    assert (await rest(first))[-1].HasField("receipt")
    await settled(running)
    four = generation_pb2.Sampling(max_tokens=2, n=4)
    assert (await running.client.generate(request(sampling=four)))[-1].HasField("receipt")


async def test_a_lost_engine_ends_open_streams_and_refuses_new_ones(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    calls = [running.client.generation.Generate(request(steer=s)) for s in ([], [add()])]
    for call in calls:
        await call.read()
        await call.read()
    running.backend.die()
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert Refusal.of(caught.value).brief == (Code.UNAVAILABLE, "REASON_ENGINE_LOST", "")
    refusal = await running.client.refusal(request())
    assert refusal.brief == (Code.UNAVAILABLE, "REASON_ENGINE_LOST", "")


async def test_what_nobody_foresaw_is_an_incident_without_details(starter, caplog) -> None:
    running = await starter(ScriptedBackend(broken=KeyError("secret")))
    refusal = await running.client.refusal(request())
    assert refusal.code is Code.INTERNAL
    assert "secret" not in refusal.message
    assert "secret" in caplog.text
    stats = await settled(running)
    assert stats.requests == engine_service_pb2.RequestCounts(admitted_count=1, failed_count=1)


async def test_a_refusal_is_typed_and_one_short_line_of_the_log_whatever_it_says(
    starter, caplog
) -> None:
    caplog.set_level(logging.INFO)
    said = "\N{GRINNING FACE}a\r\n\x1b[31m\u2028" * 1000
    error = errors.NameNotFound(
        said, field=said, resource=errors.Resource(said, said), metadata={said: said}
    )
    running = await starter(ScriptedBackend(broken=error))
    refusal = await running.client.refusal(request())
    assert (refusal.code, refusal.reason) == (Code.NOT_FOUND, "REASON_NAME_NOT_FOUND")
    assert said.startswith(refusal.message)
    (line,) = (r.getMessage() for r in caplog.records if r.name == "rheostat_server.api.rpc")
    assert line.isprintable()
    assert len(line) < 600


async def test_a_refused_request_is_counted_and_harms_no_other(running) -> None:
    refusal = await running.client.refusal(request(steer=[add(vector_pb2.VectorRef(name="x"))]))
    assert refusal.brief == (
        Code.NOT_FOUND,
        "REASON_NAME_NOT_FOUND",
        "steering.interventions[0].add.vector.name",
    )
    await running.client.generate(request())
    stats = await settled(running)
    assert stats.requests == engine_service_pb2.RequestCounts(
        admitted_count=1, completed_count=1, refused_count=1
    )


async def test_a_message_that_is_too_large_is_refused_by_grpc(running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.client.generate(request(text="x" * (17 << 20)))
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
    assert kinds(await running.client.generate(request()))[-1] == "receipt"


async def test_errors_of_the_backend_keep_their_reason(starter) -> None:
    running = await starter(ScriptedBackend(broken=EngineLost("gone")))
    assert (await running.client.refusal(request())).reason == errors.EngineLost.reason


async def test_late_events_of_a_request_never_reach_another_with_its_id(running) -> None:
    for _ in range(2):
        await running.client.generate(request(request_id="r", steer=[add()]))
        await settled(running)
    first, second = (job.plan.request_id for job in running.backend.jobs)
    assert first != second


async def test_all_samples_are_waited_for_at_once(starter, monkeypatch) -> None:
    waits: list[int] = []

    async def unreleased_after(seconds, waiting) -> list[EngineSequence]:
        waits.append(len(waiting))
        return []

    monkeypatch.setattr(sequences, "_unreleased_after", unreleased_after)
    running = await starter(ScriptedBackend(silent=True))
    sampling = generation_pb2.Sampling(max_tokens=2, n=3, temperature=1.0)
    call = running.client.generation.Generate(request(steer=[add()], sampling=sampling))
    await call.read()
    call.cancel()
    await settled(running)
    assert waits[0] == 3
    assert running.manager.ledger.requests == 0


class RefusesTheSecond(ScriptedBackend):
    """Refuses the second sample of a request, after the first has ended."""

    async def add_request(self, job, receive, fail) -> None:
        if job.sample:
            while self.tasks:
                await asyncio.sleep(0)
            raise ValueError("refused")
        await super().add_request(job, receive, fail)


async def test_a_sample_that_is_refused_once_others_have_ended_fails_the_request(starter) -> None:
    running = await starter(RefusesTheSecond())
    sampling = generation_pb2.Sampling(max_tokens=1, n=2, temperature=1.0)
    refusal = await running.client.refusal(request(sampling=sampling))
    assert refusal.brief[1] == "REASON_INTERNAL"
    await settled(running)


async def test_too_few_slots_are_called_what_they_are(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(slots=1)))
    many = request(steer=[add(where=selector(window(0, 1))), add(scale=2.0)])
    refusal = await running.client.refusal(many)
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_BANK_FULL", "steering")
    assert refusal.message == (
        "the request needs 2 more slots; 1 are free. Use fewer different combinations of "
        "interventions; the number of slots is fixed"
    )


async def test_a_drain_ends_samples_that_were_never_scheduled(starter, monkeypatch) -> None:
    monkeypatch.setattr(sequences, "UNSCHEDULED_GRACE", 0.01)
    monkeypatch.setattr(generation, "UNSCHEDULED_GRACE", 0.01)
    running = await starter(ScriptedBackend(silent=True))
    sampling = generation_pb2.Sampling(max_tokens=2, n=3, temperature=1.0)
    call = running.client.generation.Generate(request(steer=[add()], sampling=sampling))
    await call.read()
    await running.manager.drain(0)
    assert kinds(await rest(call)) == ["finished", "finished", "finished", "receipt"]
