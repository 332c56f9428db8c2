"""The server-wide steering, over both clients: set, conflicted, and read back."""

import datetime

import grpc
import numpy as np
import pytest
from google.protobuf import text_format

import rheostat
from rheostat import Ablate, Add, Band, Clamp, NormAdd, Point, Scale, Vector
from rheostat_wire.v1 import steering_service_pb2 as pb

JOY = rheostat.named("joy", points="resid_post", layers=2)
DIGEST, OTHER = "ab" * 32, "cd" * 32


def held(text: str) -> pb.GetGlobalResponse:
    text = text.replace("DIGEST", r'digest: "%s"' % (r"\xab" * 32))
    return text_format.Parse(
        text.replace("OTHER", r'digest: "%s"' % (r"\xcd" * 32)), pb.GetGlobalResponse()
    )


EVERY_OP = held(
    """policy { steering {
         interventions {
           sites { points: POINT_RESID_POST range { start: 2 stop: 6 } }
           add { vector { DIGEST } scale: 4 }
         }
         interventions {
           sites { points: POINT_RESID_MID list { layers: 3 layers: 1 } }
           where {
             include { phase: PHASE_PROMPT } include { phase: PHASE_GENERATED }
             include { positions { start: -2 } } include { positions { end: 5 } }
             include { generated { start: 1 end: 3 } } include { generated {} }
             exclude { token_ids { ids: 7 ids: 9 } } exclude { text { text: "a" } }
             exclude { text { text: "b" occurrence: 0 } }
           }
           norm_add { vector { DIGEST } }
         }
         interventions {
           sites { points: POINT_RESID_PRE all {} }
           ablate { directions { DIGEST } directions { OTHER } strength: 0.5 }
         }
         interventions {
           sites { points: POINT_RESID_PRE all {} }
           clamp {
             bands { read { vector { DIGEST } normalise: NORMALISE_UNIT } min: 0 max: 0 }
             bands { read { vector { OTHER } normalise: NORMALISE_UNIT } max: 2 strength: 0 }
           }
         }
         interventions {
           sites { points: POINT_RESID_PRE all {} }
           scale { read { vector { DIGEST } normalise: NORMALISE_UNIT } factor: -1 }
         }
       } }
       version: 3 set_time { seconds: 1700000000 }"""
)
VECTOR, SECOND = Vector(DIGEST), Vector(OTHER)
EVERYWHERE = {"points": (Point.RESID_PRE,), "layers": "all"}
UNION = "prompt" | ("generated" | rheostat.window(-2)) | rheostat.window(None, 5)
WHERE = (
    (UNION | rheostat.generated(1, 3) | rheostat.generated())
    - rheostat.token_ids(7, 9)
    - rheostat.span("a")
    - rheostat.span("b", 0)
)
EXPECTED = rheostat.GlobalSteering(
    interventions=(
        Add(VECTOR, 4.0, points=(Point.RESID_POST,), layers=range(2, 6)),
        NormAdd(VECTOR, 1.0, points=(Point.RESID_MID,), layers=(1, 3), where=WHERE),
        Ablate((VECTOR, SECOND), 0.5, **EVERYWHERE),
        Clamp((Band(VECTOR, 0.0, 0.0), Band(SECOND, None, 2.0, 0.0)), **EVERYWHERE),
        Scale(VECTOR, -1.0, **EVERYWHERE),
    ),
    version=3,
    set_time=datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=datetime.UTC),
)


@pytest.mark.parametrize(
    ("steering", "version", "expected"),
    [
        (None, None, "policy { steering {} }"),
        ([], 0, "policy { steering {} } expected_version: 0"),
        (
            [JOY * 2, rheostat.scale(JOY, 0)],
            4,
            """policy { steering {
                 interventions {
                   sites { points: POINT_RESID_POST list { layers: 2 } }
                   add { vector { name: "joy" } scale: 2 }
                 }
                 interventions {
                   sites { points: POINT_RESID_POST list { layers: 2 } }
                   scale { read { vector { name: "joy" } normalise: NORMALISE_UNIT } factor: 0 }
                 }
               } }
               expected_version: 4""",
        ),
    ],
)
def test_setting_replaces_the_whole_and_gives_the_version(
    client, server, steering, version, expected
):
    server.on("SetGlobal", pb.SetGlobalResponse(version=5))
    found = client.run(lambda engine: engine.steering.set_global(steering, version))
    assert found == 5
    assert server.asked == [text_format.Parse(expected, pb.SetGlobalRequest())]


