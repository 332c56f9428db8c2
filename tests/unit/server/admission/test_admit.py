import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from rheostat_engine import OPEN_END, Act, Capture, Kind, Plan, Point, Site
from rheostat_server import errors
from rheostat_server.admission import admit as admission
from rheostat_server.admission.admit import admit
from rheostat_server.engine.sampling import SamplingSettings
from rheostat_server.limits import LARGE_REQUEST_BYTES, LARGE_REQUESTS, OFFLOAD_BYTES, RANGES
from rheostat_server.prompts.prompts import Prompts
from rheostat_server.selectors.selection import needs_text
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import make_vector
from rheostat_wire.v1 import (
    generation_pb2,
    types_pb2,
    vector_pb2,
)

from ..admissions import admission_context, admitted, named, refused, stored
from ..characters import CharTokenizer
from ..fakes import INFO, LAYERS, PARALLEL, SITES, VOCABULARY, WIDTH
from ..messages import (
    GENERATED,
    ONES,
    PROMPT,
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


def test_defaults_are_filled_in() -> None:
    got = admitted(request(text="ab", sampling=None))
    assert got.prompt.token_ids == (1, 97, 98)
    assert got.sampling == SamplingSettings(max_tokens=61)
    assert got.plan == Plan(got.request_id)
    assert len(got.request_id) == 32


def test_a_request_becomes_a_plan_of_integers() -> None:
    at = admission_context()
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
    assert got.plan == Plan(
        "r",
        acts=(
            Act(
                Kind.ADD,
                (vector.digest,),
                ((2, (0,)), (4, (0,)), (10, (1,)), (12, (1,))),
                ((0, OPEN_END),),
                scale=0.5,
            ),
            Act(Kind.ADD, (ones.digest,), ((8, (0,)),), ((0, 3),)),
        ),
        captures=(Capture((4,), ((2, 3),)),),
    )
    assert got.vectors == (vector, ones)
    assert got.interventions[0].op.sites == (
        Site(Point.RESID_MID, 0),
        Site(Point.RESID_POST, 0),
        Site(Point.RESID_MID, 2),
        Site(Point.RESID_POST, 2),
    )
    assert got.interventions[0].op.doses == pytest.approx((2.0, 2.0, 2.0, 2.0))


def test_name_digest_and_inline_are_one_vector() -> None:
    at = admission_context()
    vector = stored(at)
    inline = tensor(np.full((1, WIDTH), 2.0))
    digest = vector_pb2.VectorRef(digest=vector.digest)
    plans = [
        replace(admitted(request(steer=[add(ref)]), at).plan, request_id="")
        for ref in (named(), digest, inline)
    ]
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].acts != ()


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
    assert got.plan == Plan("r")
    assert (len(got.interventions), got.interventions[0].acts, got.vectors) == (1, (), ())


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
    assert got.plan.captures == (
        Capture((0, 8), ((1, 3),)),
        Capture((4,), ((0, 3),)),
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
        admitted(request(steer=[add(where=found)], **prompt)).interventions[0].selection.spans
        for prompt in ({"text": "a cat"}, {"token_ids": ids}, {"chat": chat})
    ]
    assert spans == [((3, 6),), ((2, 5),), ((6, 9),)]


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


def test_branches_are_points_like_any_other() -> None:
    both = site_set(types_pb2.POINT_MLP_OUT, types_pb2.POINT_ATTN_OUT, layers=[0, 1])
    got = admitted(request(steer=[add(sites=both)], captures=[capture(both)]))
    named = tuple(Site(p, n) for n in (0, 1) for p in (Point.ATTN_OUT, Point.MLP_OUT))
    assert got.interventions[0].op.sites == got.captures[0].sites == named
    assert got.plan.captures[0].sites == tuple(site.index for site in named) == (1, 3, 5, 7)


def test_a_point_that_the_architecture_lacks_is_refused_by_name() -> None:
    with pytest.raises(errors.SiteNotServed) as caught:
        admitted(
            request(captures=[capture(site_set(MID, layers=[0, 2]))]), admission_context(PARALLEL)
        )
    assert caught.value.message == (
        "ToyForCausalLM does not serve resid_mid 0, 2: attention and MLP run in "
        "parallel. It serves resid_pre, resid_post, attn_out, mlp_out"
    )


