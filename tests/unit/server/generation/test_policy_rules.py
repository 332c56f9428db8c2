"""Rules of the server-wide policy: no request can shed them, and each firing is logged."""

import asyncio
import logging
from dataclasses import replace

import grpc
import pytest

from rheostat_engine import Dropped, SignalRows
from rheostat_server.admission.admit import admit
from rheostat_server.engine.backend import Job
from rheostat_server.requests import policy_audit
from rheostat_server.runs.store import Run, RunDraft
from rheostat_server.sweeps import sources
from rheostat_wire.v1 import (
    gain_pb2,
    gate_pb2,
    generation_pb2,
    lens_service_pb2,
    monitor_pb2,
    receipt_pb2,
    run_service_pb2,
    steering_pb2,
    steering_service_pb2,
    types_pb2,
)

from ..conftest import Events, Running, rest
from ..fakes import ScriptedBackend
from ..messages import ONES, above, add, probe, request, selector, site_set, tensor, window
from ..streams import kinds, settled
from ..sweeps.patched import PatchedBackend, order
from ..talks import SessionCall, start, update
from ..uploads import digest, refusal_of
from .lagging import Lagging
from .test_rules import at, finished, rule, tokens_of

Code = grpc.StatusCode
SAMPLING = generation_pb2.Sampling(max_tokens=6)
OBSERVE = monitor_pb2.Observe()
GATE = gate_pb2.Gate(conditions=[above(1.0, "mood")])


@pytest.fixture(autouse=True)
def _logged(caplog) -> None:
    caplog.set_level(logging.INFO, "rheostat_server.audit")


def lines(caplog) -> list[str]:
    """The audit log."""
    return [one.getMessage() for one in caplog.records if one.name == "rheostat_server.audit"]


async def set_rules(running: Running, *rules: monitor_pb2.Rule, **policy: object) -> int:
    policy.setdefault("probes", [probe()])
    answer = await running.client.steering.SetGlobal(
        steering_service_pb2.SetGlobalRequest(policy={"rules": rules, **policy})
    )
    return answer.version


async def run(running: Running, **fields: object) -> Events:
    fields.setdefault("sampling", SAMPLING)
    return await running.client.generate(request(request_id="r", **fields))


def rules_of(events: Events) -> list[tuple[str, bool, list[int]]]:
    """Name, whether it is the server's, and positions of each rule of a receipt."""
    return [
        (
            one.rule_name,
            one.server_wide,
            [
                position
                for fired in one.samples
                for run in fired.positions
                for position in range(run.start, run.start + run.count)
            ],
        )
        for one in events[-1].receipt.rules
    ]


async def test_a_rule_of_the_policy_stops_every_request(starter, caplog) -> None:
    running = await starter(ScriptedBackend(openness=at(4)))
    assert await set_rules(running, rule(stop=monitor_pb2.Stop(label="grim"))) == 1
    events = await run(running)
    end = finished(events)
    assert (end.reason, end.rule_name) == (types_pb2.FINISH_REASON_RULE, "grim")
    assert (end.rule_label, end.policy_version) == ("grim", 1)
    assert tokens_of(events) == [13, 14]  # the inputs of rows 3 and 4
    assert not any(event.HasField("signals") or event.HasField("signal_table") for event in events)
    assert rules_of(events) == [("grim", True, [4])]
    assert events[-1].receipt.rules[0].samples[0].stopped
    assert events[-1].receipt.global_version == 1
    assert lines(caplog) == [
        "policy version=1 rule=grim action=stop request=r sample=0 positions=4 ended=sample"
    ]
    await settled(running)


