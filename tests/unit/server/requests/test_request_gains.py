"""Gains of a session, over a real channel."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc
import numpy as np
import pytest

from rheostat_engine import GainsUpdate, Plan
from rheostat_server.engine import gain_updates
from rheostat_server.errors import Defect
from rheostat_server.generation import session
from rheostat_server.requests import request_gains, steering_control
from rheostat_wire.v1 import generation_pb2, steering_service_pb2

from ..conftest import Refusal
from ..fakes import ScriptedBackend, sites_with
from ..messages import above, add, at_post1, probe, request
from ..streams import kinds, settled, until
from ..talks import P, SessionCall, applied, gain, held, start, stop, update

Sampling = generation_pb2.Sampling
Code = grpc.StatusCode


def sent(backend: ScriptedBackend) -> list[GainsUpdate]:
    """All gains that reached the engine."""
    return [one for message in backend.gain_messages for one in message]


def gained_plans(backend: ScriptedBackend) -> list[Plan]:
    """The plans that gave samples gains."""
    return [one.plan for call in backend.update_calls for one in call if one.plan.gained]


async def test_a_gain_multiplies_the_steering_from_the_next_step_on(starter) -> None:
    running, talk = await held(starter, 2, steer=[add(scale=2.0), add(scale=3.0)])
    await talk.say(gain(1, 0.5), gain(4, 2.0, 1))
    assert await talk.hear("applied") == applied(1, s0=P + 1)
    assert await talk.hear("applied") == applied(4, s0=P + 1)
    (plan,) = gained_plans(running.backend)
    assert [(act.scale, act.gain) for act in plan.acts] == [(2.0, 0), (3.0, 1)]
    gains: dict[int, float] = {}
    for one in sent(running.backend):
        assert one.not_before == P
        gains |= one.gains
    assert gains == {0: 0.5, 1: 2.0}
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    assert (receipt.gain_count, receipt.update_count) == (2, 0)
    assert [one.last_gain for one in receipt.interventions] == [0.5, 2.0]
    assert await no_leaks(running)


async def no_leaks(running) -> bool:
    stats = await settled(running)
    return (stats.leaked_count, running.manager.ledger.requests) == (0, 0)


async def test_a_request_without_gains_has_none_in_its_receipt(running) -> None:
    receipt = (await running.client.generate(request(steer=[add()])))[-1].receipt
    assert receipt.gain_count == 0
    assert not receipt.interventions[0].HasField("last_gain")


async def test_server_wide_steering_and_baselines_have_no_gains(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    policy = steering_service_pb2.Policy()
    policy.steering.interventions.append(add(scale=5.0))
    await running.client.steering.SetGlobal(steering_service_pb2.SetGlobalRequest(policy=policy))
    talk = SessionCall(running)
    await talk.say(start(steer=[add(scale=2.0)], with_baseline=True))
    await talk.hear("tokens")
    await talk.say(gain(1, 4.0))
    assert await talk.hear("applied") == applied(1, s0=P)
    (plan,) = gained_plans(running.backend)
    assert [(act.scale, act.gain) for act in plan.acts] == [(5.0, None), (2.0, 0)]
    assert [one.name for one in sent(running.backend)] == [running.backend.jobs[0].plan.request_id]
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    assert [one.HasField("last_gain") for one in receipt.interventions] == [False, True]


async def test_every_sample_that_runs_gets_the_gains(starter) -> None:
    running, talk = await held(starter, steer=[add()], sampling=Sampling(n=3, max_tokens=6))
    await talk.say(gain(1, 0.0))
    assert await talk.hear("applied") == applied(1, s0=P, s1=P, s2=P)
    assert len(sent(running.backend)) == 3
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    assert receipt.gain_count == 1


async def test_gains_wait_for_no_answer_and_travel_together(starter, monkeypatch) -> None:
    monkeypatch.setattr(gain_updates, "_PAUSE", 60.0)  # until the engine has answered
    running, talk = await held(starter, steer=[add()])
    await talk.say(gain(1, 2.0))
    await talk.hear("applied")
    before = len(running.backend.gain_messages)
    release = asyncio.Event()
    set_gains = running.backend.set_gains

    async def slow(updates: Sequence[GainsUpdate]) -> None:
        await release.wait()
        await set_gains(updates)

    running.backend.set_gains = slow
    await talk.say(*(gain(number, number / 100) for number in range(2, 102)))
    # The first message leaves alone; the other gains wait behind it and share the next.
    await until(lambda: len(running.manager.gain_updates._waiting) == 1)
    await until(lambda: waiting_change(running) == 101)
    release.set()
    answers = [await talk.hear("applied") for _ in range(100)]
    assert [one.update_id for one in answers] == [*range(2, 102)]
    assert len(running.backend.gain_messages) - before <= 3
    assert sent(running.backend)[-1].gains == {0: pytest.approx(1.01)}
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    assert receipt.gain_count == 101


def waiting_change(running) -> int:
    """The number of the last change that waits to be sent; 0 if none waits."""
    waiting = running.manager.gain_updates._waiting.values()
    return max((one.update.change for one in waiting), default=0)


async def test_a_gain_after_the_engine_has_released_the_sample_is_refused(starter) -> None:
    """The release may come before the last token, and nothing of the engine comes after it."""
    running, talk = await held(starter, 2, steer=[add()])
    await talk.say(gain(1, 2.0))
    await talk.hear("applied")
    (job,) = running.backend.jobs
    name = job.plan.request_id
    _, sequence = running.manager._routes[name]
    before = len(sent(running.backend))
    running.backend.positions.pop(name)
    plan = running.backend.plans.pop(name)
    running.backend._release(replace(job, plan=plan), P + 2)
    await until(sequence.released.is_set)
    await talk.say(gain(2, 3.0))
    refused = await asyncio.wait_for(talk.hear("refused"), 5)
    assert refused.update_id == 2
    assert len(sent(running.backend)) == before
    running.backend.hold.set()
    assert (await talk.end())[-1].receipt.gain_count == 1


async def test_4000_gains_take_no_room_and_count_as_no_updates(starter) -> None:
    backend = ScriptedBackend(hold=asyncio.Event())
    running = await starter(backend)
    talk = SessionCall(running)
    await talk.say(start(steer=[add(scale=2.0)]))
    await talk.hear("tokens")
    await talk.say(gain(1, 0.5))
    await talk.hear("applied")
    requests, used = running.manager.ledger.requests, running.manager.ledger.used("bank_rows")
    calls = len(backend.update_calls)
    rng = np.random.default_rng(0)
    for number in range(2, 4001):
        await talk.say(gain(number, float(rng.uniform(0, 16))))
        assert (await talk.hear("applied")).update_id == number
    assert (running.manager.ledger.requests, running.manager.ledger.used("bank_rows")) == (
        requests,
        used,
    )
    assert len(backend.update_calls) == calls
    backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    assert (receipt.gain_count, receipt.update_count) == (4000, 0)
    assert await no_leaks(running)


async def test_an_update_begins_with_gains_of_1(starter) -> None:
    running, talk = await held(starter, steer=[add(scale=2.0), add(scale=3.0)])
    await talk.say(gain(1, 0.0), update(2, add(scale=4.0)), gain(3, 8.0, 0), gain(4, 1.0, 1))
    assert (await talk.hear("applied")).update_id == 1
    assert (await talk.hear("applied")).update_id == 2
    # A refusal needs no step, so it may come before the answer to an earlier gain.
    refusal = await talk.refused()
    assert (refusal.update_id, refusal.field) == (4, "gain.interventions[0]")
    await until(lambda: len(gained_plans(running.backend)) == 2)
    assert [len(plan.acts) for plan in gained_plans(running.backend)] == [2, 1]
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    assert [(one.intervention.update_id, one.last_gain) for one in receipt.interventions] == [
        (0, 0.0),
        (0, 0.0),
        (2, 8.0),
    ]


async def test_an_update_waits_for_the_gains_before_it(starter) -> None:
    running, talk = await held(starter, steer=[add()])
    await talk.say(gain(1, 2.0))
    await talk.hear("applied")
    release = asyncio.Event()
    set_gains = running.backend.set_gains

    async def slow(updates: Sequence[GainsUpdate]) -> None:
        await release.wait()
        await set_gains(updates)

    running.backend.set_gains = slow
    await talk.say(gain(2, 3.0), update(3, add(scale=4.0)))
    await until(lambda: running.manager.gain_updates._sending is not None)
    await asyncio.sleep(0.05)
    assert not any(not one.plan.gained for call in running.backend.update_calls for one in call)
    release.set()
    assert [(await talk.hear("applied")).update_id for _ in range(2)] == [2, 3]
    running.backend.hold.set()
    assert kinds(await talk.end())[-1] == "receipt"


async def test_acts_that_read_stay_beside_acts_with_gains(starter) -> None:
    gated = at_post1(add=add().add, gate={"conditions": [above(1.0)]})
    running, talk = await held(starter, probes=[probe()], steer=[gated])
    await talk.say(gain(1, 2.0))
    await talk.hear("applied")
    (plan,) = gained_plans(running.backend)
    own = running.backend.jobs[0].plan.acts
    assert len(plan.acts) == len(own) == 2
    assert [act.gain for act in plan.acts] == [0, None]
    assert [act.reading for act in plan.acts] == [act.reading for act in own]
    running.backend.hold.set()
    assert kinds(await talk.end())[-1] == "receipt"


async def test_acts_with_gains_need_no_more_states_of_gates(starter) -> None:
    """A sample keeps the states of its gates, so one state for each sample is enough."""
    backend = ScriptedBackend(sites=sites_with(gate_states=2), hold=asyncio.Event())
    running = await starter(backend)
    talk = SessionCall(running)
    gated = at_post1(add=add().add, gate={"conditions": [above(1.0)]})
    two = Sampling(n=2, max_tokens=6)
    await talk.say(start(probes=[probe()], steer=[gated], sampling=two))
    await talk.hear("tokens")
    used = running.manager.ledger.used
    assert (used("gate_states"), used("gates")) == (2, 1)
    await talk.say(gain(1, 2.0))
    assert (await talk.hear("applied")).update_id == 1
    assert (used("gate_states"), used("gates")) == (2, 1)
    running.backend.hold.set()
    assert kinds(await talk.end())[-1] == "receipt"
    assert await no_leaks(running)
    assert used("gate_states") == 0


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("message", "reason", "field"),
    [
        (gain(1, None), "REASON_MISSING_FIELD", "gain.factor"),
        (gain(1, NAN), "REASON_NON_FINITE", "gain.factor"),
        (gain(1, INFINITE), "REASON_NON_FINITE", "gain.factor"),
        (gain(1, 16.001), "REASON_INVALID_VALUE", "gain.factor"),
        (gain(1, -0.5), "REASON_INVALID_VALUE", "gain.factor"),
        (gain(1, 1.0, 0, 1), "REASON_INVALID_VALUE", "gain.interventions[1]"),
        (gain(1, 1.0, 2**32 - 1), "REASON_INVALID_VALUE", "gain.interventions[0]"),
        (gain(1, 1.0, *[0] * 257), "REASON_INVALID_VALUE", "gain.interventions"),
        (gain(0, 1.0), "REASON_INVALID_VALUE", "update_id"),
    ],
)
async def test_a_wrong_gain_is_refused_by_field_and_the_request_goes_on(
    starter, message, reason, field
) -> None:
    running, talk = await held(starter, steer=[add()])
    await talk.say(message)
    refusal = await talk.refused()
    assert (refusal.reason, refusal.field) == (reason, field)
    assert refusal.message
    assert running.backend.update_calls == running.backend.gain_messages == []
    await talk.say(gain(2, 16.0))
    assert await talk.hear("applied") == applied(2, s0=P)
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    assert receipt.gain_count == 1


async def test_a_request_without_steering_has_nothing_to_multiply(starter) -> None:
    running, talk = await held(starter)
    await talk.say(gain(1, 2.0))
    refusal = await talk.refused()
    assert (refusal.reason, refusal.field) == ("REASON_INVALID_VALUE", "gain")
    running.backend.hold.set()
    assert kinds(await talk.end())[-1] == "receipt"


async def test_a_flood_of_gains_is_refused_and_answered(starter, monkeypatch) -> None:
    monkeypatch.setattr(steering_control, "WAITING_GAINS", 20)
    running, talk = await held(starter, steer=[add()])
    release = asyncio.Event()
    set_gains = running.backend.set_gains

    async def slow(updates: Sequence[GainsUpdate]) -> None:
        await release.wait()
        await set_gains(updates)

    running.backend.set_gains = slow
    await talk.say(*(gain(number, 0.5) for number in range(1, 101)))
    refusal = await talk.refused()
    assert (refusal.update_id, refusal.reason, refusal.field) == (21, "REASON_QUEUE_FULL", "gain")
    assert refusal.retry
    for number in range(22, 101):
        assert (await talk.refused()).update_id == number
    release.set()
    for number in range(1, 21):
        assert (await talk.hear("applied")).update_id == number
    running.backend.hold.set()
    answers = kinds(await talk.end())
    assert (answers.count("applied"), answers.count("refused")) == (20, 80)
    assert await no_leaks(running)


async def test_a_client_that_sends_gains_and_never_reads_ends_its_session(
    starter, monkeypatch
) -> None:
    monkeypatch.setattr(session, "UNREAD_ANSWERS", 2)
    running = await starter(ScriptedBackend(unscheduled=asyncio.Event()))
    talk = SessionCall(running)
    # The third gain ends the session. A later one would fail in the client, and hide the error.
    await talk.say(start(steer=[add()]), *(gain(number, 1.0) for number in range(1, 4)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await talk.end()
    assert Refusal.of(caught.value).reason == "REASON_QUEUE_FULL"
    running.backend.unscheduled.set()
    assert await no_leaks(running)


async def test_gains_change_only_so_many_numbers(starter, monkeypatch) -> None:
    monkeypatch.setattr(request_gains, "MAX_GAIN_CHANGES", 5)
    running, talk = await held(starter, steer=[add(scale=2.0), add(scale=3.0)])
    await talk.say(gain(1, 2.0), gain(2, 2.0), gain(3, 3.0), gain(4, 4.0), gain(5, 5.0, 0))
    refusal = await talk.refused()
    assert (refusal.update_id, refusal.reason, refusal.field) == (4, "REASON_INVALID_VALUE", "gain")
    while (await talk.hear("applied")).update_id != 5:
        pass
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    assert receipt.gain_count == 4


async def test_a_first_gain_without_room_is_refused_and_the_request_goes_on(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(bank_rows=2), hold=asyncio.Event()))
    talk = SessionCall(running)
    both = [add(scale=2.0), add(scale=3.0)]  # one row together, but two with gains
    await talk.say(start(steer=both))
    await talk.hear("tokens")
    held_before = running.manager.ledger.requests
    await talk.say(gain(1, 2.0))
    refusal = await talk.refused()
    assert (refusal.reason, refusal.field) == ("REASON_BANK_FULL", "gain")
    assert running.manager.ledger.requests == held_before
    running.backend.hold.set()
    assert (await talk.end())[-1].receipt.gain_count == 0
    assert await no_leaks(running)


async def test_more_acts_at_a_site_than_a_program_has_steps_are_refused(starter) -> None:
    running, talk = await held(starter, steer=[add(scale=1.0 + n / 100) for n in range(65)])
    await talk.say(gain(1, 2.0))
    refusal = await talk.refused()
    assert (refusal.reason, refusal.field) == ("REASON_INVALID_VALUE", "gain")
    assert "65 steps meet at one site" in refusal.message
    running.backend.hold.set()
    assert kinds(await talk.end())[-1] == "receipt"


async def test_a_gain_that_finds_every_sample_ended_is_refused_before_the_receipt(starter) -> None:
    class Quick(ScriptedBackend):
        async def set_gains(self, updates: Sequence[GainsUpdate]) -> None:
            self.hold.set()
            await until(lambda: not self.plans)
            await super().set_gains(updates)

    running = await starter(Quick(hold=asyncio.Event()))
    talk = SessionCall(running)
    await talk.say(start(steer=[add()]))
    await talk.hear("tokens")
    await talk.say(gain(1, 2.0))
    events = await talk.end()
    assert kinds(events)[-2:] == ["refused", "receipt"]
    assert events[-1].receipt.gain_count == 0
    assert await no_leaks(running)


async def test_a_stop_answers_the_gains_that_wait(starter) -> None:
    running, talk = await held(starter, steer=[add()])

    async def never(updates: Sequence[GainsUpdate]) -> None:
        await asyncio.sleep(0)

    running.backend.set_gains = never
    await talk.say(gain(1, 2.0), gain(2, 3.0))
    await until(lambda: running.manager.gain_updates._sending is not None)
    await talk.say(stop(3))
    events = await talk.end()
    answers = [one for one in kinds(events) if one in ("applied", "refused")]
    assert sorted(answers) == ["applied", "refused", "refused"]
    assert kinds(events)[-1] == "receipt"
    assert await no_leaks(running)


async def test_a_lost_client_leaves_nothing(starter) -> None:
    running, talk = await held(starter, steer=[add()])
    await talk.say(gain(1, 2.0))
    await talk.hear("applied")
    await talk.say(gain(2, 3.0))
    talk.call.cancel()
    assert await no_leaks(running)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Defect("no"), "REASON_INTERNAL"), (KeyError("secret"), "REASON_INTERNAL")],
)
async def test_gains_that_do_not_reach_the_engine_fail_the_request(starter, error, reason) -> None:
    running, talk = await held(starter, steer=[add()])
    await talk.say(gain(1, 2.0))
    await talk.hear("applied")
    running.backend.update_error = error
    await talk.say(gain(2, 3.0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await talk.end()
    refusal = Refusal.of(caught.value)
    assert refusal.reason == reason
    assert "secret" not in refusal.message
    assert await no_leaks(running)


async def test_rows_beyond_the_end_are_counted_as_their_gain_says(starter) -> None:
    """The engine computes two rows beyond the last token, of which the client gets nothing."""
    for factor, rows in ((2.0, P + 5), (0.0, P + 7)):  # the scripted engine counts them all
        backend = ScriptedBackend(hold=asyncio.Event(), overrun=2)
        running = await starter(backend)
        talk = SessionCall(running)
        await talk.say(start(steer=[add()]))
        await talk.hear("tokens")
        await talk.say(gain(1, factor))
        await talk.hear("applied")
        backend.hold.set()
        receipt = (await talk.end())[-1].receipt
        assert receipt.interventions[0].sites[0].row_count == rows
