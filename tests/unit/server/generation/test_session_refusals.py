"""What a session does not do, and what ends it, over a real channel."""

import asyncio

import grpc
import numpy as np
import pytest

from rheostat_server.errors import Defect
from rheostat_server.generation import session
from rheostat_server.requests import steering_control
from rheostat_wire.v1 import (
    engine_service_pb2,
    generation_pb2,
    generation_service_pb2,
    steering_pb2,
    vector_pb2,
)

from ..conftest import Refusal, rest
from ..fakes import WIDTH, ScriptedBackend, sites_with
from ..messages import add, generated, request, selector, span, tensor, window
from ..streams import kinds, settled, until
from ..talks import P, RefusedUpdate, SessionCall, applied, held, start, update

Sampling = generation_pb2.Sampling
Code = grpc.StatusCode


NAME = vector_pb2.VectorRef(name="x")


@pytest.mark.parametrize(
    ("intervention", "reason", "field"),
    [
        (add(NAME), "REASON_NAME_NOT_FOUND", "steering.interventions[1].add.vector.name"),
        (add(scale=np.inf), "REASON_NON_FINITE", "steering.interventions[1].add.scale"),
        (
            add(where=steering_pb2.Intervention().where),
            "REASON_EMPTY_SELECTOR",
            "steering.interventions[1].where",
        ),
        (steering_pb2.Intervention(), "REASON_MISSING_FIELD", "steering.interventions[1]"),
        (
            add(where=selector(generated(5))),
            "REASON_INVALID_POSITION",
            "steering.interventions[1].where.include[0].generated",
        ),
        (
            add(where=selector(span("x"))),
            "REASON_SPAN_NOT_FOUND",
            "steering.interventions[1].where.include[0].text",
        ),
    ],
)
async def test_a_wrong_update_is_refused_by_field_and_the_request_goes_on(
    starter, intervention, reason, field
) -> None:
    running, talk = await held(starter, steer=[add(scale=2.0)])
    await talk.say(update(1, add(), intervention))
    refusal = await talk.refused()
    assert (refusal.update_id, refusal.reason, refusal.field) == (1, reason, field)
    assert refusal.message
    assert running.backend.updates == []
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    assert receipt.update_count == 0
    assert receipt.interventions[0].sites[0].row_count == P + 5


async def test_an_update_without_room_is_refused_and_the_request_goes_on(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(bank_rows=2), hold=asyncio.Event()))
    other = running.client.generation.Generate(request(steer=[add(scale=9.0)]))
    await other.read()
    talk = SessionCall(running)
    await talk.say(start(steer=[add(scale=2.0)]))
    await talk.hear("tokens")
    two = [add(scale=3.0, where=selector(window(P, P + 1))), add(scale=4.0)]
    await talk.say(update(1, add(scale=3.0)), update(2, add(scale=2.0)), update(3, *two, add()))
    refusal = await talk.refused()
    assert (refusal.update_id, refusal.reason, refusal.field) == (1, "REASON_BANK_FULL", "steering")
    assert (refusal.code, refusal.retry) == (Code.RESOURCE_EXHAUSTED, True)
    assert await talk.hear("applied") == applied(2, s0=P)
    assert (await talk.refused()).update_id == 3
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    assert receipt.update_count == 1
    await rest(other)
    await settled(running)
    assert running.manager.ledger.requests == 0


async def test_a_refused_update_keeps_no_vector_in_the_store(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(bank_rows=1), hold=asyncio.Event()))
    talk = SessionCall(running)
    await talk.say(start(steer=[add(scale=2.0)]))
    await talk.hear("tokens")
    pins, held = running.manager.store.pins, running.manager.ledger.requests
    for number in range(1, 6):
        vector = tensor(np.full((1, WIDTH), float(number)))
        await talk.say(update(number, add(vector, scale=3.0)))
        assert (await talk.refused()).reason == "REASON_BANK_FULL"
    assert (running.manager.store.pins, running.manager.ledger.requests) == (pins, held)
    running.backend.hold.set()
    assert kinds(await talk.end())[-1] == "receipt"


