"""Rules: what fires, and what a rule that stops withholds, over gRPC with a scripted engine."""

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing

import grpc
import pytest

from rheostat_wire.v1 import (
    capture_pb2,
    gain_pb2,
    gate_pb2,
    generation_pb2,
    generation_service_pb2,
    monitor_pb2,
    run_service_pb2,
    steering_pb2,
    types_pb2,
)

from ..conftest import Events, Running, rest
from ..fakes import Paced, ScriptedBackend
from ..messages import above, add, capture, probe, request, selector, site_set, window
from ..talks import start
from .lagging import Lagging
from .test_signals import all_signals, positions, sent

SAMPLING = generation_pb2.Sampling(max_tokens=6, logprobs=1)
PROMPT_LEN = 3


def rule(name: str = "grim", **fields: object) -> monitor_pb2.Rule:
    """A rule that stops, unless `fields` name another action."""
    fields.setdefault("conditions", [above(1.0)])
    if not {"observe", "stop", "steer", "gain"} & fields.keys():
        fields["stop"] = monitor_pb2.Stop()
    return monitor_pb2.Rule(name=name, **fields)


def at(*rows: int, gate: int = 0) -> Callable[[int, int], float]:
    """A gate that is open at some positions."""
    return lambda number, position: float(number == gate and position in rows)


def tokens_of(events: Events, sample: int = 0) -> list[int]:
    return [
        token
        for event in events
        if event.HasField("tokens") and event.tokens.sample == sample
        for token in event.tokens.token_ids
    ]


def text_of(events: Events) -> str:
    return "".join(event.tokens.text for event in events if event.HasField("tokens"))


def finished(events: Events, sample: int = 0) -> generation_pb2.Finished:
    (found,) = [
        event.finished
        for event in events
        if event.HasField("finished") and event.finished.sample == sample
    ]
    return found


def fired(events: Events, name: str) -> list[int]:
    """The positions at which a rule fired, by the signals."""
    return [
        positions(event.signals)[row]
        for event in events
        if event.HasField("signals")
        for one in event.signals.firings
        if one.rule_name == name
        for row in one.rows
    ]


def receipt_of(events: Events, rule_index: int = 0) -> dict[int, list[int]]:
    """The positions at which a rule fired, by sample, by the receipt."""
    found = {}
    for one in events[-1].receipt.rules[rule_index].samples:
        found[one.sample] = [
            p for run in one.positions for p in range(run.start, run.start + run.count)
        ]
        assert one.position_count == len(found[one.sample])
    return found


async def run(starter, *rows: int, rules=None, backend=None, **fields: object) -> Events:
    backend = backend or ScriptedBackend(openness=at(*rows))
    running = await starter(backend)
    fields.setdefault("sampling", SAMPLING)
    fields.setdefault("probes", [probe()])
    return await running.client.generate(request(rules=rules or [rule()], **fields))


@pytest.mark.parametrize(
    ("row", "drop_sampled", "kept"),
    [(0, True, 0), (2, True, 0), (2, False, 0), (3, True, 1), (3, False, 2), (6, True, 4)],
)
async def test_no_token_sampled_at_or_after_the_firing_row_is_sent(
    starter, row: int, drop_sampled: bool, kept: int
) -> None:
    stop = monitor_pb2.Stop(drop_sampled=drop_sampled, label="why")
    events = await run(starter, row, rules=[rule(stop=stop)])
    assert tokens_of(events) == [13, 14, 15, 16, 17, 18][:kept]
    assert text_of(events) == "".join(map(chr, range(13, 13 + kept)))
    logprobs = [
        one for event in events if event.HasField("tokens") for one in event.tokens.logprobs
    ]
    assert len(logprobs) == kept
    end = finished(events)
    assert end.reason == types_pb2.FINISH_REASON_RULE
    assert (end.rule_name, end.rule_label, end.token_count) == ("grim", "why", kept)
    assert events[-1].receipt.generated_token_count == kept
    assert receipt_of(events) == {0: [row]}
    assert events[-1].receipt.rules[0].samples[0].stopped


