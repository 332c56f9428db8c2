"""Probes and gates: the acts that they become, and all that is refused of them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rheostat_engine import (
    NEVER,
    OPEN_END,
    Activation,
    Combine,
    Form,
    Gate,
    GateCondition,
    Hold,
    Kind,
    Normalise,
    Point,
    Pool,
    Reading,
)
from rheostat_server import errors
from rheostat_server.admission.compiled_requests import CompiledRequests
from rheostat_server.generation.explain import cache_keys
from rheostat_wire.v1 import gate_pb2, generation_pb2, generation_service_pb2, types_pb2, vector_pb2

from ..admissions import admission_context, admitted, named, refused, stored
from ..fakes import INFO, SITES, WIDTH
from ..messages import (
    FIRST,
    GENERATED,
    ONES,
    PROMPT,
    above,
    add,
    at_post1,
    generated,
    probe,
    request,
    selector,
    site_set,
    tensor,
    window,
)

PRE, MID, POST = types_pb2.POINT_RESID_PRE, types_pb2.POINT_RESID_MID, types_pb2.POINT_RESID_POST
ATTN, MLP = types_pb2.POINT_ATTN_OUT, types_pb2.POINT_MLP_OUT
ROUTERS = types_pb2.POINT_ROUTER_LOGITS
ALWAYS = ((0, OPEN_END),)
MEAN = gate_pb2.PROBE_ROWS_PROMPT_MEAN
POST0, POST1 = 4, 8
"""Indices of the sites resid_post 0 and 1."""


def gate(*conditions: gate_pb2.Condition, **fields: object) -> gate_pb2.Gate:
    return gate_pb2.Gate(conditions=conditions or [above(0.5)], **fields)


def gated(
    with_gate: gate_pb2.Gate | None = None,
    probes: list[gate_pb2.Probe] | None = None,
    **fields: object,
) -> generation_service_pb2.GenerateRequest:
    """An addition at resid_post 1 with a gate, and a probe at resid_post 0."""
    intervention = at_post1(add=add().add, gate=with_gate or gate(), **fields)
    return request(steer=[intervention], probes=[probe()] if probes is None else probes)


def condition(**fields: object) -> GateCondition:
    """The first condition of `gated`, unless `fields` say otherwise."""
    default = GateCondition((0,), Pool.LAST, Combine.ANY, 0.5, math.inf, 1, NEVER)
    return default._replace(**fields)


def engine_gate(message: generation_service_pb2.GenerateRequest) -> Gate:
    """The gate of the first intervention."""
    found = admitted(message).plan.acts[0].gate
    assert found is not None
    return found


def test_an_intervention_acts_as_far_as_its_gate_is_open() -> None:
    own, read = admitted(gated()).plan.acts
    assert own.kind is Kind.ADD
    assert own.gate == Gate((condition(),), Combine.ALL, Form.STEP, 0.5, 0.0, Hold.TOKEN)
    assert (read.kind, read.rows, read.spans, read.gate) == (
        Kind.READ,
        ((POST0, (0,)),),
        ALWAYS,
        None,
    )
    assert read.reading == Reading(Normalise.NONE, Activation.IDENTITY, 0.0, 0.0, 0)


def test_every_act_of_an_intervention_has_its_gate() -> None:
    rows = np.ones((1, 2, WIDTH), np.float32)
    message = gated(where=selector(window(0, 2)))
    message.steering.interventions[0].replace.rows.CopyFrom(tensor(rows).inline)
    *own, _ = admitted(message).plan.acts
    assert [act.kind for act in own] == [Kind.REPLACE, Kind.REPLACE]
    assert own[0].gate is not None
    assert own[0].gate == own[1].gate


def test_a_probe_has_a_column_for_each_site() -> None:
    both = site_set(PRE, POST, layers=[0])
    rows = tensor(np.concatenate([FIRST]))
    probes = [probe("a", rows, sites=both), probe("b", where=selector(PROMPT), bias=-1.0)]
    conditions = above(0.5, "a", combine_sites=gate_pb2.COMBINE_VOTE), above(2.0, "b")
    acts = admitted(gated(gate(*conditions), probes)).plan.acts
    assert [(act.rows, act.spans) for act in acts[1:]] == [
        (((0, (0,)), (POST0, (0,))), ALWAYS),
        (((POST0, (0,)),), ((0, 3),)),
    ]
    assert [act.reading.column for act in acts[1:] if act.reading] == [0, 2]
    assert acts[2].reading == Reading(Normalise.NONE, Activation.IDENTITY, -1.0, 0.0, 2)
    assert acts[0].gate is not None
    assert acts[0].gate.conditions == (
        condition(columns=(0, 1), combine=Combine.VOTE),
        condition(columns=(2,), above=2.0),
    )


def test_each_layer_reads_its_own_row() -> None:
    rows = tensor(np.concatenate([FIRST, 2 * FIRST]))
    probes = [probe(direction=rows, sites=site_set(PRE, layers=[0, 1]))]
    read = admitted(gated(gate(above(0.5)), probes)).plan.acts[-1]
    assert read.rows == ((0, (0,)), (POST0, (1,)))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"normalise": vector_pb2.NORMALISE_UNIT}, (Normalise.UNIT, Activation.IDENTITY, 0, 0)),
        ({"normalise": vector_pb2.NORMALISE_COSINE}, (Normalise.COSINE, Activation.IDENTITY, 0, 0)),
        (
            {"normalise": vector_pb2.NORMALISE_PROJECTED_COSINE},
            (Normalise.PROJECTED_COSINE, Activation.IDENTITY, 0, 0),
        ),
        (
            {"activation": vector_pb2.ACTIVATION_RELU, "bias": 0.5},
            (Normalise.NONE, Activation.RELU, 0.5, 0),
        ),
        (
            {"activation": vector_pb2.ACTIVATION_JUMP_RELU, "theta": 0.25},
            (Normalise.NONE, Activation.JUMP_RELU, 0, 0.25),
        ),
        ({"activation": vector_pb2.ACTIVATION_TANH}, (Normalise.NONE, Activation.TANH, 0, 0)),
    ],
)
def test_every_readout_is_read(fields, expected) -> None:
    read = admitted(gated(probes=[probe(**fields)])).plan.acts[-1]
    assert read.reading == Reading(*expected, column=0)


@pytest.mark.parametrize(
    ("where", "spans"),
    [
        (None, ((0, 3),)),
        (PROMPT, ((0, 3),)),
        (window(1, None), ((1, 3),)),
        (window(0, 1), ((0, 1),)),
    ],
)
def test_a_mean_is_read_once_of_the_selected_prompt_tokens(where, spans) -> None:
    chosen = None if where is None else selector(where)
    one = probe(where=chosen, rows=MEAN, normalise=vector_pb2.NORMALISE_PROJECTED_COSINE)
    plan = admitted(gated(probes=[one])).plan
    read = plan.acts[-1]
    assert (read.kind, read.spans, read.conditions) == (Kind.READ, spans, ())
    expected = Reading(Normalise.PROJECTED_COSINE, Activation.IDENTITY, 0, 0, 0, mean_at=2)
    assert read.reading == expected
    assert (plan.packed_acts.row_sums, plan.packed_acts.gate_states) == (1, 1)
    each = admitted(gated(probes=[probe(rows=gate_pb2.PROBE_ROWS_EACH)])).plan
    assert each.acts[-1].reading == Reading(Normalise.NONE, Activation.IDENTITY, 0, 0, 0)
    assert each.packed_acts.row_sums == 0


def test_a_mean_of_generated_tokens_reads_nothing() -> None:
    one = probe(where=selector(GENERATED), rows=MEAN)
    assert [act.kind for act in admitted(gated(probes=[one])).plan.acts] == [Kind.ADD]


def test_a_mean_that_no_gate_reads_is_sent() -> None:
    one = probe(rows=MEAN)
    one.signals = True
    plan = admitted(request(probes=[one])).plan
    assert (plan.signals.readings, plan.packed_acts.row_sums) == (1, 1)
    assert plan.packed_acts.gate_states == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"above": 1.0, "below": 2.0}, {"above": 1.0, "below": 2.0}),
        ({"below": 2.0}, {"above": -math.inf, "below": 2.0}),
        ({"above": 0.5, "pool": gate_pb2.POOL_MEAN}, {"pool": Pool.MEAN}),
        ({"above": 0.5, "pool": gate_pb2.POOL_MAX}, {"pool": Pool.MAX}),
        ({"above": 0.5, "for_tokens": 3}, {"for_tokens": 3}),
        ({"above": 0.5}, {"stays_above": None, "stays_below": None}),
        ({"above": 0.5, "stays_above": -0.5}, {"above": 0.5, "stays_above": -0.5}),
        (
            {"below": 0.5, "stays_below": 1.5},
            {"above": -math.inf, "below": 0.5, "stays_below": 1.5},
        ),
        ({"above": 0.5, "after_prompt": True}, {"decided_at": 2}),
        ({"above": 0.5, "combine_sites": gate_pb2.COMBINE_ALL}, {"combine": Combine.ALL}),
    ],
)
def test_every_condition_is_compiled(fields, expected) -> None:
    message = gated(gate(gate_pb2.Condition(probe_name="mood", **fields)))
    assert engine_gate(message).conditions == (condition(**expected),)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (Form.STEP, 0.5, 0.0)),
        ({"step": gate_pb2.Step(threshold=0.75)}, (Form.STEP, 0.75, 0.0)),
        ({"sigmoid": gate_pb2.Sigmoid(sharpness=4.0)}, (Form.SIGMOID, 0.5, 4.0)),
        ({"sigmoid": gate_pb2.Sigmoid(sharpness=4.0, threshold=1.0)}, (Form.SIGMOID, 1.0, 4.0)),
        ({"ramp": gate_pb2.Ramp(low=-1.0, high=1.0)}, (Form.RAMP, -1.0, 1.0)),
    ],
)
def test_every_form_is_compiled(fields, expected) -> None:
    found = engine_gate(gated(gate(**fields)))
    assert (found.form, found.a, found.b) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"token": gate_pb2.HoldToken()}, (Hold.TOKEN, 0)),
        ({"next_token": gate_pb2.HoldNextToken()}, (Hold.NEXT_TOKEN, 0)),
        ({"tokens": 7}, (Hold.TOKENS, 7)),
        ({"rest": gate_pb2.HoldRest()}, (Hold.REST, 0)),
        ({"until_read": gate_pb2.HoldUntilRead()}, (Hold.UNTIL_READ, 0)),
    ],
)
def test_every_hold_is_compiled(fields, expected) -> None:
    found = engine_gate(gated(gate(hold=gate_pb2.Hold(**fields), invert=True)))
    assert (found.hold, found.tokens, found.invert) == (*expected, True)


SUM = gate_pb2.Condition(probe_name="mood", combine_sites=gate_pb2.COMBINE_SUM)


def summed(**fields: object) -> gate_pb2.Condition:
    one = gate_pb2.Condition(**fields)
    one.MergeFrom(SUM)
    return one


def test_a_sum_has_a_threshold_and_no_bounds() -> None:
    found = engine_gate(gated(gate(SUM, step=gate_pb2.Step(threshold=3.0))))
    assert found.conditions == (condition(combine=Combine.SUM, above=-math.inf),)
    assert (found.form, found.a) == (Form.STEP, 3.0)


GATE = "steering.interventions[0].gate"
FIRST_CONDITION = f"{GATE}.conditions[0]"


@pytest.mark.parametrize(
    ("with_gate", "error", "field"),
    [
        (gate_pb2.Gate(), errors.MissingField, "conditions"),
        (gate(*[above(0.5)] * 17), errors.InvalidValue, "conditions"),
        (gate(above(0.5, "other")), errors.InvalidValue, "conditions[0].probe_name"),
        (gate(above(0.5, "x" * 300)), errors.InvalidValue, "conditions[0].probe_name"),
        (gate(gate_pb2.Condition(probe_name="mood")), errors.MissingField, "conditions[0]"),
        (gate(above(math.nan)), errors.NonFinite, "conditions[0].above"),
        (gate(above(1.0, below=math.inf)), errors.NonFinite, "conditions[0].below"),
        (gate(above(1.0, below=1.0)), errors.InvalidValue, "conditions[0].below"),
        (gate(above(1.0, pool=0)), errors.UnknownEnum, "conditions[0].pool"),
        (gate(above(1.0, pool=9)), errors.UnknownEnum, "conditions[0].pool"),
        (gate(above(1.0, combine_sites=9)), errors.UnknownEnum, "conditions[0].combine_sites"),
        (gate(above(1.0, for_tokens=0)), errors.InvalidValue, "conditions[0].for_tokens"),
        (gate(above(1.0, for_tokens=1 << 21)), errors.InvalidValue, "conditions[0].for_tokens"),
        (gate(above(1.0, stays_above=1.0)), errors.InvalidValue, "conditions[0].stays_above"),
        (gate(above(1.0, stays_below=2.0)), errors.InvalidValue, "conditions[0].stays_below"),
        (gate(above(1.0, stays_above=math.nan)), errors.NonFinite, "conditions[0].stays_above"),
        (
            gate(above(1.0, below=2.0, stays_below=2.0)),
            errors.InvalidValue,
            "conditions[0].stays_below",
        ),
        (gate(summed(stays_above=1.0)), errors.InvalidValue, "conditions[0].stays_above"),
        (gate(summed(above=1.0)), errors.InvalidValue, "conditions[0].above"),
        (gate(summed(for_tokens=1)), errors.InvalidValue, "conditions[0].for_tokens"),
        (gate(SUM), errors.MissingField, "step.threshold"),
        (gate(combine=gate_pb2.COMBINE_SUM), errors.MissingField, "step.threshold"),
        (gate(combine=0), errors.UnknownEnum, "combine"),
        (gate(step=gate_pb2.Step(threshold=math.inf)), errors.NonFinite, "step.threshold"),
        (gate(sigmoid=gate_pb2.Sigmoid()), errors.MissingField, "sigmoid.sharpness"),
        (gate(sigmoid=gate_pb2.Sigmoid(sharpness=0)), errors.InvalidValue, "sigmoid.sharpness"),
        (gate(ramp=gate_pb2.Ramp(high=1)), errors.MissingField, "ramp.low"),
        (gate(ramp=gate_pb2.Ramp(low=1)), errors.MissingField, "ramp.high"),
        (gate(ramp=gate_pb2.Ramp(low=1, high=1)), errors.InvalidValue, "ramp.high"),
        (gate(ramp=gate_pb2.Ramp(low=-3e38, high=3e38)), errors.InvalidValue, "ramp.high"),
        (gate(hold=gate_pb2.Hold()), errors.MissingField, "hold"),
        (gate(hold=gate_pb2.Hold(tokens=0)), errors.InvalidValue, "hold.tokens"),
        (gate(hold=gate_pb2.Hold(tokens=1 << 21)), errors.InvalidValue, "hold.tokens"),
    ],
)
def test_a_wrong_gate_is_refused_by_field(with_gate, error, field) -> None:
    assert refused(gated(with_gate)) == (error, f"{GATE}.{field}")


@pytest.mark.parametrize(
    ("probes", "error", "field"),
    [
        ([probe("")], errors.InvalidValue, "probes[0].name"),
        ([probe("a b")], errors.InvalidValue, "probes[0].name"),
        ([probe("x" * 65)], errors.InvalidValue, "probes[0].name"),
        ([probe(), probe()], errors.InvalidValue, "probes[1].name"),
        ([gate_pb2.Probe(name="mood")], errors.MissingField, "probes[0].sites"),
        (
            [probe(sites=site_set(types_pb2.POINT_ROUTER_LOGITS))],
            errors.SiteNotServed,
            "probes[0].sites",
        ),
        ([probe(sites=site_set(PRE, POST))], errors.InvalidValue, "probes[0].sites"),
        (
            [gate_pb2.Probe(name="mood", sites=site_set(PRE, layers=[0]))],
            errors.MissingField,
            "probes[0].read",
        ),
        ([probe(direction=named())], errors.NameNotFound, "probes[0].read.vector.name"),
        ([probe(direction=tensor(0 * ONES))], errors.ZeroVector, "probes[0].read.vector"),
        ([probe(bias=math.nan)], errors.NonFinite, "probes[0].read.bias"),
        ([probe(theta=1.0)], errors.InvalidValue, "probes[0].read.theta"),
        ([probe(normalise=9)], errors.UnknownEnum, "probes[0].read.normalise"),
        ([probe(rows=0)], errors.UnknownEnum, "probes[0].rows"),
        ([probe(rows=9)], errors.UnknownEnum, "probes[0].rows"),
        ([probe(where=selector())], errors.EmptySelector, "probes[0].where"),
        ([probe(), probe("spare")], errors.InvalidValue, "probes[1]"),
    ],
)
def test_a_wrong_probe_is_refused_by_field(probes, error, field) -> None:
    assert refused(gated(probes=probes)) == (error, field)


def test_several_tokens_of_a_number_that_is_read_once_are_refused() -> None:
    message = gated(gate(above(1.0, for_tokens=2)), [probe(rows=MEAN)])
    assert refused(message) == (errors.InvalidValue, f"{FIRST_CONDITION}.for_tokens")


REST = gate_pb2.Hold(rest=gate_pb2.HoldRest())


@pytest.mark.parametrize(
    ("read_at", "act_at", "refusal"),
    [
        (site_set(PRE, layers=[0]), site_set(POST, layers=[0]), None),
        (site_set(ATTN, layers=[0]), site_set(POST, layers=[0]), None),
        (site_set(POST, layers=[0]), site_set(ATTN, layers=[1]), None),
        (site_set(POST, layers=[0]), site_set(PRE, layers=[1]), errors.GateOrder),
        (site_set(POST, layers=[1]), site_set(POST, layers=[0]), errors.GateOrder),
        (site_set(POST, layers=[0, 1]), site_set(POST, layers=[1]), errors.GateOrder),
        (site_set(PRE, layers=[1]), site_set(POST, layers=[0, 1]), errors.GateOrder),
    ],
)
def test_a_probe_reads_before_its_gate_acts(read_at, act_at, refusal) -> None:
    def message(**fields: object) -> generation_service_pb2.GenerateRequest:
        return gated(gate(**fields), [probe(sites=read_at)], sites=act_at)

    if refusal is None:
        assert admitted(message()).plan.acts
        return
    field = f"{FIRST_CONDITION}.probe_name"
    assert refused(message()) == (refusal, field)
    ramp = gate_pb2.Ramp(low=0.0, high=1.0)
    assert refused(message(hold=REST, ramp=ramp)) == (refusal, field)
    anew = engine_gate(message(hold=REST))
    assert (anew.late, anew.end, anew.recorded, anew.opens_from) == (3, 4, True, 3)
    once = gate(above(1.0, after_prompt=True), hold=REST)
    found = engine_gate(gated(once, [probe(sites=read_at)], sites=act_at))
    assert (found.late, found.recorded, found.opens_from) == (3, False, 3)


def test_branches_in_parallel_are_not_in_order() -> None:
    def message() -> generation_service_pb2.GenerateRequest:
        return gated(
            probes=[probe(sites=site_set(ATTN, layers=[1]))], sites=site_set(MLP, layers=[1])
        )

    sequential = replace(SITES, refused={})
    parallel = replace(SITES, refused={Point.RESID_MID: "the block is parallel"})
    assert admitted(message(), admission_context(sequential)).plan.acts
    assert refused(message(), admission_context(parallel))[0] is errors.GateOrder


def test_a_gate_reads_64_numbers_and_a_request_256() -> None:
    deep = replace(SITES, num_layers=300)
    sites = site_set(PRE, layers=range(65))
    message = gated(probes=[probe(sites=sites)], sites=site_set(POST, layers=[299]))
    assert refused(message, admission_context(deep)) == (
        errors.InvalidValue,
        f"{FIRST_CONDITION}.probe_name",
    )
    sites = site_set(PRE, layers=range(257))
    message = gated(probes=[probe(sites=sites)], sites=site_set(POST, layers=[299]))
    assert refused(message, admission_context(deep)) == (errors.InvalidValue, "probes[0].sites")


def test_a_request_has_32_gates_and_no_more() -> None:
    def message(count: int) -> generation_service_pb2.GenerateRequest:
        steer = [
            at_post1(
                add=add().add,
                gate=gate(above(float(number))),
                where=selector(generated(number, number + 1)),
            )
            for number in range(count)
        ]
        return request(
            steer=steer, probes=[probe()], sampling=generation_pb2.Sampling(max_tokens=40)
        )

    assert len(admitted(message(32)).plan.acts) == 33
    assert refused(message(33)) == (errors.InvalidValue, "steering")


def test_pipelines_serve_no_probes() -> None:
    at = admission_context()
    at = replace(at, info=replace(INFO, pipeline_parallel=2))
    assert refused(gated(), at) == (errors.NotSupported, "probes")


def test_a_gate_without_probes_names_what_is_missing() -> None:
    message = request(steer=[at_post1(add=add().add, gate=gate())])
    assert refused(message) == (errors.InvalidValue, f"{FIRST_CONDITION}.probe_name")


def test_probes_keep_the_vectors_that_they_read() -> None:
    at = admission_context()
    vector = stored(at)
    found = admitted(gated(probes=[probe(direction=named())]), at)
    assert vector.digest in {one.digest for one in found.vectors}
    assert found.read_count == 1


def test_equal_probes_are_compiled_once_and_others_are_not_taken_for_them() -> None:
    at = admission_context()
    at = replace(at, compiled=CompiledRequests(at.store))
    first, same = (admitted(gated(), at) for _ in range(2))
    other = admitted(gated(probes=[probe(bias=1.0)]), at)
    assert first.plan.packed_acts is same.plan.packed_acts
    assert same.read_count == 1
    assert other.plan.acts[-1].reading != first.plan.acts[-1].reading


def test_the_end_of_the_prompt_is_that_of_each_request() -> None:
    at = admission_context()
    at = replace(at, compiled=CompiledRequests(at.store))
    for length in (3, 5):
        message = gated(gate(above(0.5, after_prompt=True)))
        message.token_ids.ids[:] = range(10, 10 + length)
        (own, _) = admitted(message, at).plan.acts
        assert own.gate is not None
        assert own.gate.conditions[0].decided_at == length - 1


def test_what_is_computed_under_a_gate_is_private() -> None:
    (key,) = cache_keys(admitted(gated()).plan)
    assert (key.position, key.private) == (0, True)
    late = gated(gate(above(0.5, after_prompt=True)), where=selector(GENERATED))
    (key,) = cache_keys(admitted(late).plan)
    assert (key.position, key.private) == (3, True)
    weak = gated()
    weak.steering.interventions[0].add.scale = 0.0
    assert cache_keys(admitted(weak).plan) == []


def test_the_baseline_reads_nothing() -> None:
    message = gated()
    message.with_baseline = True
    found = admitted(message)
    assert found.baseline is not None
    assert found.baseline.plan.acts == ()