async def test_a_session_that_asks_for_nothing_does_not_stand_in_line(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(bank_rows=1), hold=asyncio.Event()))
    first = running.client.generation.Generate(request(steer=[add(scale=9.0)]))
    await first.read()
    waiting = asyncio.ensure_future(running.client.generate(request(steer=[add(scale=8.0)])))
    await until(lambda: running.manager.admission_queue.waiting == 1)
    talk = SessionCall(running)
    await talk.say(start())
    await talk.hear("tokens")
    running.backend.hold.set()
    assert kinds(await talk.end())[-1] == "receipt"
    await rest(first)
    await waiting


async def test_an_update_takes_nothing_new_while_others_wait(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(bank_rows=2), hold=asyncio.Event()))
    talk = SessionCall(running)
    await talk.say(start(steer=[add(scale=2.0)]))
    await talk.hear("tokens")
    steer = [add(scale=5.0, where=selector(window(0, 1))), add(scale=6.0)]
    waiting = asyncio.ensure_future(running.client.generate(request(steer=steer)))
    await until(lambda: running.manager.admission_queue.waiting == 1)
    await talk.say(update(1, add(scale=3.0)), update(2, add(scale=2.0)))
    refusal = await talk.refused()
    assert (refusal.update_id, refusal.reason) == (1, "REASON_BANK_FULL")
    assert await talk.hear("applied") == applied(2, s0=P)
    running.backend.hold.set()
    await talk.end()
    assert kinds(await waiting)[-1] == "receipt"


@pytest.mark.parametrize("numbers", [(0,), (3, 3), (3, 2)])
async def test_update_ids_rise_from_one(starter, numbers) -> None:
    running, talk = await held(starter)
    for number in numbers[:-1]:
        await talk.say(update(number, add()))
        await talk.hear("applied")
    await talk.say(update(numbers[-1], add()))
    refusal = await talk.refused()
    assert (refusal.update_id, refusal.reason, refusal.field) == (
        numbers[-1],
        "REASON_INVALID_VALUE",
        "update_id",
    )
    running.backend.hold.set()
    assert (await talk.end())[-1].receipt.update_count == len(numbers) - 1


@pytest.mark.parametrize(
    ("message", "reason", "field"),
    [
        (
            generation_service_pb2.SessionRequest(update_id=1, start=request()),
            "REASON_INVALID_VALUE",
            "start",
        ),
        (generation_service_pb2.SessionRequest(update_id=1), "REASON_MISSING_FIELD", ""),
    ],
)
async def test_what_a_session_cannot_do_is_refused_and_the_request_goes_on(
    starter, message, reason, field
) -> None:
    running, talk = await held(starter)
    await talk.say(message)
    refusal = await talk.refused()
    assert (refusal.update_id, refusal.reason, refusal.field) == (1, reason, field)
    running.backend.hold.set()
    assert kinds(await talk.end())[-1] == "receipt"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "start"),
        ([update(1, add())], "start"),
        ([generation_service_pb2.SessionRequest(update_id=1, start=request())], "update_id"),
        ([start(sampling=Sampling(n=0))], "start.sampling.n"),
    ],
)
async def test_a_session_begins_with_a_sound_request(running, messages, field) -> None:
    call = running.client.generation.Session(iter(messages))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    refusal = Refusal.of(caught.value)
    assert (refusal.code, refusal.field) == (Code.INVALID_ARGUMENT, field)
    stats = await settled(running)
    assert stats.requests == engine_service_pb2.RequestCounts(refused_count=1)