@pytest.mark.parametrize("lag", [0, 1, 3])
async def test_the_log_says_that_a_rule_ended_a_sample_only_if_it_did(starter, caplog, lag) -> None:
    """The engine may compute a row beyond the last token, and report it before the token."""
    running = await starter(Lagging(openness=at(8), overrun=2, lag=lag))
    await set_rules(running, rule())
    events = await run(running)
    assert finished(events).reason == types_pb2.FINISH_REASON_LENGTH
    assert rules_of(events) == [("grim", True, [])]
    stopping = "policy version=1 rule=grim action=stop request=r sample=0 positions="
    assert lines(caplog) == [f"{stopping}8"]
    running.backend.openness = at(7)
    events = await run(running)
    assert finished(events).reason == types_pb2.FINISH_REASON_RULE
    assert events[-1].receipt.rules[0].samples[0].stopped
    assert lines(caplog)[1:] == [f"{stopping}7 ended=sample"]
    await settled(running)


async def test_a_rule_that_observes_is_in_the_receipt_and_the_log_alone(starter, caplog) -> None:
    running = await starter(ScriptedBackend(openness=at(0, 2, 4, 5)))
    plain = await run(running)
    await set_rules(running, rule(observe=OBSERVE))
    events = await run(running)
    assert tokens_of(events) == tokens_of(plain)
    assert list(dict.fromkeys(kinds(events))) == list(dict.fromkeys(kinds(plain)))
    assert rules_of(events) == [("grim", True, [0, 2, 4, 5])]
    assert [one.partition("positions=")[2] for one in lines(caplog)] == ["0,2", "4", "5"]
    await settled(running)


async def test_the_rules_of_a_request_are_apart_from_those_of_the_policy(starter, caplog) -> None:
    running = await starter(ScriptedBackend(openness=at(3, gate=1)))
    await set_rules(running, rule(observe=OBSERVE, conditions=[above(7.0)]))
    own = rule(observe=OBSERVE, conditions=[above(1.0)])
    events = await run(running, probes=[probe()], rules=[own])
    fired = [one for event in events for one in event.signals.firings]
    found = rules_of(events)
    assert sorted(found, key=lambda one: one[1]) == found
    assert [one[:2] for one in found] == [("grim", False), ("grim", True)]
    # The scripted engine opens one of the two gates.
    assert sorted(one[2] for one in found) == [[], [3]]
    assert len(fired) == (found[0][2] == [3])
    assert len(lines(caplog)) == (found[1][2] == [3])


async def test_a_rule_of_the_policy_steers(starter, caplog) -> None:
    running = await starter(ScriptedBackend(openness=lambda gate, position: float(position == 4)))
    steer = steering_pb2.Steering(interventions=[add(), add(scale=2.0)])
    await set_rules(running, rule(steer=steer), steering={"interventions": [add(scale=3.0)]})
    events = await run(running, steer=[add(scale=4.0)])
    refs = [one.intervention for one in events[-1].receipt.interventions]
    of = receipt_pb2.ORIGIN_GLOBAL
    assert [(one.origin, one.index, one.rule_name) for one in refs] == [
        (of, 0, ""),
        (of, 0, "grim"),
        (of, 1, "grim"),
        (receipt_pb2.ORIGIN_REQUEST, 0, ""),
    ]
    (job, *_) = running.backend.jobs
    acts = [act for act in job.plan.acts if act.acts]
    assert [(act.scale, act.gate is not None) for act in acts] == [
        (3.0, False),
        (1.0, True),
        (2.0, True),
        (4.0, False),
    ]
    (line,) = lines(caplog)
    assert "action=steer" in line
    await settled(running)


HALF = gain_pb2.Gain(factor=0.5)


