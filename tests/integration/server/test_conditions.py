"""Conditions that are fitted to prompts, and what they decide, against Hugging Face's model.

A condition that is decided at the prompt's end, and steers generated tokens if it holds, decides as
conditional activation steering (CAST; Lee et al., 2024) does. It reads CAST's own number, a cosine
of the prompt's mean row, or the mean of the tokens' cosines. Hooks in Hugging Face's model read
each prompt alone, in float64; the server decides in batches, with a cold and a warm cache.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch

import rheostat
import rheostat.aio
from rheostat_engine import Point, Site

from ...effort import FACTOR, at_length
from ..engine.reference import Change, Float, HfReference
from .conftest import Server

pytestmark = pytest.mark.integration

WIDTH, READ, LATE, ACT = 128, 2, 4, 3
OPTIONS = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
WHO = ["Anna", "The old man", "My sister", "A small dog", "The king"]
FELT = ["felt happy", "was sad", "laughed", "cried", "smiled", "was afraid", "sang", "was angry"]
WHY = ["when the sun came out", "after the war", "in the garden", "at night", "because of him"]
PROMPTS = [" ".join(parts) for parts in product(WHO, FELT, WHY)]
"""200 prompts of different lengths, half of them glad."""
GLAD = ("happy", "laughed", "smiled", "sang")
SOME = PROMPTS if FACTOR > 1 else PROMPTS[::5]


def is_glad(prompt: str) -> bool:
    return any(word in prompt for word in GLAD)


def unit(seed: int) -> Float:
    vector = np.random.default_rng(seed).normal(size=WIDTH)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


PUSH = rheostat.inline(3 * unit(2)).at(points="resid_post", layers=ACT)


class Reader:
    """Reads prompts with hooks in Hugging Face's model."""

    def __init__(self, reference: HfReference, engine: rheostat.Engine) -> None:
        self._reference = reference
        self._engine = engine
        self._rows: dict[tuple[str, int], Float] = {}

    def rows(self, prompt: str, layer: int) -> Float:
        """Rows of a prompt at resid_post, float64 [tokens, W]."""
        if (prompt, layer) not in self._rows:
            tokens = [*self._engine.tokenize(prompt).token_ids]
            found: list[Float] = []

            def note(x: torch.Tensor) -> torch.Tensor:
                found.append(x.double().numpy())
                return x

            site = Site(Point.RESID_POST, layer).index
            self._reference.run(tokens, [Change(site, note, range(len(tokens)))])
            self._rows[prompt, layer] = found[-1]
        return self._rows[prompt, layer]

    def score(self, prompt: str, probe: rheostat.Probe, pool: str) -> float:
        """What a probe reads of a prompt, pooled."""
        (layer,) = probe.layers
        vector = np.asarray(self._engine.vectors.get(digest=probe.vector.digest).values, np.float64)
        rows = self.rows(prompt, layer)
        numbers = rows @ vector[0] / np.linalg.norm(vector[0])
        if probe.readout.normalise == "cosine":
            numbers = numbers / np.linalg.norm(rows, axis=1)
        if probe.readout.activation == "tanh":
            numbers = np.tanh(numbers)
        return float(numbers[-1] if pool == "last" else numbers.mean())


def cast_score(rows: Float, c: Float) -> float:
    """The similarity of a prompt's rows, [tokens, W], with a condition vector, [W].

    As `leash_layer.py` of IBM's activation-steering computes it: the mean of the hidden states is
    projected with the outer product of c, divided by c.c. Then come tanh and the cosine.
    """
    mean = rows.mean(axis=0)
    projected = np.tanh(np.outer(c, c) / (c @ c) @ mean)
    return float(mean @ projected / (np.linalg.norm(mean) * np.linalg.norm(projected)))


def mean_score(rows: Float, c: Float) -> float:
    """The cosine of the mean row."""
    mean = rows.mean(axis=0)
    return float(mean @ c / (np.linalg.norm(mean) * np.linalg.norm(c)))


SCORES = {"projected_cosine": cast_score, "cosine": mean_score}


@pytest.fixture(scope="module")
def reader(reference: HfReference, server: Server):
    with rheostat.connect(server.target) as client:
        yield Reader(reference, client)


