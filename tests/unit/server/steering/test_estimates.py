"""The work of a request is estimated on the event loop, so the estimate itself must be short."""

import numpy as np
import pytest

from rheostat_server.limits import DIRECTIONS
from rheostat_server.steering.estimates import PromptWork, estimate_steering
from rheostat_server.vectors.store import VectorView
from rheostat_server.vectors.token_directions import TokenDirections
from rheostat_wire.v1 import replace_pb2, steering_pb2, vector_pb2

from ..fakes import SITES, WIDTH
from ..messages import add, at_post1, selector, span, tensor, token_range


@pytest.mark.parametrize(
    ("count", "looked_up"), [(1, 0), (2, 2), (DIRECTIONS, DIRECTIONS), (DIRECTIONS + 1, 0)]
)
def test_directions_of_an_ablate_that_is_refused_are_not_looked_up(
    monkeypatch, count: int, looked_up: int
) -> None:
    sizes: list[str | bytes] = []
    monkeypatch.setattr(VectorView, "size", lambda _, reference: sizes.append(reference) or 8)
    ablate = steering_pb2.Ablate(directions=[vector_pb2.VectorRef(name="calm")] * count)
    steering = steering_pb2.Steering(interventions=[steering_pb2.Intervention(ablate=ablate)])
    vectors = VectorView({}, {}, TokenDirections())
    estimate_steering(steering, 3, SITES, vectors)
    assert len(sizes) == looked_up


@pytest.mark.parametrize("prompt_len", [0, 1, 2, 3, 500, 501, 100_000])
def test_the_work_of_a_policy_is_bounded_by_the_estimates_of_two_prompts(prompt_len: int) -> None:
    rows = replace_pb2.Replace(rows=tensor(np.ones((1, 2, WIDTH))).inline)
    steering = steering_pb2.Steering(
        interventions=[
            add(),
            add(where=selector(span("a"), token_range(1))),
            at_post1(replace=rows),
        ]
    )
    vectors = VectorView({}, {}, TokenDirections())

    def estimate(length: int) -> int:
        return estimate_steering(steering, length, SITES, vectors)

    bound = PromptWork.of(estimate).at(prompt_len)
    assert estimate(prompt_len) <= bound
    if prompt_len <= 500 and prompt_len % 2 == 0:
        assert bound == estimate(prompt_len)
