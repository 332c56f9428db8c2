"""Gains that a watch sets on the requests of others, over a real channel."""

import asyncio
from collections import Counter
from typing import cast

import grpc
import pytest

from rheostat_server.limits import BATCH_EVENTS
from rheostat_server.monitors import call
from rheostat_server.monitors.watch import Watch
from rheostat_server.requests import steering_control
from rheostat_server.tasks.turns import TimedTurns
from rheostat_wire.v1 import gain_pb2, generation_pb2, monitor_service_pb2, receipt_pb2

from ..conftest import Refusal, rest
from ..fakes import ScriptedBackend
from ..messages import add, request
from ..streams import until
from ..talks import P, SessionCall, applied, start, update
from ..talks import gain as own_gain
from ..watchers import SAMPLING, Watcher, clean, opening, refused, rule, watched

pb = monitor_service_pb2


def gain(number: int, factor: float | None, *interventions: int, of: str = "r") -> pb.WatchSteer:
    message = gain_pb2.Gain(factor=factor, interventions=interventions)
    return pb.WatchSteer(update_id=number, request_id=of, gain=message)


async def test_a_watch_multiplies_the_steering_of_a_request(starter) -> None:
    running, watcher, call = await watched(starter, add(scale=2.0), add(scale=3.0))
    await watcher.say(steer=gain(1, 0.5))
    assert (await watcher.until("applied")).applied == applied(1, s0=P + 1)
    await watcher.say(steer=gain(4, 3.0, 1))
    assert (await watcher.until("applied", 2)).applied == applied(4, s0=P + 1)
    sent: dict[int, float] = {}
    for message in running.backend.gain_messages:
        for one in message:
            assert one.not_before == P
            sent |= one.gains
    assert sent == {0: 0.5, 1: 3.0}
    running.backend.hold.set()
    receipt = (await rest(call))[-1].receipt
    assert [one.last_gain for one in receipt.interventions] == [0.5, 3.0]
    (by,) = receipt.watches
    assert (by.watch_id, by.change_count) == (watcher.name, 2)
    positions = [generation_pb2.SamplePosition(sample=0, position=P + 1)]
    assert list(by.changes) == [
        receipt_pb2.WatchChange(update_id=number, first_positions=positions, gain=factor)
        for number, factor in (
            (1, gain_pb2.Gain(factor=0.5)),
            (4, gain_pb2.Gain(factor=3.0, interventions=[1])),
        )
    ]
    await watcher.rest()
    assert await clean(running)


async def test_an_answer_and_the_signals_of_a_step_come_in_one_message(starter) -> None:
    running, watcher, call = await watched(starter, add(), batches=True)
    ((active, sequence),) = running.manager._routes.values()
    watch = active.watched[0].part.watch
    for number in range(1, 10):
        position = running.backend.positions[sequence.plan_id] + number - 1
        watch.answer(pb.WatchResponse(applied=applied(number)))
        running.backend.deliver(running.backend.signals(sequence.job.plan, position, position + 1))
        while True:  # those of steps before may come first
            events = (await watcher.hear()).batch.events
            if events:
                break
        kinds = [(event.WhichOneof("event"), bool(event.sequence)) for event in events]
        assert kinds[0] == ("applied", False)
        assert set(kinds[1:]) == {("signals", True)}
    call.cancel()


@pytest.mark.parametrize("batches", [False, True])
async def test_gains_of_one_message_are_answered_one_by_one(starter, batches: bool) -> None:
    running, watcher, call = await watched(starter, add(), batches=batches)
    steers = [gain(1, 0.5), gain(2, 0.5, of="gone"), gain(2, 4.0), gain(3, 17.0), gain(4, 3.0)]
    steers.append(pb.WatchSteer(update_id=5, request_id="r"))
    await watcher.say(steer_batch=pb.WatchSteerBatch(steers=steers))
    answers: dict[int, str] = {}
    messages = 0
    while len(answers) < 5:
        event = await watcher.hear()
        several = list(event.batch.events) or [event]
        found = [one for one in several if one.HasField("applied") or one.HasField("refused")]
        messages += bool(found)
        for one in found:
            kind = one.WhichOneof("event")
            number = one.applied.update_id or one.refused.update_id
            assert not one.sequence
            assert answers.setdefault(number, kind) == kind
    assert answers == {1: "applied", 2: "refused", 3: "refused", 4: "applied", 5: "refused"}
    assert (messages < 5) == batches
    running.backend.hold.set()
    receipt = (await rest(call))[-1].receipt
    assert [one.last_gain for one in receipt.interventions] == [3.0]
    await watcher.rest()
    assert await clean(running)


