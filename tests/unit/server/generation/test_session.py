"""Requests that change while they run, over a real channel."""

import asyncio
from collections.abc import Sequence

import grpc
import numpy as np
import pytest

from rheostat_server.delivery.items import Chunk
from rheostat_server.delivery.row_messages import CapturedRows, captured_rows
from rheostat_server.errors import Defect
from rheostat_server.generation import joined_events, responses, session
from rheostat_server.prompts import prompts
from rheostat_server.prompts.tokenizer import Tokenizer
from rheostat_wire.v1 import (
    engine_service_pb2,
    generation_pb2,
    generation_service_pb2,
    receipt_pb2,
    steering_pb2,
    steering_service_pb2,
    types_pb2,
)

from ..conftest import Refusal
from ..fakes import WIDTH, ScriptedBackend
from ..messages import GENERATED, add, capture, request, selector, span, tensor
from ..streams import kinds, settled, tokens, until
from ..talks import P, RefusedUpdate, SessionCall, applied, held, start, stop, update

Sampling = generation_pb2.Sampling
Code = grpc.StatusCode


async def test_a_session_without_updates_is_a_request(running) -> None:
    talk = SessionCall(running)
    await talk.say(start(request_id="r", steer=[add()], sampling=Sampling(max_tokens=2)))
    await talk.call.done_writing()
    events = await talk.end()
    assert (kinds(events)[0], kinds(events)[-2:]) == ("started", ["finished", "receipt"])
    assert tokens(events) == [13, 14]
    plain = await running.client.generate(request(request_id="r", steer=[add()]))
    assert events[0].started == plain[0].started
    assert events[-1].receipt == plain[-1].receipt


def flat(events) -> list[generation_service_pb2.SessionResponse]:
    """The events, those of batches one by one."""
    return [one for event in events for one in (event.batch.events or [event])]


async def test_events_that_are_ready_together_come_in_one_message_if_the_client_reads_them(
    starter,
) -> None:
    found = {}
    for batches in (False, True):
        running, talk = await held(starter, 2, batches=batches, steer=[add()])
        ((active, _),) = running.manager._routes.values()
        for number in range(3, 10):
            active.pending_notices += 1
            active.notify(generation_pb2.UpdateApplied(update_id=number))
        running.backend.hold.set()
        await talk.call.done_writing()
        found[batches] = await talk.end()
    assert "batch" not in kinds(found[False])
    assert flat(found[True]) != found[True]
    assert len(found[True]) <= len(found[False]) - 6
    assert all(len(event.batch.events) > 1 for event in found[True] if event.HasField("batch"))
    answered = [e.applied.update_id for e in flat(found[True]) if e.HasField("applied")]
    assert answered == [*range(3, 10)]
    assert tokens(flat(found[True])) == tokens(found[False]) == [13, 14, 15, 16, 17, 18]
    assert [kinds(flat(found[True]))[i] for i in (0, -1)] == ["started", "receipt"]


def joined(happenings):
    """The messages of a session whose client reads batches."""
    return joined_events.joined_events(happenings, session._answer, session._CAPTURED)


async def test_no_event_waits_for_the_next_and_all_are_sent_before_a_failure() -> None:
    async def happenings():
        for number in (1, 2):
            yield generation_pb2.UpdateApplied(update_id=number)
        yield None
        assert sent == [[1, 2]]
        yield None
        yield generation_pb2.UpdateApplied(update_id=3)
        raise Defect("x")

    async def send() -> None:
        async for message in joined(happenings()):
            sent.append([event.applied.update_id for event in flat([message])])

    sent: list[list[int]] = []
    with pytest.raises(Defect):
        await send()
    assert sent == [[1, 2], [3]]


async def test_no_event_waits_until_rows_are_encoded(running, monkeypatch) -> None:
    encoded = asyncio.Event()

    async def encode(item: Chunk) -> CapturedRows:
        await encoded.wait()
        return await captured_rows(item)

    monkeypatch.setattr(responses, "captured_rows", encode)
    talk = SessionCall(running)
    await talk.say(start(batches=True, captures=[capture()]))
    events = kinds(flat([await talk.next()]))
    assert events[0] == "started"
    assert "captured" not in events
    encoded.set()
    await talk.call.done_writing()
    assert kinds(flat(await talk.end()))[-1] == "receipt"