async def test_a_rule_that_does_not_fire_changes_nothing(starter) -> None:
    events = await run(starter)
    assert tokens_of(events) == [13, 14, 15, 16, 17, 18]
    assert finished(events).reason == types_pb2.FINISH_REASON_LENGTH
    assert receipt_of(events) == {}
    assert [one.rule_name for one in events[-1].receipt.rules] == ["grim"]


async def test_a_row_beyond_the_last_token_stops_nothing(starter) -> None:
    backend = ScriptedBackend(openness=at(8, 9), overrun=2)
    events = await run(starter, backend=backend)
    assert tokens_of(events) == [13, 14, 15, 16, 17, 18]
    assert finished(events).reason == types_pb2.FINISH_REASON_LENGTH
    assert receipt_of(events) == {}


async def test_the_row_of_the_last_sampled_token_stops(starter) -> None:
    events = await run(starter, 7)
    assert tokens_of(events) == [13, 14, 15, 16, 17]
    assert finished(events).reason == types_pb2.FINISH_REASON_RULE


async def test_an_observed_rule_is_reported_alone(starter) -> None:
    observe = rule(observe=monitor_pb2.Observe())
    events = await run(starter, 1, 2, 4, 7, rules=[observe])
    assert tokens_of(events) == [13, 14, 15, 16, 17, 18]
    assert fired(events, "grim") == [1, 2, 4, 7]
    assert receipt_of(events) == {0: [1, 2, 4, 7]}
    assert not any(event.signals.HasField("values") for event in events)
    assert list(events[1].signal_table.columns) == []


async def test_rows_and_signals_end_at_the_firing_row(starter) -> None:
    captured = capture(site_set(types_pb2.POINT_RESID_POST, layers=[0]))
    events = await run(starter, 5, probes=[sent()], captures=[captured])
    assert tokens_of(events) == [13, 14, 15]
    assert all_signals(events)[0] == [0, 1, 2, 3, 4, 5]
    rows = [
        p
        for event in events
        if event.HasField("captured")
        for run in event.captured.positions
        for p in range(run.start, run.start + run.count)
    ]
    assert rows == [0, 1, 2, 3, 4, 5]
    assert events[-1].receipt.captures[0].sites[0].row_count == 6
    assert events[-1].receipt.captures[0].sites[0].dropped_row_count == 0


async def test_the_first_rule_at_a_row_ends_the_sample(starter) -> None:
    rules = [
        rule("seen", observe=monitor_pb2.Observe(), conditions=[above(0.0)]),
        rule("first", conditions=[above(1.0)]),
        rule("second", conditions=[above(2.0)]),
    ]
    backend = ScriptedBackend(openness=lambda gate, p: float(p >= 4))
    events = await run(starter, backend=backend, rules=rules)
    assert finished(events).rule_name == "first"
    assert [receipt_of(events, n) for n in range(3)] == [{0: [4]}] * 3
    assert [one.samples[0].stopped for one in events[-1].receipt.rules] == [False, True, False]


async def test_a_rule_of_one_sample_leaves_the_others(starter) -> None:
    class Second(Paced):
        """Only the second sample fires."""

        def signals(self, plan, start, end):
            found = super().signals(plan, start, end)
            if found is not None and "#1" not in plan.request_id:
                found.values[:, found.readings :] = 0
            return found

    sampling = generation_pb2.Sampling(max_tokens=6, n=3)
    events = await run(starter, backend=Second(openness=at(4)), sampling=sampling)
    assert [len(tokens_of(events, sample)) for sample in range(3)] == [6, 2, 6]
    assert receipt_of(events) == {1: [4]}
    every = rule(stop=monitor_pb2.Stop(all_samples=True, label="all"))
    events = await run(starter, backend=Second(openness=at(4)), sampling=sampling, rules=[every])
    for sample in range(3):
        end = finished(events, sample)
        assert (end.reason, end.rule_label) == (types_pb2.FINISH_REASON_RULE, "all")
    assert len(tokens_of(events, 1)) == 2
    assert receipt_of(events) == {1: [4]}


