"""What sweeps find in the demo model's facts: zoom's top cells, ROME's shape, and 64 pairs."""

import numpy as np
import pytest

import rheostat

from ...effort import FACTOR, at_length
from .facts import GROUPS, POINTS, by_point, facts, landmarks, swapped, trace, traced, zoomed

pytestmark = pytest.mark.integration

LAYERS = 6
BEFORE, SUBJECT, BETWEEN, LAST = range(4)


@at_length
@pytest.mark.parametrize("point", POINTS)
def test_zoom_finds_the_top_cell_of_facts_with_a_quarter_of_the_cells(
    engine: rheostat.Engine, point: str
) -> None:
    pairs = [pair for fact in facts() if (pair := swapped(fact)) is not None]
    assert len(pairs) > 160
    chosen = pairs if FACTOR > 1 else pairs[6::14]
    found = [zoomed(engine, pair, point) for pair in chosen]
    missed = [one for one in found if not one.right]
    assert len(missed) <= max(1, 0.05 * len(found)), missed
    assert sum(one.ran for one in found) <= 0.25 * sum(one.cells for one in found)


@at_length
@pytest.mark.parametrize("window", [1, 3])
def test_facts_have_the_shape_that_meng_et_al_found(engine: rheostat.Engine, window: int) -> None:
    """The subject's last token matters early, the last token late, and attention moves the fact.

    Not found here: in GPT-2 XL, MLPs matter most at the subject, in the middle layers. In this
    model of 6 layers they matter there in the first layer alone, and later at the last token.
    """
    chosen = traced()
    assert len(chosen) > 100
    result = trace(engine, chosen[:: 4 if FACTOR > 1 else 31], window, noises=10)
    rises = by_point(result)
    assert result.columns == GROUPS
    assert result.noise[0].mean < 0.35  # noise destroys the fact
    stream, mlp, attention = (rises[point] for point in ("resid_post", "mlp_out", "attn_out"))
    early = 0 if window == 1 else slice(2)
    # The stream: at the subject's last token early, at the last token late, nowhere between.
    assert np.min(stream[early, SUBJECT]) > 0.4
    assert stream[0].argmax() == SUBJECT
    assert (stream[3:].argmax(axis=1) == LAST).all()
    assert stream[-1, LAST] > 0.5
    assert (np.diff(stream[:, LAST]) > -0.02).all()
    assert stream[-1, SUBJECT] < 0.1
    assert np.abs(stream[:, BETWEEN]).max() < 0.1
    # MLPs: at the subject's last token in the first layer, at the last token from the third on.
    assert mlp[:, :LAST].max() == pytest.approx(np.max(mlp[early, SUBJECT]))
    assert np.max(mlp[early, SUBJECT]) > 0.3
    assert mlp[:, LAST].argmax() >= 2
    assert mlp[0, LAST] < np.min(mlp[3:, LAST])
    # Attention: at the last token, in the layers between these.
    assert attention.max() == attention[1:3, LAST].max()
    assert attention.max() > 0.3
    assert attention[:, :LAST].max() < attention.max() / 2


def test_many_pairs_layers_and_groups_in_one_call(engine: rheostat.Engine) -> None:
    pairs = landmarks(64)
    result = engine.sweep(pairs, grades="logit_difference", pair_values=True, watch=False)
    assert (len(result.pairs), result.pair_values.shape) == (64, (64, 1, LAYERS, len(GROUPS)))
    assert not np.isnan(result.pair_values).any()
    assert not result.skipped
    values = result.pair_values
    np.testing.assert_allclose(result.values, values.mean(axis=0), rtol=1e-12)
    errors = values.std(axis=0, ddof=1) / np.sqrt(64)
    np.testing.assert_allclose(result.standard_errors, errors, rtol=1e-9)
    assert np.ptp(values, axis=0).min() > 0.1
    for number in (0, 17, 63):
        alone = engine.sweep(pairs[number], grades="logit_difference", watch=False)
        np.testing.assert_allclose(values[number], alone.values, atol=1e-3)


def test_more_pairs_than_are_allowed_are_refused(engine: rheostat.Engine) -> None:
    pair = landmarks(1)[0]
    with pytest.raises(rheostat.InvalidRequest, match="257 pairs") as caught:
        engine.sweep([pair] * 257, watch=False)
    assert caught.value.path == "pairs"
