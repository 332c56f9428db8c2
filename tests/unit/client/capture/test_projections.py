"""Captures with directions: what the request says, and what is refused before it is sent."""

import dataclasses

import numpy as np
import pytest

import rheostat
from rheostat_wire.v1 import capture_pb2, tensor_pb2, vector_pb2

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


def sent(*args: object, **options: object) -> capture_pb2.CaptureSpec:
    return rheostat.Capture(*args, **options).to_wire()


def refs(spec: capture_pb2.CaptureSpec) -> list[vector_pb2.VectorRef]:
    """The vectors of a projection, each of which is read as it is."""
    readouts = spec.projection.readouts.readouts
    assert [one.ListFields()[0][0].name for one in readouts] == ["vector"] * len(readouts)
    return [one.vector for one in readouts]


def test_directions_are_named_stored_or_travel_along():
    stored = rheostat.Vector("ab" * 32, shape=(1, 4))
    many = [rheostat.named("joy"), stored, rheostat.inline(ROWS[1])]
    spec = sent("resid_post", 3, projection=many)
    first, second, third = refs(spec)
    assert first.name == "joy"
    assert second.digest == bytes.fromhex("ab" * 32)
    assert third.inline.inline == ROWS[1].tobytes()
    assert refs(sent("resid_post", 3, projection=many[0]))[0].name == "joy"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_rows_of_an_array_are_directions(dtype):
    array = ROWS.astype(dtype)
    directions = refs(sent("resid_post", 3, projection=array))
    assert [list(one.inline.shape) for one in directions] == [[1, 4], [1, 4]]
    assert b"".join(one.inline.inline for one in directions) == array.tobytes()
    assert len(refs(sent("resid_post", 3, projection=array[0]))) == 1


def test_a_vector_with_a_row_per_layer_says_which_layers_are_meant():
    vector = rheostat.inline(np.ones((6, 4), np.float32), points="resid_post", layers="all")
    (ref,) = refs(sent("resid_post", [1, 4], projection=vector))
    assert list(ref.row_layers.layers) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(rheostat.InvalidRequest) as raised:
        sent("resid_post", [1, 4, 5], projection=rheostat.inline(ROWS))
    assert raised.value.path == "captures.projection.readouts.readouts[0].vector"


def test_rows_of_a_probe_are_not_taken_for_those_of_other_layers():
    probe = rheostat.inline(ROWS, points="resid_post", layers=[1, 4])
    with pytest.raises(rheostat.InvalidRequest, match=r"rows for layers 1, 4, not for layers 2-3"):
        rheostat.Capture("resid_post", [2, 3], projection=probe).to_wire()
    moved = dataclasses.replace(probe, row_layers=(2, 3))
    spec = rheostat.Capture("resid_post", [2, 3], projection=moved).to_wire()
    assert list(refs(spec)[0].row_layers.layers) == [2, 3]


def test_a_capture_without_directions_says_nothing_of_them():
    spec = sent("resid_post", 3)
    assert not spec.HasField("projection")
    assert not spec.HasField("dtype")
    assert rheostat.Capture("resid_post").projection == ()


def test_an_element_type_can_be_asked_for():
    assert sent("resid_post", 3, dtype="bfloat16").dtype == tensor_pb2.DTYPE_BFLOAT16
    with pytest.raises(rheostat.InvalidRequest) as raised:
        sent("resid_post", 3, dtype="int8")
    assert raised.value.path == "captures.dtype"


@pytest.mark.parametrize(
    ("given", "path", "message"),
    [
        ("joy", "[0]", "a direction is a vector, not str"),
        (["joy"], "[0]", "a direction is a vector, not str"),
        ([rheostat.named("a"), 3], "[1]", "a direction is a vector, not int"),
        ([rheostat.named("a")] * 4097, "", "4097 directions; at most 4096 go together"),
    ],
)
def test_what_is_no_direction_is_refused_by_place(given, path, message):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        rheostat.Capture("resid_post", 3, projection=given)
    assert raised.value.path == f"captures.projection{path}"
    assert raised.value.message.startswith(message)


@pytest.mark.parametrize("bad", [np.full((2, 4), np.nan), np.ones((2, 2, 2))])
def test_an_array_that_holds_no_directions_is_refused(bad):
    with pytest.raises(rheostat.InvalidRequest):
        rheostat.Capture("resid_post", 3, projection=bad)