MOOD = rheostat.probe(
    rheostat.inline(np.ones((1, 4), np.float32)), points="resid_pre", layers=1, name="mood",
    normalise="cosine", where="prompt",
)  # fmt: skip
GATES = [
    rheostat.gate(MOOD.above(0.5, pool="mean", after_prompt=True), hold="rest", invert=True),
    rheostat.gate(MOOD.between(-1, 1, for_tokens=2), MOOD.below(3, until=4), combine="vote"),
    rheostat.gate(MOOD.summed(), form=rheostat.Sigmoid(2.0, 1.5), hold=3),
    rheostat.gate(MOOD.summed(), form=rheostat.Ramp(0, 1), hold="until_read"),
    rheostat.gate(MOOD.summed(), form=2.5, hold="next_token"),
    MOOD.above(1).as_gate(),
]


def test_gates_are_set_with_their_probes_and_read_again(client, server):
    """The server answers with digests, and so does this one."""
    server.on("SetGlobal", pb.SetGlobalResponse(version=5))
    steering = [JOY.at(points="resid_post", layers=2).when(gate) for gate in GATES]
    client.run(lambda engine: engine.steering.set_global(one for one in steering))
    (asked,) = server.asked
    assert [probe.name for probe in asked.policy.probes] == ["mood"]
    policy = asked.policy
    policy.probes[0].read.vector.digest = bytes.fromhex(DIGEST)
    for intervention in policy.steering.interventions:
        intervention.add.vector.digest = bytes.fromhex(OTHER)
    server.on("GetGlobal", pb.GetGlobalResponse(policy=policy, version=5))
    found = client.run(lambda engine: engine.steering.get_global())
    client.run(lambda engine: engine.steering.set_global(found.interventions))
    assert server.asked[-1].policy == policy
    assert "mean" not in str(found)  # in words, a gate says what it holds for
    assert "held for rest" in str(found)


REPLACEMENTS = [
    rheostat.replace(JOY),
    rheostat.replace(rheostat.Zeros(), alpha=0.5, dimensions=[0, 3]),
    rheostat.replace(rheostat.Noise(std=2), mask=[0.25, 1]),
    rheostat.replace(rheostat.Noise(embedding_std=3, seed=2**63)),
]


def test_replacements_are_set_and_read_again(client, server):
    """The server answers with digests, and so does this one."""
    server.on("SetGlobal", pb.SetGlobalResponse(version=5))
    steering = [one.at(points="resid_post", layers=2) for one in REPLACEMENTS]
    client.run(lambda engine: engine.steering.set_global(steering))
    policy = server.asked[0].policy
    policy.steering.interventions[0].replace.vector.digest = bytes.fromhex(OTHER)
    server.on("GetGlobal", pb.GetGlobalResponse(policy=policy, version=5))
    found = client.run(lambda engine: engine.steering.get_global()).interventions
    client.run(lambda engine: engine.steering.set_global(found))
    assert server.asked[-1].policy == policy
    assert [str(one).split(" at ")[0] for one in found[1:]] == [
        "replace by zeros (alpha 0.5), masked",
        "replace by x + noise of std 2, seed 0, masked",
        "replace by x + noise of 3 embedding_std, seed 9223372036854775808",
    ]


def test_another_version_is_a_refusal_that_names_it(client, server, refusal):
    code = grpc.StatusCode.FAILED_PRECONDITION
    conflict = refusal.of(code, "version 7 holds", "REASON_VERSION_CONFLICT", version="7")
    server.on("SetGlobal", conflict)
    with pytest.raises(rheostat.Refused) as raised:
        client.run(lambda engine: engine.steering.set_global(JOY, expected_version=6))
    found = raised.value
    assert (found.reason, found.metadata) == ("REASON_VERSION_CONFLICT", {"version": "7"})


@pytest.mark.parametrize(
    ("steering", "version", "path"),
    [
        (rheostat.ablate(JOY, strength=2), None, "steering.interventions[0].ablate.strength"),
        (JOY, -1, "expected_version"),
    ],
)
def test_what_cannot_be_set_is_refused_before_it_is_sent(client, server, steering, version, path):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.steering.set_global(steering, version))
    assert (raised.value.path, server.asked) == (path, [])


def test_what_holds_reads_as_what_it_could_be_set_with(client, server):
    server.on("GetGlobal", EVERY_OP)
    server.on("SetGlobal", pb.SetGlobalResponse(version=4))
    found = client.run(lambda engine: engine.steering.get_global())
    assert found == EXPECTED
    client.run(lambda engine: engine.steering.set_global(found.interventions))
    sent = server.asked[-1].policy
    again = pb.GetGlobalResponse(policy=sent, version=3, set_time=EVERY_OP.set_time)
    server.on("GetGlobal", again)
    assert client.run(lambda engine: engine.steering.get_global()) == EXPECTED


def test_what_holds_at_the_start_is_nothing(client, server):
    server.on("GetGlobal", pb.GetGlobalResponse())
    found = client.run(lambda engine: engine.steering.get_global())
    assert found == rheostat.GlobalSteering((), 0, None)
    assert str(found) == "server-wide steering, version 0\n  interventions: none"


