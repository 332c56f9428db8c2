"""What of a readout is served, and that the rest is refused by name."""

import math

import numpy as np
import pytest

from rheostat_engine import Activation, Band, Normalise, Readout
from rheostat_server import errors
from rheostat_wire.v1 import (
    capture_pb2,
    gate_pb2,
    matrix_pb2,
    steering_pb2,
    types_pb2,
    vector_pb2,
)

from ..admissions import admitted, refused
from ..fakes import WIDTH
from ..messages import at_post1, capture, request, site_set, tensor

JOY = tensor(np.ones((1, WIDTH), np.float32))
DOWN = tensor(-np.ones((1, WIDTH), np.float32))
ZERO = tensor(np.zeros((1, WIDTH), np.float32))
TINY = tensor(np.full((1, WIDTH), 1e-20, np.float32))
HUGE = tensor(np.full((1, WIDTH), 1e20, np.float32))
PROJECTED = vector_pb2.NORMALISE_PROJECTED_COSINE
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


def scale(read: vector_pb2.Readout, **fields: object) -> object:
    return request(steer=[at_post1(scale=steering_pb2.Scale(read=read, factor=2.0, **fields))])


def probed(read: vector_pb2.Readout) -> object:
    probe = gate_pb2.Probe(
        name="p", sites=site_set(types_pb2.POINT_RESID_PRE, layers=[0]), read=read
    )
    condition = gate_pb2.Condition(probe_name="p", above=0.0)
    intervention = at_post1(add=steering_pb2.Add(vector=JOY))
    intervention.gate.conditions.append(condition)
    return request(steer=[intervention], probes=[probe])


def projected(read: vector_pb2.Readout) -> object:
    readouts = capture_pb2.ReadoutList(readouts=[read])
    return request(captures=[capture(projection=capture_pb2.Projection(readouts=readouts))])


PLACES = {
    "band": (band, "steering.interventions[0].clamp.bands[0]", "read"),
    "scale": (scale, "steering.interventions[0].scale", "read"),
    "projection": (projected, "captures[0].projection.readouts", "readouts[0]"),
    "probe": (probed, "probes[0]", "read"),
}
PULLS = ["band", "scale"]


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize(
    ("said", "error", "field"),
    [
        ({"normalise": 0}, errors.UnknownEnum, "normalise"),
        ({"normalise": 9}, errors.UnknownEnum, "normalise"),
        ({"activation": 0}, errors.UnknownEnum, "activation"),
        ({"activation": 9}, errors.UnknownEnum, "activation"),
        ({"activation": JUMP}, errors.MissingField, "theta"),
        ({"activation": JUMP, "theta": math.nan}, errors.NonFinite, "theta"),
        ({"theta": 0.5}, errors.InvalidValue, "theta"),
        ({"bias": math.inf}, errors.NonFinite, "bias"),
    ],
)
def test_an_impossible_readout_is_refused_by_its_field(place, said, error, field) -> None:
    make, path, name = PLACES[place]
    read = vector_pb2.Readout(**{"vector": JOY, **said})
    assert refused(make(read)) == (error, f"{path}.{name}.{field}")


READOUTS = {
    "product": {},
    "in words": {"bias": 0.0, "activation": SAME, "normalise": NONE},
    "bias": {"bias": 0.5},
    "unit": {"normalise": UNIT, "bias": -1.0},
    "relu": {"activation": RELU, "bias": 0.5},
    "jump": {"activation": JUMP, "theta": 0.5, "normalise": UNIT},
}
BENT = {
    "cosine": {"normalise": COSINE},
    "tanh": {"activation": TANH},
    "both": {"activation": TANH, "normalise": COSINE},
    "projected cosine": {"normalise": PROJECTED},
}


@pytest.mark.parametrize("said", list(READOUTS | BENT))
@pytest.mark.parametrize("place", list(PLACES))
def test_every_readout_is_served_where_a_step_can_reach_it(place, said) -> None:
    make, path, name = PLACES[place]
    read = vector_pb2.Readout(vector=JOY, **(READOUTS | BENT)[said])
    if place == "projection" and said == "projected cosine":
        assert refused(make(read)) == (errors.NotSupported, f"{path}.{name}.normalise")
        return
    if place not in PULLS:
        admitted(make(read))
        return
    admitted(make(read, write=DOWN))
    if said in READOUTS:
        admitted(make(read))
    else:
        assert refused(make(read)) == (errors.MissingField, f"{path}.write")


