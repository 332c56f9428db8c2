"""Features of sparse autoencoders over gRPC, against hooks that compute the formula of SAELens."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import rheostat
from rheostat_engine import Point, Site

from ..engine.reference import Change, Float, HfReference

pytestmark = pytest.mark.integration

WIDTH, FEATURES, LAYER = 128, 16, 2
PROMPT = "The weather was grey and Anna felt"
COUNT = 12
OPTIONS = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "logprobs": 5}
EVERY_LAYER = rheostat.Capture("resid_post", "all")
SITE = Site(Point.RESID_POST, LAYER).index
KINDS = ["standard", "jumprelu"]


class Sae:
    """An SAE as SAELens computes it: StandardSAE and JumpReLUSAE, `encode` and `decode`."""

    def __init__(self, kind: str) -> None:
        rng = np.random.default_rng(5)
        self.kind = kind
        self.weights = {
            "W_enc": rng.normal(size=(WIDTH, FEATURES)) / 8,
            "b_enc": rng.normal(size=FEATURES) / 8,
            "W_dec": rng.normal(size=(FEATURES, WIDTH)),
            "b_dec": rng.normal(size=WIDTH) / 8,
        }
        if kind == "jumprelu":
            self.weights["threshold"] = rng.uniform(0.2, 0.5, FEATURES)
        self.weights = {name: value.astype(np.float32) for name, value in self.weights.items()}

    def write(self, folder: Path) -> Path:
        """The files that SAELens writes."""
        config = {
            "architecture": self.kind,
            "d_in": WIDTH,
            "d_sae": FEATURES,
            "dtype": "float32",
            "apply_b_dec_to_input": True,
            "normalize_activations": "none",
            "metadata": {"hook_name": f"blocks.{LAYER}.hook_resid_post"},
        }
        folder.mkdir()
        (folder / "cfg.json").write_text(json.dumps(config))
        save_file(self.weights, folder / "sae_weights.safetensors")
        return folder

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Activations [n, features] of rows."""
        w = {name: torch.from_numpy(value).double() for name, value in self.weights.items()}
        hidden = (x.double() - w["b_dec"]) @ w["W_enc"] + w["b_enc"]
        mask = hidden > w["threshold"] if self.kind == "jumprelu" else 1.0
        return hidden.relu() * mask

    def decode(self, activations: torch.Tensor) -> torch.Tensor:
        """Rows of activations."""
        w = {name: torch.from_numpy(value).double() for name, value in self.weights.items()}
        return activations @ w["W_dec"] + w["b_dec"]


def clamped(sae: Sae, feature: int, value: float, *, only_on: bool):
    """A hook: the row with the feature's activation set, and the SAE's error kept."""

    def change(x: torch.Tensor) -> torch.Tensor:
        before = sae.encode(x)
        after = before.clone()
        on = before[:, feature] > 0 if only_on else torch.ones(len(x), dtype=torch.bool)
        after[on, feature] = value
        error = x.double() - sae.decode(before)
        return (sae.decode(after) + error).to(x.dtype)

    return change


def streams(out: rheostat.Generation) -> Float:
    return out.activations["resid_post", LAYER]


def check(out: rheostat.Generation, reference: HfReference, change) -> Float:
    """Compares all layers with Hugging Face's; returns the stream at the layer."""
    tokens = [*out.prompt_token_ids, *out.token_ids[:-1]]
    expected = reference.run(tokens, [Change(SITE, change, range(len(tokens)))]).streams
    for layer in range(6):
        wanted = expected[Site(Point.RESID_POST, layer).index]
        got = out.activations["resid_post", layer]
        np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-5 * np.abs(wanted).max())
    return expected[SITE]


def some_on_some_off(sae: Sae, rows: Float) -> int:
    """A feature that is on at some rows and off at others."""
    on = (sae.encode(torch.from_numpy(rows)).numpy() > 0).sum(0)
    return int(np.argmin(np.abs(on - len(rows) / 2)))


