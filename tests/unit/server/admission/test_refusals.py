import math

import numpy as np
import pytest

from rheostat_engine.plan import tables
from rheostat_server import errors
from rheostat_server.engine import sampling
from rheostat_wire.v1 import (
    capture_pb2,
    gate_pb2,
    generation_pb2,
    generation_service_pb2,
    monitor_pb2,
    replace_pb2,
    selector_pb2,
    steering_pb2,
    tensor_pb2,
    types_pb2,
    vector_pb2,
)

from ..admissions import admitted, named, refused
from ..fakes import LAYERS, WIDTH
from ..messages import (
    FIRST,
    ONES,
    SECOND,
    add,
    along,
    capture,
    request,
    selector,
    site_set,
    tensor,
    token_range,
    window,
)

PRE, POST = types_pb2.POINT_RESID_PRE, types_pb2.POINT_RESID_POST
Sampling = generation_pb2.Sampling


def where(one: selector_pb2.Range) -> steering_pb2.Intervention:
    return add(where=selector(one))


STEER = "steering.interventions[0]"


@pytest.mark.parametrize(
    ("message", "error", "field"),
    [
        (request(request_id="a b"), errors.InvalidValue, "request_id"),
        (request(request_id="x" * 129), errors.InvalidValue, "request_id"),
        (generation_service_pb2.GenerateRequest(), errors.MissingField, ""),
        (request(text=""), errors.MissingField, "text"),
        (request(token_ids=types_pb2.TokenIds()), errors.MissingField, "token_ids.ids"),
        (
            request(token_ids=types_pb2.TokenIds(ids=[1, 128])),
            errors.UnknownToken,
            "token_ids.ids[1]",
        ),
        (request(token_ids=types_pb2.TokenIds(ids=[128] * 65)), errors.PromptTooLong, "token_ids"),
        (request(text="é" * 513), errors.PromptTooLong, "text"),
        (
            request(
                chat=types_pb2.Chat(
                    messages=[types_pb2.ChatMessage(role="nobody", content="x" * 1025)]
                )
            ),
            errors.PromptTooLong,
            "chat",
        ),
        (request(text="x" * 63), errors.PromptTooLong, "text"),
        (request(text="x" * 70), errors.PromptTooLong, "text"),
        (request(text="é"), errors.UnknownToken, "text[1]"),
        (request(chat=types_pb2.Chat()), errors.MissingField, "chat.messages"),
        (
            request(chat=types_pb2.Chat(messages=[types_pb2.ChatMessage()])),
            errors.MissingField,
            "chat.messages[0].role",
        ),
        (
            request(chat=types_pb2.Chat(messages=[types_pb2.ChatMessage(role="nobody")])),
            errors.InvalidValue,
            "chat",
        ),
        (
            request(
                chat=types_pb2.Chat(
                    messages=[types_pb2.ChatMessage(role="a")],
                    add_generation_prompt=True,
                    continue_final_message=True,
                )
            ),
            errors.InvalidValue,
            "chat.continue_final_message",
        ),
        (
            request(
                chat=types_pb2.Chat(
                    messages=[types_pb2.ChatMessage(role="a")], template_variables={"x": "{"}
                )
            ),
            errors.InvalidValue,
            "chat.template_variables[x]",
        ),
        (
            request(
                chat=types_pb2.Chat(
                    messages=[types_pb2.ChatMessage(role="a")],
                    template_variables={"tokenize": "true"},
                )
            ),
            errors.InvalidValue,
            "chat.template_variables[tokenize]",
        ),
        (request(lora_name="x"), errors.LoraNotFound, "lora_name"),
        (request(when_full=0), errors.UnknownEnum, "when_full"),
        (request(when_full=9), errors.UnknownEnum, "when_full"),
        (request(probes=[gate_pb2.Probe()]), errors.InvalidValue, "probes[0].name"),
        (request(probes=[gate_pb2.Probe()] * 257), errors.InvalidValue, "probes"),
        (request(rules=[monitor_pb2.Rule()]), errors.InvalidValue, "rules[0].name"),
        (request(labels={"": "x"}), errors.InvalidValue, "labels"),
        (request(labels={"k": "x" * 256}), errors.InvalidValue, "labels[k]"),
        (request(labels={str(i): "" for i in range(17)}), errors.InvalidValue, "labels"),
        (request(steer=[add()] * 257), errors.InvalidValue, "steering.interventions"),
        (request(captures=[capture()] * 17), errors.InvalidValue, "captures"),
    ],
)
def test_a_wrong_request_is_refused_by_field(message, error, field) -> None:
    assert refused(message) == (error, field)