async def test_only_so_many_events_and_bytes_are_joined(monkeypatch) -> None:
    monkeypatch.setattr(joined_events, "JOINED_EVENTS", 3)

    async def happenings():
        for number in range(1, 8):
            yield generation_pb2.UpdateApplied(update_id=number)

    async def sizes() -> list[int]:
        return [len(flat([message])) async for message in joined(happenings())]

    assert await sizes() == [3, 3, 1]
    monkeypatch.setattr(joined_events, "JOINED_BYTES", 1)
    assert await sizes() == [1] * 7


async def test_batches_are_asked_for_beside_start_only(starter) -> None:
    running, talk = await held(starter)
    late = stop(1)
    late.batches = True
    await talk.say(late)
    refused = await talk.refused()
    assert (refused.reason, refused.field) == ("REASON_INVALID_VALUE", "batches")
    running.backend.hold.set()
    assert kinds(await talk.end())[-1] == "receipt"


async def test_the_request_of_a_session_has_no_batches_of_its_own(running) -> None:
    talk = SessionCall(running)
    asked = start()
    asked.start.batches = True
    await talk.say(asked)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await talk.end()
    refusal = Refusal.of(caught.value)
    assert (refusal.reason, refusal.field) == ("REASON_INVALID_VALUE", "start.batches")


@pytest.mark.parametrize("steer", [[], [add()]])
async def test_what_a_session_generates_is_its_own_and_the_engine_knows_every_one(
    running, steer
) -> None:
    talk = SessionCall(running)
    await talk.say(start(steer=steer))
    assert kinds(await talk.end())[-1] == "receipt"
    await running.client.generate(request(steer=steer))
    session_job, plain_job = running.backend.jobs
    assert (session_job.plan.private_from, session_job.has_plan) == (P, True)
    assert (plain_job.plan.private_from, plain_job.has_plan) == (None, bool(steer))


async def test_an_update_replaces_the_steering_from_the_next_step_on(starter) -> None:
    running, talk = await held(starter, 2, steer=[add(scale=2.0)])
    await talk.say(update(5, add(scale=3.0), add(scale=4.0)))
    assert await talk.hear("applied") == applied(5, s0=P + 1)
    ((_, acts, not_before),) = running.backend.updates
    assert ([act.scale for act in acts], not_before) == ([3.0, 4.0], P)
    running.backend.hold.set()
    events = await talk.end()
    receipt = events[-1].receipt
    assert receipt.update_count == 1
    found = [
        (
            one.intervention.origin,
            one.intervention.index,
            one.intervention.update_id,
            [(run.start, run.count) for rows in one.rows for run in rows.positions],
            one.sites[0].row_count,
        )
        for one in receipt.interventions
    ]
    assert found == [
        (receipt_pb2.ORIGIN_REQUEST, 0, 0, [(0, P + 1)], P + 1),
        (receipt_pb2.ORIGIN_UPDATE, 0, 5, [(P + 1, 4)], 4),
        (receipt_pb2.ORIGIN_UPDATE, 1, 5, [(P + 1, 4)], 4),
    ]
    assert tokens(events) == [13, 14, 15, 16, 17, 18]


@pytest.mark.parametrize("steer", [[], [add(where=selector(span("e")))]])
async def test_an_update_finds_text_in_a_prompt_of_token_ids_whatever_the_session_began_with(
    starter, monkeypatch, steer
) -> None:
    decoded: list[int] = []
    decode = prompts.decode_with_offsets

    def counting(tokenizer: Tokenizer, ids: Sequence[int]):
        decoded.append(len(ids))
        return decode(tokenizer, ids)

    monkeypatch.setattr(prompts, "decode_with_offsets", counting)
    ids = types_pb2.TokenIds(ids=[ord(letter) for letter in "ten"])
    running, talk = await held(starter, token_ids=ids, steer=steer)
    assert len(decoded) == len(steer)
    for number in (1, 2):
        where = selector(span("e"), GENERATED)
        await talk.say(update(number, add(scale=number, where=where)))
        assert (await talk.hear("applied")).update_id == number
    assert [acts[0].spans[0] for _, acts, _ in running.backend.updates] == [(1, 2)] * 2
    assert decoded == [P]
    running.backend.hold.set()
    assert kinds(await talk.end())[-1] == "receipt"
    assert len(running.manager.prompts._decoded) == 0