async def test_a_rule_of_the_policy_multiplies_the_steering_of_requests(starter, caplog) -> None:
    running = await starter(ScriptedBackend(openness=lambda gate, position: float(position == 4)))
    before = site_set(types_pb2.POINT_RESID_POST, layers=[0])
    server = steering_pb2.Steering(interventions=[add(scale=3.0, sites=before)])
    await set_rules(running, rule(gain=HALF, hold={"next_token": {}}), steering=server)
    own = [add(sites=site_set(types_pb2.POINT_RESID_POST, layers=[layer])) for layer in (1, 2)]
    events = await run(running, steer=own)
    (job,) = running.backend.jobs
    gates = [act.gate for act in job.plan.acts if act.acts]
    assert gates[0] is None  # the server-wide steering
    assert [(gate.invert, gate.factor, gate.late > 0) for gate in gates[1:]] == [
        (True, 0.5, False),
        (True, 0.5, False),
    ]
    assert rules_of(events) == [("grim", True, [4])]
    assert [one.partition(" request=")[0] for one in lines(caplog)] == [
        "policy version=1 rule=grim action=gain"
    ]
    await run(running)  # without steering of its own
    assert len(running.backend.jobs) == 2


GATED = add()
GATED.gate.CopyFrom(GATE)


@pytest.mark.parametrize("own", [[GATED], [add(), add()]])
async def test_no_request_sheds_a_gain_of_the_policy(starter, own) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    await set_rules(running, rule(gain=HALF))
    probes = [probe(name="mood")] if own[0].HasField("gate") else []
    refusal = await refusal_of(run(running, steer=own, probes=probes))
    assert refusal.brief == (Code.FAILED_PRECONDITION, "REASON_NOT_SUPPORTED", "steering")
    assert not running.backend.jobs
    call = SessionCall(running)
    await call.say(start(request_id="s", steer=[add()]), update(1, add(scale=2.0)))
    assert (await call.hear("refused")).update_id == 1
    running.backend.hold.set()
    assert kinds(await call.end())[-1] == "receipt"
    await settled(running)


async def test_a_policy_is_given_back_with_digests(running) -> None:
    steered = add(tensor(ONES), scale=2.0)
    await set_rules(running, rule(steer=steering_pb2.Steering(interventions=[steered])))
    answer = await running.client.steering.GetGlobal(steering_service_pb2.GetGlobalRequest())
    (found,) = answer.policy.rules
    assert found.steer.interventions[0].add.vector.digest == digest(ONES.tobytes())
    again = await running.client.steering.SetGlobal(
        steering_service_pb2.SetGlobalRequest(policy=answer.policy)
    )
    assert again.version == 2
    held = await running.client.steering.GetGlobal(steering_service_pb2.GetGlobalRequest())
    assert held.policy == answer.policy


@pytest.mark.parametrize(
    ("bad", "reason", "field"),
    [
        (rule(gain=gain_pb2.Gain()), "REASON_MISSING_FIELD", "rules[0].gain.factor"),
        (
            rule(gain=gain_pb2.Gain(factor=0.5, interventions=[0])),
            "REASON_INVALID_VALUE",
            "rules[0].gain.interventions",
        ),
        (
            rule(gain=gain_pb2.Gain(factor=0.5), hold={"tokens": 0}),
            "REASON_INVALID_VALUE",
            "rules[0].hold.tokens",
        ),
        (rule("no name"), "REASON_INVALID_VALUE", "rules[0].name"),
        (
            rule(conditions=[above(1.0, "other")]),
            "REASON_INVALID_VALUE",
            "rules[0].conditions[0].probe_name",
        ),
        (
            rule(steer=steering_pb2.Steering()),
            "REASON_MISSING_FIELD",
            "rules[0].steer.interventions",
        ),
    ],
)
async def test_malformed_rules_are_refused_by_name(running, bad, reason, field) -> None:
    refusal = await refusal_of(set_rules(running, bad))
    assert refusal.brief[1:] == (reason, f"policy.{field}")
    held = await running.client.steering.GetGlobal(steering_service_pb2.GetGlobalRequest())
    assert held.version == 0


async def test_what_the_rules_would_not_read_is_refused(running) -> None:
    await set_rules(running, rule(observe=OBSERVE))
    refusal = await refusal_of(run(running, with_baseline=True))
    assert refusal.brief == (Code.FAILED_PRECONDITION, "REASON_NOT_SUPPORTED", "with_baseline")
    await settled(running)


