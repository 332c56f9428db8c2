"""Gates of the server-wide steering over a real channel."""

import asyncio

import pytest

from rheostat_engine import Kind
from rheostat_server.admission.admit import admit
from rheostat_server.steering import probes
from rheostat_wire.v1 import (
    gate_pb2,
    generation_service_pb2,
    steering_pb2,
    steering_service_pb2,
    types_pb2,
    vector_pb2,
)

from ..conftest import rest
from ..fakes import ScriptedBackend
from ..messages import ONES, add, request, site_set, tensor
from ..talks import SessionCall, start, update
from ..uploads import digest, refusal_of

pb = steering_service_pb2


async def held(running) -> steering_service_pb2.GetGlobalResponse:
    return await running.client.steering.GetGlobal(pb.GetGlobalRequest())


async def generate(running, message) -> None:
    await rest(running.client.generation.Generate(message))


def probe(name: str = "p", layers: tuple[int, ...] = (0,), **fields: object) -> gate_pb2.Probe:
    read = vector_pb2.Readout(vector=tensor(ONES))
    sites = site_set(types_pb2.POINT_RESID_PRE, layers=list(layers))
    return gate_pb2.Probe(**{"name": name, "sites": sites, "read": read, **fields})


def gated(name: str = "p", **fields: object) -> steering_pb2.Intervention:
    """An addition at resid_post 1 that a probe gates."""
    intervention = add(tensor(ONES))
    condition = gate_pb2.Condition(probe_name=name, above=0.5, **fields)
    intervention.gate.conditions.append(condition)
    return intervention


async def set_policy(running, *steer: steering_pb2.Intervention, probes=None) -> int:
    policy = pb.Policy(
        steering={"interventions": steer}, probes=[probe()] if probes is None else probes
    )
    answer = await running.client.steering.SetGlobal(pb.SetGlobalRequest(policy=policy))
    return answer.version


async def test_gates_of_the_server_read_first_and_gate_every_request(running) -> None:
    await set_policy(running, gated(after_prompt=True), probes=[probe(layers=(0, 1))])
    answer = await held(running)
    (kept,) = answer.policy.probes
    assert kept.read.vector.digest == digest(ONES.tobytes())
    assert answer.policy.steering.interventions[0].gate == gated(after_prompt=True).gate
    own = request(steer=[gated()], probes=[probe()])
    for message in (request(), own, request(with_baseline=True)):
        await generate(running, message)
    plans = [job.plan for job in running.backend.jobs]
    assert len(plans) >= 4  # the baseline has a plan of its own
    for plan in plans:
        first = plan.acts[0]
        assert first.gate is not None
        assert first.gate.columns == (0, 1)
        assert first.gate.conditions[0].decided_at == 2
        reads = [act for act in plan.acts if act.kind is Kind.READ]
        assert reads[0].reading.column == 0
        assert len(reads[0].rows) == 2
    (both,) = (plan for plan in plans if len(plan.acts) == 4)
    assert [act.kind for act in both.acts] == [Kind.ADD, Kind.ADD, Kind.READ, Kind.READ]
    assert both.acts[1].gate.columns == (2,)
    assert both.acts[3].reading.column == 2


async def test_means_of_prompts_are_those_of_each_request(running) -> None:
    mean = probe(rows=gate_pb2.PROBE_ROWS_PROMPT_MEAN)
    await set_policy(running, gated(after_prompt=True), probes=[mean])
    own = probe(layers=(1,), rows=gate_pb2.PROBE_ROWS_PROMPT_MEAN, signals=True)
    for message in (request(), request(probes=[own])):
        await generate(running, message)
    for job in running.backend.jobs:
        reads = [act for act in job.plan.acts if act.kind is Kind.READ]
        assert [(act.reading.mean_at, act.spans) for act in reads] == [(2, ((0, 3),))] * len(reads)
    assert len(reads) == 2


