import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from rheostat._proto.v1 import (
    capture_pb2,
    generation_pb2,
    generation_service_pb2,
    monitor_pb2,
    patch_pb2,
    selector_pb2,
    steering_pb2,
    tensor_pb2,
    types_pb2,
)
from rheostat_engine import OPEN_END, Addition, Capture, Plan, Point, Site
from rheostat_server import errors
from rheostat_server.admission import Admitted, Desk, admit
from rheostat_server.prompts import Prompts
from rheostat_server.sampling import SamplingSettings
from rheostat_server.tensors import FloatType
from rheostat_server.vectors import Name, VectorStore, make_vector

from .fakes import (
    INFO,
    LAYERS,
    ONES,
    PARALLEL,
    PROMPT,
    SITES,
    VOCABULARY,
    WIDTH,
    CharTokenizer,
    add,
    capture,
    request,
    selector,
    site_set,
    span,
    tensor,
    token_range,
    window,
)

PRE, MID, POST = types_pb2.POINT_RESID_PRE, types_pb2.POINT_RESID_MID, types_pb2.POINT_RESID_POST
Sampling = generation_pb2.Sampling


def desk(sites=SITES, tokenizer=True, capacity=1 << 20) -> Desk:
    prompts = Prompts(CharTokenizer() if tokenizer else None, VOCABULARY)
    return Desk(INFO, sites, prompts, VectorStore(capacity, lambda digest: None))


def admitted(message, at: Desk | None = None) -> Admitted:
    return asyncio.run(admit(message, at or desk()))


def refused(message, at: Desk | None = None) -> tuple[type, str]:
    with pytest.raises(errors.RheostatError) as caught:
        admitted(message, at)
    return type(caught.value), caught.value.field


def stored(at: Desk, rows: int = 1, name: str = "joy", value: float = 2.0):
    data = np.full((rows, WIDTH), value, dtype="<f4").tobytes()
    vector = make_vector(FloatType.FLOAT32, rows, WIDTH, data, "v")
    at.store.put_named(vector, name, Name(vector.digest, "", None))
    return vector


def named(name: str = "joy") -> steering_pb2.VectorRef:
    return steering_pb2.VectorRef(name=name)


def test_defaults_are_filled_in() -> None:
    got = admitted(request(text="ab", sampling=None))
    assert got.prompt.token_ids == (1, 97, 98)
    assert got.sampling == SamplingSettings(max_tokens=61)
    assert got.plan(0) == Plan(f"{got.request_id}#0")
    assert len(got.request_id) == 32


def test_a_request_becomes_a_plan_of_integers() -> None:
    at = desk()
    vector = stored(at, rows=2)
    got = admitted(
        request(
            request_id="r",
            steer=[
                add(named(), sites=site_set(MID, POST, layers=[2, 0]), scale=0.5),
                add(tensor(ONES), where=selector(PROMPT)),
            ],
            captures=[capture(site_set(PRE, layers=[1]), where=selector(window(-1)))],
        ),
        at,
    )
    ones = make_vector(FloatType.FLOAT32, 1, WIDTH, ONES.tobytes(), "v")
    assert got.plan(1) == Plan(
        "r#1",
        additions=(
            Addition(vector.digest, ((1, 0), (2, 0), (5, 1), (6, 1)), 0.5, ((0, OPEN_END),)),
            Addition(ones.digest, ((4, 0),), 1.0, ((0, 3),)),
        ),
        captures=(Capture((2,), ((2, 3),)),),
    )
    assert got.vectors == (vector, ones)
    assert got.additions[0].sites == (
        Site(Point.RESID_MID, 0),
        Site(Point.RESID_POST, 0),
        Site(Point.RESID_MID, 2),
        Site(Point.RESID_POST, 2),
    )
    assert got.additions[0].doses == pytest.approx((2.0, 2.0, 2.0, 2.0))


def test_name_digest_and_inline_are_one_vector() -> None:
    at = desk()
    vector = stored(at)
    inline = tensor(np.full((1, WIDTH), 2.0))
    digest = steering_pb2.VectorRef(digest=vector.digest)
    plans = [
        replace(admitted(request(steer=[add(ref)]), at).plan(0), request_id="")
        for ref in (named(), digest, inline)
    ]
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].cache_salt() == plans[2].cache_salt() is not None


@pytest.mark.parametrize(
    "idle",
    [
        add(scale=0.0),
        add(scale=-0.0),
        add(tensor(np.zeros((1, WIDTH)))),
        add(where=selector(PROMPT, exclude=[PROMPT])),
    ],
)
def test_what_changes_no_bit_is_not_in_the_plan(idle) -> None:
    got = admitted(request(request_id="r", steer=[idle]))
    assert got.plan(0) == Plan("r#0")
    assert len(got.additions) == 1