async def test_a_session_takes_updates_and_sheds_no_rule(starter, caplog) -> None:
    opens = lambda gate, position: float(position == 3)  # noqa: E731
    running = await starter(ScriptedBackend(openness=opens, hold=asyncio.Event()))
    steer = steering_pb2.Steering(interventions=[add(scale=5.0)])
    await set_rules(running, rule(observe=OBSERVE), rule(name="push", steer=steer))
    call = SessionCall(running)
    await call.say(start(request_id="s", steer=[add(scale=2.0)]), update(1, add(scale=3.0)))
    assert (await call.hear("applied")).update_id == 1
    ((_, acts, _),) = running.backend.updates
    assert [(act.scale, act.gate is not None) for act in acts if act.acts] == [
        (5, True),
        (3, False),
    ]
    running.backend.hold.set()
    events = await call.end()
    assert rules_of(events) == [("grim", True, [3]), ("push", True, [3])]
    assert len(lines(caplog)) == 2
    await settled(running)


async def test_a_sweep_goes_on_under_the_policy_with_which_it_began(starter, monkeypatch) -> None:
    running = await starter(PatchedBackend())

    async def admit_later(request, admission):
        await set_rules(running, rule(stop={}))
        return await admit(request, replace(running.manager.admission, watches=None))

    monkeypatch.setattr(sources, "admit", admit_later)
    cells = [event.cell for event in await rest(running.client.sweep.Sweep(order()))]
    assert not any(cell.HasField("error") for cell in cells)
    await settled(running)


async def test_a_sweep_is_refused(starter) -> None:
    running = await starter(PatchedBackend())
    await set_rules(running, rule(observe=OBSERVE))
    refusal = await refusal_of(running.client.sweep.Sweep(order()).read())
    assert refusal.reason == "REASON_NOT_SUPPORTED"
    assert not running.backend.jobs


async def test_a_prompt_whose_rows_do_not_all_come_is_refused(starter) -> None:
    running = await starter(ScriptedBackend(openness=at(1)))
    await set_rules(running, rule())
    message = lens_service_pb2.LensRequest(
        prompt=types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=[10, 11, 12])),
        sites=site_set(types_pb2.POINT_RESID_POST, layers=[0]),
        top_k=1,
    )
    refusal = await refusal_of(running.client.lens.Lens(message).read())
    assert refusal.brief[:2] == (Code.FAILED_PRECONDITION, "REASON_NOT_SUPPORTED")
    await settled(running)


@pytest.mark.parametrize(("begin", "refused"), [(0, True), (2, True), (1, False)])
async def test_a_stored_run_whose_prompt_is_stopped_before_all_its_rows_came_is_refused(
    starter, begin: int, refused: bool
) -> None:
    running = await starter(ScriptedBackend(openness=at(1)))
    await set_rules(running, rule())
    call = running.client.runs.CaptureRun(
        run_service_pb2.CaptureRunRequest(
            prompt=types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=[10, 11, 12])),
            sites=site_set(types_pb2.POINT_RESID_POST, layers=[0]),
            where=selector(window(begin, 3 if refused else 2)),
        )
    )
    if refused:
        refusal = await refusal_of(call)
        assert refusal.brief[:2] == (Code.FAILED_PRECONDITION, "REASON_NOT_SUPPORTED")
        assert "ended this prompt early" in refusal.message
    else:
        (positions,) = (await call).run.positions
        assert (positions.start, positions.count) == (1, 1)
    stats = await settled(running)
    assert (stats.run_count, stats.leaked_count) == (not refused, 0)


