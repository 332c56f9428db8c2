"""The whole way, from the client over gRPC through vLLM and back, against Hugging Face's model."""

import asyncio

import numpy as np
import pytest
import transformers as hf

import rheostat
from rheostat import Capture, Point, Site

from ..engine.reference import Add, HfReference
from .conftest import MODEL, Server
from .naive import POINTS, TOLERANCE, number_of

pytestmark = pytest.mark.integration

PROMPT = "The Eiffel Tower is in the city of"
LAYERS = 6
WIDTH = 128
VECTOR = np.random.default_rng(0).normal(size=(1, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def tokenizer() -> hf.PreTrainedTokenizerBase:
    return hf.AutoTokenizer.from_pretrained(MODEL)


def test_the_model_answers_and_the_receipt_says_that_nothing_was_done(
    engine: rheostat.Engine,
) -> None:
    out = engine.generate(PROMPT, max_tokens=1, temperature=0)
    assert (out.text, out.finish_reason) == (" Paris", "length")
    assert out.receipt.interventions == ()
    assert out.receipt.captures == ()


def test_captured_rows_and_steered_log_probabilities_equal_hugging_faces(
    engine: rheostat.Engine, reference: HfReference, tokenizer: hf.PreTrainedTokenizerBase
) -> None:
    assert_huggingfaces(engine, reference, tokenizer)


def assert_huggingfaces(
    engine: rheostat.Engine, reference: HfReference, tokenizer: hf.PreTrainedTokenizerBase
) -> None:
    """Rows at every point and layer, of the prompt and of generated tokens, are the hooks'.

    The prompt alone is steered, and then generated tokens as well.
    """
    vector = engine.vectors.put(VECTOR, points="resid_post", layers=2, name="parity")
    prompt = tokenizer(PROMPT).input_ids
    steered = number_of(Site(Point.RESID_POST, 2))
    for where, end in (("prompt", len(prompt)), ("all", None)):
        out = engine.generate(
            PROMPT,
            steering=[(vector * 3.0).at(where=where)],
            capture=Capture(list(POINTS), layers="all"),
            max_tokens=4,
            temperature=0,
            logprobs=5,
        )
        tokens = prompt + list(out.token_ids)[:-1]
        run = reference.run(tokens, [Add(steered, 3.0 * VECTOR[0], slice(0, end))])
        for site in (Site(Point(point), layer) for point in POINTS for layer in range(LAYERS)):
            rows = out.activations[site.point, site.layer]
            positions = out.activations.positions(site.point, site.layer)
            assert list(positions) == list(range(len(tokens))), site
            stream = run.streams[number_of(site)]
            np.testing.assert_allclose(rows, stream, rtol=1e-3, atol=1e-3, err_msg=str(site))
        for step, token in enumerate(out.token_ids):
            expected = run.logprobs[len(prompt) - 1 + step]
            assert abs(out.logprobs[step].token.logprob - expected[token]) < TOLERANCE
            assert token == int(expected.argmax())


def test_the_receipt_says_what_was_done(engine: rheostat.Engine) -> None:
    vector = engine.vectors.put(VECTOR, points="resid_post", layers=[1, 2])
    out = engine.generate(
        PROMPT,
        steering=[(vector * 2.0).at(where=rheostat.positions(-1))],
        capture=Capture("resid_mid", layers=4, where="generated"),
        max_tokens=3,
        temperature=0,
    )
    length = out.receipt.prompt_token_count
    (applied,) = out.receipt.interventions
    assert (applied.origin, applied.index, applied.op) == ("request", 0, "add")
    assert applied.digests == (vector.digest,)
    sites = [Site(Point.RESID_POST, 1), Site(Point.RESID_POST, 2)]
    assert [(one.site, one.row_count) for one in applied.sites] == [(site, 1) for site in sites]
    assert [rows.positions for rows in applied.rows] == [(range(length - 1, length),)]
    (captured,) = out.receipt.captures
    assert [(one.site, one.row_count) for one in captured.sites] == [(Site(Point.RESID_MID, 4), 2)]
    assert out.activations["resid_mid", 4].shape == (2, WIDTH)


def test_explain_says_it_beforehand_and_runs_nothing(engine: rheostat.Engine) -> None:
    vector = engine.vectors.put(VECTOR, points="resid_post", layers=[1, 2])
    before = engine.stats()
    told = engine.explain(
        PROMPT, steering=[(vector * -2.0).at(where=rheostat.positions(-1))], max_tokens=3
    )
    length = len(told.prompt_token_ids)
    (one,) = told.interventions
    assert one.sites == (Site(Point.RESID_POST, 1), Site(Point.RESID_POST, 2))
    assert one.selection.positions == (range(length - 1, length),)
    norm = float(np.linalg.norm(2.0 * VECTOR))
    assert [round(dose, 3) for dose in one.doses.values()] == [round(norm, 3)] * 2
    assert engine.stats().admitted_count == before.admitted_count


def test_name_digest_and_inline_are_the_same_vector(engine: rheostat.Engine) -> None:
    stored = engine.vectors.put(VECTOR, name="three")
    ways = [
        stored.at(points="resid_post", layers=2),
        rheostat.named("three", points="resid_post", layers=2),
        rheostat.inline(VECTOR, points="resid_post", layers=2),
    ]
    outs = [
        engine.generate(PROMPT, steering=[way * 4.0], max_tokens=6, temperature=0, logprobs=3)
        for way in ways
    ]
    assert outs[0].token_ids == outs[1].token_ids == outs[2].token_ids
    assert outs[0].logprobs == outs[1].logprobs == outs[2].logprobs


def test_text_token_ids_and_chat_prompts_are_served(
    engine: rheostat.Engine, tokenizer: hf.PreTrainedTokenizerBase
) -> None:
    ids = tokenizer(PROMPT).input_ids
    messages = [{"role": "user", "content": "Where is the Eiffel Tower?"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    if not isinstance(rendered, list):
        rendered = rendered["input_ids"]
    chat = engine.generate(messages, max_tokens=40, temperature=0)
    assert engine.generate(ids, max_tokens=1, temperature=0).text == " Paris"
    assert list(chat.prompt_token_ids) == list(rendered)
    assert chat.text
    assert chat.finish_reason == "stop"


def test_a_role_that_the_demo_model_does_not_know_is_refused(engine: rheostat.Engine) -> None:
    with pytest.raises(rheostat.InvalidRequest, match="roles are system, user and assistant, not"):
        engine.generate([{"role": "usr", "content": "hi"}], max_tokens=1)


def test_a_stop_string_ends_a_steered_request_and_cuts_its_rows(engine: rheostat.Engine) -> None:
    vector = engine.vectors.put(VECTOR, points="resid_post", layers=2)
    out = engine.generate(
        PROMPT,
        steering=[vector * 0.1],
        capture=Capture("resid_post", layers=2),
        stop=["."],
        max_tokens=40,
        temperature=0,
    )
    assert out.finish_reason == "stop"
    assert "." not in out.text
    rows = len(out.prompt_token_ids) + len(out.token_ids) - 1
    assert out.activations["resid_post", 2].shape == (rows, WIDTH)


def test_samples_of_one_request_are_steered_and_captured_alike(engine: rheostat.Engine) -> None:
    vector = engine.vectors.put(VECTOR, points="resid_post", layers=2)
    out = engine.generate(
        "My day was",
        n=3,
        seed=1,
        temperature=1.0,
        max_tokens=5,
        steering=[vector * 2.0],
        capture=Capture("resid_post", layers=2, where="prompt"),
    )
    assert len(out.samples) == 3
    first = out.samples[0].activations["resid_post", 2]
    for sample in out.samples[1:]:
        np.testing.assert_allclose(sample.activations["resid_post", 2], first, atol=1e-4)


def test_a_name_that_moves_while_a_request_uses_it_changes_nothing_for_it(
    engine: rheostat.Engine,
) -> None:
    engine.vectors.put(VECTOR, name="moving")
    steer = rheostat.named("moving", points="resid_post", layers=2) * 4.0
    alone = engine.generate("My day was", steering=[steer], max_tokens=200, temperature=0)
    with engine.stream("My day was", steering=[steer], max_tokens=200, temperature=0) as stream:
        next(stream)
        engine.vectors.put(-VECTOR, name="moving")
        assert stream.result().token_ids == alone.token_ids
    engine.vectors.delete("moving")
    with pytest.raises(rheostat.NotFound):
        engine.generate("My day was", steering=[steer], max_tokens=1)


def test_both_clients_give_the_same(server: Server, engine: rheostat.Engine) -> None:
    options = {
        "max_tokens": 5,
        "temperature": 0,
        "logprobs": 2,
        "capture": Capture("resid_mid", layers=[1, 4]),
        "steering": [rheostat.inline(VECTOR, points="resid_post", layers=3) * 2.0],
    }

    async def other() -> rheostat.Generation:
        async with rheostat.aio.connect(server.target) as client:
            return await client.generate(PROMPT, **options)

    one, two = engine.generate(PROMPT, **options), asyncio.run(other())
    assert (one.text, one.token_ids, one.logprobs) == (two.text, two.token_ids, two.logprobs)
    for layer in (1, 4):
        np.testing.assert_array_equal(
            one.activations["resid_mid", layer], two.activations["resid_mid", layer]
        )


def test_thirty_requests_at_once_each_get_their_own(server: Server) -> None:
    async def run() -> list[tuple[rheostat.Generation, rheostat.Generation]]:
        async with rheostat.aio.connect(server.target) as client:

            async def one(i: int) -> rheostat.Generation:
                return await client.generate(
                    f"{PROMPT[: 10 + i % 20]}",
                    steering=[
                        rheostat.inline(VECTOR, points="resid_post", layers=i % 6) * float(i)
                    ],
                    capture=Capture("resid_post", layers=5),
                    max_tokens=6,
                    temperature=0,
                )

            together = await asyncio.gather(*(one(i) for i in range(30)))
            return [(both, await one(i)) for i, both in enumerate(together)]

    for together, alone in asyncio.run(run()):
        assert together.token_ids == alone.token_ids
        np.testing.assert_allclose(
            together.activations["resid_post", 5],
            alone.activations["resid_post", 5],
            rtol=1e-3,
            atol=1e-3,
        )