async def test_too_many_changes_in_a_message_end_the_call(running) -> None:
    watcher = await Watcher.open(running, opening(steers=True))
    steers = [gain(number, 0.5) for number in range(1, BATCH_EVENTS + 2)]
    await watcher.say(steer_batch=pb.WatchSteerBatch(steers=steers))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await watcher.until("refused")
    refusal = Refusal.of(caught.value)
    assert (refusal.reason, refusal.field) == ("REASON_INVALID_VALUE", "steer_batch.steers")


class Clock:
    """A clock that advances only by changes of requests, and counts them by iteration."""

    def __init__(self, monkeypatch, cost: float) -> None:
        """A change takes `cost` seconds."""
        self.iteration = 0
        self.made: Counter[int] = Counter()
        """Changes, by iteration of the event loop."""
        steer = call._Changes._steer

        def counted(changes: object, release: object, found: Watch, message: object) -> None:
            self.made[self.iteration] += 1
            steer(changes, release, found, message)

        self._cost = cost
        monkeypatch.setattr(call._Changes, "_steer", counted)
        self._count_iteration()

    def __call__(self) -> float:
        return self._cost * self.made.total()

    def _count_iteration(self) -> None:
        self.iteration += 1
        asyncio.get_running_loop().call_soon(self._count_iteration)


@pytest.mark.parametrize(("cost", "most"), [(0.0, 100), (0.1, 16), (3.0, 2)])
async def test_watches_change_requests_for_a_limited_time_of_each_iteration(
    running, monkeypatch, cost: float, most: int
) -> None:
    clock = Clock(monkeypatch, cost)
    running.manager.watches.change_turns = TimedTurns(1.5, clock)
    watchers = [await Watcher.open(running, opening(steers=True)) for _ in range(2)]
    for watcher in watchers:
        steers = [gain(number, 0.5, of="gone") for number in range(1, 101)]
        await watcher.say(steer_batch=pb.WatchSteerBatch(steers=steers))
    for watcher in watchers:
        assert (await watcher.until("refused", 100)).refused.update_id == 100
        await watcher.rest()
    assert clock.made.total() == 200
    fullest = max(clock.made.values())
    assert fullest <= most + 2 if cost else fullest >= most


@pytest.mark.parametrize("action", ["steer_batch", "stop"])
async def test_a_resumed_watch_makes_no_more_changes_of_its_earlier_call(
    running, monkeypatch, action: str
) -> None:
    waits = asyncio.Event()

    async def turn_of_the_next_call() -> None:
        (watch,) = running.manager.watches._open.values()
        reader = watch._call
        waits.set()
        while watch._call is reader:
            await asyncio.sleep(0)

    monkeypatch.setattr(running.manager.watches.change_turns, "turn", turn_of_the_next_call)
    first = await Watcher.open(running, opening(steers=True))
    (watch,) = running.manager.watches._open.values()
    steers = [gain(number, 0.5, of="gone") for number in range(1, 4)]
    stop = pb.WatchStop(update_id=1, request_id="gone")
    batch = pb.WatchSteerBatch(steers=steers)
    await first.say(**{action: stop if action == "stop" else batch})
    await waits.wait()
    second = await Watcher.resume(running, first.name, 0)
    await second.rest()
    assert watch._last_update == 0
    assert not second.of("refused")
    assert await clean(running)


async def test_changes_that_wait_for_their_turn_when_the_call_ends_keep_no_memory() -> None:
    released = 0

    def release() -> None:
        nonlocal released
        released += 1

    async def never() -> None:
        await asyncio.Event().wait()

    steers = [gain(1, 0.5), gain(2, 0.5)]
    changes = call._Changes(cast(call.Requests, None), lambda: release, never)
    changing = asyncio.create_task(changes._steer_all(cast(Watch, None), steers, lambda: True))
    await asyncio.sleep(0)
    assert not released
    changing.cancel()
    await asyncio.wait({changing})
    assert released == 1


