"""Activation patching over gRPC: other rows, or noise, replace a request's."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rheostat
from rheostat_wire.noise import normal_row

from ..engine.reference import Change, Float, HfReference
from .conftest import MODEL
from .naive import Placed, compare, positions_of, put_stored, replace_by_rows, replace_by_run

pytestmark = pytest.mark.integration

WIDTH, LAYERS = 128, 6
CLEAN = "The Eiffel Tower is in the city of"
CORRUPT = "The Willis Tower is in the city of"
LONGER = "My friend said that the Eiffel Tower is in the city of"
BLOCK = 128
"""Tokens of a block of the KV cache, which vLLM chooses on a CPU."""
OPTIONS = {"max_tokens": 4, "temperature": 0, "logprobs": 20, "ignore_eos": True}


class Pair(NamedTuple):
    """Two prompts, each run alone; the run of the first is stored as "clean"."""

    clean: rheostat.Generation
    corrupt: rheostat.Generation

    def rows(self, layer: int, point: str = "resid_post") -> Float:
        """The clean run's rows of the prompt."""
        return self.clean.activations[point, layer][: len(self.clean.prompt_token_ids)]


@pytest.fixture
def pair(engine: rheostat.Engine):
    prompt = rheostat.Capture(["resid_post", "attn_out"], "all", where="prompt")
    into = rheostat.Capture(
        ["resid_post", "attn_out"], "all", where="prompt", to=rheostat.Run("clean")
    )
    clean = engine.generate(CLEAN, capture=[into, prompt], **OPTIONS)
    yield Pair(clean, engine.generate(CORRUPT, capture=prompt, **OPTIONS))
    if any(run.id == "clean" for run in engine.runs()):
        engine.delete_run("clean")


def logprobs(out: rheostat.Generation) -> list[dict[int, float]]:
    """The listed log-probabilities of each token."""
    return [
        {one.token_id: one.logprob for one in (step.token, *step.alternatives)}
        for step in out.logprobs
    ]


def assert_close(one: rheostat.Generation, other: rheostat.Generation) -> None:
    """The same tokens, with about the same probabilities."""
    assert one.token_ids == other.token_ids
    for ours, theirs in zip(logprobs(one), logprobs(other), strict=True):
        common = ours.keys() & theirs.keys()
        assert len(common) >= 15
        assert max(abs(ours[token] - theirs[token]) for token in common) < 1e-3


def from_clean(layers: object = 2, where: object = "prompt", **options: object) -> rheostat.Replace:
    source = rheostat.from_run("clean", **options)
    return rheostat.replace(source).at(points="resid_post", layers=layers, where=where)


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_all_rows_of_another_prompts_run_give_its_answer(
    engine: rheostat.Engine, pair: Pair, layer: int
) -> None:
    capture = rheostat.Capture("resid_post", layer, where="prompt")
    out = engine.generate(CORRUPT, steering=from_clean(layer), capture=capture, **OPTIONS)
    assert out.text.split()[0] == pair.clean.text.split()[0] != pair.corrupt.text.split()[0]
    assert logprobs(out)[0] == pytest.approx(logprobs(pair.clean)[0], abs=1e-3)
    assert np.array_equal(out.activations["resid_post", layer], pair.rows(layer))
    count = len(pair.clean.prompt_token_ids)
    (applied,) = out.receipt.interventions
    assert applied.op == "replace"
    assert applied.source is not None
    assert applied.source.run_id == "clean"
    assert applied.source.rows == tuple((position, position) for position in range(count))
    assert applied.source.sha256 == hashlib.sha256(pair.rows(layer).tobytes()).hexdigest()
    assert applied.sites[0].row_count == count
    assert applied.sites[0].dose is not None
    assert applied.rows[0].positions == (range(count),)


@pytest.mark.parametrize("point", ["resid_post", "attn_out"])
def test_one_row_is_what_the_same_hook_does_in_hugging_face(
    engine: rheostat.Engine, pair: Pair, reference: HfReference, point: str
) -> None:
    tokens = pair.corrupt.prompt_token_ids
    for layer in range(LAYERS):
        row = pair.rows(layer, point)[3]
        site = 4 * layer + (4 if point == "resid_post" else 1)
        hook = Change(site, lambda x, row=row: torch.from_numpy(row.copy())[None], [3])
        expected = reference.run(tokens, [hook]).logprobs[-1]
        placed = rheostat.replace(rheostat.from_run("clean")).at(
            points=point, layers=layer, where=rheostat.positions(3)
        )
        out = engine.generate(CORRUPT, steering=placed, **{**OPTIONS, "max_tokens": 1})
        for token, logprob in logprobs(out)[0].items():
            assert logprob == pytest.approx(float(expected[token]), abs=1e-3)