async def test_a_run_without_all_its_rows_is_never_seen_by_another_client(
    starter, monkeypatch
) -> None:
    running = await starter(ScriptedBackend(openness=at(1)))
    await set_rules(running, rule())
    runs = running.manager.runs
    keep = runs.keep

    def keep_and_delete(draft: RunDraft) -> Run | None:
        kept = keep(draft)
        runs.delete(draft.id, "")  # as another client does at once
        return kept

    monkeypatch.setattr(runs, "keep", keep_and_delete)
    call = running.client.runs.CaptureRun(
        run_service_pb2.CaptureRunRequest(
            prompt=types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=[10, 11, 12])),
            sites=site_set(types_pb2.POINT_RESID_POST, layers=[0]),
            where=selector(window(0, 3)),
            run_id="shared",
        )
    )
    refusal = await refusal_of(call)
    assert refusal.reason == "REASON_NOT_SUPPORTED"
    assert "ended this prompt early" in refusal.message
    await settled(running)


@pytest.mark.parametrize(
    ("policy", "field"), [({"rules": [rule()]}, "probes"), ({"probes": []}, "rules")]
)
async def test_a_pipeline_has_no_rules_or_probes_in_its_policy(starter, policy, field) -> None:
    backend = ScriptedBackend()
    backend.info = replace(backend.info, pipeline_parallel=2)
    running = await starter(backend)
    policy = {"probes": [probe()], "rules": [rule()], **policy}
    message = steering_service_pb2.SetGlobalRequest(policy=policy)
    refusal = await refusal_of(running.client.steering.SetGlobal(message))
    assert refusal.brief == (
        Code.FAILED_PRECONDITION,
        "REASON_NOT_SUPPORTED",
        f"policy.{field}",
    )
    assert "pipeline parallelism" in refusal.message


async def test_a_request_keeps_the_rules_that_it_was_admitted_under(starter, caplog) -> None:
    running = await starter(ScriptedBackend(openness=at(4)))
    await set_rules(running, rule())
    await running.client.steering.SetGlobal(
        steering_service_pb2.SetGlobalRequest(policy={}, expected_version=1)
    )
    events = await run(running)
    assert finished(events).reason == types_pb2.FINISH_REASON_LENGTH
    assert (rules_of(events), lines(caplog)) == ([], [])


async def test_what_is_lost_of_a_request_is_logged(starter, caplog) -> None:
    running = await starter(ScriptedBackend(openness=at(4), lost_signals=frozenset({4})))
    await set_rules(running, rule(observe=OBSERVE))
    await run(running)
    assert lines(caplog) == ["policy version=1 request=r sample=0 unread=4"]
    await set_rules(running, rule(), rule(name="seen", observe=OBSERVE))
    refusal = await refusal_of(run(running))
    assert refusal.code == Code.DATA_LOSS
    assert lines(caplog)[-1] == "policy version=2 request=r sample=0 unread=4"


class ReadsOn(ScriptedBackend):
    """Brings the signals of two more steps after a sample was aborted."""

    def _release(self, job: Job, computed: int) -> None:
        for position in range(computed, computed + 2):
            self._signal(job, position, position + 1)
        super()._release(job, computed)


@pytest.mark.parametrize("lost", [frozenset(), frozenset({3, 4})])
async def test_what_fires_after_a_cancel_is_logged(starter, caplog, lost) -> None:
    backend = ReadsOn(openness=at(1, 3, 4), hold=asyncio.Event(), lost_signals=lost)
    running = await starter(backend)
    await set_rules(running, rule(observe=OBSERVE), rule(name="late", conditions=[above(9.0)]))
    call = running.client.generation.Generate(request(request_id="r", sampling=SAMPLING))
    while (await call.read()).WhichOneof("event") != "tokens":
        pass
    call.cancel()
    await settled(running)
    found = [one.removeprefix("policy version=1 ") for one in lines(caplog)]
    assert found == [
        "rule=grim action=observe request=r sample=0 positions=1",
        *(
            ["request=r sample=0 unread=3", "request=r sample=0 unread=4"]
            if lost
            else [
                "rule=grim action=observe request=r sample=0 positions=3",
                "rule=grim action=observe request=r sample=0 positions=4",
            ]
        ),
    ]
    assert running.manager.budget.used == 0


