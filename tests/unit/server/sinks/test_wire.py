"""Targets, artefacts and rows on the wire, and the sinks that write no files."""

from pathlib import Path

import numpy as np
import pytest

from rheostat_engine import Point, Site
from rheostat_server import errors
from rheostat_server.capture.encodings import Form
from rheostat_server.sinks import (
    CaptureAbout,
    Encoding,
    Ending,
    FloatType,
    Layout,
    Outcome,
    RowBlock,
    SinkError,
    Target,
)
from rheostat_server.sinks.guarded import SinkArtifact
from rheostat_server.sinks.memory import Memory
from rheostat_server.sinks.registry import Sinks
from rheostat_server.sinks.samples import SITES, block, request
from rheostat_server.sinks.settings import parse_sink
from rheostat_server.sinks.wire import (
    block_of,
    encoding_of,
    group_targets,
    to_artifact,
    to_wire_layout,
)
from rheostat_server.tensors import stack_rows
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, tensor_pb2, types_pb2

from ..sink_plugins import recorded

COMPLETE = Outcome(Ending.COMPLETE)


@pytest.fixture
def sinks(tmp_path: Path):
    found = Sinks([parse_sink(f"disk=filesystem:root={tmp_path}"), parse_sink("m=memory")])
    yield found
    found.close()


def wire(**fields: object) -> capture_pb2.SinkTarget:
    return capture_pb2.SinkTarget(**fields)


def test_captures_with_one_sink_and_tag_share_a_recording() -> None:
    a, b = Target("d", "a", Layout.PACKED, {}), Target("d", "b", Layout.PACKED, {})
    assert group_targets([(0, a), (2, b), (3, a)]) == [(a, (0, 3)), (b, (2,))]
    other = Target("d", "a", Layout.SHARDED, {})
    with pytest.raises(errors.InvalidValue) as caught:
        group_targets([(0, a), (2, other)])
    assert caught.value.field == "captures[2].sink"


def test_only_encodings_whose_rows_stand_alone_go_to_sinks() -> None:
    assert encoding_of(tensor_pb2.ENCODING_TOPK8, "x") is Encoding.TOPK8
    with pytest.raises(errors.InvalidValue):
        encoding_of(tensor_pb2.ENCODING_LZ4_PLANES, "x")


def test_an_artifact_travels_with_everything(sinks: Sinks) -> None:
    made, _ = recorded(sinks, request("a", Layout.PACKED, sink="disk"))
    found = to_artifact(SinkArtifact("disk", made))
    assert found.write_time.ToNanoseconds() == pytest.approx(made.write_time * 1e9, abs=1e6)
    found.ClearField("write_time")
    assert found == capture_service_pb2.Artifact(
        ref=tensor_pb2.ArtifactRef(sink_name="disk", path="default/requests/a/rows.safetensors"),
        media_type="application/x-safetensors",
        state=capture_service_pb2.ARTIFACT_STATE_COMPLETE,
        size_bytes=made.length,
        row_count=made.rows,
        sites=[
            types_pb2.Site(point=types_pb2.POINT_RESID_POST, layer=0),
            types_pb2.Site(point=types_pb2.POINT_RESID_PRE, layer=1),
            types_pb2.Site(point=types_pb2.POINT_MLP_OUT, layer=3),
        ],
        sha256=made.sha256,
    )


def test_a_part_of_a_shard_travels_with_its_place(sinks: Sinks) -> None:
    recorded(sinks, request("a", Layout.SHARDED, sink="disk"))
    (made,) = recorded(sinks, request("b", Layout.SHARDED, sink="disk"))
    ref = to_artifact(SinkArtifact("disk", made)).ref
    assert (ref.offset, ref.length) == (made.offset, made.length)
    assert made.offset > 0


def test_layouts_are_those_of_the_wire() -> None:
    assert [to_wire_layout(layout) for layout in Layout] == [1, 2, 3]


@pytest.mark.parametrize("encoding", [*Encoding])
def test_a_message_becomes_the_rows_that_are_in_it(encoding: Encoding) -> None:
    number = tensor_pb2.Encoding.Value(f"ENCODING_{encoding.name}")
    about = CaptureAbout(2, SITES, FloatType.FLOAT32, 8, encoding, kept=3, seed=1)
    rows = np.random.default_rng(0).standard_normal((3, 4, 8)).astype(np.float32)
    encode = Form(number, kept=3, seed=1).encode
    held = FloatType.FLOAT32
    message = capture_pb2.Captured(
        capture_index=2,
        sample=1,
        baseline=True,
        positions=[
            types_pb2.PositionRun(start=4, count=3),
            types_pb2.PositionRun(start=9, count=1),
        ],
        token_ids=[1, 2, 3, 4],
        tensor=encode(stack_rows(rows), row_type=held, wanted=held),
    )
    found = block_of(message, SITES, about)
    assert found.positions.tolist() == [4, 5, 6, 9]
    assert (found.capture_index, found.sample, found.baseline, found.rows) == (2, 1, True, 12)
    assert sum(part.nbytes for part in found.parts.values()) == len(message.tensor.inline)
    Memory(1 << 20).open(request("a", None, [about])).write(found)
    if encoding is Encoding.RAW:
        np.testing.assert_array_equal(found.parts["rows"], rows)


def test_memory_keeps_the_last_and_never_more_than_its_limit() -> None:
    capture = CaptureAbout(0, (Site(Point.RESID_POST, 0),), FloatType.FLOAT32, 256)
    random = np.random.default_rng(0)
    memory = Memory(4096)
    for name in ("a", "b", "c", "d"):
        recording = memory.open(request(name, None, [capture]))
        recording.write(block(capture, random, 0, 0, 2))
        recording.finish(COMPLETE)
    kept = [memory.recorded(name) is not None for name in "abcd"]
    assert kept == [False, False, True, True]
    large = memory.open(request("e", None, [capture]))
    large.write(block(capture, random, 0, 0, 4))
    with pytest.raises(SinkError, match="limit"):
        large.write(block(capture, random, 0, 4, 1))
    large.abandon(SinkError("made up"))
    recording = memory.open(request("f", None, [capture]))
    recording.write(block(capture, random, 0, 0, 4))
    recording.finish(COMPLETE)
    assert memory.recorded("f") is not None


def test_the_log_says_how_much_came_and_how_long_rows_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rheostat_server.sinks.log")
    capture = CaptureAbout(0, SITES[:2], FloatType.BFLOAT16, 4)
    sinks = Sinks([parse_sink("l=logging")])
    target = sinks.check(wire(sink_name="l", options={"norms": "true"}), "")
    recording = sinks.open(request("a", None, [capture], sink="l", options=target.options))
    ones = np.full((2, 3, 4), 0x3F80, np.uint16)
    labels = np.array([7, 8, 9], np.int32)
    recording.write(RowBlock(0, 1, SITES[:2], labels, labels, {"rows": ones}, True))
    recording.finish(Outcome(Ending.ABORTED, 5))
    assert caplog.messages == [
        "l: a capture 0 sample 1 of the baseline: 6 rows at 2 sites, positions 7 to 9, mean norm 2",
        "l: a is aborted: 6 rows, 5 lost",
    ]
    with pytest.raises(errors.InvalidValue):
        sinks.check(wire(sink_name="l", options={"norms": "yes"}), "")
