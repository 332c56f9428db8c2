"""Requests, over both clients: what is left to the server, and what is refused before sending."""

import numpy as np
import pytest
from google.protobuf import text_format

import rheostat
from rheostat_wire.v1 import generation_service_pb2

NAME = 'steering takes vectors, not a name: use rheostat.named("joy", points=..., layers=...)'
ARRAY = "steering takes vectors, not %s: use rheostat.inline(array, points=..., layers=...)"
SCALE = "steering takes vectors, not a number: a scale multiplies its vector, as in %s"
DICT = "steering takes vectors, not a dict: use %s"
JOY = rheostat.named("joy", points="resid_post", layers=2)
WHOLE = [
    text_format.Parse(text, generation_service_pb2.GenerateResponse())
    for text in ("started {}", "finished { reason: FINISH_REASON_LENGTH }", "receipt {}")
]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", 'text: "hello"'),
        ([1, 2], "token_ids { ids: 1 ids: 2 }"),
        (np.array([1, 2]), "token_ids { ids: 1 ids: 2 }"),
        (
            [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}],
            'chat { messages { role: "system" } messages { role: "user" content: "hi" } }',
        ),
    ],
)
def test_what_is_left_out_is_left_to_the_server(client, server, prompt, expected):
    server.on("Generate", WHOLE)
    client.run(lambda engine: engine.generate(prompt))
    assert server.asked == [
        text_format.Parse(
            f"{expected} return_prompt_token_ids: true", generation_service_pb2.GenerateRequest()
        )
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"with_baseline": False, "lora": None, "when_full": None}, ""),
        ({"lora": "poet"}, 'lora_name: "poet"'),
        ({"when_full": "wait"}, "when_full: WHEN_FULL_WAIT"),
        ({"when_full": "refuse"}, "when_full: WHEN_FULL_REFUSE"),
        ({"controller": "pi"}, 'controlled { controller_name: "pi" }'),
        (
            {"controller": "pi", "on_controller_disabled": "continue"},
            'controlled { controller_name: "pi" on_disabled: ON_DISABLED_CONTINUE }',
        ),
    ],
)
def test_how_a_request_runs_is_said_where_the_caller_says_it(client, server, options, expected):
    server.on("Generate", WHOLE)
    client.run(lambda engine: engine.generate("x", **options))
    assert server.asked == [
        text_format.Parse(
            f'text: "x" return_prompt_token_ids: true {expected}',
            generation_service_pb2.GenerateRequest(),
        )
    ]


