"""Gates: the messages that they become, and all that is refused before it is sent."""

import numpy as np
import pytest

import rheostat
from rheostat._client.requests import generate_request
from rheostat_wire.v1 import gate_pb2, types_pb2, vector_pb2

WIDTH = 4
ROW = rheostat.inline(np.arange(1, WIDTH + 1, dtype=np.float32))
MOOD = rheostat.probe(ROW, points="resid_post", layers=1, name="mood")
PUSH = ROW.at(points="resid_post", layers=2)


def gate_of(given: rheostat.Gate | rheostat.Condition) -> gate_pb2.Gate:
    return PUSH.when(given).to_wire("steering.interventions[0]").gate


def test_a_request_has_the_probes_of_its_gates_each_once() -> None:
    other = rheostat.probe(ROW, points="resid_pre", layers=0)
    steering = (
        PUSH.when(gate) for gate in (MOOD.above(1), rheostat.gate(MOOD.below(0), other.above(2)))
    )
    request = generate_request("a", steering=steering)
    assert [one.gate.conditions[0].probe_name for one in request.steering.interventions] == [
        "mood",
        "mood",
    ]
    assert [one.name for one in request.probes] == ["mood", other.name]
    (first, _) = request.probes
    assert first.sites == types_pb2.SiteSet(
        points=[types_pb2.POINT_RESID_POST], list=types_pb2.LayerList(layers=[1])
    )
    assert (first.read.normalise, first.read.activation, first.read.bias) == (
        vector_pb2.NORMALISE_NONE,
        vector_pb2.ACTIVATION_IDENTITY,
        0,
    )
    assert not first.HasField("where")


def test_a_probe_says_what_it_reads() -> None:
    probe = rheostat.probe(
        ROW,
        points="resid_post",
        layers=1,
        where="prompt",
        bias=-1,
        normalise="cosine",
        activation="jump_relu",
        theta=0.5,
    )
    wire = probe.to_wire("probes[0]")
    assert (wire.read.bias, wire.read.theta) == (-1, 0.5)
    assert wire.read.normalise == vector_pb2.NORMALISE_COSINE
    assert wire.read.activation == vector_pb2.ACTIVATION_JUMP_RELU
    assert wire.where.include[0].phase == types_pb2.PHASE_PROMPT
    assert not wire.HasField("rows")


def test_a_probe_of_the_mean_says_so() -> None:
    probe = rheostat.probe(
        ROW, points="resid_post", layers=1, normalise="projected_cosine", rows="prompt_mean"
    )
    wire = probe.to_wire("probes[0]")
    assert wire.rows == gate_pb2.PROBE_ROWS_PROMPT_MEAN
    assert wire.read.normalise == vector_pb2.NORMALISE_PROJECTED_COSINE
    with pytest.raises(rheostat.InvalidRequest, match="rows"):
        rheostat.probe(ROW, points="resid_post", layers=1, rows="mean").to_wire("probes[0]")  # type: ignore[arg-type]  # no such word


def test_a_name_follows_from_what_is_read() -> None:
    def named(**fields: object) -> str:
        return rheostat.probe(ROW, points="resid_post", layers=1, **fields).name

    assert named() == named()
    assert named() != named(bias=1.0)