async def test_explanations_and_receipts_name_the_probes_of_gates(running) -> None:
    await set_policy(running, gated())
    own = request(steer=[gated("q"), add(tensor(ONES))], probes=[probe("q")])
    asked = generation_service_pb2.ExplainRequest(request=own)
    explained = await running.client.generation.Explain(asked)
    for answer in (explained, (await running.client.generate(own))[-1].receipt):
        names = [list(one.intervention.gate_probe_names) for one in answer.interventions]
        assert names == [["p"], ["q"], []]


async def test_names_of_the_server_and_of_a_request_do_not_meet(running) -> None:
    await set_policy(running, gated())
    own = request(steer=[gated("q")], probes=[probe("q", layers=(1,))])
    await generate(running, own)
    call = generate(running, request(steer=[gated("p")]))
    refusal = await refusal_of(call)
    assert refusal.field == "steering.interventions[0].gate.conditions[0].probe_name"


async def test_what_no_longer_fits_beside_the_policy_is_refused_by_its_field(
    running, monkeypatch
) -> None:
    monkeypatch.setattr(probes, "MAX_COLUMNS", 3)
    message = request(steer=[gated()], probes=[probe(layers=(0, 1))])
    await generate(running, message)
    await set_policy(running, gated(), probes=[probe(layers=(0, 1))])
    refusal = await refusal_of(generate(running, message))
    assert (refusal.reason, refusal.field) == ("REASON_INVALID_VALUE", "probes[0].sites")
    assert "of which the server-wide steering takes 2" in refusal.message
    await generate(running, request(steer=[gated()], probes=[probe()]))


async def test_more_gates_than_an_engine_has_are_refused_with_the_policy_named(running) -> None:
    await set_policy(running, gated())
    many = [gated(for_tokens=1 + count) for count in range(32)]
    refusal = await refusal_of(generate(running, request(steer=many, probes=[probe()])))
    assert (refusal.reason, refusal.field) == ("REASON_INVALID_VALUE", "steering")
    assert "together with the server-wide steering" in refusal.message
    await admit(request(steer=many[:31], probes=[probe()]), running.manager.admission)


async def test_a_session_cannot_shed_a_gate_by_an_update(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    await set_policy(running, gated())
    talk = SessionCall(running)
    await talk.say(start(request_id="s"), update(1, add(scale=7.0)))
    await talk.hear("applied")
    running.backend.hold.set()
    await talk.end()
    (job,) = running.backend.jobs
    ((_, acts, _),) = running.backend.updates
    assert [(act.scale, act.gate) for act in acts[:2]] == [
        (job.plan.acts[0].scale, job.plan.acts[0].gate),
        (7.0, None),
    ]
    (plan,) = [one.plan for one in running.backend.update_calls[0]]
    assert plan.packed_acts.gates == plan.signals.kept == job.plan.packed_acts.gates


@pytest.mark.parametrize(
    ("steer", "probes", "reason", "field"),
    [
        ([gated()], [], "INVALID_VALUE", "steering.interventions[0].gate.conditions[0].probe_name"),
        ([add()], [probe()], "INVALID_VALUE", "probes[0]"),
        ([gated()], [probe(signals=True)], "NOT_SUPPORTED", "probes[0].signals"),
        ([gated()], [probe(), probe()], "INVALID_VALUE", "probes[1].name"),
        ([gated()], [probe(name="/")], "INVALID_VALUE", "probes[0].name"),
        ([gated()], [probe(sites=None)], "MISSING_FIELD", "probes[0].sites"),
        (
            [gated()],
            [probe(layers=(2,))],
            "GATE_ORDER",
            "steering.interventions[0].gate.conditions[0].probe_name",
        ),
    ],
)
async def test_gates_that_no_request_can_have_are_refused(
    running, steer, probes, reason, field
) -> None:
    refusal = await refusal_of(set_policy(running, *steer, probes=probes))
    assert (refusal.reason, refusal.field) == (f"REASON_{reason}", f"policy.{field}")
    assert (await held(running)).version == 0