@pytest.mark.parametrize("only_on", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_clamped_feature_is_what_saelens_and_a_hook_make_of_it(
    engine, reference, tmp_path, kind, only_on
) -> None:
    sae = Sae(kind)
    path = sae.write(tmp_path / "sae")
    plain = engine.generate(PROMPT, capture=EVERY_LAYER, **OPTIONS)
    feature = some_on_some_off(sae, streams(plain))
    one = rheostat.load_sae_feature(path, feature)
    for value in (3.0, 0.0):
        steering = one.clamp(value, only_on=only_on)
        out = engine.generate(PROMPT, steering=steering, capture=EVERY_LAYER, **OPTIONS)
        check(out, reference, clamped(sae, feature, value, only_on=only_on))
    (applied,) = out.receipt.interventions
    assert applied.sites[0].row_count == len(streams(out))
    assert len(applied.digests) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_scaled_feature_moves_by_what_it_writes(engine, reference, tmp_path, kind) -> None:
    sae = Sae(kind)
    plain = engine.generate(PROMPT, capture=EVERY_LAYER, **OPTIONS)
    feature = some_on_some_off(sae, streams(plain))
    one = rheostat.load_sae_feature(sae.write(tmp_path / "sae"), feature)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        change = sae.encode(x)[:, [feature]] * torch.from_numpy(sae.weights["W_dec"][[feature]])
        return (x.double() - 0.75 * change).to(x.dtype)

    out = engine.generate(PROMPT, steering=one.scale(0.25), capture=EVERY_LAYER, **OPTIONS)
    check(out, reference, scaled)


def test_a_probe_of_a_feature_reads_its_activation_and_gates_its_clamp(
    engine, reference, tmp_path
) -> None:
    sae = Sae("jumprelu")
    plain = engine.generate(PROMPT, capture=EVERY_LAYER, **OPTIONS)
    feature = some_on_some_off(sae, streams(plain))
    one = rheostat.load_sae_feature(sae.write(tmp_path / "sae"), feature)
    later = one.clamp(4.0).at(points="resid_post", layers=LAYER + 2)
    steering = later.when(one.probe().above(0.0))
    out = engine.generate(PROMPT, steering=steering, capture=EVERY_LAYER, **OPTIONS)
    tokens = [*out.prompt_token_ids, *out.token_ids[:-1]]
    read: list[torch.Tensor] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        read.append(sae.encode(x)[:, feature] > 0)
        return x

    def act(x: torch.Tensor) -> torch.Tensor:
        changed = clamped(sae, feature, 4.0, only_on=False)(x)
        return torch.where(read[-1][:, None], changed, x)

    places = range(len(tokens))
    acting = Site(Point.RESID_POST, LAYER + 2).index
    changes = [Change(SITE, note, places), Change(acting, act, places)]
    expected = reference.run(tokens, changes).streams
    for layer in range(6):
        wanted = expected[Site(Point.RESID_POST, layer).index]
        got = out.activations["resid_post", layer]
        np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-5 * np.abs(wanted).max())
    assert 0 < int(read[-1].sum()) < len(tokens)


def test_readouts_of_captured_rows_are_what_numpy_makes_of_the_rows(engine) -> None:
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(2, WIDTH)).astype(np.float32)
    v, w = map(rheostat.inline, vectors)
    readouts = [
        v,
        rheostat.readout(v, bias=0.5),
        rheostat.readout(w, normalise="unit", activation="relu"),
        rheostat.readout(w, normalise="cosine", bias=-0.25),
        rheostat.readout(v, activation="jump_relu", theta=1.5),
        rheostat.readout(v, normalise="unit", activation="tanh"),
    ]
    whole = rheostat.Capture("resid_post", LAYER)
    read = rheostat.Capture("resid_post", LAYER, projection=readouts)
    rows = [engine.generate(PROMPT, capture=one, **OPTIONS) for one in (whole, read)]
    x, numbers = (out.activations["resid_post", LAYER].astype(np.float64) for out in rows)
    a, b = (x @ row.astype(np.float64) for row in vectors)
    norms = [np.linalg.norm(row.astype(np.float64)) for row in vectors]
    expected = np.stack(
        [
            a,
            a + 0.5,
            np.maximum(b / norms[1], 0),
            b / norms[1] / np.linalg.norm(x, axis=1) - 0.25,
            np.where(a > 1.5, a, 0),
            np.tanh(a / norms[0]),
        ],
        axis=1,
    )
    np.testing.assert_allclose(numbers, expected, atol=1e-4)