async def test_an_update_that_finds_every_sample_ended_is_refused_before_the_receipt(
    starter,
) -> None:
    class Quick(ScriptedBackend):
        async def load_vectors(self, vectors):
            self.hold.set()
            await until(lambda: not self.plans)
            await super().load_vectors(vectors)

    running = await starter(Quick(hold=asyncio.Event()))
    talk = SessionCall(running)
    await talk.say(start())
    await talk.hear("tokens")
    await talk.say(update(1, add()))
    events = await talk.end()
    (refused,) = [
        RefusedUpdate.of_update(e.refused) for e in events if e.WhichOneof("event") == "refused"
    ]
    assert (refused.update_id, refused.reason) == (1, "REASON_REQUEST_NOT_FOUND")
    assert kinds(events)[-2:] == ["refused", "receipt"]


async def test_an_update_that_a_worker_cannot_take_up_fails_the_request(starter) -> None:
    running, talk = await held(starter)
    running.backend.update_error = Defect("a worker did not take an update up")
    await talk.say(update(1, add()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await talk.end()
    assert Refusal.of(caught.value).brief == (Code.INTERNAL, "REASON_INTERNAL", "")
    stats = await settled(running)
    assert (stats.leaked_count, stats.requests.failed_count) == (0, 1)


async def test_an_unforeseen_failure_of_an_update_fails_the_request(starter, caplog) -> None:
    running, talk = await held(starter)
    running.backend.update_error = KeyError("secret")
    await talk.say(update(1, add()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await talk.end()
    refusal = Refusal.of(caught.value)
    assert refusal.code is Code.INTERNAL
    assert "secret" not in refusal.message
    assert "secret" in caplog.text


async def test_a_session_takes_only_so_many_updates(starter, monkeypatch) -> None:
    monkeypatch.setattr(steering_control, "UPDATES", 2)
    running, talk = await held(starter)
    await talk.say(*(update(number, add()) for number in (1, 2, 3)))
    for _ in range(2):
        await talk.hear("applied")
    refusal = await talk.refused()
    assert (refusal.update_id, refusal.reason) == (3, "REASON_INVALID_VALUE")
    running.backend.hold.set()
    assert (await talk.end())[-1].receipt.update_count == 2


async def test_only_so_many_updates_wait(starter, monkeypatch) -> None:
    monkeypatch.setattr(steering_control, "WAITING_UPDATES", 1)
    running = await starter(ScriptedBackend(unscheduled=asyncio.Event()))
    talk = SessionCall(running)
    await talk.say(start())
    await talk.hear("started")
    await until(lambda: bool(running.backend.jobs))
    await talk.say(*(update(number, add()) for number in (1, 2, 3, 4)))
    refusal = await talk.refused()
    assert refusal.reason == "REASON_QUEUE_FULL"
    running.backend.unscheduled.set()
    assert kinds(await talk.end())[-1] == "receipt"


async def test_updates_that_together_cost_too_much_are_refused(starter, monkeypatch) -> None:
    from rheostat_server.admission import planning

    running, talk = await held(starter, steer=[add()])
    monkeypatch.setattr(planning, "MAX_PLAN_COST", 9)
    await talk.say(*(update(number, add(scale=2.0)) for number in range(1, 6)))
    refusal = await talk.refused()
    assert (refusal.update_id, refusal.reason) == (4, "REASON_INVALID_VALUE")
    assert refusal.message.startswith("together with what the session did before: ")
    running.backend.hold.set()
    assert kinds(await talk.end())[-1] == "receipt"


async def test_a_client_that_talks_and_never_listens_ends_its_session(starter, monkeypatch) -> None:
    monkeypatch.setattr(session, "UNREAD_ANSWERS", 2)
    running = await starter(ScriptedBackend(unscheduled=asyncio.Event()))
    talk = SessionCall(running)
    await talk.say(start(), *(update(number, add()) for number in range(1, 5)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await talk.end()
    assert Refusal.of(caught.value).reason == "REASON_QUEUE_FULL"
    running.backend.unscheduled.set()
    await settled(running)
    assert running.manager.ledger.requests == 0