@pytest.mark.parametrize("lag", [0, 2])
async def test_a_row_beyond_the_last_token_of_a_sample_stops_no_other(starter, lag: int) -> None:
    over = asyncio.Event()

    class Uneven(Lagging):
        """The second sample begins once the first has ended and run on, and does not fire."""

        async def generate(self, job):
            second = "#1" in job.plan.request_id
            if second:
                await over.wait()
                self.openness = at()
            async with aclosing(super().generate(job)) as deltas:
                async for delta in deltas:
                    yield delta
            over.set()

    every = rule(stop=monitor_pb2.Stop(all_samples=True))
    backend = Uneven(openness=at(8), overrun=2, lag=lag)
    sampling = generation_pb2.Sampling(max_tokens=6, n=2)
    events = await run(starter, backend=backend, rules=[every], sampling=sampling)
    for sample in range(2):
        assert finished(events, sample).reason == types_pb2.FINISH_REASON_LENGTH
        assert len(tokens_of(events, sample)) == 6
    assert receipt_of(events) == {}


async def test_lost_signals_fail_a_request_that_may_be_stopped(starter) -> None:
    backend = ScriptedBackend(lost_signals=frozenset({4}))
    running = await starter(backend)
    asked = request(rules=[rule()], probes=[probe()], sampling=SAMPLING)
    events: Events = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(running.client.generation.Generate(asked), events)
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert len(tokens_of(events)) <= 2


async def test_signals_that_never_come_fail_the_request(starter) -> None:
    class Mute(ScriptedBackend):
        def signals(self, plan, start, end):
            return None

    running = await starter(Mute())
    refusal = await running.client.refusal(request(rules=[rule()], probes=[probe()]))
    assert refusal.code is grpc.StatusCode.INTERNAL


async def test_the_baseline_knows_no_rules(starter) -> None:
    events = await run(starter, 4, steer=[add()], with_baseline=True)
    ends = [event.finished for event in events if event.HasField("finished")]
    assert {(one.baseline, one.reason) for one in ends} == {
        (False, types_pb2.FINISH_REASON_RULE),
        (True, types_pb2.FINISH_REASON_LENGTH),
    }
    (divergence,) = [event.divergence for event in events if event.HasField("divergence")]
    assert len(divergence.kl) == 2


async def test_held_back_tokens_come_late_and_all_of_them(starter) -> None:
    events = await run(starter, hold_back=3, rules=[rule(observe=monitor_pb2.Observe())])
    assert tokens_of(events) == [13, 14, 15, 16, 17, 18]
    events = await run(starter, 5, hold_back=3)
    assert tokens_of(events) == [13, 14, 15]


async def test_a_session_that_stops_drops_what_is_held_back(starter) -> None:
    import asyncio

    backend = ScriptedBackend(hold=asyncio.Event(), hold_from=4)
    running = await starter(backend)
    waits = asyncio.Event()

    async def messages():
        yield start(token_ids=types_pb2.TokenIds(ids=[10, 11, 12]), sampling=SAMPLING, hold_back=2)
        await waits.wait()
        yield generation_service_pb2.SessionRequest(
            update_id=1, stop=generation_service_pb2.SessionStop()
        )

    call = running.client.generation.Session(messages(), timeout=10)
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
        if len(tokens_of(events)) == 2:
            waits.set()
    assert tokens_of(events) == [13, 14]
    assert finished(events).reason == types_pb2.FINISH_REASON_ABORTED