@pytest.mark.parametrize(
    ("intervention", "error", "field"),
    [
        (steering_pb2.Intervention(), errors.MissingField, ""),
        (steering_pb2.Intervention(add=steering_pb2.Add()), errors.MissingField, "sites"),
        (
            steering_pb2.Intervention(replace=replace_pb2.Replace()),
            errors.MissingField,
            "sites",
        ),
        (
            steering_pb2.Intervention(add=add().add, sites=add().sites, gate=gate_pb2.Gate()),
            errors.MissingField,
            "gate.conditions",
        ),
        (add(sites=types_pb2.SiteSet()), errors.MissingField, "sites.points"),
        (add(sites=types_pb2.SiteSet(points=[POST])), errors.MissingField, "sites"),
        (add(sites=site_set(0)), errors.UnknownEnum, "sites.points[0]"),
        (add(sites=site_set(POST, 9)), errors.UnknownEnum, "sites.points[1]"),
        (add(sites=site_set(POST, POST)), errors.InvalidValue, "sites.points"),
        (add(sites=site_set(POST, layers=[])), errors.InvalidValue, "sites.list.layers"),
        (add(sites=site_set(POST, layers=[1, 1])), errors.InvalidValue, "sites.list.layers"),
        (
            add(sites=site_set(POST, layers=[0, LAYERS])),
            errors.UnknownLayer,
            "sites.list.layers[1]",
        ),
        (add(sites=site_set(PRE, POST)), errors.InvalidValue, "sites"),
        (add(where=selector_pb2.Selector()), errors.EmptySelector, "where"),
        (where(window(-4)), errors.InvalidPosition, "where.include[0].positions.start"),
        (where(window(4, 5)), errors.InvalidPosition, "where.include[0].positions"),
        (where(token_range(128)), errors.UnknownToken, "where.include[0].token_ids.ids[0]"),
        (add(scale=math.nan), errors.NonFinite, "add.scale"),
        (add(scale=math.inf), errors.NonFinite, "add.scale"),
        (
            steering_pb2.Intervention(sites=add().sites, add=steering_pb2.Add()),
            errors.MissingField,
            "add.vector",
        ),
        (add(vector_pb2.VectorRef()), errors.MissingField, "add.vector"),
        (
            add(vector_pb2.VectorRef(digest=b"x")),
            errors.InvalidValue,
            "add.vector.digest",
        ),
        (
            add(vector_pb2.VectorRef(digest=bytes(32))),
            errors.VectorNotFound,
            "add.vector.digest",
        ),
        (add(named("/x")), errors.InvalidValue, "add.vector.name"),
        (add(named("gone")), errors.NameNotFound, "add.vector.name"),
        (add(tensor(np.ones(WIDTH))), errors.VectorShape, "add.vector.inline.shape"),
        (add(tensor(np.ones((0, WIDTH)))), errors.VectorShape, "add.vector.inline.shape"),
        (
            add(tensor(np.ones((1, WIDTH + 1)))),
            errors.VectorShape,
            "add.vector.inline.shape",
        ),
        (
            add(tensor(np.ones((1025, WIDTH)), crc32c=7)),
            errors.VectorShape,
            "add.vector.inline.shape",
        ),
        (add(tensor(np.ones((2, WIDTH)))), errors.VectorShape, "add.vector"),
        (
            add(tensor(np.array([[1, 2, np.nan, 4]]))),
            errors.NonFinite,
            "add.vector.inline.inline",
        ),
        (
            add(tensor(np.array([[1, 2, -np.inf, 4]]))),
            errors.NonFinite,
            "add.vector.inline.inline",
        ),
        (
            add(tensor(ONES, dtype=tensor_pb2.DTYPE_FLOAT64)),
            errors.InvalidValue,
            "add.vector.inline.dtype",
        ),
        (add(tensor(ONES, crc32c=7)), errors.TensorPayload, "add.vector.inline.crc32c"),
        (
            add(tensor(np.ones((600_000, WIDTH)))),
            errors.MessageTooLarge,
            "add.vector.inline.inline",
        ),
        (add(tensor(np.full((1, WIDTH), 3e38)), scale=2.0), errors.NonFinite, "add.scale"),
    ],
)
def test_wrong_steering_is_refused_by_field(intervention, error, field) -> None:
    path = ".".join(filter(None, (STEER, field)))
    assert refused(request(steer=[intervention])) == (error, path)


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"inline": None}, errors.MissingField, ""),
        ({"inline": None, "subscription_id": "s"}, errors.NotSupported, "subscription_id"),
        ({"inline": None, "sink": capture_pb2.SinkTarget()}, errors.SinkNotFound, "sink.sink_name"),
        ({"inline": None, "run": capture_pb2.RunTarget()}, errors.StoreFull, "run.run_id"),
        ({"encoding": 0}, errors.UnknownEnum, "encoding"),
        ({"encoding": tensor_pb2.ENCODING_RP8}, errors.MissingField, "kept"),
        ({"encoding": tensor_pb2.ENCODING_RP8, "kept": 0}, errors.InvalidValue, "kept"),
        ({"encoding": tensor_pb2.ENCODING_TOPK8, "kept": 5}, errors.InvalidValue, "kept"),
        ({"encoding": tensor_pb2.ENCODING_FULL8, "kept": 2}, errors.InvalidValue, "kept"),
        (
            {"encoding": tensor_pb2.ENCODING_TOPK8, "kept": 2, "seed": 1},
            errors.InvalidValue,
            "seed",
        ),
        ({"kept": 2}, errors.InvalidValue, "kept"),
        ({"seed": 2}, errors.InvalidValue, "seed"),
        ({"projection": capture_pb2.Projection()}, errors.MissingField, "projection"),
        (
            {"projection": along(*[vector_pb2.VectorRef(name="joy")] * 4097)},
            errors.InvalidValue,
            "projection.readouts.readouts",
        ),
        (
            {"projection": along(tensor(FIRST), vector_pb2.VectorRef())},
            errors.MissingField,
            "projection.readouts.readouts[1].vector",
        ),
        (
            {"projection": along(tensor(FIRST), vector_pb2.VectorRef(name="nobody"))},
            errors.NameNotFound,
            "projection.readouts.readouts[1].vector.name",
        ),
        (
            {"projection": along(tensor(np.ones((1, WIDTH + 1))))},
            errors.VectorShape,
            "projection.readouts.readouts[0].vector.inline.shape",
        ),
        (
            {"projection": along(tensor(np.ones((2, WIDTH))))},
            errors.VectorShape,
            "projection.readouts.readouts[0].vector",
        ),
        (
            {
                "projection": along(tensor(FIRST), tensor(SECOND)),
                "encoding": tensor_pb2.ENCODING_TOPK8,
                "kept": 3,
            },
            errors.InvalidValue,
            "kept",
        ),
        ({"overload": 0}, errors.UnknownEnum, "overload"),
        ({"overload": capture_pb2.OVERLOAD_SPILL}, errors.NotSupported, "overload"),
        ({"sharding": 0}, errors.UnknownEnum, "sharding"),
        ({"dtype": 0}, errors.UnknownEnum, "dtype"),
        ({"dtype": tensor_pb2.DTYPE_INT32}, errors.InvalidValue, "dtype"),
        ({"sites": types_pb2.SiteSet()}, errors.MissingField, "sites.points"),
        ({"where": selector_pb2.Selector()}, errors.EmptySelector, "where"),
    ],
)
def test_a_wrong_capture_is_refused_by_field(fields, error, field) -> None:
    path = ".".join(filter(None, ("captures[0]", field)))
    sites = fields.pop("sites", None)
    spec = capture(sites, **fields)
    assert refused(request(captures=[spec])) == (error, path)


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"temperature": -1}, errors.InvalidValue, "temperature"),
        ({"temperature": 2.5}, errors.InvalidValue, "temperature"),
        ({"temperature": 0.0099}, errors.InvalidValue, "temperature"),
        ({"temperature": math.nan}, errors.NonFinite, "temperature"),
        ({"temperature": math.inf}, errors.NonFinite, "temperature"),
        ({"top_p": 0}, errors.InvalidValue, "top_p"),
        ({"top_p": 1.5}, errors.InvalidValue, "top_p"),
        ({"min_p": -0.1}, errors.InvalidValue, "min_p"),
        ({"max_tokens": 0}, errors.InvalidValue, "max_tokens"),
        ({"max_tokens": 62}, errors.PromptTooLong, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, errors.InvalidValue, "min_tokens"),
        ({"stop": [""]}, errors.MissingField, "stop[0]"),
        ({"stop": ["x"] * 17}, errors.InvalidValue, "stop"),
        ({"stop": ["ok", "x" * 257]}, errors.InvalidValue, "stop[1]"),
        ({"stop": ["\u00e9" * 129]}, errors.InvalidValue, "stop[0]"),
        ({"stop_token_ids": [128]}, errors.UnknownToken, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 129}, errors.InvalidValue, "stop_token_ids"),
        ({"seed": 2**63}, errors.InvalidValue, "seed"),
        ({"n": 0}, errors.InvalidValue, "n"),
        ({"n": 65}, errors.InvalidValue, "n"),
        ({"n": 2, "temperature": 0}, errors.InvalidValue, "n"),
        ({"logprobs": 6}, errors.InvalidValue, "logprobs"),
        ({"prompt_logprobs": 6}, errors.InvalidValue, "prompt_logprobs"),
        ({"repetition_penalty": 0}, errors.InvalidValue, "repetition_penalty"),
        ({"presence_penalty": 2.5}, errors.InvalidValue, "presence_penalty"),
        ({"frequency_penalty": -2.5}, errors.InvalidValue, "frequency_penalty"),
    ],
)
def test_wrong_sampling_is_refused_by_field(fields, error, field) -> None:
    assert refused(request(sampling=Sampling(**fields))) == (error, f"sampling.{field}")


