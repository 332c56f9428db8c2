"""Layers that a watch puts over the steering of others' requests, over a real channel."""

import asyncio

import pytest

from rheostat_engine import Gate, Kind
from rheostat_server.requests import steering_control
from rheostat_wire.v1 import (
    gain_pb2,
    gate_pb2,
    generation_pb2,
    monitor_pb2,
    monitor_service_pb2,
    receipt_pb2,
    steering_pb2,
    types_pb2,
)

from ..conftest import rest
from ..fakes import ScriptedBackend, sites_with
from ..messages import above, add, probe, site_set
from ..talks import P, SessionCall, applied, start, update
from ..talks import gain as own_gain
from ..watchers import Watcher, clean, opening, refused, rule, watched

pb = monitor_service_pb2


def layer(number: int, *interventions: steering_pb2.Intervention, of: str = "r") -> pb.WatchSteer:
    steering = steering_pb2.Steering(interventions=interventions)
    return pb.WatchSteer(update_id=number, request_id=of, layer=steering)


def gain(number: int, factor: float) -> pb.WatchSteer:
    return pb.WatchSteer(update_id=number, request_id="r", gain=gain_pb2.Gain(factor=factor))


def lists(backend: ScriptedBackend) -> list[list[float]]:
    """The scales of the acts of each update, without those that read."""
    return [
        [act.scale for act in one.plan.acts if act.kind is not Kind.READ]
        for call in backend.update_calls
        for one in call
        if not one.plan.gained
    ]


def refs(receipt: receipt_pb2.Receipt) -> list[tuple[int, int, str, int]]:
    """Origin, index, watch and update of each intervention."""
    every = [one.intervention for one in receipt.interventions]
    return [(one.origin, one.index, one.watch_id, one.update_id) for one in every]


async def test_a_layer_acts_beside_the_requests_own_steering(starter) -> None:
    running, watcher, call = await watched(starter, add(scale=2.0))
    await watcher.say(steer=layer(1, add(scale=5.0), add(scale=6.0)))
    assert (await watcher.until("applied")).applied == applied(1, s0=P + 1)
    await watcher.say(steer=layer(2, add(scale=7.0)))
    await watcher.until("applied", 2)
    await watcher.say(steer=layer(3))
    await watcher.until("applied", 3)
    assert lists(running.backend) == [[2.0, 5.0, 6.0], [2.0, 7.0], [2.0]]
    # The probes of the watch go on reading.
    assert all(
        one.plan.signals.readings == 1 for made in running.backend.update_calls for one in made
    )
    running.backend.hold.set()
    receipt = (await rest(call))[-1].receipt
    of = receipt_pb2.ORIGIN_WATCH
    assert refs(receipt) == [
        (receipt_pb2.ORIGIN_REQUEST, 0, "", 0),
        (of, 0, watcher.name, 1),
        (of, 1, watcher.name, 1),
        (of, 0, watcher.name, 2),
    ]
    (by,) = receipt.watches
    assert [one.layer.intervention_count for one in by.changes] == [2, 1, 0]
    assert [one.first_positions[0].position for one in by.changes] == [P + 1] * 3
    assert receipt.update_count == 0  # of a session
    await watcher.rest()
    assert await clean(running)


async def test_a_request_without_steering_takes_a_layer(starter) -> None:
    running, watcher, call = await watched(starter)
    await watcher.say(steer=layer(1, add(scale=5.0)))
    await watcher.until("applied")
    running.backend.hold.set()
    assert refs((await rest(call))[-1].receipt) == [(receipt_pb2.ORIGIN_WATCH, 0, watcher.name, 1)]