async def test_a_stop_that_comes_after_a_cancel_has_ended_nothing(starter, caplog) -> None:
    running = await starter(ReadsOn(openness=at(3), hold=asyncio.Event()))
    await set_rules(running, rule())
    call = running.client.generation.Generate(request(request_id="r", sampling=SAMPLING))
    while (await call.read()).WhichOneof("event") != "tokens":
        pass
    call.cancel()
    await settled(running)
    line = "policy version=1 rule=grim action=stop request=r sample=0 positions=3"
    assert lines(caplog) == [line]


async def test_signals_that_cannot_be_handled_are_logged_as_unread(starter, caplog) -> None:
    class Lossy(ScriptedBackend):
        """Cannot bring signals to the server."""

        def start(self, deliver, lost) -> None:
            super().start(
                lambda one: deliver(Dropped(one) if isinstance(one, SignalRows) else one), lost
            )

    running = await starter(Lossy(hold=asyncio.Event()))
    await set_rules(running, rule(observe=OBSERVE))
    refusal = await refusal_of(run(running))
    assert refusal.code == Code.INTERNAL
    assert lines(caplog) == ["policy version=1 request=r sample=0 unread=0-2"]
    await settled(running)


async def test_firings_without_a_line_are_counted(starter, caplog, monkeypatch) -> None:
    monkeypatch.setattr(policy_audit, "_BURST", 3)
    monkeypatch.setattr(policy_audit, "_RATE", 0.0)
    monkeypatch.setattr(policy_audit, "_COUNT_SECONDS", 0.05)
    running = await starter(ScriptedBackend(openness=lambda gate, position: 1.0))
    await set_rules(running, rule(observe=OBSERVE))
    await run(running)
    counted = "policy version=1 rule=grim action=observe firings=3 positions=3 (in no other line)"
    while counted not in lines(caplog):
        await settled(running)
    assert [one.partition("positions=")[2] for one in lines(caplog)[:3]] == ["0-2", "3", "4"]
    assert len(lines(caplog)) == 4


async def test_counts_are_logged_before_the_server_ends(starter, caplog, monkeypatch) -> None:
    monkeypatch.setattr(policy_audit, "_BURST", 0)
    running = await starter(ScriptedBackend(openness=at(4)))
    await set_rules(running, rule(observe=OBSERVE))
    await run(running)
    assert lines(caplog) == []
    await running.server.stop(0)
    assert [one.partition("firings=")[2] for one in lines(caplog)] == [
        "1 positions=1 (in no other line)"
    ]


async def test_lines_of_lost_positions_are_limited_too(caplog) -> None:
    audit = policy_audit.PolicyAudit(lambda: 0.0)
    for version in (2, 3, 3):
        for _ in range(policy_audit._BURST):
            audit.unread("a", 0, version, 5, 7)
    assert lines(caplog) == ["policy version=2 request=a sample=0 unread=5-6"] * policy_audit._BURST
    audit.flush()
    assert lines(caplog)[policy_audit._BURST :] == [
        f"policy version=3 losses={2 * policy_audit._BURST} unread_positions="
        f"{4 * policy_audit._BURST} (in no other line)"
    ]


async def test_lines_come_back_with_time(caplog) -> None:
    now = 0.0
    audit = policy_audit.PolicyAudit(lambda: now)
    fired = policy_audit.Rule("r", None, None, policy=2)  # type: ignore[arg-type]  # no gate needed
    for _ in range(policy_audit._BURST + 5):
        audit.fired("a", 0, fired, ((1, 3), (5, 6)), stopped=False)
    assert len(lines(caplog)) == policy_audit._BURST
    now += 1.0
    for _ in range(50):
        audit.fired("a", 0, fired, ((1, 3),), stopped=False)
    assert len(lines(caplog)) == policy_audit._BURST + policy_audit._RATE
    audit.flush()
    assert lines(caplog)[-1].endswith("firings=35 positions=75 (in no other line)")
