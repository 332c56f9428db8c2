"""What people write first, used to other libraries: each is answered with what to write here."""

import logging
import operator

import numpy as np
import pytest

import rheostat
from rheostat._client.sessions import Updates
from rheostat._watches.controls import WatchControls
from rheostat_wire.v1 import generation_service_pb2, steering_service_pb2

JOY = rheostat.inline([1.0, 2.0], points="resid_post", layers=3)


def message_of(call) -> str:
    with pytest.raises(rheostat.InvalidRequest) as raised:
        call()
    return raised.value.message


def test_a_list_of_texts_is_answered_with_how_to_run_many(client, server):
    for prompts in (["My day was", "I feel"], ("My day was",), [[5, 6], [7]]):
        with pytest.raises(rheostat.InvalidRequest) as raised:
            client.run(lambda engine, prompts=prompts: engine.generate(prompts))
        assert raised.value.message == (
            "this takes one prompt, not a list of them: run several at once with "
            "rheostat.aio and asyncio.gather(*(engine.generate(prompt) for prompt in prompts))"
        )
    assert server.asked == []


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("max_token", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("captures", "capture"),
        ("num_return_sequences", "n"),
    ],
)
def test_an_option_that_is_nearly_one_is_answered_with_it(client, given, meant):
    with pytest.raises(TypeError) as raised:
        client.run(lambda engine: engine.generate("x", **{given: 3}))
    assert str(raised.value) == f"generate() has no option {given!r}: did you mean {meant!r}?"


def test_a_captures_arguments_are_answered_alike():
    with pytest.raises(TypeError) as raised:
        rheostat.Capture("resid_post", layer=3)
    assert str(raised.value) == "Capture() has no argument 'layer': did you mean 'layers'?"
    with pytest.raises(TypeError, match=r"^Capture\(\) has no argument 'x'; it has points, layers"):
        rheostat.Capture("resid_post", x=3)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("named", lambda **given: rheostat.named("joy", **given)),
        ("inline", lambda **given: rheostat.inline([1.0], **given)),
        ("probe", lambda **given: rheostat.probe(JOY, **given)),
        ("at", JOY.at),
        ("at", (2 * JOY).at),
    ],
)
def test_arguments_of_vectors_and_doses_are_answered_alike(name, call):
    with pytest.raises(TypeError) as raised:
        call(layer=3)
    assert str(raised.value) == f"{name}() has no argument 'layer': did you mean 'layers'?"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("derive", lambda engine: engine.vectors.derive),
        ("put", lambda engine: engine.vectors.put),
        ("set_name", lambda engine: engine.vectors.set_name),
        ("fit", lambda engine: engine.conditions.fit),
        ("lens", lambda engine: engine.lens),
        ("capture_run", lambda engine: engine.capture_run),
        ("read_run", lambda engine: engine.read_run),
    ],
)
def test_arguments_of_calls_are_answered_alike(client, name, call):
    with pytest.raises(TypeError) as raised:
        client.run(lambda engine: call(engine)("x", layer=3))
    assert str(raised.value) == f"{name}() has no argument 'layer': did you mean 'layers'?"


def test_at_takes_points_and_layers_in_the_order_of_a_capture():
    joy = rheostat.named("joy")
    assert joy.at("resid_mid", 3, "prompt") == joy.at(points="resid_mid", layers=3, where="prompt")


@pytest.mark.parametrize("method", ["watch", "subscribe"])
def test_options_by_position_are_answered_with_their_names(client, method):
    with pytest.raises(TypeError) as raised:
        client.run(lambda engine: getattr(engine, method)("x", every=True))
    assert str(raised.value).startswith(
        f"{method}() takes its options by name only: write NAME='x'; the names are "
    )


PAIR = rheostat.Pair("a", "b", " c")


@pytest.mark.parametrize(
    ("pairs", "options"),
    [(("a", "b"), {}), (([("a", "b")],), {"answer": " c"}), (([PAIR, "a"],), {})],
)
def test_prompts_in_the_place_of_pairs_are_answered_with_a_pair(client, pairs, options):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.sweep(*pairs, **options))
    assert "a pair is a rheostat.Pair(prompt, corrupt, answer=...), not " in raised.value.message