async def test_layers_of_watches_and_updates_of_a_session_leave_each_other_alone(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    first = await Watcher.open(running, opening(steers=True))
    second = await Watcher.open(running, opening(steers=True))
    talk = SessionCall(running)
    await talk.say(start(request_id="r", steer=[add(scale=2.0)]))
    await talk.hear("tokens")
    for watcher, scale in ((first, 3.0), (second, 4.0)):
        await watcher.say(steer=layer(1, add(scale=scale)))
        await watcher.until("applied")
    await talk.say(update(7, add(scale=5.0)))
    await talk.hear("applied")
    await first.say(steer=layer(2, add(scale=6.0)))
    await first.until("applied", 2)
    assert lists(running.backend) == [[2, 3], [2, 3, 4], [5, 3, 4], [5, 6, 4]]
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    assert sorted(refs(receipt)) == sorted(
        [
            (receipt_pb2.ORIGIN_REQUEST, 0, "", 0),
            (receipt_pb2.ORIGIN_UPDATE, 0, "", 7),
            (receipt_pb2.ORIGIN_WATCH, 0, first.name, 1),
            (receipt_pb2.ORIGIN_WATCH, 0, second.name, 1),
            (receipt_pb2.ORIGIN_WATCH, 0, first.name, 2),
        ]
    )
    assert receipt.update_count == 1


def replacing(number: int, *interventions: steering_pb2.Intervention) -> pb.WatchSteer:
    steering = steering_pb2.Steering(interventions=interventions)
    return pb.WatchSteer(update_id=number, request_id="r", replace=steering)


async def test_a_watch_replaces_the_own_steering_and_a_session_replaces_that(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    watcher = await Watcher.open(running, opening(steers=True))
    other = await Watcher.open(running, opening(steers=True))
    talk = SessionCall(running)
    await talk.say(start(request_id="r", steer=[add(scale=2.0)]))
    await talk.hear("tokens")
    await other.say(steer=layer(1, add(scale=3.0)))
    await other.until("applied")
    await talk.say(own_gain(1, 4.0))
    await talk.hear("applied")
    await watcher.say(steer=replacing(1, add(scale=5.0), add(scale=6.0)))
    await watcher.until("applied")
    await watcher.say(steer=gain(2, 0.5))
    await watcher.until("applied", 2)
    assert running.backend.gain_messages[-1][0].gains == {0: 0.5, 1: 0.5}
    await talk.say(update(2, add(scale=7.0)))
    await talk.hear("applied")
    await watcher.say(steer=replacing(3))
    await watcher.until("applied", 3)
    assert lists(running.backend) == [[2, 3], [5, 6, 3], [7, 3], [3]]
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    of = receipt_pb2.ORIGIN_UPDATE
    gains = dict(zip(refs(receipt), receipt.interventions, strict=True))
    assert {ref: one.last_gain for ref, one in gains.items() if one.HasField("last_gain")} == {
        (receipt_pb2.ORIGIN_REQUEST, 0, "", 0): 4.0,
        (of, 0, watcher.name, 1): 0.5,
        (of, 1, watcher.name, 1): 0.5,
    }
    assert gains.keys() >= {(of, 0, "", 2), (receipt_pb2.ORIGIN_WATCH, 0, other.name, 1)}
    assert receipt.update_count == 1
    (by,) = [one for one in receipt.watches if one.watch_id == watcher.name]
    assert [one.WhichOneof("change") for one in by.changes] == ["replace", "gain", "replace"]
    assert [one.replace.intervention_count for one in by.changes] == [2, 0, 0]


async def test_updates_of_a_session_and_of_a_watch_with_one_number_keep_their_gains_apart(
    starter,
) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    watcher = await Watcher.open(running, opening(steers=True))
    talk = SessionCall(running)
    await talk.say(start(request_id="r", steer=[add()]))
    await talk.hear("tokens")
    await talk.say(update(1, add(scale=2.0)))
    await talk.say(own_gain(2, 4.0))
    await talk.hear("applied")
    await talk.hear("applied")
    await watcher.say(steer=replacing(1, add(scale=5.0)))
    await watcher.say(steer=gain(2, 0.5))
    await watcher.until("applied", 2)
    running.backend.hold.set()
    receipt = (await talk.end())[-1].receipt
    found = [(one.intervention.watch_id, one.last_gain) for one in receipt.interventions[1:]]
    assert found == [("", 4.0), (watcher.name, 0.5)]


async def test_wrong_steering_in_place_of_the_own_names_its_field(starter) -> None:
    running, watcher, call = await watched(starter, add())
    wrong = add()
    wrong.ClearField("sites")
    await watcher.say(steer=replacing(1, wrong))
    assert (await refused(watcher))[1].field == "steer.replace.interventions[0].sites"
    running.backend.hold.set()
    assert not (await rest(call))[-1].receipt.watches


async def test_gains_multiply_the_own_steering_under_a_layer_alone(starter) -> None:
    running, watcher, call = await watched(starter, add(scale=2.0))
    await watcher.say(steer=layer(1, add(scale=5.0)))
    await watcher.say(steer=gain(2, 0.5))
    await watcher.until("applied", 2)
    (gained,) = [
        one.plan for made in running.backend.update_calls for one in made if one.plan.gained
    ]
    assert [(act.scale, act.gain) for act in gained.acts if act.kind is not Kind.READ] == [
        (2.0, 0),
        (5.0, None),
    ]
    # A layer under which the gain would be lost is refused, and the gain stays.
    await watcher.say(steer=layer(3, add(scale=6.0)))
    number, refusal = await refused(watcher)
    assert (number, refusal.reason, refusal.field) == (3, "REASON_NOT_SUPPORTED", "steer.layer")
    await watcher.say(steer=gain(4, 1.0))
    await watcher.say(steer=layer(5, add(scale=6.0)))
    await watcher.until("applied", 4)
    running.backend.hold.set()
    receipt = (await rest(call))[-1].receipt
    assert [one.HasField("last_gain") for one in receipt.interventions] == [True, False, False]


async def test_gains_that_cancel_each_other_stay_under_a_layer(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    watcher = await Watcher.open(running, opening(steers=True))
    talk = SessionCall(running)
    await talk.say(start(request_id="r", steer=[add()]))
    await talk.hear("tokens")
    await talk.say(own_gain(1, 2.0))
    await talk.hear("applied")
    await watcher.say(steer=gain(1, 0.5))
    await watcher.say(steer=layer(2, add(scale=5.0)))
    await watcher.until("applied", 2)
    await watcher.say(steer=gain(3, 3.0))
    await watcher.until("applied", 3)
    assert running.backend.gain_messages[-1][0].gains == {0: 6.0}
    running.backend.hold.set()
    await talk.end()


async def test_a_layer_without_room_is_refused_and_the_request_goes_on(starter) -> None:
    backend = ScriptedBackend(sites=sites_with(bank_rows=2), hold=asyncio.Event(), hold_from=2)
    running, watcher, call = await watched(starter, add(scale=2.0), backend=backend)
    await watcher.say(steer=layer(1, add(scale=3.0)))
    await watcher.say(steer=layer(2, add(scale=5.0)))
    number, refusal = await refused(watcher)
    assert (number, refusal.reason) == (2, "REASON_BANK_FULL")
    assert refusal.retry
    running.backend.hold.set()
    receipt = (await rest(call))[-1].receipt
    assert receipt.watches[0].change_count == 1
    await watcher.rest()
    assert await clean(running)


def gates_of(backend: ScriptedBackend) -> list[tuple[Gate, ...]]:
    """The gates of each update, after those of the request's own plan."""
    plans = [backend.jobs[0].plan, *(one.plan for call in backend.update_calls for one in call)]
    return [plan.packed_acts.gates for plan in plans if plan.packed_acts.table is not None]


STEER = monitor_pb2.Rule(
    name="steers", conditions=[above(2.0)], steer={"interventions": [add(scale=9.0)]}
)


async def test_a_layer_leaves_gates_and_rules_of_all_kinds_as_they_are(starter) -> None:
    gated = add(scale=2.0)
    gated.gate.CopyFrom(gate_pb2.Gate(conditions=[above(0.0)], signals=True))
    running, watcher, call = await watched(
        starter,
        gated,
        rules=[rule(7.0), rule(8.0, name="other", steer={"interventions": [add(scale=8.0)]})],
        probes=[probe()],
        own_rules=[STEER],
    )
    await watcher.say(steer=layer(1, add(scale=5.0)))
    await watcher.until("applied")
    await watcher.say(steer=layer(2, add(scale=6.0)))
    await watcher.until("applied", 2)
    assert lists(running.backend) == [[2, 9, 8, 5], [2, 9, 8, 6]]
    first, *later = gates_of(running.backend)
    assert len(first) == 6  # a rule that steers has two
    assert later == [first, first]
    plans = [one.plan for call in running.backend.update_calls for one in call]
    assert {plan.packed_acts.gate_states for plan in plans} == {0}
    (job,) = running.backend.jobs
    for plan in plans:
        assert plan.signals._replace(kept=(), means_kept=False) == job.plan.signals
        reads = [[act for act in one.acts if act.kind is Kind.READ] for one in (plan, job.plan)]
        assert reads[0] == reads[1]
    running.backend.hold.set()
    events = await rest(call)
    assert [ref[:2] for ref in refs(events[-1].receipt)] == [
        (receipt_pb2.ORIGIN_REQUEST, 0),
        (receipt_pb2.ORIGIN_RULE, 0),
        (receipt_pb2.ORIGIN_WATCH, 0),
        (receipt_pb2.ORIGIN_WATCH, 0),
        (receipt_pb2.ORIGIN_WATCH, 0),
    ]
    signals = [event.signals for event in events if event.HasField("signals")]
    positions = [
        p
        for one in signals
        for run in one.positions
        for p in range(run.start, run.start + run.count)
    ]
    assert positions == sorted(set(positions))
    await watcher.rest()
    assert await clean(running)


async def test_other_steering_leaves_what_rules_steer(starter) -> None:
    running, watcher, call = await watched(
        starter,
        add(scale=2.0),
        rules=[rule(8.0, steer={"interventions": [add(scale=8.0)]})],
        probes=[probe()],
        own_rules=[STEER],
    )
    await watcher.say(steer=layer(1, add(scale=5.0)))
    await watcher.say(steer=replacing(2, add(scale=3.0)))
    await watcher.until("applied", 2)
    assert lists(running.backend) == [[2, 9, 8, 5], [3, 9, 8, 5]]
    running.backend.hold.set()
    await rest(call)
    await watcher.rest()
    assert await clean(running)


async def test_a_gain_of_a_rule_takes_layers_and_keeps_its_steering(starter) -> None:
    half = gain_pb2.Gain(factor=0.5)
    running, watcher, call = await watched(starter, add(), rules=[rule(1.0, gain=half)])
    await watcher.say(steer=replacing(1, add()))
    number, refusal = await refused(watcher)
    assert (number, refusal.reason, refusal.field) == (1, "REASON_NOT_SUPPORTED", "steer.replace")
    # An addition of the layer would be summed with the one that is multiplied.
    await watcher.say(steer=layer(2, add()))
    number, refusal = await refused(watcher, 2)
    assert (number, refusal.reason, refusal.field) == (2, "REASON_NOT_SUPPORTED", "steer.layer")
    elsewhere = add(sites=site_set(types_pb2.POINT_RESID_POST, layers=[2]))
    await watcher.say(steer=layer(3, elsewhere))
    await watcher.until("applied")
    running.backend.hold.set()
    assert (await rest(call))[-1].receipt.watches[0].change_count == 1


async def test_a_wrong_layer_names_its_field(starter) -> None:
    running, watcher, call = await watched(starter)
    wrong = add()
    wrong.ClearField("sites")
    gated = add()
    gated.gate.conditions.append(gate_pb2.Condition(probe_name="a", above=1))
    for number, bad in enumerate((wrong, gated), start=1):
        await watcher.say(steer=layer(number, bad))
    fields = [(await refused(watcher, number))[1].field for number in (1, 2)]
    assert fields == ["steer.layer.interventions[0].sites", "steer.layer.interventions[0].gate"]
    running.backend.hold.set()
    await rest(call)


async def test_only_so_many_layers_are_carried_out(starter, monkeypatch) -> None:
    monkeypatch.setattr(steering_control, "UPDATES", 2)
    running, watcher, call = await watched(starter)
    for number in (1, 2, 3):
        await watcher.say(steer=layer(number, add()))
    number, refusal = await refused(watcher)
    assert (number, refusal.reason, refusal.field) == (3, "REASON_INVALID_VALUE", "steer.layer")
    running.backend.hold.set()
    assert (await rest(call))[-1].receipt.watches[0].change_count == 2


@pytest.mark.parametrize("count", [1, 3])
async def test_every_sample_gets_the_layer(starter, count: int) -> None:
    sampling = generation_pb2.Sampling(n=count, max_tokens=6)
    running, watcher, call = await watched(starter, sampling=sampling)
    await watcher.say(steer=layer(1, add(scale=5.0)))
    answer = (await watcher.until("applied")).applied
    assert answer == applied(1, **{f"s{sample}": P + 1 for sample in range(count)})
    running.backend.hold.set()
    (one,) = (await rest(call))[-1].receipt.interventions
    assert [rows.sample for rows in one.rows] == list(range(count))
    assert all(rows.positions[0].start == P + 1 for rows in one.rows)


async def test_a_request_of_another_watch_takes_no_layer(starter) -> None:
    running, _watcher, call = await watched(starter)
    late = await Watcher.open(running, opening(steers=True))
    await late.say(steer=layer(1, add()))
    assert (await refused(late))[1].reason == "REASON_REQUEST_NOT_FOUND"
    running.backend.hold.set()
    await rest(call)
