"""The work of a request is estimated on the event loop, so the estimate itself must be short."""

import pytest

from rheostat_server.limits import DIRECTIONS
from rheostat_server.steering.estimates import estimate_steering
from rheostat_server.vectors.store import VectorView
from rheostat_server.vectors.token_directions import TokenDirections
from rheostat_wire.v1 import steering_pb2, vector_pb2

from ..fakes import SITES


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