def middle(scores: Sequence[float]) -> float:
    """A threshold in the widest gap of the middle third of scores, far from each of them."""
    ordered = np.sort(scores)
    central = ordered[len(ordered) // 3 : 2 * len(ordered) // 3]
    at = int(np.argmax(np.diff(central)))
    assert central[at + 1] - central[at] > 1e-5
    return float(central[at : at + 2].mean())


def decisions(
    engine: rheostat.Engine,
    prompts: Sequence[str],
    steering: rheostat.Intervention | None,
    **options: object,
) -> list[rheostat.Generation]:
    """Generates from all prompts at once, in batches as they come."""

    def run(prompt: str) -> rheostat.Generation:
        return engine.generate(prompt, steering=steering, **{**OPTIONS, **options})

    with ThreadPoolExecutor(24) as pool:
        return list(pool.map(run, prompts))


def fired(out: rheostat.Generation) -> bool:
    return out.receipt.interventions[0].sites[0].row_count > 0


@at_length
@pytest.mark.parametrize("activation", ["identity", "tanh"])
@pytest.mark.parametrize("layer", [READ, LATE])
def test_a_cosine_of_the_prompt_decides_as_hooks_in_hugging_face(
    engine: rheostat.Engine, reader: Reader, layer: int, activation: str
) -> None:
    stored = engine.vectors.put(unit(7)[None], points="resid_post", layers=layer)
    probe = rheostat.probe(stored, where="prompt", normalise="cosine", activation=activation)
    scores = {prompt: reader.score(prompt, probe, "mean") for prompt in SOME}
    bound = middle(list(scores.values()))
    gate = rheostat.gate(probe.above(bound, pool="mean", after_prompt=True), hold="rest")
    steering = PUSH.when(gate)
    shuffled = [SOME[i] for i in np.random.default_rng(1).permutation(len(SOME))]
    cold, warm = (decisions(engine, order, steering) for order in (SOME, shuffled))
    plain = decisions(engine, SOME, PUSH.at(where="generated", layers=ACT, points="resid_post"))
    unsteered = decisions(engine, SOME, None)
    expected = {prompt: score > bound for prompt, score in scores.items()}
    assert 0.2 < np.mean(list(expected.values())) < 0.8
    for order, outs in ((SOME, cold), (shuffled, warm)):
        assert {p: fired(out) for p, out in zip(order, outs, strict=True)} == expected
    always, never = (
        {p: out.token_ids for p, out in zip(SOME, outs, strict=True)} for outs in (plain, unsteered)
    )
    for prompt, out in zip(SOME, cold, strict=True):
        if not expected[prompt]:
            assert out.token_ids == never[prompt]
        elif layer > ACT:  # a late gate acts from the first generated token on
            assert out.token_ids == always[prompt]


@at_length
@pytest.mark.parametrize("normalise", SCORES)
@pytest.mark.parametrize("layer", [READ, LATE])
def test_the_mean_row_of_the_prompt_decides_as_cast_does(
    engine: rheostat.Engine, reader: Reader, layer: int, normalise: str
) -> None:
    c = 2.5 * unit(8)  # CAST's number does not depend on its length
    stored = engine.vectors.put(c[None], points="resid_post", layers=layer)
    probe = rheostat.probe(stored, normalise=normalise, rows="prompt_mean", name="cast")
    scores = {p: SCORES[normalise](reader.rows(p, layer), c.astype(np.float64)) for p in SOME}
    bound = middle(list(scores.values()))
    expected = {prompt: score > bound for prompt, score in scores.items()}
    assert 0.2 < np.mean(list(expected.values())) < 0.8
    steering = PUSH.when(rheostat.gate(probe.above(bound, after_prompt=True), hold="rest"))
    shuffled = [SOME[i] for i in np.random.default_rng(1).permutation(len(SOME))]
    cold, warm = (decisions(engine, order, steering) for order in (SOME, shuffled))
    for order, outs in ((SOME, cold), (shuffled, warm)):
        assert {p: fired(out) for p, out in zip(order, outs, strict=True)} == expected
    plain = decisions(engine, SOME, PUSH.at(where="generated", layers=ACT, points="resid_post"))
    unsteered = decisions(engine, SOME, None)
    for prompt, out, always, never in zip(SOME, cold, plain, unsteered, strict=True):
        if not expected[prompt]:
            assert out.token_ids == never.token_ids
        elif layer > ACT:  # a late gate acts from the first generated token on
            assert out.token_ids == always.token_ids
    out = engine.generate(SOME[0], probes=probe, **OPTIONS)
    assert out.signals.positions.tolist() == [len(out.prompt_token_ids) - 1]
    np.testing.assert_allclose(out.signals["cast"], [scores[SOME[0]]], rtol=1e-4, atol=1e-5)


def test_a_fitted_condition_is_that_of_hugging_faces_rows_and_decides_alike(
    engine: rheostat.Engine, reader: Reader
) -> None:
    mixed = [SOME[i] for i in np.random.default_rng(3).permutation(len(SOME))]
    train, held = mixed[::2], mixed[1::2]
    glad, rest = ([p for p in train if is_glad(p) == wanted] for wanted in (True, False))
    seen: list[tuple[int, int]] = []
    found = engine.conditions.fit(
        glad,
        rest,
        points="resid_post",
        layers=range(1, 5),
        name="glad",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert len(found.fits) == 4 * 2 * 2 * 2
    assert (seen[0], seen[-1]) == ((0, len(train)), (len(train), len(train)))
    best, probe = found.best, found.probe
    assert best.held_out_f1 is not None
    assert best.f1 > 0.9
    assert "best" in str(found)
    for fit in found.fits:
        if fit.direction != "difference_of_means" or fit.normalise != "unit":
            continue
        rows = [
            np.stack(
                [
                    r[-1] if fit.pool == "last" else r.mean(axis=0)
                    for r in (reader.rows(p, fit.site.layer) for p in prompts)
                ]
            )
            for prompts in (glad, rest)
        ]
        difference = rows[0].mean(axis=0) - rows[1].mean(axis=0)
        scores = [one @ difference / np.linalg.norm(difference) for one in rows]
        tp, fp = ((one > fit.threshold).sum() for one in scores)
        assert fit.f1 == pytest.approx(2 * tp / (tp + fp + len(glad)))
    expected = {}
    for prompt in SOME:
        score = reader.score(prompt, probe, best.pool)
        expected[prompt] = score < best.threshold if best.below else score > best.threshold
    judged = [expected[p] == is_glad(p) for p in train]
    assert np.mean(judged) > 0.9
    gate = rheostat.gate(found.condition, hold="rest")
    for prompts in (train, held, train):
        outs = decisions(engine, prompts, PUSH.when(gate))
        assert [fired(out) for out in outs] == [expected[prompt] for prompt in prompts]
    engine.vectors.delete("glad")


def f1(on_p: Float, on_n: Float, bound: float, below: bool) -> float:
    """F1 of a condition, by the scores of both sets."""
    tp, fp = (int((one < bound if below else one > bound).sum()) for one in (on_p, on_n))
    return 2 * tp / (tp + fp + len(on_p))


def test_conditional_activation_steering_is_fitted_and_decides_alike(
    engine: rheostat.Engine, reader: Reader
) -> None:
    """IBM's search over layers, thresholds and sides, with an own vector and with fitted ones."""
    mixed = [SOME[i] for i in np.random.default_rng(3).permutation(len(SOME))]
    train, held = mixed[::2], mixed[1::2]
    glad, rest = ([p for p in train if is_glad(p) == wanted] for wanted in (True, False))
    own = unit(9)
    found = engine.conditions.fit(
        glad,
        rest,
        points="resid_post",
        layers=[READ, LATE],
        rows="prompt_mean",
        normalises=["projected_cosine", "cosine"],
        directions="difference_of_means",
        vectors=rheostat.inline(own[None]),
    )
    assert len(found.fits) == 2 * 2 * 2
    for fit in found.fits:
        of_set = [[reader.rows(p, fit.site.layer) for p in prompts] for prompts in (glad, rest)]
        means = [np.mean([rows.mean(axis=0) for rows in one], axis=0) for one in of_set]
        v = means[0] - means[1] if fit.direction == "difference_of_means" else own.astype(float)
        on_p, on_n = (np.array([SCORES[fit.normalise](rows, v) for rows in one]) for one in of_set)
        ordered = np.sort(np.concatenate([on_p, on_n]))
        sides = (False, True) if fit.normalise == "projected_cosine" else (fit.below,)
        bounds = (ordered[1:] + ordered[:-1]) / 2
        grid = [f1(on_p, on_n, bound, side) for bound in bounds for side in sides]
        assert fit.f1 == pytest.approx(f1(on_p, on_n, fit.threshold, fit.below))
        assert fit.f1 == pytest.approx(max(grid))
    best, probe = found.best, found.probe
    assert (probe.rows, probe.readout.normalise) == ("prompt_mean", best.normalise)
    v = engine.vectors.get(digest=probe.vector.digest).values[0].astype(np.float64)
    scores = {p: SCORES[best.normalise](reader.rows(p, best.site.layer), v) for p in SOME}
    expected = {
        p: (s < best.threshold if best.below else s > best.threshold) for p, s in scores.items()
    }
    assert 0.2 < np.mean(list(expected.values())) < 0.8
    gate = rheostat.gate(found.condition, hold="rest")
    for prompts in (train, held):
        outs = decisions(engine, prompts, PUSH.when(gate))
        assert [fired(out) for out in outs] == [expected[prompt] for prompt in prompts]


async def test_the_asyncio_client_fits_as_the_other(
    engine: rheostat.Engine, server: Server
) -> None:
    sets = PROMPTS[:3], PROMPTS[40:43]
    options = {
        "points": "resid_post",
        "layers": [1, 2],
        "pools": ["last"],
        "rows": ["each", "prompt_mean"],
        "normalises": ["unit", "projected_cosine"],
    }
    async with rheostat.aio.connect(server.target) as awaited:
        found = await awaited.conditions.fit(*sets, **options)
    again = engine.conditions.fit(*sets, **options)
    assert found.vector.digest == again.vector.digest
    assert found.fits == again.fits
