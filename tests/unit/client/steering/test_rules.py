"""Rules: the messages that they become, and all that is refused before it is sent."""

import numpy as np
import pytest

import rheostat
from rheostat._client.requests import generate_request
from rheostat_wire.v1 import gate_pb2, monitor_pb2

WIDTH = 4
ROW = rheostat.inline(np.arange(1, WIDTH + 1, dtype=np.float32))
MOOD = rheostat.probe(ROW, points="resid_post", layers=1, name="mood")
TONE = rheostat.probe(ROW, points="resid_post", layers=2, name="tone")
PUSH = ROW.at(points="resid_post", layers=3)


def test_a_rule_stops_unless_it_says_otherwise() -> None:
    message = rheostat.Rule("grim", MOOD.above(2)).to_wire("rules[0]")
    assert message.name == "grim"
    assert message.conditions[0].probe_name == "mood"
    assert message.combine == gate_pb2.COMBINE_ALL
    assert message.stop == monitor_pb2.Stop(drop_sampled=True)
    assert not message.HasField("threshold")


def test_a_rule_says_what_it_does() -> None:
    rule = rheostat.Rule(
        "grim",
        [MOOD.summed(), TONE.summed()],
        rheostat.Stop("why", drop_sampled=False, all_samples=True),
        combine="sum",
        threshold=3,
    )
    message = rule.to_wire("rules[0]")
    assert message.stop == monitor_pb2.Stop(label="why", drop_sampled=False, all_samples=True)
    assert (message.combine, message.threshold) == (gate_pb2.COMBINE_SUM, 3)
    seen = rheostat.Rule("seen", MOOD.above(1), rheostat.Observe()).to_wire("rules[0]")
    assert seen.WhichOneof("action") == "observe"
    off = rheostat.Rule("off", MOOD.above(1), rheostat.Gain(0.0, [2]), hold=3).to_wire("rules[0]")
    assert (off.gain.factor, off.gain.HasField("factor")) == (0.0, True)
    assert (list(off.gain.interventions), off.hold.tokens) == ([2], 3)


def test_a_request_has_every_probe_once_and_sends_those_asked_for() -> None:
    request = generate_request(
        "a",
        steering=PUSH.when(rheostat.gate(TONE.above(1), signals=True)),
        probes=MOOD,
        rules=[rheostat.Rule("a", MOOD.above(1)), rheostat.Rule("b", TONE.below(0))],
        hold_back=3,
    )
    assert [(one.name, one.signals) for one in request.probes] == [("mood", True), ("tone", False)]
    assert [one.name for one in request.rules] == ["a", "b"]
    assert request.steering.interventions[0].gate.signals
    assert request.hold_back == 3


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"rules": rheostat.Rule("no name", MOOD.above(1))}, "rules[0].name"),
        ({"rules": [rheostat.Rule("a", MOOD)]}, "rules[0].conditions"),
        ({"rules": rheostat.Rule("a", MOOD.above(1), "stop")}, "rules[0].then"),
        ({"rules": [MOOD.above(1)]}, "rules[0]"),
        ({"rules": rheostat.Rule("a", MOOD.above(1), combine="most")}, "rules[0].combine"),
        (
            {"rules": rheostat.Rule("a", MOOD.above(1), threshold=float("nan"))},
            "rules[0].threshold",
        ),
        (
            {"rules": rheostat.Rule("a", MOOD.above(1), rheostat.Gain(float("inf")))},
            "rules[0].gain.factor",
        ),
        (
            {"rules": rheostat.Rule("a", MOOD.above(1), rheostat.Gain(0.5, [0, -1]))},
            "rules[0].gain.interventions[1]",
        ),
        ({"probes": [ROW]}, "probes[0]"),
        ({"probes": ROW}, "probes"),
        ({"hold_back": -1}, "hold_back"),
    ],
)
def test_what_cannot_be_sent_is_refused(options: dict[str, object], field: str) -> None:
    with pytest.raises(rheostat.InvalidRequest) as caught:
        generate_request("a", **options)
    assert caught.value.violations[0].path == field


def test_steering_of_another_type_is_refused_at_the_rule_that_has_it() -> None:
    rule = rheostat.Rule("cheer", MOOD.above(1), rheostat.Steer(np.ones(8)))
    with pytest.raises(rheostat.InvalidRequest, match=r"use rheostat\.inline") as raised:
        rule.to_wire("rules[0]")
    assert raised.value.path == "rules[0].steer[0]"


def test_a_hold_that_does_not_exist_is_refused_by_its_name() -> None:
    rule = rheostat.Rule("cheer", MOOD.above(1), rheostat.Gain(0.5), hold="forever")
    with pytest.raises(rheostat.InvalidRequest, match=r"^hold is 'token', .* not 'forever'"):
        rule.to_wire("rules[0]")
