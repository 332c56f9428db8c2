"""What of a readout is served, and that the rest is refused by name."""

import math

import numpy as np
import pytest

from rheostat_server import errors
from rheostat_wire.v1 import capture_pb2, matrix_pb2, steering_pb2, vector_pb2

from ..admissions import admitted, refused
from ..fakes import WIDTH
from ..messages import at_post1, capture, request, tensor

JOY = tensor(np.ones((1, WIDTH), np.float32))
UNIT, NONE, COSINE = (
    vector_pb2.NORMALISE_UNIT,
    vector_pb2.NORMALISE_NONE,
    vector_pb2.NORMALISE_COSINE,
)
RELU, JUMP, TANH, SAME = (
    vector_pb2.ACTIVATION_RELU,
    vector_pb2.ACTIVATION_JUMP_RELU,
    vector_pb2.ACTIVATION_TANH,
    vector_pb2.ACTIVATION_IDENTITY,
)


def band(read: vector_pb2.Readout, **fields: object) -> object:
    one = steering_pb2.Band(read=read, min=0.0, **fields)
    return request(steer=[at_post1(clamp=steering_pb2.Clamp(bands=[one]))])


def scale(read: vector_pb2.Readout) -> object:
    return request(steer=[at_post1(scale=steering_pb2.Scale(read=read, factor=2.0))])


def projected(read: vector_pb2.Readout) -> object:
    readouts = capture_pb2.ReadoutList(readouts=[read])
    return request(captures=[capture(projection=capture_pb2.Projection(readouts=readouts))])


PLACES = {
    "band": (band, UNIT, "steering.interventions[0].clamp.bands[0].read"),
    "scale": (scale, UNIT, "steering.interventions[0].scale.read"),
    "projection": (projected, NONE, "captures[0].projection.readouts.readouts[0]"),
}


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize(
    ("said", "error", "field"),
    [
        ({"normalise": 0}, errors.UnknownEnum, "normalise"),
        ({"normalise": 9}, errors.UnknownEnum, "normalise"),
        ({"normalise": COSINE}, errors.NotSupported, "normalise"),
        ({"activation": 0}, errors.UnknownEnum, "activation"),
        ({"activation": 9}, errors.UnknownEnum, "activation"),
        ({"activation": RELU}, errors.NotSupported, "activation"),
        ({"activation": TANH}, errors.NotSupported, "activation"),
        ({"activation": JUMP, "theta": 0.5}, errors.NotSupported, "activation"),
        ({"activation": JUMP}, errors.MissingField, "theta"),
        ({"activation": JUMP, "theta": math.nan}, errors.NonFinite, "theta"),
        ({"theta": 0.5}, errors.InvalidValue, "theta"),
        ({"bias": 0.5}, errors.NotSupported, "bias"),
        ({"bias": math.inf}, errors.NonFinite, "bias"),
    ],
)
def test_what_is_not_served_of_a_readout_is_refused_by_its_field(place, said, error, field) -> None:
    make, served, path = PLACES[place]
    read = vector_pb2.Readout(**{"vector": JOY, "normalise": served, **said})
    assert refused(make(read)) == (error, f"{path}.{field}")


@pytest.mark.parametrize("place", list(PLACES))
def test_what_says_the_default_in_words_is_served(place) -> None:
    make, served, _ = PLACES[place]
    admitted(make(vector_pb2.Readout(vector=JOY, normalise=served)))
    words = vector_pb2.Readout(vector=JOY, normalise=served, bias=0.0, activation=SAME)
    admitted(make(words))


def test_what_is_not_said_of_the_norm_is_never_guessed() -> None:
    """One default for all places: a band must say that it reads along a unit vector."""
    bare = vector_pb2.Readout(vector=JOY)
    admitted(projected(bare))
    for make, _, path in (PLACES["band"], PLACES["scale"]):
        assert refused(make(bare)) == (errors.NotSupported, f"{path}.normalise")
    unit = vector_pb2.Readout(vector=JOY, normalise=UNIT)
    path = PLACES["projection"][2]
    assert refused(projected(unit)) == (errors.NotSupported, f"{path}.normalise")


def test_writing_elsewhere_matrices_and_the_largest_numbers_are_refused() -> None:
    unit = vector_pb2.Readout(vector=JOY, normalise=UNIT)
    path = "steering.interventions[0].clamp.bands[0].write"
    assert refused(band(unit, write=JOY)) == (errors.NotSupported, path)
    matrix = capture_pb2.Projection(matrix=matrix_pb2.MatrixRef(name="sae"))
    readouts = capture_pb2.ReadoutList(readouts=[vector_pb2.Readout(vector=JOY)])
    largest = capture_pb2.Projection(readouts=readouts, top_k=3)
    for projection, field in ((matrix, "matrix"), (largest, "top_k")):
        message = request(captures=[capture(projection=projection)])
        assert refused(message) == (errors.NotSupported, f"captures[0].projection.{field}")