def test_an_array_a_vector_and_zeros_replace_like_a_run(
    engine: rheostat.Engine, pair: Pair
) -> None:
    where = rheostat.positions(3)
    by_run = engine.generate(CORRUPT, steering=from_clean(2, where), **OPTIONS)
    row = pair.rows(2)[3]
    for source in (row[None, None], rheostat.inline(row)):
        placed = rheostat.replace(source).at(points="resid_post", layers=2, where=where)
        out = engine.generate(CORRUPT, steering=placed, **OPTIONS)
        assert logprobs(out) == logprobs(by_run)
    capture = rheostat.Capture("resid_post", 2, where=where)
    for source, want in (
        (rheostat.Zeros(), np.zeros(WIDTH)),
        (rheostat.run_mean("clean"), pair.rows(2).mean(axis=0)),
    ):
        placed = rheostat.replace(source).at(points="resid_post", layers=2, where=where)
        out = engine.generate(CORRUPT, steering=placed, capture=capture, **OPTIONS)
        np.testing.assert_allclose(out.activations["resid_post", 2][0], want, rtol=1e-5, atol=1e-6)


def test_rows_of_generated_tokens_are_replaced_in_each_sample_as_hooks_do(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    put_stored(engine, [1, 3])
    length = len(engine.tokenize(CLEAN).token_ids)
    late = length + 8
    placed = [
        Placed(
            replace_by_run(),
            [1, 3],
            rheostat.window(2, 5) | rheostat.generated(1, 6),
            lambda p, token, n: 2 <= p < 5 or n + 1 <= p < n + 6,
        ),
        Placed(
            replace_by_rows(range(late, late + 4), 1),
            [4],
            rheostat.generated(8, 12),
            lambda p, token, n: n + 8 <= p < n + 12,
        ),
    ]
    options = {"n": 3, "seed": 2, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    steering = [one.ours for one in placed]
    out = engine.generate(CLEAN, steering=steering, max_tokens=16, **options)
    engine.delete_run("stored")
    samples = compare(reference, out, placed)
    assert len({sample.token_ids for sample in out.samples}) == 3
    for number, applied in enumerate(out.receipt.interventions):
        assert [rows.sample for rows in applied.rows] == [0, 1, 2]
        for rows, sample in zip(applied.rows, samples, strict=True):
            want = next(iter(sample.moved[number].values())).positions
            assert positions_of([*rows.cached_positions, *rows.positions]) == want


def test_alpha_and_a_mask_replace_a_part(engine: rheostat.Engine, pair: Pair) -> None:
    where = rheostat.positions(3)
    capture = rheostat.Capture("resid_post", 2, where=where)
    plain = engine.generate(CORRUPT, capture=capture, **OPTIONS).activations["resid_post", 2][0]
    row = pair.rows(2)[3]

    def replaced(**options: object) -> Float:
        source = rheostat.from_run("clean")
        placed = rheostat.replace(source, **options).at(points="resid_post", layers=2, where=where)
        out = engine.generate(CORRUPT, steering=placed, capture=capture, **OPTIONS)
        rows: Float = out.activations["resid_post", 2][0]
        return rows

    np.testing.assert_allclose(replaced(alpha=0.25), plain + 0.25 * (row - plain), atol=1e-5)
    masked = replaced(dimensions=range(10))
    assert np.array_equal(masked[:10], row[:10])
    assert np.array_equal(masked[10:], plain[10:])
    assert np.array_equal(replaced(alpha=0.0), plain)


def test_replacing_rows_by_themselves_under_steering_changes_no_bit(
    engine: rheostat.Engine,
) -> None:
    steered = [rheostat.inline(np.ones(WIDTH), points="resid_post", layers=[1, 2]) * 0.5]
    run = rheostat.Run("steered")
    into = rheostat.Capture("resid_post", [1, 2], where="prompt", to=run)
    plain = engine.generate(CLEAN, steering=steered, capture=into, **OPTIONS)
    placed = rheostat.replace(rheostat.from_run("steered")).at(
        points="resid_post", layers=[1, 2], where="prompt"
    )
    out = engine.generate(CLEAN, steering=[placed, *steered], **OPTIONS)
    engine.delete_run("steered")
    assert logprobs(out) == logprobs(plain)


def test_prompts_of_other_lengths_are_aligned_by_their_ends(
    engine: rheostat.Engine, pair: Pair
) -> None:
    shift = len(engine.tokenize(LONGER).token_ids) - len(pair.clean.prompt_token_ids)
    assert shift > 0
    last = shift + len(pair.clean.prompt_token_ids) - 1
    placed = from_clean(5, rheostat.positions(last), align="affixes")
    explanation = engine.explain(LONGER, steering=placed, max_tokens=4)
    assert explanation.interventions[0].source.rows == ((last, last - shift),)
    out = engine.generate(LONGER, steering=placed, **OPTIONS)
    assert out.token_ids[0] == pair.clean.token_ids[0]
    with pytest.raises(rheostat.Refused) as raised:
        engine.generate(LONGER, steering=from_clean(5, align="affixes"), **OPTIONS)
    assert raised.value.reason == "REASON_RUN_INCOMPLETE"
    by_hand = from_clean(5, rheostat.positions(last), positions=-1)
    assert logprobs(engine.generate(LONGER, steering=by_hand, **OPTIONS)) == logprobs(out)


def test_a_missing_run_refuses_that_request_alone(engine: rheostat.Engine, pair: Pair) -> None:
    placed = rheostat.replace(rheostat.from_run("gone")).at(
        points="resid_post", layers=2, where="prompt"
    )
    with pytest.raises(rheostat.NotFound) as raised:
        engine.generate(CORRUPT, steering=placed, **OPTIONS)
    assert raised.value.reason == "REASON_RUN_NOT_FOUND"
    engine.delete_run("clean")
    with pytest.raises(rheostat.NotFound):
        engine.generate(CORRUPT, steering=from_clean(), **OPTIONS)


def test_patched_blocks_are_not_shared_with_other_requests(
    engine: rheostat.Engine, pair: Pair
) -> None:
    filler = "The weather was fine and the streets were full of people. " * 26
    prompt = filler + CORRUPT
    length = len(engine.tokenize(prompt).token_ids)
    assert length > 2 * BLOCK + 20
    options = {**OPTIONS, "max_tokens": 8}
    cold = engine.generate(prompt, **options)
    patched = from_clean(2, rheostat.positions(BLOCK + 10), positions=3)
    one, again = (engine.generate(prompt, steering=patched, **options) for _ in range(2))
    plain = engine.generate(prompt, **options)
    assert_close(plain, cold)
    assert_close(one, again)
    assert logprobs(one) != logprobs(plain)
    cached = [out.receipt.cached_prompt_token_count for out in (one, again, plain)]
    assert cached == [BLOCK, 2 * BLOCK, 2 * BLOCK]
    (applied,) = again.receipt.interventions
    assert applied.rows[0].cached_positions == (range(BLOCK + 10, BLOCK + 11),)


SUBJECT = [1, 2, 3]
"""Positions of a subject's tokens."""


def drawn(std: float, site: int, positions: list[int], seed: int) -> Float:
    """Rows of noise by the recipe, [positions, WIDTH]."""
    rows = [std * normal_row(seed, site, position, WIDTH) for position in positions]
    return np.array(rows, np.float32)


def noisy(
    point: str = "resid_pre",
    layer: int = 0,
    positions: list[int] | None = None,
    *,
    noise: rheostat.Noise | None = None,
    **options: object,
) -> rheostat.Replace:
    source = noise or rheostat.Noise(embedding_std=3, seed=5)
    where = rheostat.positions(*(positions or SUBJECT))
    return rheostat.replace(source, **options).at(points=point, layers=layer, where=where)


def test_the_embeddings_deviation_is_that_of_the_stored_matrix(engine: rheostat.Engine) -> None:
    weights = load_file(MODEL / "model.safetensors")
    matrix = weights["model.embed_tokens.weight"].double()
    assert engine.model().embedding_std == pytest.approx(float(matrix.std(correction=0)), rel=1e-6)


def test_noise_on_a_subject_does_what_the_same_hook_does_in_hugging_face(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    std = 3.0 * (engine.model().embedding_std or 0.0)
    tokens = engine.tokenize(CLEAN).token_ids
    for point, layer, site in (("resid_pre", 0, 0), ("resid_mid", 2, 10), ("mlp_out", 4, 19)):
        rows = torch.from_numpy(drawn(std, site, SUBJECT, 5))
        hook = Change(site, lambda x, rows=rows: x + rows, SUBJECT)
        expected = reference.run(tokens, [hook]).logprobs[-1]
        options = {**OPTIONS, "max_tokens": 1}
        out = engine.generate(CLEAN, steering=noisy(point, layer), **options)
        for token, logprob in logprobs(out)[0].items():
            assert logprob == pytest.approx(float(expected[token]), abs=1e-3)
        (applied,) = out.receipt.interventions
        assert applied.source is not None
        assert applied.source.rows == tuple((position, None) for position in SUBJECT)
        assert applied.source.sha256 == hashlib.sha256(rows.numpy().tobytes()).hexdigest()
        again = engine.generate(CLEAN, steering=noisy(point, layer), **options)
        assert logprobs(again) == logprobs(out)


def test_noise_comes_after_other_ops_in_the_order_of_the_replacements(
    engine: rheostat.Engine,
) -> None:
    capture = rheostat.Capture("resid_post", 2, where=rheostat.positions(3))
    added = rheostat.inline(np.ones(WIDTH), points="resid_post", layers=2) * 0.5
    zeros = rheostat.replace(rheostat.Zeros()).at(
        points="resid_post", layers=2, where=rheostat.positions(3)
    )
    noise = noisy("resid_post", 2, [3], noise=rheostat.Noise(std=0.5, seed=1))
    row = drawn(0.5, 12, [3], 1)[0]

    def captured(*steering: rheostat.Intervention) -> Float:
        out = engine.generate(CLEAN, steering=steering, capture=capture, **OPTIONS)
        rows: Float = out.activations["resid_post", 2][0]
        return rows

    steered = captured(added)
    np.testing.assert_allclose(captured(noise, added), steered + row, rtol=0, atol=1e-6)
    assert np.array_equal(captured(noise, added), captured(added, noise))
    assert np.array_equal(captured(zeros, noise), row)
    assert not captured(noise, zeros).any()


def test_alpha_and_a_mask_scale_noise(engine: rheostat.Engine) -> None:
    capture = rheostat.Capture("resid_post", 2, where=rheostat.positions(3))
    noise, row = rheostat.Noise(std=0.5, seed=1), drawn(0.5, 12, [3], 1)[0]

    def captured(**options: object) -> Float:
        steering = noisy("resid_post", 2, [3], noise=noise, **options) if options else None
        out = engine.generate(CLEAN, steering=steering, capture=capture, **OPTIONS)
        rows: Float = out.activations["resid_post", 2][0]
        return rows

    plain = captured()
    np.testing.assert_allclose(captured(alpha=0.25), plain + 0.25 * row, rtol=0, atol=1e-6)
    masked = captured(dimensions=range(10))
    assert np.array_equal(masked[:10], plain[:10] + row[:10])
    assert np.array_equal(masked[10:], plain[10:])
    assert np.array_equal(captured(alpha=0.0), plain)


def test_chunks_and_neighbours_change_no_number_of_noise(engine: rheostat.Engine) -> None:
    filler = "The weather was fine and the streets were full of people. " * 26
    prompt = filler + CLEAN
    length = len(engine.tokenize(prompt).token_ids)
    assert length > 2 * BLOCK + 20
    positions = [0, 5, BLOCK - 1, BLOCK, BLOCK + 31, 2 * BLOCK + 10]
    capture = rheostat.Capture("resid_pre", 0, where=rheostat.positions(*positions))
    plain = engine.generate(prompt, capture=capture, max_tokens=1)
    want = plain.activations["resid_pre", 0] + drawn(0.5, 0, positions, 1)
    noise = rheostat.Noise(std=0.5, seed=1)

    def rows(count: int) -> list[Float]:
        """Of so many requests at once, so that the scheduler cuts their prompts differently."""
        steering = noisy("resid_pre", 0, positions, noise=noise)
        with ThreadPoolExecutor(count) as pool:
            outs = pool.map(
                lambda n: engine.generate(
                    prompt, steering=steering, capture=capture, max_tokens=n + 1
                ),
                range(count),
            )
            return [out.activations["resid_pre", 0] for out in outs]

    for found in (*rows(1), *rows(3)):
        assert np.array_equal(found, want)
