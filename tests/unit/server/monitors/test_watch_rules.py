"""Rules of watches that steer the requests of others, or multiply their steering."""

import logging

import grpc
import pytest

from rheostat_wire.v1 import (
    gain_pb2,
    gate_pb2,
    monitor_pb2,
    monitor_service_pb2,
    receipt_pb2,
    steering_pb2,
    types_pb2,
)

from ..conftest import Events, Running
from ..fakes import ScriptedBackend, sites_with
from ..messages import ONES, above, add, capture, probe, request, selector, site_set, tensor, window
from ..streams import settled
from ..subscribers import by_id
from ..uploads import refusal_of
from ..watchers import SAMPLING, Request, Watcher, opening, rule

pb = monitor_service_pb2
Code = grpc.StatusCode
LAST = probe("a", sites=site_set(types_pb2.POINT_RESID_POST, layers=[2]))
HALF = gain_pb2.Gain(factor=0.5)


def at(layer: int, **fields: object) -> steering_pb2.Intervention:
    return add(sites=site_set(types_pb2.POINT_RESID_POST, layers=[layer]), **fields)


def steering(*interventions: steering_pb2.Intervention, **fields: object) -> monitor_pb2.Rule:
    """A rule that steers."""
    message = rule(1.0, steer=steering_pb2.Steering(interventions=interventions))
    message.MergeFrom(monitor_pb2.Rule(**fields))
    return message


def gated(layer: int = 1) -> steering_pb2.Intervention:
    """An intervention with a gate of its own."""
    one = at(layer)
    one.gate.CopyFrom(gate_pb2.Gate(conditions=[above(1.0)]))
    return one


def scales(running: Running) -> list[tuple[float, bool]]:
    """The scale of each acting act of the last request, and whether it has a gate."""
    acts = running.backend.jobs[-1].plan.acts
    return [(act.scale, act.gate is not None) for act in acts if act.acts]


def refs(events: Events) -> list[tuple[int, int, str, str]]:
    """Origin, index, rule and watch of each intervention of a receipt."""
    every = [one.intervention for one in events[-1].receipt.interventions]
    return [(one.origin, one.index, one.rule_name, one.watch_id) for one in every]


async def run(running: Running, *own: steering_pb2.Intervention, **fields: object) -> Events:
    message = request(request_id="r", sampling=SAMPLING, steer=own, **fields)
    return await running.client.generate(message)


async def test_a_rule_of_a_watch_steers_behind_the_requests_own_steering(starter) -> None:
    running = await starter(ScriptedBackend(openness=lambda gate, position: float(position == 4)))
    rules = [steering(at(1, scale=5.0), at(2, scale=6.0), hold={"tokens": 2})]
    watcher = await Watcher.open(running, opening(rules=rules))
    own = rule(1.0, name="own", steer={"interventions": [at(1, scale=3.0)]})
    events = await run(running, at(1, scale=2.0), rules=[own], probes=[probe("a")])
    assert scales(running) == [(2.0, False), (3.0, True), (5.0, True), (6.0, True)]
    assert refs(events) == [
        (receipt_pb2.ORIGIN_REQUEST, 0, "", ""),
        (receipt_pb2.ORIGIN_RULE, 0, "own", ""),
        (receipt_pb2.ORIGIN_WATCH, 0, "high", watcher.name),
        (receipt_pb2.ORIGIN_WATCH, 1, "high", watcher.name),
    ]
    assert [one.rule_name for one in events[-1].receipt.rules] == ["own"]
    ended = (await watcher.until("ended")).ended
    assert not ended.missed_reason
    assert [len(event.signals.firings) for event in watcher.of("signals")].count(1) == 1
    await watcher.rest()
    await run(running, at(1, scale=2.0))
    assert scales(running) == [(2.0, False)]
    stats = await settled(running)
    assert (stats.leaked_count, running.manager.store.pins) == (0, 0)


async def test_what_a_watch_steers_may_select_tokens(running: Running) -> None:
    rules = [steering(at(1, where=selector(window(0, 2))), at(1, where=selector(window(8, 9))))]
    watcher = await Watcher.open(running, opening(rules=rules))
    await run(running)
    (act,) = [act for act in running.backend.jobs[-1].plan.acts if act.acts and act.spans]
    assert act.spans == ((0, 2),)
    await watcher.rest()


async def test_a_rule_of_a_watch_multiplies_the_requests_own_steering(running: Running) -> None:
    gain = gain_pb2.Gain(factor=0.5, interventions=[1])
    rules = [rule(1.0, gain=gain), steering(at(1, scale=5.0), name="other")]
    rules[1].name = "other"
    watcher = await Watcher.open(running, opening(rules=rules))
    events = await run(running, at(1, scale=2.0), at(2, scale=3.0))
    acts = [act for act in running.backend.jobs[-1].plan.acts if act.acts]
    assert [act.gate and (act.gate.invert, act.gate.factor) for act in acts] == [
        None,
        (True, 0.5),
        (False, 0.0),
    ]
    assert [one[0] for one in refs(events)] == [
        receipt_pb2.ORIGIN_REQUEST,
        receipt_pb2.ORIGIN_REQUEST,
        receipt_pb2.ORIGIN_WATCH,
    ]
    await watcher.rest()