def test_what_is_read_and_written_reaches_the_act() -> None:
    read = vector_pb2.Readout(vector=JOY, bias=0.5, activation=JUMP, theta=0.25)
    (act,) = admitted(band(read, write=DOWN, only_on=True, strength=0.5)).plan.acts
    one = Readout(Normalise.NONE, Activation.JUMP_RELU, 0.5, 0.25)
    assert act.bands == (Band(0.0, math.inf, 0.5, one, True, True),)
    assert len(set(act.vectors)) == 2
    (act,) = admitted(scale(read, write=DOWN)).plan.acts
    assert act.bands == (Band(0.0, 0.0, -1.0, one, True),)
    plain = vector_pb2.Readout(vector=JOY, normalise=UNIT)
    (act,) = admitted(band(plain)).plan.acts
    assert (act.bands, act.bands[0].plain) == ((Band(0.0, math.inf, 1.0),), True)


def test_a_band_without_strength_takes_its_vectors_with_it() -> None:
    def one(strength: float, write: bool) -> steering_pb2.Band:
        read = vector_pb2.Readout(vector=JOY, normalise=UNIT)
        return steering_pb2.Band(
            read=read, write=DOWN if write else None, min=0.0, strength=strength
        )

    bands = [one(0.0, True), one(0.5, True), one(0.0, False), one(0.25, False)]
    message = request(steer=[at_post1(clamp=steering_pb2.Clamp(bands=bands))])
    (act,) = admitted(message).plan.acts
    joy, down = act.vectors[0], act.vectors[1]
    assert (act.vectors, joy != down) == ((joy, down, joy), True)
    assert [(one.strength, one.writes) for one in act.bands] == [(0.5, True), (0.25, False)]


@pytest.mark.parametrize(
    ("read", "more", "error", "field"),
    [
        ({}, {"write": ZERO}, errors.ZeroVector, "write"),
        ({}, {"write": HUGE}, errors.InvalidValue, "write"),
        ({"vector": TINY}, {}, errors.InvalidValue, "read.vector"),
        ({}, {"write": vector_pb2.VectorRef()}, errors.MissingField, "write"),
        ({}, {"only_on": True}, errors.InvalidValue, "only_on"),
        ({"activation": TANH}, {"write": JOY, "only_on": True}, errors.InvalidValue, "only_on"),
    ],
)
def test_what_a_band_cannot_read_or_write_is_refused(read, more, error, field) -> None:
    message = band(vector_pb2.Readout(**{"vector": JOY, **read}), **more)
    assert refused(message) == (error, f"{PLACES['band'][1]}.{field}")


def test_norms_that_do_not_count_may_be_tiny() -> None:
    unit = vector_pb2.Readout(vector=TINY, normalise=UNIT)
    admitted(band(unit))
    admitted(probed(unit))
    path = PLACES["probe"][1]
    bare = vector_pb2.Readout(vector=TINY)
    assert refused(probed(bare)) == (errors.InvalidValue, f"{path}.read.vector")
    path = PLACES["projection"][1]
    field = f"{path}.readouts[0].vector"
    assert refused(projected(unit)) == (errors.InvalidValue, field)
    admitted(projected(bare))


def test_matrices_and_the_largest_numbers_are_refused() -> None:
    matrix = capture_pb2.Projection(matrix=matrix_pb2.MatrixRef(name="sae"))
    readouts = capture_pb2.ReadoutList(readouts=[vector_pb2.Readout(vector=JOY)])
    largest = capture_pb2.Projection(readouts=readouts, top_k=3)
    for projection, field in ((matrix, "matrix"), (largest, "top_k")):
        message = request(captures=[capture(projection=projection)])
        assert refused(message) == (errors.NotSupported, f"captures[0].projection.{field}")
