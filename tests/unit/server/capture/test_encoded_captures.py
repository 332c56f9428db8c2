"""Captured rows in every encoding, as the client decodes them."""

import numpy as np
import pytest

from rheostat import back_projected, captures, projection_matrix
from rheostat._capture.encodings import read_tensor
from rheostat_engine import Point, Site
from rheostat_wire.v1 import capture_pb2, tensor_pb2, types_pb2

from ..fakes import WIDTH, ScriptedBackend, row
from ..messages import capture, request, site_set

POST = types_pb2.POINT_RESID_POST
FORMS = {
    "raw": {"encoding": tensor_pb2.ENCODING_RAW},
    "lz4_planes": {"encoding": tensor_pb2.ENCODING_LZ4_PLANES},
    "full8": {"encoding": tensor_pb2.ENCODING_FULL8},
    "rp8": {"encoding": tensor_pb2.ENCODING_RP8, "kept": 3, "seed": 11},
    "topk8": {"encoding": tensor_pb2.ENCODING_TOPK8, "kept": 2},
}
MADE = np.stack([row(Site(Point.RESID_POST, 1).index, position) for position in range(4)])
"""What the engine captures of the test's request at resid_post 1."""


def decoded(events) -> list:
    parts = [event.captured for event in events if event.WhichOneof("event") == "captured"]
    return [read_tensor(part.tensor) for part in parts]


@pytest.mark.parametrize("whole", [False, True], ids=["on the device", "on the server"])
@pytest.mark.parametrize("name", FORMS)
async def test_rows_decode_to_what_was_made_within_the_stated_error(starter, name, whole) -> None:
    running = await starter(ScriptedBackend(whole=whole))
    spec = capture(site_set(POST, layers=[1]), **FORMS[name])
    parts = decoded(await running.client.generate(request(captures=[spec])))
    values = np.concatenate([part.values[0] for part in parts])
    bounds = np.concatenate(
        [
            np.zeros(part.values.shape[1]) if part.max_error is None else part.max_error[0]
            for part in parts
        ]
    )
    wanted = MADE
    if name == "rp8":
        matrix = projection_matrix(3, WIDTH, seed=11)
        wanted = MADE @ matrix.T
        assert back_projected(values, matrix).shape == MADE.shape
    assert (np.abs(values - wanted).max(axis=1) <= bounds).all()
    assert bounds.any() == (name not in ("raw", "lz4_planes"))
    assert {part.encoding.name for part in parts} == {name}


@pytest.mark.parametrize("name", ["full8", "rp8", "topk8"])
async def test_stored_rows_keep_their_encoding(starter, tmp_path, name) -> None:
    running = await starter(sinks=(f"disk=filesystem:root={tmp_path}",))
    spec = capture_pb2.CaptureSpec(
        sites=site_set(POST, layers=[1]),
        sink=capture_pb2.SinkTarget(sink_name="disk"),
        **FORMS[name],
    )
    inline = capture(site_set(POST, layers=[1]), **FORMS[name])
    events = await running.client.generate(request(request_id="a", captures=[spec, inline]))
    sent = np.concatenate([part.values[0] for part in decoded(events)])
    found = captures.open_captures(tmp_path).rows_of("a", "resid_post", 1)
    assert np.array_equal(found.values, sent)