def test_what_holds_in_words_and_in_a_notebook():
    first = rheostat.GlobalSteering(EXPECTED.interventions[2:4], 3, EXPECTED.set_time)
    lines = [
        "server-wide steering, version 3, set 2023-11-14 22:13:20 UTC",
        "  0: ablate vector abababababab, vector cdcdcdcdcdcd (strength 0.5) at resid_pre all",
        "  1: clamp vector abababababab to 0, vector cdcdcdcdcdcd to ..2 (strength 0) "
        "at resid_pre all",
    ]
    assert str(first).splitlines() == lines
    assert lines[1][5:] in first._repr_html_()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "gate { signals: true } add { vector { DIGEST } }",
            rheostat.Unimplemented,
            "interventions[0].gate of the server sends signals, which this client does not know",
        ),
        (
            'gate { conditions { probe_name: "p" } } add { vector { DIGEST } }',
            rheostat.ServerError,
            "the server sent no probe 'p'",
        ),
        (
            "replace { rows {} }",
            rheostat.Unimplemented,
            "interventions[0] of the server has a source unknown to this client: rows",
        ),
        (
            'add { vector { name: "joy" } }',
            rheostat.ServerError,
            "the server sent steering whose vectors are not resolved to digests",
        ),
        (
            "where { include {} } add { vector { DIGEST } }",
            rheostat.Unimplemented,
            "interventions[0].where of the server has a kind of range that this client does not "
            "know",
        ),
        (
            "where { exclude { phase: 9 } } add { vector { DIGEST } }",
            rheostat.Unimplemented,
            "interventions[0].where of the server has a kind of range that this client does not "
            "know",
        ),
        (
            "sites { range { start: 2 } } add { vector { DIGEST } }",
            rheostat.Unimplemented,
            "interventions[0] of the server acts at sites that this client cannot name",
        ),
    ],
)
def test_what_this_client_cannot_hold_is_an_error_and_not_left_out(
    client, server, text, error, message
):
    if "sites" not in text:
        text += " sites { points: POINT_RESID_PRE all {} }"
    server.on("GetGlobal", held(f"policy {{ steering {{ interventions {{ {text} }} }} }}"))
    with pytest.raises(error) as raised:
        client.run(lambda engine: engine.steering.get_global())
    assert raised.value.message == message


def test_which_layers_rows_belong_to_reads_as_it_was_set(client, server):
    text = "row_layers { layers: [2, 4] }"
    server.on(
        "GetGlobal",
        held(
            "policy { steering { interventions { "
            f"sites {{ points: POINT_RESID_PRE list {{ layers: 4 }} }} "
            f"add {{ vector {{ DIGEST {text} }} }} }} }} }}"
        ),
    )
    found = client.run(lambda engine: engine.steering.get_global())
    (one,) = found.interventions
    assert list(one.to_wire("x").add.vector.row_layers.layers) == [2, 4]


def test_rules_are_sent_and_read_back(client, server):
    mood = rheostat.probe(VECTOR, points="resid_post", layers=2, name="mood")
    rules = (
        rheostat.Rule("seen", mood.above(1), rheostat.Observe()),
        rheostat.Rule("grim", mood.above(2), rheostat.Stop("why", drop_sampled=False)),
        rheostat.Rule(
            "cheer",
            [mood.above(1, pool="mean"), mood.below(4, for_tokens=2)],
            rheostat.Steer(2 * VECTOR.at(points="resid_post", layers=3)),
            "vote",
            0.75,
            8,
        ),
        rheostat.Rule("off", mood.below(0), rheostat.Gain(0.0), hold="next_token"),
    )
    server.on("SetGlobal", pb.SetGlobalResponse(version=4))
    version = client.run(lambda engine: engine.steering.set_global(None, 3, rules=rules))
    sent = server.asked[-1]
    assert (version, sent.expected_version, len(sent.policy.probes)) == (4, 3, 1)
    actions = [rule.WhichOneof("action") for rule in sent.policy.rules]
    assert actions == ["observe", "stop", "steer", "gain"]
    server.on("GetGlobal", pb.GetGlobalResponse(policy=sent.policy, version=4))
    found = client.run(lambda engine: engine.steering.get_global())
    again = [rule.to_wire("") for rule in found.rules]
    assert again == list(sent.policy.rules)
    assert [rule.name for rule in found.rules] == ["seen", "grim", "cheer", "off"]
    assert str(found).splitlines()[1:] == [
        "  rule seen: observe when 1 < mood",
        "  rule grim: stop when 2 < mood",
        "  rule cheer: steer when vote of 1 < mood, mood < 4, held for 8",
        "  rule off: gain 0 when mood < 0, held for next_token",
    ]


def test_a_rule_that_this_client_does_not_know_is_an_error(client, server):
    server.on("GetGlobal", held('policy { rules { name: "r" } }'))
    with pytest.raises(rheostat.Unimplemented) as raised:
        client.run(lambda engine: engine.steering.get_global())
    message = "rules[0] of the server has an action unknown to this client"
    assert raised.value.message == message
