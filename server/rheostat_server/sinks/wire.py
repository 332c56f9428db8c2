"""Converts between messages and sinks: targets, layouts, artefacts, and captured rows."""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from rheostat_engine import Site
from rheostat_server import validation
from rheostat_server.errors import InvalidValue
from rheostat_server.selectors.sites import to_wire
from rheostat_server.sinks.guarded import SinkArtifact
from rheostat_server.sinks.protocol import (
    CaptureAbout,
    Encoding,
    Layout,
    RowBlock,
    Target,
)
from rheostat_server.sinks.tables import NUMPY
from rheostat_server.validation import field_path
from rheostat_wire.dtypes import StoredArray
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, tensor_pb2

_ENCODINGS = {
    tensor_pb2.Encoding.Value(f"ENCODING_{encoding.name}"): encoding for encoding in Encoding
}


def encoding_of(encoding: tensor_pb2.Encoding.ValueType, path: str) -> Encoding:
    """The encoding of a capture whose target is a sink; `path` is that of its field.

    Raises:
        InvalidValue: single rows of this encoding cannot be read.
    """
    if encoding not in _ENCODINGS:
        raise InvalidValue(
            "sinks store rows that can be read one by one: use ENCODING_RAW, which is exact too",
            field=path,
        )
    return _ENCODINGS[encoding]


def layout_of(
    target: capture_pb2.SinkTarget, layouts: Sequence[Layout], path: str
) -> Layout | None:
    """The layout of a target, by default the sink's first; None if the sink writes no files.

    Raises:
        UnknownEnum: there is no such layout.
        InvalidValue: the sink does not support it.
    """
    if not target.HasField("layout"):
        return layouts[0] if layouts else None
    field = field_path(path, "layout")
    validation.known_enum(target.layout, capture_pb2.Layout.values(), field)
    layout = Layout[capture_pb2.Layout.Name(target.layout).removeprefix("LAYOUT_")]
    if layout not in layouts:
        supported = ", ".join(layouts) or "no files"
        raise InvalidValue(
            f"{target.sink_name} does not write {layout.value}; it writes {supported}", field=field
        )
    return layout


def to_wire_layout(layout: Layout) -> capture_pb2.Layout.ValueType:
    """The enum value of a layout."""
    return capture_pb2.Layout.Value(f"LAYOUT_{layout.name}")


def to_artifact(entry: SinkArtifact) -> capture_service_pb2.Artifact:
    """The message of an artefact."""
    artifact = entry.artifact
    message = capture_service_pb2.Artifact(
        ref=tensor_pb2.ArtifactRef(
            sink_name=entry.sink,
            path=artifact.path,
            offset=artifact.offset,
            length=0 if artifact.whole else artifact.length,
        ),
        media_type=artifact.media_type,
        state=capture_service_pb2.ArtifactState.Value(f"ARTIFACT_STATE_{artifact.state.name}"),
        size_bytes=artifact.length,
        row_count=artifact.rows,
        sites=[to_wire(site) for site in artifact.sites],
        sha256=artifact.sha256,
    )
    if artifact.write_time:
        message.write_time.FromNanoseconds(int(artifact.write_time * 1e9))
    return message


def group_targets(
    targets: Sequence[tuple[int, Target]],  # index of the capture, its target
) -> list[tuple[Target, tuple[int, ...]]]:
    """Groups captures into recordings by sink and tag.

    Raises:
        InvalidValue: two captures of a group differ in layout or options.
    """
    groups: dict[tuple[str, str], tuple[Target, list[int]]] = {}
    for index, target in targets:
        first, members = groups.setdefault((target.sink, target.tag), (target, []))
        if first != target:
            raise InvalidValue(
                f"captures {members[0]} and {index} go to one sink under one tag with different "
                "layouts or options: give them different tags",
                field=f"captures[{index}].sink",
            )
        members.append(index)
    return [(target, tuple(members)) for target, members in groups.values()]


def block_of(
    captured: capture_pb2.Captured, sites: Sequence[Site], about: CaptureAbout
) -> RowBlock:
    """The rows of a message with an inline tensor; `sites` are those of the message."""
    positions = np.fromiter(
        chain.from_iterable(
            range(part.start, part.start + part.count) for part in captured.positions
        ),
        np.int32,
    )
    return RowBlock(
        captured.capture_index,
        captured.sample,
        tuple(sites),
        positions,
        np.array(captured.token_ids, np.int32),
        split_payload(captured.tensor.inline, (len(sites), len(positions)), about),
        captured.baseline,
    )


def split_payload(
    payload: bytes, rows: tuple[int, int], about: CaptureAbout
) -> dict[str, StoredArray]:
    """The columns of rows [sites, positions] in a payload of tensor.proto, not copied."""
    parts: dict[str, StoredArray] = {}
    offset = 0
    for part in about.parts:
        kind = NUMPY[part.dtype]
        shape = (*rows, *part.shape)
        count = int(np.prod(shape))
        parts[part.name] = np.frombuffer(payload, kind, count, offset).reshape(shape)
        offset += count * kind.itemsize
    return parts