def test_a_condition_says_which_numbers_hold() -> None:
    (condition,) = gate_of(
        MOOD.between(0, 1, pool="mean", combine="vote", after_prompt=True, for_tokens=3)
    ).conditions
    assert condition == gate_pb2.Condition(
        probe_name="mood",
        pool=gate_pb2.POOL_MEAN,
        combine_sites=gate_pb2.COMBINE_VOTE,
        after_prompt=True,
        above=0,
        below=1,
        for_tokens=3,
    )
    (condition,) = gate_of(MOOD.above(1, until=0.5)).conditions
    assert (condition.stays_above, condition.HasField("stays_below")) == (0.5, False)
    (condition,) = gate_of(MOOD.below(1, until=1.5)).conditions
    assert (condition.stays_below, condition.HasField("stays_above")) == (1.5, False)
    (condition,) = gate_of(rheostat.gate(MOOD.summed(), form=2.0)).conditions
    assert condition.combine_sites == gate_pb2.COMBINE_SUM
    assert not any(condition.HasField(name) for name in ("above", "below", "for_tokens"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, gate_pb2.Gate()),
        ({"form": 2.0}, gate_pb2.Gate(step=gate_pb2.Step(threshold=2))),
        (
            {"form": rheostat.Sigmoid(sharpness=4)},
            gate_pb2.Gate(sigmoid=gate_pb2.Sigmoid(sharpness=4, threshold=0.5)),
        ),
        ({"form": rheostat.Ramp(0, 2)}, gate_pb2.Gate(ramp=gate_pb2.Ramp(low=0, high=2))),
        ({"invert": True}, gate_pb2.Gate(invert=True)),
        ({"hold": 3}, gate_pb2.Gate(hold=gate_pb2.Hold(tokens=3))),
        ({"hold": "rest"}, gate_pb2.Gate(hold=gate_pb2.Hold(rest=gate_pb2.HoldRest()))),
        (
            {"hold": "next_token"},
            gate_pb2.Gate(hold=gate_pb2.Hold(next_token=gate_pb2.HoldNextToken())),
        ),
        (
            {"hold": "until_read"},
            gate_pb2.Gate(hold=gate_pb2.Hold(until_read=gate_pb2.HoldUntilRead())),
        ),
    ],
)
def test_a_gate_says_how_far_and_how_long_it_is_open(fields, expected) -> None:
    if not expected.HasField("hold"):
        expected.hold.token.SetInParent()
    expected.combine = gate_pb2.COMBINE_ALL
    found = gate_of(rheostat.gate(MOOD.above(1), **fields))
    del found.conditions[:]
    assert found == expected


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (lambda: rheostat.gate(), "gate.conditions"),
        (lambda: rheostat.gate(MOOD), "gate.conditions"),
        (lambda: PUSH.when(MOOD.summed()), "gate.form"),
        (lambda: rheostat.gate(MOOD.above(1), combine="sum"), "gate.form"),
        (lambda: PUSH.when(3), "steering"),
        (lambda: rheostat.probe(ROW), "probe.sites"),
        (lambda: rheostat.probe(PUSH), "probe.vector"),
        (lambda: rheostat.probe("joy", points="resid_post", layers=0), "probe.vector"),
        (lambda: rheostat.probe([1.0, 2.0], points="resid_post", layers=0), "probe.vector"),
        (lambda: rheostat.probe(ROW, points="resid_post", layers=0, name="a b"), "probe.name"),
        (lambda: gate_of(MOOD.above(float("nan"))), "conditions[0].above"),
        (lambda: gate_of(MOOD.above(1, until=float("inf"))), "conditions[0].stays_above"),
        (lambda: gate_of(MOOD.above(1, pool="first")), "conditions[0].pool"),
        (lambda: gate_of(MOOD.above(1, for_tokens=0)), "conditions[0].for_tokens"),
        (lambda: gate_of(rheostat.gate(MOOD.above(1), combine="xor")), "combine"),
        (lambda: gate_of(rheostat.gate(MOOD.above(1), hold="ever")), "hold"),
        (lambda: gate_of(rheostat.gate(MOOD.above(1), hold=0)), "hold.tokens"),
        (lambda: gate_of(rheostat.gate(MOOD.above(1), form=float("inf"))), "step.threshold"),
    ],
)
def test_what_is_wrong_is_refused_by_field(wrong, field) -> None:
    with pytest.raises(rheostat.InvalidRequest) as caught:
        wrong()
    assert caught.value.path.endswith(field)


def test_two_different_probes_with_one_name_are_refused() -> None:
    other = rheostat.probe(ROW, points="resid_post", layers=0, name="mood")
    steering = [PUSH.when(MOOD.above(1)), PUSH.when(other.above(1))]
    with pytest.raises(rheostat.InvalidRequest, match="two different probes have the name 'mood'"):
        generate_request("a", steering=steering)


def test_a_vector_is_gated_as_its_dose_is() -> None:
    vector = rheostat.named("joy", points="resid_post", layers=1)
    condition = MOOD.above(1)
    assert vector.when(condition).to_wire("p") == (1 * vector).when(condition).to_wire("p")


def test_an_intervention_says_when_it_acts() -> None:
    assert str(PUSH.when(MOOD.above(1))).endswith(" when 1 < mood")
    gate = rheostat.gate(MOOD.below(2), hold="rest", invert=True)
    assert str(PUSH.when(gate)).endswith(" when not mood < 2, held for rest")