@pytest.mark.parametrize(
    ("own", "gain", "why"),
    [
        ([gated(1)], HALF, "has a gate"),
        ([at(1), at(1)], HALF, "meets another addition"),
        (
            [at(1)],
            gain_pb2.Gain(factor=0.5, interventions=[3]),
            "has 1 intervention; there is no intervention 3",
        ),
    ],
)
async def test_a_request_that_a_watch_cannot_multiply_runs_and_is_missed(
    running: Running, own: list[steering_pb2.Intervention], gain: gain_pb2.Gain, why: str
) -> None:
    probes = [probe()] if own[0].HasField("gate") else []
    other = await Watcher.open(running, opening(probe("b")))
    watcher = await Watcher.open(running, opening(rules=[rule(1.0, gain=gain)]))
    events = await run(running, *own, probes=probes)
    ended = (await watcher.until("ended")).ended
    assert why in ended.missed_reason
    assert not (await other.until("ended")).ended.missed_reason  # others read it
    plain = [act.gate for act in running.backend.jobs[-1].plan.acts if act.acts]
    await other.rest()
    await watcher.rest()
    again = await run(running, *own, probes=probes)
    assert plain == [act.gate for act in running.backend.jobs[-1].plan.acts if act.acts]
    assert refs(events) == refs(again)


async def test_two_watches_do_not_multiply_one_intervention(running: Running) -> None:
    watchers = [await Watcher.open(running, opening(rules=[rule(1.0, gain=HALF)])) for _ in "ab"]
    await run(running, at(1))
    first, second = [(await one.until("ended")).ended.missed_reason for one in watchers]
    assert not first
    assert "the gain of another rule" in second


async def test_a_request_without_steering_is_read_by_a_watch_with_gains(running: Running) -> None:
    watcher = await Watcher.open(running, opening(rules=[rule(1.0, gain=HALF)]))
    await run(running)
    assert not (await watcher.until("ended")).ended.missed_reason


async def test_a_sum_that_a_watch_would_make_infinite_is_not_made(running: Running) -> None:
    huge = tensor(ONES * 3e38)
    watcher = await Watcher.open(running, opening(rules=[steering(at(1, vector=huge))]))
    events = await run(running, at(1, vector=huge))
    assert "not finite" in (await watcher.until("ended")).ended.missed_reason
    assert [one[0] for one in refs(events)] == [receipt_pb2.ORIGIN_REQUEST]


async def test_a_controlled_request_is_not_steered_by_rules_of_watches(
    starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rheostat_server.serve.entry_points", lambda group, name: {name})
    running = await starter(ScriptedBackend(), controllers=("pi",))
    watcher = await Watcher.open(running, opening(rules=[steering(at(1))]))
    await run(running, at(1), probes=[probe()], controlled={"controller_name": "pi"})
    assert "controller" in (await watcher.until("ended")).ended.missed_reason


async def test_a_baseline_is_not_steered_by_a_watch(running: Running) -> None:
    await Watcher.open(running, opening(rules=[steering(at(1))]))
    await run(running, at(1), with_baseline=True, captures=[capture()])
    own, baseline = [job.plan.acts for job in running.backend.jobs][:2]
    assert len([act for act in own if act.acts]) == 2
    assert not [act for act in baseline if act.acts]


@pytest.mark.parametrize(
    ("message", "reason", "field"),
    [
        (
            opening(rules=[rule(1.0, gain=gain_pb2.Gain(factor=17.0))]),
            "INVALID_VALUE",
            "rules[0].gain.factor",
        ),
        (opening(rules=[rule(1.0, steer={})]), "MISSING_FIELD", "rules[0].steer.interventions"),
        (
            opening(LAST, rules=[steering(at(1), hold={"token": {}})]),
            "GATE_ORDER",
            "rules[0].conditions[0].probe_name",
        ),
        (
            opening(rules=[steering(*[at(1)] * 256), steering(at(1), name="b")]),
            "INVALID_VALUE",
            "rules[1].steer.interventions[0].add",
        ),
        (
            opening(probe("a"), probe("mood"), rules=[steering(gated())]),
            "INVALID_VALUE",
            "rules[0].steer.interventions[0].gate",
        ),
        (
            opening(
                rules=[steering(add(vector=tensor(ONES * 3e38)), at(1, vector=tensor(ONES * 3e38)))]
            ),
            "NON_FINITE",
            "rules[0].steer.interventions[1].add.scale",
        ),
    ],
)
async def test_rules_that_cannot_steer_are_refused_by_field(
    running: Running, message: pb.WatchOpen, reason: str, field: str
) -> None:
    for number, one in enumerate(message.rules):
        one.name = f"rule{number}"
    call = running.client.monitor.Watch()
    await call.write(Request(open=message))
    refusal = await refusal_of(call.read())
    assert (refusal.reason, refusal.field) == (f"REASON_{reason}", f"open.{field}")


async def test_a_watch_that_no_engine_could_run_is_refused(starter) -> None:
    backend = ScriptedBackend()
    backend.sites = sites_with(bank_rows=2)
    running = await starter(backend)
    call = running.client.monitor.Watch()
    ops = [at(1, vector=tensor(ONES * number)) for number in (1, 2, 3)]
    await call.write(Request(open=opening(rules=[steering(*ops)])))
    refusal = await refusal_of(call.read())
    assert refusal.brief[:2] == (Code.RESOURCE_EXHAUSTED, "REASON_BANK_FULL")
    assert not running.manager.store.pins


async def test_the_log_has_a_line_for_each_watch(running, caplog) -> None:
    caplog.set_level(logging.INFO)
    first = await Watcher.open(
        running, opening(rules=[rule(1.0, "grim")], on_lost=pb.WATCH_LOST_STOP)
    )
    second = await Watcher.open(running, opening(filter=by_id("a", "b")))
    lines = [record.getMessage() for record in caplog.records]
    assert (
        f"watch {first.name} of every request: 1 columns, rules: grim; if it is lost: "
        "WATCH_LOST_STOP"
    ) in lines
    assert (
        f"watch {second.name} of 2 listed requests: 1 columns, rules: none; if it is lost: "
        "WATCH_LOST_CONTINUE"
    ) in lines