def test_further_arguments_of_a_sweep_are_options(client):
    with pytest.raises(TypeError, match=r"NAME='x'; the names are points, layers, grades, where"):
        client.run(lambda engine: engine.sweep(PAIR, "x"))


def test_a_compared_probe_is_answered_with_its_condition():
    tone = rheostat.probe(JOY)
    for compare, method in (
        (lambda: tone < 2, "below(2)"),
        (lambda: tone > 2, "above(2)"),
        (lambda: operator.lt(2, tone), "above(2)"),
    ):
        assert message_of(compare) == f"a probe is not compared: write probe.{method}"


@pytest.mark.parametrize(
    ("given", "lack"), [({"layers": 3}, "points"), ({"points": "resid_post"}, "layers")]
)
def test_a_probe_with_half_of_its_sites_is_answered_with_the_other_half(given, lack):
    vector = rheostat.inline([1.0])
    assert message_of(lambda: rheostat.probe(vector, **given)) == (
        f"{vector.label} has no default {lack}: give them, with {lack}="
    )


@pytest.mark.parametrize(
    ("option", "what"),
    [("stop", "a text or a list of texts"), ("stop_token_ids", "a list of token ids")],
)
def test_a_stop_that_is_no_list_is_named(client, server, option, what):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.generate("x", **{option: 3}))
    assert (raised.value.path, raised.value.message) == (
        f"sampling.{option}",
        f"{option} is {what}, not 3",
    )
    assert server.asked == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": "2"}, "max_tokens is a whole number, not '2'"),
        ({"max_tokens": 1.5}, "max_tokens is a whole number, not 1.5"),
        ({"max_tokens": -2}, "max_tokens must be at least 1, not -2"),
        ({"max_tokens": 2**32}, "max_tokens must be at most 4294967295, not 4294967296"),
        ({"n": -1}, "n must be at least 1, not -1"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
        ({"seed": 2**64}, f"seed must be at most {2**63 - 1}, not {2**64}"),
        ({"logprobs": True}, "logprobs is a whole number, not True"),
        ({"temperature": "hot"}, "temperature is a number, not 'hot'"),
        ({"with_baseline": "yes"}, "with_baseline is True or False, not 'yes'"),
        ({"ignore_eos": "no"}, "ignore_eos is True or False, not 'no'"),
        (
            {"stop_token_ids": "ab"},
            "stop_token_ids is a list of token ids, not 'ab'; "
            "engine.tokenize('ab', special_tokens=False).token_ids is that of a text",
        ),
    ],
)
def test_an_option_of_the_wrong_type_is_answered_with_what_it_takes(client, server, options, said):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.generate("x", **options))
    assert raised.value.message == said
    assert server.asked == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("x",), "the factor is a number, not 'x'"),
        ((0.5, 3), "interventions is a list of their indices, such as [0, 2], not 3"),
        ((0.5, "0"), "interventions is a list of their indices, such as [0, 2], not '0'"),
        ((0.5, [-1]), "an intervention's index is 0 to 4294967295, not -1"),
        (
            (0.5, np.array(1)),
            "the request cannot be encoded, because a value has the wrong type: "
            "iteration over a 0-d array",
        ),
    ],
)
def test_a_gain_of_the_wrong_type_is_answered_with_what_it_takes(arguments, said):
    factor, interventions = arguments if len(arguments) == 2 else (*arguments, ())
    updates = Updates(generation_service_pb2.GenerateRequest(), lambda _: None)
    for make in (
        lambda: updates.gain(factor, interventions),
        lambda: WatchControls().gain("a", factor, interventions),
    ):
        assert message_of(make) == said


@pytest.mark.parametrize("zoom", [4, True, [("layer_stride", 2)]])
def test_a_zoom_that_is_no_dict_is_answered_with_its_keys(client, server, zoom):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.sweep(rheostat.Pair("a", "b", [1]), zoom=zoom))
    assert raised.value.message == (
        "zoom is a dict of layer_stride, column_stride, layer_radius, column_radius, peak_count, "
        f"not {zoom!r}"
    )


def test_a_text_in_the_place_of_token_ids_is_answered_with_its_ids(client, server):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.lens("x", tokens=" Paris"))
    assert raised.value.message == (
        "tokens is a list of token ids, not ' Paris'; "
        "engine.tokenize(' Paris', special_tokens=False).token_ids is that of a text"
    )
    assert server.asked == []