async def test_without_a_tokenizer_an_update_that_names_text_is_refused(starter) -> None:
    backend = ScriptedBackend(text=None, hold=asyncio.Event(), hold_from=1)
    running = await starter(backend)
    talk = SessionCall(running)
    await talk.say(start())
    await talk.hear("tokens")
    await talk.say(update(1, add(where=selector(span("x")))))
    refusal = await talk.refused()
    assert (refusal.reason, refusal.field) == (
        "REASON_NOT_SUPPORTED",
        "steering.interventions[0].where.include[0].text",
    )
    running.backend.hold.set()
    assert kinds(await talk.end())[-1] == "receipt"


async def test_updates_follow_each_other(starter) -> None:
    running, talk = await held(starter, 2)
    await talk.say(update(1, add(scale=3.0)), update(2, add(scale=4.0, where=selector(GENERATED))))
    assert [await talk.hear("applied") for _ in range(2)] == [
        applied(1, s0=P + 1),
        applied(2, s0=P + 1),
    ]
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    assert receipt.update_count == 2
    assert [
        (one.intervention.update_id, one.sites[0].row_count, one.sites[0].dose.norm)
        for one in receipt.interventions
    ] == [(1, 0, 0.0), (2, 4, 8.0)]


async def test_server_wide_steering_stays_whatever_an_update_says(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    await running.client.steering.SetGlobal(
        steering_service_pb2.SetGlobalRequest(
            policy={"steering": steering_pb2.Steering(interventions=[add(scale=0.5)])}
        )
    )
    talk = SessionCall(running)
    await talk.say(start(steer=[add(scale=2.0)]))
    await talk.hear("tokens")
    await talk.say(update(1, add(scale=3.0)), update(2))
    await talk.hear("applied")
    await talk.hear("applied")
    assert [[act.scale for act in acts] for _, acts, _ in running.backend.updates] == [
        [0.5, 3.0],
        [0.5],
    ]
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    origins = [one.intervention.origin for one in receipt.interventions]
    assert origins.count(receipt_pb2.ORIGIN_GLOBAL) == 1
    assert receipt.interventions[0].sites[0].row_count == P + 5


async def test_an_update_waits_until_its_sample_begins_and_leaves_the_prompt_alone(starter) -> None:
    running = await starter(ScriptedBackend(unscheduled=asyncio.Event(), hold=asyncio.Event()))
    talk = SessionCall(running)
    await talk.say(start(), update(1, add(scale=3.0)))
    await talk.hear("started")
    await until(lambda: bool(running.backend.jobs))
    assert running.backend.updates == []
    running.backend.unscheduled.set()
    assert await talk.hear("applied") == applied(1, s0=P)
    assert [not_before for _, _, not_before in running.backend.updates] == [P]
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    (one,) = receipt.interventions
    assert [(run.start, run.count) for run in one.rows[0].positions] == [(P, 5)]


async def test_every_sample_has_its_own_first_position_and_an_ended_one_has_none(starter) -> None:
    class Uneven(ScriptedBackend):
        async def generate(self, job):
            hold = gates[job.sample]
            async for delta in super().generate(job):
                yield delta
                if len(gates) > job.sample and hold is not None:
                    await hold.wait()

    gates = [None, asyncio.Event(), asyncio.Event()]
    running = await starter(Uneven())
    talk = SessionCall(running)
    await talk.say(start(sampling=Sampling(max_tokens=4, n=3)))
    assert (await talk.hear("finished")).sample == 0
    await talk.say(update(1, add()))
    assert await talk.hear("applied") == applied(1, s1=P, s2=P)
    for gate in gates[1:]:
        gate.set()
    receipt = (await talk.end())[-1].receipt
    assert [rows.sample for rows in receipt.interventions[0].rows] == [1, 2]


async def test_vectors_of_an_update_are_with_the_workers_and_kept_until_the_end(starter) -> None:
    running, talk = await held(starter)
    assert running.backend.loaded == []
    vector = tensor(np.full((1, WIDTH), 7.0))
    await talk.say(update(1, add(vector)))
    await talk.hear("applied")
    ((_, (act,), _),) = running.backend.updates
    assert running.backend.loaded == [act.vectors[0].hex()]
    assert running.manager.store.pins == 1
    assert running.manager.ledger.used("bank_rows") == 1
    running.backend.hold.set()
    await talk.end()
    await settled(running)
    assert (running.manager.store.pins, running.manager.ledger.requests) == (0, 0)


async def test_stop_ends_every_sample_and_the_receipt_still_comes(starter) -> None:
    running, talk = await held(starter, sampling=Sampling(max_tokens=6, n=2), steer=[add()])
    await talk.say(stop(4))
    events = await talk.end()
    ends = [e.finished for e in events if e.WhichOneof("event") == "finished"]
    assert [(one.sample, one.reason) for one in ends] == [
        (0, types_pb2.FINISH_REASON_ABORTED),
        (1, types_pb2.FINISH_REASON_ABORTED),
    ]
    assert [e.applied for e in events if e.WhichOneof("event") == "applied"] == [applied(4)]
    assert (kinds(events)[-1], events[-1].receipt.update_count) == ("receipt", 0)
    stats = await settled(running)
    assert (stats.leaked_count, stats.requests.aborted_count) == (0, 1)


async def test_stop_does_not_wait_behind_updates(starter, monkeypatch) -> None:
    from rheostat_server.generation import responses as generation
    from rheostat_server.requests import sequence as sequences

    monkeypatch.setattr(sequences, "UNSCHEDULED_GRACE", 0.01)
    monkeypatch.setattr(generation, "UNSCHEDULED_GRACE", 0.01)
    running = await starter(ScriptedBackend(silent=True))
    talk = SessionCall(running)
    await talk.say(start(), update(1, add()), stop(2))
    events = await talk.end()
    assert [e.applied for e in events if e.WhichOneof("event") == "applied"] == [applied(2)]
    (refused,) = [
        RefusedUpdate.of_update(e.refused) for e in events if e.WhichOneof("event") == "refused"
    ]
    assert (refused.update_id, refused.reason) == (1, "REASON_REQUEST_NOT_FOUND")
    assert kinds(events)[-1] == "receipt"


async def test_half_closing_lets_the_request_run_to_its_end(starter) -> None:
    running, talk = await held(starter)
    await talk.say(update(1, add()))
    await talk.call.done_writing()
    assert await talk.hear("applied") == applied(1, s0=P)
    running.backend.hold.set()
    assert kinds(await talk.end())[-1] == "receipt"


async def test_a_client_that_leaves_aborts_its_session_and_frees_everything(starter) -> None:
    running, talk = await held(starter, steer=[add()])
    await talk.say(update(1, add(scale=3.0)))
    await talk.hear("applied")
    talk.call.cancel()
    stats = await settled(running)
    assert len(running.backend.aborted) == 1
    assert stats.requests == engine_service_pb2.RequestCounts(admitted_count=1, aborted_count=1)
    assert (stats.leaked_count, running.manager.ledger.requests, running.manager.store.pins) == (
        0,
        0,
        0,
    )


async def test_updates_do_not_touch_the_baseline(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    talk = SessionCall(running)
    await talk.say(start(with_baseline=True, request_id="r"))
    await talk.hear("tokens")
    await talk.hear("tokens")
    await talk.say(update(1, add()))
    await talk.hear("applied")
    assert [plan_id.split("@")[0] for plan_id, _, _ in running.backend.updates] == ["r#0"]
    running.backend.hold.set()
    events = await talk.end()
    assert kinds(events).count("divergence") == 1
    private = {j.plan.request_id.split("@")[0]: j.plan.private_from for j in running.backend.jobs}
    assert private == {"r#0": P, "r#0b": None, "r#0s": None}
