"""Features of SAEs that SAELens saved, against what SAELens itself computes with them.

`saelens/make.py` made the SAEs and the results. It also says how.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import rheostat
from rheostat_engine import Point, Site

from ..engine.reference import Change, Float

pytestmark = pytest.mark.integration

MADE = Path(__file__).parent / "saelens"
SAES = ("batchtopk", "jumprelu", "jumprelu-float16", "standard", "standard-bfloat16")
PROMPT = "The weather was grey and Anna felt"
LAYER, FEATURE, FEATURES, VALUE = 2, 1, 4, 3.0
OPTIONS = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
EVERY_LAYER = rheostat.Capture("resid_post", "all")


class Made(NamedTuple):
    """An SAE, and what SAELens computes with it."""

    folder: Path
    tokens: tuple[int, ...]
    """Of the prompt."""
    rows: Float
    """The stream at the SAE's site, [n, width]."""
    activations: Float
    """[n, features]."""
    clamped: Float
    """The stream after the feature is set to the value at every token, [n, width]."""


@pytest.fixture(params=SAES)
def made(request: pytest.FixtureRequest) -> Made:
    folder = MADE / request.param
    stream = load_file(MADE / "rows.safetensors")
    results = load_file(folder / "results.safetensors")
    return Made(folder, tuple(stream["tokens"].tolist()), stream["rows"], **results)


def assert_close(got: Float, wanted: Float) -> None:
    """Equal but for the rounding of float32."""
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_every_sae_here_is_tested() -> None:
    assert sorted(path.parent.name for path in MADE.glob("*/cfg.json")) == sorted(SAES)


def test_the_server_reads_the_activations_that_saelens_encodes(engine, made: Made) -> None:
    features = [rheostat.load_sae_feature(made.folder, number) for number in range(FEATURES)]
    read = rheostat.Capture("resid_post", LAYER, projection=[one.read for one in features])
    out = engine.generate(PROMPT, capture=read, **OPTIONS)
    assert out.prompt_token_ids == made.tokens
    assert_close(out.activations["resid_post", LAYER], made.activations)
    on = (made.activations > 0).sum(0)
    assert ((on > 0) & (on < len(made.tokens))).all()


@pytest.mark.parametrize("only_on", [False, True])
def test_a_clamp_puts_the_rows_that_saelens_decodes(
    engine, reference, made: Made, only_on: bool
) -> None:
    feature = rheostat.load_sae_feature(made.folder, FEATURE)
    out = engine.generate(
        PROMPT, steering=feature.clamp(VALUE, only_on=only_on), capture=EVERY_LAYER, **OPTIONS
    )
    on = made.activations[:, [FEATURE]] > 0
    rows = np.where(on | (not only_on), made.clamped, made.rows)

    def put(_: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(rows)

    site = Site(Point.RESID_POST, LAYER).index
    changes = [Change(site, put, range(len(made.tokens)))]
    expected = reference.run(made.tokens, changes).streams
    for layer in range(6):
        got = out.activations["resid_post", layer]
        assert_close(got, expected[Site(Point.RESID_POST, layer).index])
    if only_on:
        plain = engine.generate(PROMPT, capture=EVERY_LAYER, **OPTIONS)
        off = ~on[:, 0]
        one, other = (each.activations["resid_post", LAYER] for each in (out, plain))
        assert np.array_equal(one[off], other[off])