@pytest.mark.parametrize(
    ("layers", "advice"),
    [
        ("2-5", "write range(2, 6)"),
        ("3", "write 3"),
        ("0,4", "write [0, 4]"),
        ("last", "or engine.model().layer_count - 1 for the last"),
        (-1, "engine.model().layer_count - 1 is the last"),
    ],
)
def test_layers_in_other_words_are_answered_with_how_to_write_them(layers, advice):
    assert advice in message_of(lambda: rheostat.Capture("resid_post", layers))


@pytest.mark.parametrize(
    ("where", "advice"),
    [
        ("last", "write rheostat.positions(-1)"),
        ("last_token", "write rheostat.positions(-1)"),
        ("first", "write rheostat.positions(0)"),
        (-1, "write rheostat.positions(-1)"),
        ([0, 5], "write rheostat.positions(0, 5)"),
        ("Eiffel", 'write rheostat.span("Eiffel") for the tokens of a text'),
    ],
)
def test_tokens_in_other_words_are_answered_with_how_to_select_them(where, advice):
    assert message_of(lambda: rheostat.Capture("resid_post", 3, where)).endswith(advice)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("blocks.3.hook_resid_post", 'write "resid_post" with layers=3'),
        ("blocks.11.hook_resid_pre", 'write "resid_pre" with layers=11'),
        ("blocks.0.hook_mlp_out", 'write "mlp_out" with layers=0'),
        ("hook_resid_mid", 'write "resid_mid"'),
        ("model.layers.7", 'write "resid_post" with layers=7'),
        ("model.layers.7.mlp", 'write "mlp_out" with layers=7'),
        ("transformer.h.2.attn", 'write "attn_out" with layers=2'),
        ("resid_pots", 'did you mean "resid_post"?'),
        ("hook_z", "heads are not served"),
        ("q_proj", "there are resid_pre, "),
    ],
)
def test_a_point_by_the_name_of_another_library_is_answered_with_ours(name, advice):
    assert advice in message_of(lambda: rheostat.Capture(name, 3))


@pytest.mark.parametrize("factor", ["a", None, [1]])
def test_a_dose_that_is_no_number_is_refused_as_it_is_written(factor):
    for dose in (lambda: JOY * factor, lambda: factor * JOY, lambda: JOY / factor):
        assert message_of(dose) == f"a dose is a number, not {factor!r}"
    assert message_of(lambda: JOY / 0) == "a dose cannot be divided by 0"
    for huge in (lambda: JOY * 10**400, lambda: JOY / 10**400):
        assert message_of(huge) == "the scale is not finite"


@pytest.mark.parametrize(("norms", "warns"), [([0, 0], True), ([0, 1], False)])
def test_a_derived_vector_that_is_zero_is_warned_of(client, server, caplog, norms, warns):
    answer = steering_service_pb2.DerivedVectors()
    vector = answer.vectors.add(point="POINT_RESID_POST", digest=bytes(32), name="joy")
    for layer, norm in enumerate(norms, 2):
        vector.rows.add(layer=layer, norm=norm, stream_norm=8)
    server.on("DeriveVectors", [steering_service_pb2.DeriveVectorsResponse(derived=answer)])
    with caplog.at_level(logging.WARNING, "rheostat"):
        client.run(
            lambda engine: engine.vectors.derive(["a"], ["a"], points="resid_post", layers=[2, 3])
        )
    told = "the two sets do not differ at resid_post 2-3: the vector is zero and steers nothing"
    # gRPC's event loops of other tests log too.
    own = [one.getMessage() for one in caplog.records if one.name == "rheostat"]
    assert own == ([told] if warns else [])


def test_a_message_outside_of_a_list_is_answered_with_the_list(client, server):
    message = {"role": "user", "content": "x"}
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.generate(message))
    assert raised.value.message == 'messages come in a list: [{"role": ..., "content": ...}]'
    assert server.asked == []