async def test_equal_requests_share_what_was_compiled(starter) -> None:
    running = await starter(ScriptedBackend(openness=at(4)))
    asked = request(rules=[rule()], probes=[sent()], sampling=SAMPLING)
    first = await running.client.generate(asked)
    again = await running.client.generate(asked)
    for events in (first, again):
        assert tokens_of(events) == [13, 14]
        assert all_signals(events)[0] == [0, 1, 2, 3, 4]
    assert len({id(job.plan.packed_acts) for job in running.backend.jobs}) == 1


async def test_a_sink_and_a_subscriber_see_no_withheld_row(starter) -> None:
    backend = ScriptedBackend(openness=at(4))
    running = await starter(backend, sinks=("mem=memory",))
    spec = capture(sink=capture_pb2.SinkTarget(sink_name="mem"), inline=None)
    events = await running.client.generate(
        request(rules=[rule()], probes=[probe()], sampling=SAMPLING, captures=[spec])
    )
    assert events[-1].receipt.captures[0].sites[0].row_count == 5


STEERING = steering_pb2.Steering(interventions=[add()])
GATED = add()
GATED.gate.CopyFrom(gate_pb2.Gate(conditions=[above(1.0)]))
SUMMED = gate_pb2.Condition(probe_name="mood", combine_sites=gate_pb2.COMBINE_SUM)


@pytest.mark.parametrize(
    ("rules", "reason", "field"),
    [
        ([monitor_pb2.Rule(stop=monitor_pb2.Stop())], "INVALID_VALUE", "rules[0].name"),
        ([rule(), rule()], "INVALID_VALUE", "rules[1].name"),
        ([rule(conditions=[])], "MISSING_FIELD", "rules[0].conditions"),
        ([rule(conditions=[above(1.0)] * 17)], "INVALID_VALUE", "rules[0].conditions"),
        (
            [rule(conditions=[above(1.0, "no")])],
            "INVALID_VALUE",
            "rules[0].conditions[0].probe_name",
        ),
        ([rule(conditions=[SUMMED])], "MISSING_FIELD", "rules[0].threshold"),
        ([rule(threshold=float("nan"))], "NON_FINITE", "rules[0].threshold"),
        ([rule(combine=99)], "UNKNOWN_ENUM", "rules[0].combine"),
        (
            [monitor_pb2.Rule(name="r", conditions=[above(1.0)])],
            "MISSING_FIELD",
            "rules[0]",
        ),
        (
            [rule(hold=gate_pb2.Hold(rest=gate_pb2.HoldRest()))],
            "INVALID_VALUE",
            "rules[0].hold",
        ),
        ([rule(stop=monitor_pb2.Stop(label="x" * 256))], "INVALID_VALUE", "rules[0].stop.label"),
        ([rule(f"r{n}") for n in range(17)], "INVALID_VALUE", "rules"),
        (
            [rule(steer=steering_pb2.Steering())],
            "MISSING_FIELD",
            "rules[0].steer.interventions",
        ),
        (
            [rule(steer=STEERING, hold=gate_pb2.Hold(tokens=0))],
            "INVALID_VALUE",
            "rules[0].hold.tokens",
        ),
        (
            [rule(steer=STEERING, hold=gate_pb2.Hold())],
            "MISSING_FIELD",
            "rules[0].hold",
        ),
        (
            [rule(steer=steering_pb2.Steering(interventions=[add(scale=math.inf)]))],
            "NON_FINITE",
            "rules[0].steer.interventions[0].add.scale",
        ),
        (
            [rule(steer=steering_pb2.Steering(interventions=[GATED]))],
            "INVALID_VALUE",
            "rules[0].steer.interventions[0].gate",
        ),
        (
            [rule(steer=STEERING, hold=gate_pb2.Hold(token=gate_pb2.HoldToken()))],
            "GATE_ORDER",
            "rules[0].conditions[0].probe_name",
        ),
        (
            [rule(steer=steering_pb2.Steering(interventions=[add()] * 257))],
            "INVALID_VALUE",
            "rules[0].steer.interventions",
        ),
    ],
)
async def test_rules_that_mean_nothing_are_refused(
    running: Running, rules: list[monitor_pb2.Rule], reason: str, field: str
) -> None:
    last = probe(sites=site_set(types_pb2.POINT_RESID_POST, layers=[2]))
    refusal = await running.client.refusal(request(rules=rules, probes=[last]))
    assert refusal.brief == (grpc.StatusCode.INVALID_ARGUMENT, f"REASON_{reason}", field)