def test_sums_at_one_site_must_be_finite_in_the_models_dtype() -> None:
    half = admission_context(replace(SITES, dtype="float16"))
    large = tensor(np.full((1, WIDTH), 40_000.0))
    assert admitted(request(steer=[add(large)]), half).interventions != ()
    assert refused(request(steer=[add(large), add(large)]), half) == (
        errors.NonFinite,
        "steering.interventions[1].add.scale",
    )
    elsewhere = add(large, sites=site_set(POST, layers=[0]))
    assert admitted(request(steer=[add(large), elsewhere]), half).interventions != ()


HALF = admission_context(replace(SITES, dtype="float16"))
LARGE = tensor(np.full((1, WIDTH), 40_000.0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (selector(window(0, 1)), selector(window(1, 3))),
        (selector(PROMPT), selector(GENERATED)),
        (selector(token_range(10)), selector(token_range(11), exclude=[GENERATED])),
        (selector(window(1, 2)), selector(window(0, 1), window(2, 3))),
    ],
)
def test_what_is_added_to_different_tokens_is_no_sum(one, other) -> None:
    steer = [add(LARGE, where=one), add(LARGE, where=other)]
    assert len(admitted(request(steer=steer), HALF).interventions) == 2
    for again in steer:
        assert refused(request(steer=[*steer, again]), HALF) == (
            errors.NonFinite,
            "steering.interventions[2].add.scale",
        )


def test_what_is_added_to_no_token_is_in_no_sum() -> None:
    nowhere = add(LARGE, where=selector(PROMPT, exclude=[PROMPT]))
    assert admitted(request(steer=[nowhere, add(LARGE), nowhere]), HALF).plan.acts


def test_only_what_meets_is_in_the_sum_that_a_refusal_tells() -> None:
    steer = [
        add(LARGE, where=selector(window(0, 1))),
        add(LARGE, where=selector(window(1, 2))),
        add(LARGE, scale=0.75, where=selector(window(1, 3))),
    ]
    with pytest.raises(errors.NonFinite, match=r"resid_post 1 reach 7e\+04, which") as caught:
        admitted(request(steer=steer), HALF)
    assert caught.value.field == "steering.interventions[2].add.scale"


def test_without_a_tokenizer_only_token_ids_are_taken() -> None:
    bare = admission_context(tokenizer=False)
    assert admitted(request(), bare).prompt.token_ids == (10, 11, 12)
    assert refused(request(text="x"), bare) == (errors.NoTokenizer, "text")
    assert refused(request(chat=types_pb2.Chat()), bare) == (errors.NoTokenizer, "chat")
    assert refused(request(sampling=Sampling(stop=["x"])), bare) == (
        errors.NoTokenizer,
        "sampling.stop",
    )


def test_without_a_chat_template_chats_are_refused() -> None:
    at = admission_context()
    plain = CharTokenizer()
    plain.has_chat_template = False
    at = replace(at, prompts=Prompts(plain, vocabulary=VOCABULARY, model_tokens=INFO.model_tokens))
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


def test_few_large_requests_are_checked_at_a_time_and_small_ones_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running: list[bool] = []
    most = small_beside_large = 0
    resolve = Prompts.resolve

    async def watched(self: Prompts, message, *, with_text: bool):
        nonlocal most, small_beside_large
        large = message.ByteSize() > LARGE_REQUEST_BYTES
        running.append(large)
        most = max(most, running.count(True))
        small_beside_large += not large and True in running
        await asyncio.sleep(0.01)
        running.remove(large)
        return await resolve(self, message, with_text=with_text)

    monkeypatch.setattr(Prompts, "resolve", watched)
    large = request(steer=[add(where=selector(*[window(0, 1)] * RANGES))] * 4)

    async def main() -> None:
        at = admission_context()
        await asyncio.gather(*(admit(one, at) for one in [large] * 4 + [request()]))

    asyncio.run(main())
    assert most == LARGE_REQUESTS
    assert small_beside_large == 1


def test_who_looks_for_text_is_found_out_once_and_not_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[threading.Thread] = []

    def watched(one) -> bool:
        asked.append(threading.current_thread())
        return needs_text(one)

    monkeypatch.setattr(admission, "needs_text", watched)
    count = 8
    many = selector(*[token_range(*range(100))] * 128)
    large = request(steer=[add(where=many)] * count)
    assert large.ByteSize() > OFFLOAD_BYTES
    admitted(large)
    assert len(asked) == count
    assert threading.main_thread() not in asked