@pytest.mark.parametrize("timeout", ["x", -1, float("nan"), float("inf"), [3]])
@pytest.mark.parametrize(
    "use",
    [
        lambda engine, timeout: engine.generate("x", timeout=timeout),
        lambda engine, timeout: engine.vectors.put([1.0], timeout=timeout),
        lambda engine, timeout: engine.explain("x", timeout=timeout),
        lambda engine, timeout: engine.wait_until_ready(timeout),
        lambda engine, timeout: rheostat.connect("localhost:1", timeout=timeout),
    ],
)
def test_a_timeout_that_is_no_number_of_seconds_is_refused(client, server, use, timeout):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: use(engine, timeout))
    assert raised.value.path == "timeout"
    assert raised.value.message.startswith("a timeout is a number of seconds, 0 or more, or None")
    assert server.asked == []


def test_a_dose_says_the_layers_at_which_it_acts():
    tone = rheostat.inline([1.0, 2.0], points="resid_post", layers=range(6))
    at = f"add 0.5 * {tone.label} at"
    assert str(tone.at(layers=3, where="prompt") * 0.5) == f'{at} resid_post 3 on "prompt"'
    assert str(tone.at(points="resid_mid") * 0.5) == f"{at} resid_mid 0-5"
    assert str(rheostat.named("joy").at(layers=3)) == "add 1 * joy at its points 3"


MOOD = rheostat.probe(JOY, layers=2, name="mood")


@pytest.mark.parametrize(
    "written",
    [
        lambda a, b: JOY.when(a and b),
        lambda a, b: JOY.when(a or b),
        lambda a, b: JOY.when(not a),
        lambda a, b: JOY.when(a & b),
        lambda a, b: JOY.when(a | b),
        lambda a, b: JOY.when(~a),
        lambda a, b: JOY.when(rheostat.gate(a) and rheostat.gate(b)),
    ],
)
def test_operators_between_conditions_are_answered_with_a_gate(written):
    message = message_of(lambda: written(MOOD.above(1), MOOD.below(4)))
    assert "write rheostat.gate(a, b)" in message


@pytest.mark.parametrize("compare", [operator.gt, operator.ge, operator.lt, operator.le])
def test_a_comparison_of_a_probe_is_answered_with_its_method(compare):
    method = "above" if compare in (operator.gt, operator.ge) else "below"
    message = f"a probe is not compared: write probe.{method}(2)"
    assert message_of(lambda: compare(MOOD, 2)) == message


def test_a_second_gate_is_answered_with_one_of_both_conditions():
    message = message_of(lambda: JOY.when(MOOD.above(1)).when(MOOD.below(4)))
    assert message == (
        "it has a gate already, when 1 < mood: put all conditions into one, rheostat.gate(a, b)"
    )


@pytest.mark.parametrize("given", [MOOD, [MOOD.above(1)], 2])
def test_something_else_than_a_gate_is_answered_with_a_condition(given):
    message = message_of(lambda: JOY.when(given))
    assert message.endswith(f" or a fit's .condition, not {type(given).__name__}")


@pytest.mark.parametrize("form", ["ramp", rheostat.Ramp])
def test_a_form_that_is_none_is_answered_with_the_forms(form):
    gate = rheostat.gate(MOOD.summed(), form=form)
    message = message_of(lambda: JOY.when(gate).to_wire("steering.interventions[0]"))
    assert message.startswith("a form is a number, rheostat.Ramp(low, high) or rheostat.Sigmoid(")


def test_an_index_for_a_list_of_interventions_is_answered_with_a_list():
    rule = rheostat.Rule("off", MOOD.above(1), rheostat.Gain(0.5, 0))
    message = message_of(lambda: rule.to_wire("rules[0]"))
    assert message == "interventions is a list of their indices, such as [0, 2], not 0"


def test_signals_that_nobody_asked_for_are_answered_with_how_to_ask():
    with pytest.raises(KeyError, match="probes= asks for them"):
        rheostat.Signals()["mood"]


@pytest.mark.parametrize(
    ("function", "wrong", "meant"),
    [(rheostat.inline, "aray", "array"), (rheostat.probe, "vectr", "vector")],
)
def test_a_misspelt_required_argument_is_answered_with_it(function, wrong, meant):
    with pytest.raises(TypeError) as raised:
        function(**{wrong: 1})
    name = function.__name__
    assert str(raised.value) == f"{name}() has no argument {wrong!r}: did you mean {meant!r}?"