def test_captures_that_overlap_are_copied_once() -> None:
    got = admitted(
        request(
            request_id="r",
            captures=[
                capture(site_set(POST, layers=[0]), where=selector(window(0, 2))),
                capture(site_set(PRE, POST, layers=[0, 1]), where=selector(window(1, 3))),
            ],
        )
    )
    assert got.plan(0).captures == (
        Capture((0, 4), ((1, 3),)),
        Capture((2,), ((0, 3),)),
    )
    assert got.captures[1].sites == (
        Site(Point.RESID_PRE, 0),
        Site(Point.RESID_POST, 0),
        Site(Point.RESID_PRE, 1),
        Site(Point.RESID_POST, 1),
    )


def test_spans_of_texts_are_found_in_every_kind_of_prompt() -> None:
    found = selector(span("cat"))
    ids = types_pb2.TokenIds(ids=[ord(c) for c in "a cat"])
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(role="user", content="cat")])
    spans = [
        admitted(request(steer=[add(where=found)], **prompt)).additions[0].spans
        for prompt in ({"text": "a cat"}, {"token_ids": ids}, {"chat": chat})
    ]
    assert spans == [((3, 6),), ((2, 5),), ((6, 9),)]


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
        (request(lora="x"), errors.LoraNotFound, "lora"),
        (request(with_baseline=True), errors.NotSupported, "with_baseline"),
        (request(patches=[patch_pb2.Patch()]), errors.NotSupported, "patches"),
        (request(rules=[monitor_pb2.Rule()]), errors.NotSupported, "rules"),
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
            steering_pb2.Intervention(norm_add=steering_pb2.NormAdd()),
            errors.OpNotServed,
            "norm_add",
        ),
        (steering_pb2.Intervention(ablate=steering_pb2.Ablate()), errors.OpNotServed, "ablate"),
        (steering_pb2.Intervention(clamp=steering_pb2.Clamp()), errors.OpNotServed, "clamp"),
        (steering_pb2.Intervention(scale=steering_pb2.Scale()), errors.OpNotServed, "scale"),
        (
            steering_pb2.Intervention(replace=steering_pb2.Replace()),
            errors.OpNotServed,
            "replace",
        ),
        (
            steering_pb2.Intervention(add=add().add, sites=add().sites, gate=steering_pb2.Gate()),
            errors.NotSupported,
            "gate",
        ),
        (add(sites=types_pb2.SiteSet()), errors.MissingField, "sites.points"),
        (add(sites=types_pb2.SiteSet(points=[POST])), errors.MissingField, "sites"),
        (add(sites=site_set(0)), errors.UnknownEnum, "sites.points[0]"),
        (add(sites=site_set(POST, 9)), errors.UnknownEnum, "sites.points[1]"),
        (add(sites=site_set(POST, POST)), errors.InvalidValue, "sites.points"),
        (
            add(sites=site_set(types_pb2.POINT_ATTN_OUT)),
            errors.SiteNotServed,
            "sites.points[0]",
        ),
        (
            add(sites=site_set(POST, types_pb2.POINT_MLP_OUT)),
            errors.SiteNotServed,
            "sites.points[1]",
        ),
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
        (where(token_range(1)), errors.NotSupported, "where.include[0].token_ids"),
        (add(scale=math.nan), errors.NonFinite, "add.scale"),
        (add(scale=math.inf), errors.NonFinite, "add.scale"),
        (
            steering_pb2.Intervention(sites=add().sites, add=steering_pb2.Add()),
            errors.MissingField,
            "add.vector",
        ),
        (add(steering_pb2.VectorRef()), errors.MissingField, "add.vector"),
        (
            add(steering_pb2.VectorRef(digest=b"x")),
            errors.InvalidValue,
            "add.vector.digest",
        ),
        (
            add(steering_pb2.VectorRef(digest=bytes(32))),
            errors.VectorNotFound,
            "add.vector.digest",
        ),
        (add(named("/x")), errors.InvalidValue, "add.vector.name"),
        (add(named("gone")), errors.NameNotFound, "add.vector.name"),
        (add(tensor(np.ones(WIDTH))), errors.VectorShape, "add.vector.inline.shape"),
        (add(tensor(np.ones((0, WIDTH)))), errors.VectorShape, "add.vector.inline.shape"),
        (add(tensor(np.ones((1, WIDTH + 1)))), errors.VectorShape, "add.vector"),
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


def layer_range(**fields: int) -> types_pb2.SiteSet:
    return types_pb2.SiteSet(points=[PRE], range=types_pb2.LayerRange(**fields))


@pytest.mark.parametrize(
    ("sites", "layers"),
    [
        (layer_range(), (0, 1, 2)),
        (layer_range(start=1), (1, 2)),
        (layer_range(stop=2), (0, 1)),
        (layer_range(step=2), (0, 2)),
        (layer_range(start=0, stop=3, step=5), (0,)),
    ],
)
def test_a_range_of_layers_is_these_layers(sites, layers) -> None:
    got = admitted(request(captures=[capture(sites)])).captures[0].sites
    assert got == tuple(Site(Point.RESID_PRE, layer) for layer in layers)