def test_a_stop_text_of_just_as_many_bytes_as_may_be_is_taken() -> None:
    longest = ["\u00e9" * 128]
    assert admitted(request(sampling=Sampling(stop=longest))).sampling.stop == tuple(longest)


def test_the_prompt_times_the_samples_is_limited(monkeypatch) -> None:
    monkeypatch.setattr(sampling, "SAMPLED_PROMPT_TOKENS", 6)
    admitted(request(sampling=Sampling(max_tokens=1, n=2)))
    admitted(request(token_ids=types_pb2.TokenIds(ids=[5] * 7)))
    assert refused(request(sampling=Sampling(max_tokens=1, n=3))) == (
        errors.InvalidValue,
        "sampling.n",
    )


def test_the_log_probabilities_of_a_prompt_are_limited_but_its_own_tokens(monkeypatch) -> None:
    monkeypatch.setattr(sampling, "PROMPT_LOGPROBS", 6)
    admitted(request(sampling=Sampling(prompt_logprobs=1)))
    admitted(
        request(token_ids=types_pb2.TokenIds(ids=[5] * 7), sampling=Sampling(prompt_logprobs=0))
    )
    assert refused(request(sampling=Sampling(prompt_logprobs=2))) == (
        errors.InvalidValue,
        "sampling.prompt_logprobs",
    )


