"""A cell's scores do not depend on how many pairs are scored together."""

import numpy as np
import pytest

from rheostat_server.sweeps.grades import Grade
from rheostat_server.sweeps.scores import Scores, pair_scale
from rheostat_wire.v1 import sweep_pb2

GRADES = [
    Grade(sweep_pb2.METRIC_LOGPROB, recovered, f"grades[{number}]")
    for number, recovered in enumerate((True, False, True))
]


def scored(metrics: np.ndarray, *, pair_values: bool) -> tuple[sweep_pb2.SweepCell, Scores]:
    """The message of a cell whose pairs all have the same scale, and its scores."""
    draw = np.random.default_rng(1)
    repeats = [draw.standard_normal(len(GRADES)) for _ in range(4)]
    clean = draw.standard_normal(len(GRADES)) + 3
    scores = Scores(np.full(2, np.nan), GRADES)
    scores.set_scales([pair_scale(repeats, [], clean, into_clean=False)] * len(metrics))
    message = sweep_pb2.SweepCell()
    scores.score(1, metrics.tolist(), message, pair_values=pair_values)
    return message, scores


@pytest.mark.parametrize("pair_values", [True, False])
def test_a_cell_of_one_pair_has_the_values_of_numpy_to_the_last_bit(pair_values: bool) -> None:
    metrics = np.random.default_rng(2).standard_normal((1, len(GRADES)))
    message, scores = scored(metrics, pair_values=pair_values)
    expected = ((metrics - scores._zero) / scores._unit)[0].tolist()
    assert list(message.values) == expected == scores.values[1].tolist()
    assert list(message.standard_errors) == [0.0] * len(GRADES)
    assert list(message.pair_values) == (expected if pair_values else [])


def test_equal_pairs_have_the_mean_of_one_and_no_error() -> None:
    metrics = np.random.default_rng(3).standard_normal((1, len(GRADES)))
    alone, _ = scored(metrics, pair_values=True)
    both, _ = scored(np.repeat(metrics, 2, axis=0), pair_values=True)
    assert list(both.values) == pytest.approx(list(alone.values), rel=1e-15)
    assert list(both.standard_errors) == [0.0] * len(GRADES)
    assert list(both.pair_values) == list(alone.values) * 2


@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize(("distance", "below"), [(0.0, True), (0.99, True), (1.01, False)])
def test_a_cell_is_below_the_noise_only_if_all_its_grades_are(
    pairs: int, distance: float, below: bool
) -> None:
    _, scores = scored(np.zeros((1, len(GRADES))), pair_values=False)
    graded = scores.base + distance * scores.noise_limit * [0, 0, 1]
    metrics = graded * scores._unit[0] + scores._zero[0]
    message, _ = scored(np.repeat(metrics[None], pairs, axis=0), pair_values=False)
    assert message.below_noise is below