@pytest.mark.parametrize(
    ("prompt", "options", "path", "reason"),
    [
        ("", {}, "prompt", "REASON_MISSING_FIELD"),
        ([], {}, "prompt", "REASON_MISSING_FIELD"),
        ([-1], {}, "prompt", "REASON_INVALID_VALUE"),
        ([1.5], {}, "prompt", "REASON_INVALID_VALUE"),
        ([{"role": "user"}], {}, "chat.messages[0]", "REASON_INVALID_VALUE"),
        ([{"role": "user", "content": 3}], {}, "chat.messages[0]", "REASON_INVALID_VALUE"),
        ("x", {"request_id": "a b"}, "request_id", "REASON_INVALID_VALUE"),
        ("x", {"lora": ""}, "lora", "REASON_INVALID_VALUE"),
        ("x", {"when_full": "hurry"}, "when_full", "REASON_UNKNOWN_ENUM"),
        (
            "x",
            {"on_controller_disabled": "fail"},
            "on_controller_disabled",
            "REASON_INVALID_VALUE",
        ),
        (
            "x",
            {"controller": "pi", "on_controller_disabled": "stop"},
            "on_controller_disabled",
            "REASON_UNKNOWN_ENUM",
        ),
        (
            "x",
            {"steering": [rheostat.named("a", points="resid_pre", layers=0)] * 257},
            "steering.interventions",
            "REASON_INVALID_VALUE",
        ),
        ("x", {"max_tokens": -1}, "sampling.max_tokens", "REASON_INVALID_VALUE"),
        ("x", {"max_tokens": 1.5}, "sampling.max_tokens", "REASON_INVALID_VALUE"),
        ("x", {"temperature": "hot"}, "sampling.temperature", "REASON_INVALID_VALUE"),
        ("x", {"temperature": float("nan")}, "sampling.temperature", "REASON_NON_FINITE"),
        ("x", {"with_baseline": "yes"}, "with_baseline", "REASON_INVALID_VALUE"),
        (
            "x",
            {"capture": [rheostat.Capture("resid_pre", 0)] * 17},
            "captures",
            "REASON_INVALID_VALUE",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_before_it_is_sent(
    client, server, prompt, options, path, reason
):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.generate(prompt, **options))
    assert (raised.value.path, raised.value.reason) == (path, reason)
    assert server.asked == []


@pytest.mark.parametrize(
    ("options", "path", "message"),
    [
        ({"encoding": "rp8"}, "captures.kept", 'encoding="rp8" needs kept='),
        ({"encoding": "topk8"}, "captures.kept", 'encoding="topk8" needs kept='),
        ({"kept": 8}, "captures.kept", 'kept= is for "rp8" and "topk8", not encoding="raw"'),
        ({"encoding": "topk8", "kept": 8, "seed": 1}, "captures.seed", 'seed= is for "rp8"'),
    ],
)
def test_an_encodings_arguments_are_checked_before_they_are_sent(
    client, server, options, path, message
):
    capture = rheostat.Capture("resid_post", 3, **options)
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.generate("x", capture=capture))
    assert raised.value.path == path
    assert message in str(raised.value)
    assert server.asked == []


def test_an_unknown_option_is_a_type_error_that_names_the_method(client, server):
    for method in ("generate", "stream", "session", "explain"):
        message = rf"^{method}\(\) has no option 'beams'; rheostat.GenerateOptions has steering, "
        with pytest.raises(TypeError, match=message):
            client.run(lambda engine, method=method: getattr(engine, method)("x", beams=3))
    assert server.asked == []


@pytest.mark.parametrize(
    ("steering", "path", "message"),
    [
        ("joy", "steering[0]", NAME),
        (["joy"], "steering[0]", NAME),
        (np.ones(2), "steering[0]", ARRAY % "ndarray"),
        ([rheostat.named("a", points="mlp_out", layers=0), np.ones(2)], "steering[1]",
         ARRAY % "ndarray"),
        (4.0, "steering[0]", ARRAY % "float"),
        ((JOY, 0.5), "steering[1]", SCALE % "joy * 0.5"),
        ([-2, JOY], "steering[0]", SCALE % "joy * -2"),
        ([JOY.at(layers=3), 0.5], "steering[1]", SCALE % "joy * 0.5"),
        ([rheostat.named("mood/joy"), 0.5], "steering[1]", SCALE % "vector * 0.5"),
        ({"joy": 0.5}, "steering", DICT % 'rheostat.named("joy") * 0.5'),
        ({JOY: 2}, "steering", DICT % "joy * 2"),
        ({"joy": "a"}, "steering", DICT % 'rheostat.named("joy")'),
        ({"joy": 0.5, "calm": 1}, "steering",
         DICT % '[rheostat.named("joy") * 0.5, rheostat.named("calm") * 1]'),
    ],
)  # fmt: skip
def test_steering_that_is_no_vector_is_told_how_to_make_one(
    client, server, steering, path, message
):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.generate("x", steering=steering))
    assert (raised.value.path, raised.value.message) == (path, message)
    assert server.asked == []


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        ([rheostat.Sink("disk")], "they went to the sink 'disk'"),
        ([rheostat.Run("clean"), rheostat.Run()], "they went to the run 'clean' and a run"),
        ([None, "sub-1"], "there are none at all, and others went to the subscription 'sub-1'"),
    ],
)
def test_rows_that_went_elsewhere_are_a_key_error_that_says_where(client, server, targets, told):
    server.on("Generate", WHOLE)
    captures = [rheostat.Capture("resid_post", 3, to=one) for one in targets]
    found = client.run(lambda engine: engine.generate("x", capture=captures))
    with pytest.raises(KeyError) as raised:
        found.activations["resid_post", 3]
    assert raised.value.args[0].endswith(told)


def test_rows_of_a_request_without_a_capture_are_a_key_error_that_says_so(client, server):
    server.on("Generate", WHOLE)
    found = client.run(lambda engine: engine.generate("x"))
    for read in (
        lambda: found.activations["resid_post", 3],
        lambda: found.activations.stack("resid_post"),
    ):
        with pytest.raises(KeyError, match=r"no rows of .*; no capture= was asked for"):
            read()