async def test_gains_of_a_session_and_of_watches_multiply_each_other(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    first = await Watcher.open(running, opening(steers=True))
    second = await Watcher.open(running, opening(steers=True))
    talk = SessionCall(running)
    await talk.say(start(request_id="r", steer=[add(), add()]))
    await talk.hear("tokens")
    await talk.say(own_gain(1, 2.0))
    await talk.hear("applied")
    await first.say(steer=gain(1, 0.25))
    await first.until("applied")
    await second.say(steer=gain(1, 3.0, 0))
    await second.until("applied")
    assert running.backend.gain_messages[-1][0].gains == {0: 1.5}
    await talk.say(own_gain(2, 4.0))  # what the watches have set stays
    await talk.hear("applied")
    assert running.backend.gain_messages[-1][0].gains == {0: 3.0, 1: 1.0}
    # One table with gains serves all of them.
    assert sum(one.plan.gained for call in running.backend.update_calls for one in call) == 1
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    assert [one.last_gain for one in receipt.interventions] == [3.0, 1.0]
    assert [one.watch_id for one in receipt.watches] == [first.name, second.name]
    assert receipt.gain_count == 4


async def test_a_product_above_the_largest_gain_is_refused(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    watcher = await Watcher.open(running, opening(steers=True))
    talk = SessionCall(running)
    await talk.say(start(request_id="r", steer=[add()]))
    await talk.hear("tokens")
    await talk.say(own_gain(1, 8.0))
    await talk.hear("applied")
    await watcher.say(steer=gain(1, 4.0))
    number, refusal = await refused(watcher)
    assert (number, refusal.reason) == (1, "REASON_INVALID_VALUE")
    assert refusal.field == "steer.gain.factor"
    assert "would be 32" in refusal.message
    await watcher.say(steer=gain(2, 2.0))  # the refused gain left nothing behind
    await watcher.until("applied")
    assert running.backend.gain_messages[-1][0].gains == {0: 16.0}
    running.backend.hold.set()
    await talk.end()


async def test_new_steering_of_a_session_begins_with_gains_of_one(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    watcher = await Watcher.open(running, opening(steers=True))
    talk = SessionCall(running)
    await talk.say(start(request_id="r", steer=[add()]))
    await talk.hear("tokens")
    await watcher.say(steer=gain(1, 0.5))
    await watcher.until("applied")
    await talk.say(update(1, add(scale=5.0)))
    await talk.hear("applied")
    await watcher.say(steer=gain(2, 0.5))
    await watcher.until("applied", 2)
    assert running.backend.gain_messages[-1][0].gains == {0: 0.5}
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    assert receipt.watches[0].change_count == 2


async def test_a_request_with_rules_and_a_rule_of_the_watch_takes_gains(starter) -> None:
    running, watcher, call = await watched(starter, add(), rules=[rule(1e9)])
    await watcher.say(steer=gain(1, 0.5))
    await watcher.until("applied")
    (plan,) = [one.plan for made in running.backend.update_calls for one in made]
    assert plan.gained
    assert plan.signals._replace(kept=(), means_kept=False) == running.backend.jobs[0].plan.signals
    running.backend.hold.set()
    assert (await rest(call))[-1].receipt.watches[0].change_count == 1


async def test_every_sample_gets_the_gain_of_a_watch(starter) -> None:
    sampling = generation_pb2.Sampling(n=3, max_tokens=6)
    running, watcher, call = await watched(starter, add(), sampling=sampling)
    await watcher.say(steer=gain(1, 0.0))
    answer = (await watcher.until("applied")).applied
    assert answer == applied(1, s0=P + 1, s1=P + 1, s2=P + 1)
    running.backend.hold.set()
    assert (await rest(call))[-1].receipt.watches[0].change_count == 1


async def test_only_watches_that_steer_keep_generated_tokens_out_of_the_cache(starter) -> None:
    running = await starter()
    watcher = await Watcher.open(running, opening())
    await running.client.generate(request(sampling=SAMPLING))
    await watcher.rest()
    steering = await Watcher.open(running, opening(steers=True))
    await running.client.generate(request(sampling=SAMPLING))
    await steering.rest()
    await running.client.generate(request(sampling=SAMPLING))
    private = [job.plan.private_from for job in running.backend.jobs]
    assert private == [None, P, None]


@pytest.mark.parametrize(
    ("message", "reason", "field"),
    [
        (gain(0, 1.0), "REASON_INVALID_VALUE", "update_id"),
        (gain(1, 1.0, of="other"), "REASON_REQUEST_NOT_FOUND", "steer.request_id"),
        (gain(1, 1.0, of="no id"), "REASON_INVALID_VALUE", "steer.request_id"),
        (gain(1, None), "REASON_MISSING_FIELD", "steer.gain.factor"),
        (gain(1, 17.0), "REASON_INVALID_VALUE", "steer.gain.factor"),
        (gain(1, float("nan")), "REASON_NON_FINITE", "steer.gain.factor"),
        (gain(1, 1.0, 1), "REASON_INVALID_VALUE", "steer.gain.interventions[0]"),
        (pb.WatchSteer(update_id=1, request_id="r"), "REASON_MISSING_FIELD", "steer"),
    ],
)
async def test_a_refused_change_leaves_the_watch_and_the_request(
    starter, message, reason, field
) -> None:
    running, watcher, call = await watched(starter, add())
    await watcher.say(steer=message)
    number, refusal = await refused(watcher)
    assert (number, refusal.reason, refusal.field) == (message.update_id, reason, field)
    await watcher.say(steer=gain(2, 0.5))
    await watcher.until("applied")
    running.backend.hold.set()
    assert (await rest(call))[-1].receipt.watches[0].change_count == 1


async def test_a_request_without_steering_has_nothing_that_a_watch_could_multiply(starter) -> None:
    running, watcher, call = await watched(starter)
    await watcher.say(steer=gain(1, 0.5))
    assert (await refused(watcher))[1].field == "steer.gain"
    running.backend.hold.set()
    assert not (await rest(call))[-1].receipt.watches


async def test_a_watch_that_does_not_steer_is_refused(starter) -> None:
    running = await starter()
    watcher = await Watcher.open(running, opening())
    await watcher.say(steer=gain(1, 0.5))
    number, refusal = await refused(watcher)
    assert (number, refusal.reason, refusal.field) == (1, "REASON_NOT_SUPPORTED", "steer")


async def test_a_watch_cannot_steer_what_it_does_not_read(starter) -> None:
    running, _watcher, call = await watched(starter, add())
    late = await Watcher.open(running, opening(steers=True))
    await late.say(steer=gain(1, 0.5))
    assert (await refused(late))[1].reason == "REASON_REQUEST_NOT_FOUND"
    running.backend.hold.set()
    await rest(call)


async def test_the_receipt_waits_for_changes_that_have_begun(starter) -> None:
    running, watcher, call = await watched(starter, add())
    goes_on = asyncio.Event()
    prepare = running.manager.preparations.prepare

    async def slow(plan):
        prepared = await prepare(plan)
        await goes_on.wait()
        return prepared

    running.manager.preparations.prepare = slow
    await watcher.say(steer=gain(1, 0.5))
    control = running.manager._active_requests["r"].control
    await until(lambda: control.pending)
    running.backend.hold.set()
    await until(lambda: not running.backend.positions)  # the engine has ended the sample
    goes_on.set()
    receipt = (await rest(call))[-1].receipt
    assert (await refused(watcher))[1].reason == "REASON_REQUEST_NOT_FOUND"
    assert not receipt.watches
    await watcher.rest()
    assert await clean(running)


async def test_changes_of_a_request_that_is_cancelled_are_refused(starter) -> None:
    running, watcher, call = await watched(starter, add())
    never = asyncio.Event()

    async def stuck(plan):
        await never.wait()

    running.manager.preparations.prepare = stuck
    await watcher.say(steer=gain(1, 0.5))
    await watcher.say(steer=gain(2, 0.5))
    control = running.manager._active_requests["r"].control
    await until(lambda: control._unanswered[watcher.name, True] == 2)
    call.cancel()
    assert {(await refused(watcher, n))[1].reason for n in (1, 2)} == {"REASON_REQUEST_NOT_FOUND"}
    await watcher.rest()
    assert await clean(running)


async def test_a_flood_of_gains_of_a_watch_is_refused_and_leaves_room_for_the_session(
    starter, monkeypatch
) -> None:
    monkeypatch.setattr(steering_control, "WAITING_GAINS", 20)
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    watcher = await Watcher.open(running, opening(steers=True))
    talk = SessionCall(running)
    await talk.say(start(request_id="r", steer=[add()]))
    await talk.hear("tokens")
    release = asyncio.Event()
    set_gains = running.backend.set_gains

    async def slow(updates):
        await release.wait()
        await set_gains(updates)

    running.backend.set_gains = slow
    for number in range(1, 31):
        await watcher.say(steer=gain(number, number / 100))
    number, refusal = await refused(watcher, 1)
    assert (number, refusal.reason) == (21, "REASON_QUEUE_FULL")
    assert refusal.field == "steer.gain"
    await talk.say(own_gain(1, 2.0))
    release.set()
    await talk.hear("applied")
    await watcher.until("applied", 20)
    running.backend.hold.set()
    await talk.end()


async def test_a_receipt_lists_the_first_changes_and_counts_all(starter, monkeypatch) -> None:
    monkeypatch.setattr(steering_control, "WATCH_CHANGES", 2)
    running, watcher, call = await watched(starter, add())
    for number in (1, 2, 3):
        await watcher.say(steer=gain(number, number / 4))
    await watcher.until("applied", 3)
    running.backend.hold.set()
    (by,) = (await rest(call))[-1].receipt.watches
    assert ([one.update_id for one in by.changes], by.change_count) == ([1, 2], 3)


async def test_gains_stay_when_the_watch_ends(starter) -> None:
    running, watcher, call = await watched(starter, add())
    await watcher.say(steer=gain(1, 0.5))
    await watcher.until("applied")
    await watcher.rest()
    running.backend.hold.set()
    assert (await rest(call))[-1].receipt.interventions[0].last_gain == 0.5
