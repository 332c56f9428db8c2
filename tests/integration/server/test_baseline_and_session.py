"""Baselines, their divergence, and updates of running requests, against Hugging Face's model."""

import numpy as np
import pytest
import transformers as hf

import rheostat
from rheostat import Capture, Point, Site

from ..engine.reference import Add, HfReference
from .conftest import MODEL
from .naive import OPS, TOLERANCE, Placed, compare, everywhere, number_of

pytestmark = pytest.mark.integration

PROMPT = "The Eiffel Tower is in the city of"
SITE = number_of(Site(Point.RESID_POST, 2))
WIDTH = 128
VECTOR = np.random.default_rng(0).normal(size=(1, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def tokenizer() -> hf.PreTrainedTokenizerBase:
    return hf.AutoTokenizer.from_pretrained(MODEL)


def steered(scale: float) -> list[rheostat.Add]:
    return [rheostat.inline(VECTOR, points="resid_post", layers=2) * scale]


@pytest.mark.parametrize("scale", [0.05, 0.5, 4.0])
def test_the_divergence_is_a_lower_bound_of_that_between_hugging_faces_distributions(
    engine: rheostat.Engine,
    reference: HfReference,
    tokenizer: hf.PreTrainedTokenizerBase,
    scale: float,
) -> None:
    out = engine.generate(
        PROMPT, steering=steered(scale), with_baseline=True, max_tokens=8, temperature=0
    )
    found = out.divergence
    assert found is not None
    prompt = tokenizer(PROMPT).input_ids
    read = prompt + list(out.token_ids)
    own = reference.run(read, [Add(SITE, scale * VECTOR[0], slice(0, len(read)))]).logprobs
    plain = reference.run(read).logprobs
    steps = range(len(prompt) - 1, len(read) - 1)
    full = np.array([(np.exp(own[i]) * (own[i] - plain[i])).sum() for i in steps])
    # What is listed gives nearly all where it has nearly all the probability, and here about half
    # of it at least elsewhere. The rest is what float32 leaves open: two log-probabilities near -10
    # are each rounded by up to 5e-7, and two implementations add in other orders.
    least = np.where(found.compared > 0.99, 0.9, 0.4) * full
    assert (least - 2e-6 <= found.kl).all()
    assert (found.kl <= full + 2e-6).all()
    assert full.max() > 1e-3
    expected = [plain[i][token] for i, token in zip(steps, out.token_ids, strict=True)]
    np.testing.assert_allclose(found.baseline_logprobs, expected, rtol=0, atol=TOLERANCE)


def test_the_baseline_is_what_the_request_gives_without_its_steering(
    engine: rheostat.Engine,
) -> None:
    options = {"max_tokens": 8, "seed": 5, "temperature": 1.0, "n": 2}
    capture = Capture("resid_post", layers=3)
    out = engine.generate(
        PROMPT, steering=steered(2.0), with_baseline=True, capture=capture, **options
    )
    alone = engine.generate(PROMPT, capture=capture, **options)
    again = engine.generate(PROMPT, steering=steered(2.0), capture=capture, **options)
    assert out.baseline is not None
    assert [one.token_ids for one in out.baseline.samples] == [s.token_ids for s in alone.samples]
    assert [one.token_ids for one in out.samples] == [one.token_ids for one in again.samples]
    np.testing.assert_array_equal(
        out.baseline.activations["resid_post", 3], alone.activations["resid_post", 3]
    )
    np.testing.assert_array_equal(
        out.activations["resid_post", 3], again.activations["resid_post", 3]
    )


def test_a_request_that_nothing_steers_does_not_diverge_in_float32(
    engine: rheostat.Engine,
) -> None:
    out = engine.generate(PROMPT, with_baseline=True, max_tokens=16, seed=1)
    assert out.divergence is not None
    assert out.divergence.kl.max() < 1e-4


def test_an_updated_session_goes_on_as_hugging_faces_model_with_the_same_hooks(
    engine: rheostat.Engine, reference: HfReference, tokenizer: hf.PreTrainedTokenizerBase
) -> None:
    with engine.session(
        PROMPT, steering=steered(0.5), max_tokens=48, temperature=0, ignore_eos=True, logprobs=0
    ) as session:
        for event in session:
            if isinstance(event, rheostat.Tokens):
                session.steer(steered(-2.0))
                break
        for _ in session:
            pass
        out = session.result()
    prompt = tokenizer(PROMPT).input_ids
    first, second = out.receipt.interventions
    assert (first.origin, second.origin) == ("request", "update")
    assert out.receipt.update_count == 1
    (changed,) = second.rows[0].positions
    start = changed.start
    tokens = prompt + list(out.token_ids)[:-1]
    assert len(prompt) <= start < len(tokens)
    assert first.rows[0].positions == (range(start),)
    assert second.rows[0].positions == (range(start, len(tokens)),)
    run = reference.run(
        tokens,
        [
            Add(SITE, 0.5 * VECTOR[0], slice(0, start)),
            Add(SITE, -2.0 * VECTOR[0], slice(start, len(tokens))),
        ],
    )
    for step, token in enumerate(out.token_ids):
        expected = run.logprobs[len(prompt) - 1 + step]
        assert abs(out.logprobs[step].token.logprob - expected[token]) < TOLERANCE


@pytest.mark.parametrize("name", OPS)
def test_a_session_goes_over_to_any_op_from_one_token_to_the_next(
    engine: rheostat.Engine, reference: HfReference, name: str
) -> None:
    after = everywhere(OPS[name], [1, 3]).ours
    with engine.session(
        PROMPT,
        steering=[everywhere(OPS["norm_add"], [2]).ours],
        max_tokens=40,
        temperature=0,
        ignore_eos=True,
        logprobs=0,
    ) as session:
        for event in session:
            if isinstance(event, rheostat.Tokens):
                session.steer([after])
                break
        applied = [one for one in session if isinstance(one, rheostat.UpdateApplied)]
        out = session.result()
    (start,) = applied[0].first_positions.values()
    placed = [
        Placed(OPS["norm_add"], [2], "all", lambda p, token, n: p < start),
        Placed(OPS[name], [1, 3], "all", lambda p, token, n: p >= start),
    ]
    (found,) = compare(reference, out, placed)
    for done, moved in zip(out.receipt.interventions, found.moved, strict=True):
        for site in done.sites:
            want = moved[site.site]
            assert site.row_count == len(want.positions) > 0
            assert site.dose is not None
            assert site.dose.relative_mean == pytest.approx(want.relative.mean(), rel=0.01)


def test_what_a_session_generated_is_no_other_requests_cache(engine: rheostat.Engine) -> None:
    options = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}  # more than a block
    request = engine.generate("A request said that", **options)
    with engine.session("A session said that", **options) as session:
        for _ in session:
            pass
        private = session.result()
    assert private.token_ids
    for out, shared in ((request, True), (private, False)):
        longer = [*out.prompt_token_ids, *out.token_ids]
        again = engine.generate(longer, max_tokens=1, temperature=0)
        assert (again.receipt.cached_prompt_token_count > 0) is shared