@pytest.mark.parametrize(
    ("sites", "error", "field"),
    [
        (layer_range(start=1, stop=1), errors.InvalidValue, "range"),
        (layer_range(stop=LAYERS + 1), errors.UnknownLayer, "range.stop"),
        (layer_range(start=LAYERS), errors.InvalidValue, "range"),
        (layer_range(step=0), errors.InvalidValue, "range.step"),
    ],
)
def test_a_wrong_range_of_layers_is_refused(sites, error, field) -> None:
    assert refused(request(captures=[capture(sites)])) == (error, f"captures[0].sites.{field}")


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"inline": None}, errors.MissingField, ""),
        ({"inline": None, "subscription": "s"}, errors.NotSupported, "subscription"),
        ({"inline": None, "sink": capture_pb2.SinkTarget()}, errors.NotSupported, "sink"),
        ({"inline": None, "run": capture_pb2.RunTarget()}, errors.NotSupported, "run"),
        ({"encoding": 0}, errors.UnknownEnum, "encoding"),
        ({"encoding": tensor_pb2.ENCODING_FULL8}, errors.NotSupported, "encoding"),
        ({"kept": 2}, errors.InvalidValue, "kept"),
        ({"seed": 2}, errors.InvalidValue, "seed"),
        ({"projection": capture_pb2.Projection()}, errors.NotSupported, "projection"),
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


def test_a_point_that_the_architecture_lacks_is_refused_by_name() -> None:
    with pytest.raises(errors.SiteNotServed) as caught:
        admitted(request(captures=[capture(site_set(MID, layers=[0, 2]))]), desk(PARALLEL))
    assert caught.value.message == (
        "ToyForCausalLM does not serve resid_mid 0, resid_mid 2: attention and MLP run in "
        "parallel. It serves resid_pre, resid_post"
    )


def test_sums_at_one_site_must_be_finite_in_the_models_dtype() -> None:
    half = desk(replace(SITES, dtype="float16"))
    large = tensor(np.full((1, WIDTH), 40_000.0))
    assert admitted(request(steer=[add(large)]), half).additions != ()
    assert refused(request(steer=[add(large), add(large)]), half) == (
        errors.NonFinite,
        "steering.interventions[1].add.scale",
    )
    elsewhere = add(large, sites=site_set(POST, layers=[0]))
    assert admitted(request(steer=[add(large), elsewhere]), half).additions != ()


def test_without_a_tokenizer_only_token_ids_are_taken() -> None:
    bare = desk(tokenizer=False)
    assert admitted(request(), bare).prompt.token_ids == (10, 11, 12)
    assert refused(request(text="x"), bare) == (errors.NoTokenizer, "text")
    assert refused(request(chat=types_pb2.Chat()), bare) == (errors.NoTokenizer, "chat")
    assert refused(request(sampling=Sampling(stop=["x"])), bare) == (
        errors.NoTokenizer,
        "sampling.stop",
    )


def test_without_a_chat_template_chats_are_refused() -> None:
    at = desk()
    plain = CharTokenizer()
    plain.has_chat_template = False
    at = replace(at, prompts=Prompts(plain, VOCABULARY))
    assert refused(request(chat=types_pb2.Chat()), at) == (errors.NoChatTemplate, "chat")


def test_a_chat_is_rendered_with_its_variables() -> None:
    chat = types_pb2.Chat(
        messages=[types_pb2.ChatMessage(role="user", content="hi")],
        template_variables={"depth": '"high"'},
    )
    assert admitted(request(chat=chat)).prompt.text == "user: hi\ndepth=high\n>"
    chat.continue_final_message = True
    assert admitted(request(chat=chat)).prompt.text == "user: hi\ndepth=high"


def test_sampling_is_taken_over() -> None:
    sampling = Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        max_tokens=7,
        min_tokens=2,
        stop=["a"],
        stop_token_ids=[5],
        seed=2**63 - 1,
        n=2,
        logprobs=0,
        prompt_logprobs=5,
        repetition_penalty=1.5,
        presence_penalty=-2,
        frequency_penalty=2,
        ignore_eos=True,
    )
    got = admitted(request(sampling=sampling)).sampling
    assert got == SamplingSettings(
        max_tokens=7,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        min_tokens=2,
        stop=("a",),
        stop_token_ids=(5,),
        seed=2**63 - 1,
        samples=2,
        logprobs=0,
        prompt_logprobs=5,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        ignore_eos=True,
    )
    assert [got.seed_of(0), got.seed_of(1)] == [2**63 - 1, 0]


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"temperature": -1}, errors.InvalidValue, "temperature"),
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
