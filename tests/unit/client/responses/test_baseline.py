"""Generation beside its baseline, over both clients: never mixed, and how far apart they are."""

import numpy as np
import pytest
from google.protobuf import text_format

import rheostat
from rheostat_wire.v1 import generation_service_pb2


def response(text: str) -> generation_service_pb2.GenerateResponse:
    return text_format.Parse(text, generation_service_pb2.GenerateResponse())


def rows(value: float, baseline: bool) -> generation_service_pb2.GenerateResponse:
    """One row [1, 1, 2] of resid_post[2]."""
    message = response(
        """captured {
             sites { point: POINT_RESID_POST layer: 2 } positions { start: 0 count: 1 } token_ids: 5
             tensor { dtype: DTYPE_FLOAT32 encoding: ENCODING_RAW shape: 1 shape: 1 shape: 2 }
           }"""
    )
    message.captured.baseline = baseline
    message.captured.tensor.inline = np.full(2, value, "<f4").tobytes()
    return message


STREAM = [
    response('started { request_id: "r1" model_name: "m" prompt_token_ids { ids: 5 } }'),
    response("prompt_logprobs { tokens { token { token_id: 5 logprob: -1 rank: 1 } } }"),
    response(
        "prompt_logprobs { tokens { token { token_id: 5 logprob: -2 rank: 3 } } baseline: true }"
    ),
    rows(1.0, baseline=False),
    response('tokens { baseline: true token_ids: 8 text: " dull" }'),
    response('tokens { token_ids: 7 text: " bright" }'),
    rows(2.0, baseline=True),
    response('tokens { offset: 1 token_ids: 9 text: "!" }'),
    response(
        "finished { baseline: true reason: FINISH_REASON_STOP stop_token_id: 8 token_count: 1 }"
    ),
    response("finished { reason: FINISH_REASON_LENGTH token_count: 2 }"),
    response(
        """divergence {
             kl: 0.5 kl: 0.25 compared: 1 compared: 0.75
             baseline_logprobs: -3 baseline_logprobs: -0.5 mean_kl: 0.375
           }"""
    ),
    response(
        """receipt {
             request_id: "r1" prompt_token_count: 1 generated_token_count: 2
             captures { sites { site { point: POINT_RESID_POST layer: 2 } row_count: 1 } }
           }"""
    ),
]
CAPTURE = rheostat.Capture("resid_post", 2)


def test_the_baseline_is_asked_for_and_kept_apart(client, server):
    server.on("Generate", STREAM)
    out = client.run(
        lambda engine: engine.generate(
            "x", with_baseline=True, capture=CAPTURE, prompt_logprobs=0, max_tokens=2
        )
    )
    (request,) = server.asked
    assert request == text_format.Parse(
        """text: "x" sampling { max_tokens: 2 prompt_logprobs: 0 } with_baseline: true
           captures { sites { points: POINT_RESID_POST list { layers: 2 } } inline {} }
           return_prompt_token_ids: true""",
        generation_service_pb2.GenerateRequest(),
    )
    told = [
        (
            one.text,
            one.token_ids,
            one.finish_reason,
            one.samples[0].stop,
            one.prompt_logprobs[0].token.logprob,
            one.activations["resid_post", 2].tolist(),
            len(one.samples),
        )
        for one in (out, out.baseline)
    ]
    assert told == [
        (" bright!", (7, 9), "length", None, -1.0, [[1, 1]], 1),
        (" dull", (8,), "stop", 8, -2.0, [[2, 2]], 1),
    ]


def test_a_sample_knows_how_far_it_lies_from_the_baseline(client, server):
    server.on("Generate", STREAM)
    out = client.run(lambda engine: engine.generate("x", with_baseline=True))
    found = out.divergence
    assert found is out.samples[0].divergence
    assert out.baseline.samples[0].divergence is None
    numbers = [found.kl, found.compared, found.baseline_logprobs]
    assert [one.tolist() for one in numbers] == [[0.5, 0.25], [1, 0.75], [-3, -0.5]]
    assert {one.dtype for one in numbers} == {np.dtype(np.float32)}
    assert (found.sample, found.mean_kl) == (0, 0.375)
    assert repr(found) == (
        "Divergence(sample=0, mean_kl=0.375 nats over 2 tokens, compared at least 0.75)"
    )


def test_events_say_whether_they_are_of_the_baseline(client, server):
    server.on("Generate", STREAM)
    events, _ = client.stream("x", with_baseline=True, capture=CAPTURE)
    kinds = [(type(event).__name__, getattr(event, "baseline", None)) for event in events]
    assert kinds == [
        ("Started", None),
        ("PromptLogprobs", False),
        ("PromptLogprobs", True),
        ("Rows", False),
        ("Tokens", True),
        ("Tokens", False),
        ("Rows", True),
        ("Tokens", False),
        ("Finished", True),
        ("Finished", False),
        ("Divergence", None),
        ("Receipt", None),
    ]
    assert events[4] == rheostat.Tokens(0, " dull", (8,), (), baseline=True)
    assert repr(events[6]) == "Rows(baseline sample=0, resid_post[2], shape=[1, 2])"


def test_samples_of_a_baseline_keep_their_numbers(client, server):
    numbered = [
        response(
            f'tokens {{ sample: {sample} baseline: {word} token_ids: 1 text: "{word} {sample}" }}'
        )
        for sample in (1, 0)
        for word in ("true", "false")
    ]
    ends = [
        response(f"finished {{ sample: {n} baseline: {b} reason: FINISH_REASON_LENGTH }}")
        for n in (0, 1)
        for b in ("true", "false")
    ]
    apart = [response(f"divergence {{ sample: {n} mean_kl: {n}.5 }}") for n in (1, 0)]
    server.on("Generate", [STREAM[0], *numbered, *ends, *apart, response("receipt {}")])
    out = client.run(lambda engine: engine.generate("x", n=2, with_baseline=True))
    assert [one.text for one in out.samples] == ["false 0", "false 1"]
    assert [one.text for one in out.baseline.samples] == ["true 0", "true 1"]
    assert [one.divergence.mean_kl for one in out.samples] == [0.5, 1.5]


def test_a_request_without_a_baseline_has_none(client, server):
    server.on("Generate", [STREAM[0], STREAM[9], response("receipt {}")])
    out = client.run(lambda engine: engine.generate("x"))
    assert (out.baseline, out.divergence) == (None, None)


def test_a_baseline_that_never_came_is_an_error(client, server):
    server.on("Generate", [STREAM[0], STREAM[9], response("receipt {}")])
    with pytest.raises(rheostat.ServerError) as raised:
        client.run(lambda engine: engine.generate("x", with_baseline=True))
    assert str(raised.value) == "the stream ended without the baseline that was asked for"


def test_both_texts_and_their_distance_are_shown(client, server):
    server.on("Generate", STREAM)
    out = client.run(lambda engine: engine.generate("x", with_baseline=True))
    assert repr(out) == (
        "Generation('r1', "
        "Sample(text=' bright!', tokens=2, finish_reason='length', activations=1 sites), "
        "baseline=Samples("
        "Sample(text=' dull', tokens=1, finish_reason='stop', activations=1 sites)))"
    )
    html = out._repr_html_()
    for cell in (">baseline</td>", "> dull</td>", ">sample 0: mean KL 0.375 nats</td>"):
        assert cell in html