def test_the_variables_of_a_chat_template_are_limited_in_bytes() -> None:
    messages = [types_pb2.ChatMessage(role="user", content="hi")]
    for name, value in (("depth", f'"{"x" * 65536}"'), ("x" * 65536, "1")):
        chat = types_pb2.Chat(messages=messages, template_variables={name: value})
        assert refused(request(chat=chat)) == (errors.InvalidValue, "chat.template_variables")


def test_selectors_that_cut_a_request_into_too_many_combinations_are_refused(monkeypatch) -> None:
    steer = [add(where=selector(window(i, i + 1))) for i in range(3)]
    monkeypatch.setattr(tables, "MAX_PLAN_COST", 4)
    admitted(request(steer=steer))
    monkeypatch.setattr(tables, "MAX_PLAN_COST", 3)
    assert refused(request(steer=steer)) == (errors.InvalidValue, "steering")


def test_the_ranges_of_a_request_are_limited_over_all_its_selectors() -> None:
    many = selector(*[window(0, 1)] * 1024)
    steer = [add(where=many), add(where=many)]
    admitted(request(steer=steer, captures=[capture(where=many), capture(where=many)]))
    captures = [capture(where=many), capture(where=many), capture(where=selector(window()))]
    assert refused(request(text="x", steer=steer, captures=captures)) == (
        errors.InvalidValue,
        "captures[2].where",
    )