OFF = gain_pb2.Gain(factor=0.0)
GATED_BEHIND = add(sites=site_set(types_pb2.POINT_RESID_POST, layers=[2]))
GATED_BEHIND.gate.CopyFrom(GATED.gate)


@pytest.mark.parametrize(
    ("own", "gains", "reason", "field"),
    [
        ([add()], [gain_pb2.Gain()], "MISSING_FIELD", "rules[0].gain.factor"),
        ([add()], [gain_pb2.Gain(factor=17.0)], "INVALID_VALUE", "rules[0].gain.factor"),
        ([add()], [gain_pb2.Gain(factor=math.nan)], "NON_FINITE", "rules[0].gain.factor"),
        ([], [OFF], "INVALID_VALUE", "rules[0].gain"),
        (
            [add()],
            [gain_pb2.Gain(factor=0.0, interventions=[0, 1])],
            "INVALID_VALUE",
            "rules[0].gain.interventions[1]",
        ),
        ([GATED_BEHIND], [OFF], "NOT_SUPPORTED", "rules[0].gain"),
        ([add()], [OFF, OFF], "NOT_SUPPORTED", "rules[1].gain"),
        ([add(), add()], [OFF], "NOT_SUPPORTED", "rules[0].gain"),
    ],
)
async def test_gains_that_mean_nothing_are_refused(
    running: Running,
    own: list[steering_pb2.Intervention],
    gains: list[gain_pb2.Gain],
    reason: str,
    field: str,
) -> None:
    refusal = await running.client.refusal(
        request(
            steering=steering_pb2.Steering(interventions=own),
            rules=[rule(f"r{number}", gain=gain) for number, gain in enumerate(gains)],
            probes=[probe()],
        )
    )
    assert (refusal.brief[1], refusal.brief[2]) == (f"REASON_{reason}", field)


def adding(start: int, end: int) -> steering_pb2.Intervention:
    """An addition at some positions, behind the probe."""
    return add(where=selector(window(start, end)))


async def test_gains_multiply_additions_that_meet_no_other(running: Running) -> None:
    own = steering_pb2.Steering(interventions=[adding(0, 2), adding(2, 3)])
    gain = gain_pb2.Gain(factor=0.5, interventions=[1])
    message = request(steering=own, rules=[rule(gain=gain)], probes=[probe()])
    assert (await running.client.generate(message))[-1].HasField("receipt")
    (job,) = running.backend.jobs
    gates = [one.gate for one in job.plan.acts if one.reading is None]
    assert [gate and (gate.invert, gate.factor) for gate in gates] == [None, (True, 0.5)]
    own.interventions.append(adding(1, 3))
    message = request(steering=own, rules=[rule(gain=gain)], probes=[probe()])
    refusal = await running.client.refusal(message)
    assert refusal.brief[1:] == ("REASON_NOT_SUPPORTED", "rules[0].gain")


async def test_a_run_of_a_stopped_sample_ends_at_the_firing_row(starter) -> None:
    running = await starter(ScriptedBackend(openness=at(4)))
    spec = capture(run=capture_pb2.RunTarget(run_id="kept"), inline=None)
    events = await running.client.generate(
        request(rules=[rule()], probes=[probe()], sampling=SAMPLING, captures=[spec])
    )
    assert events[-1].receipt.captures[0].run_id == "kept"
    (listed,) = (await running.client.runs.ListRuns(run_service_pb2.ListRunsRequest())).runs
    assert [(one.start, one.count) for one in listed.positions] == [(0, 5)]
