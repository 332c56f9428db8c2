"""Sinks under test: how the rules reach them, and what is stored, read bit by bit."""

from pathlib import Path

import numpy as np

from rheostat.captures import StoredRequest, open_captures
from rheostat.captures._arrays import arrays_in, read_rows
from rheostat_engine import Point, Site
from rheostat_server.sinks import Artifact, Layout, RequestAbout, RowBlock, Sink
from rheostat_server.sinks.conformance import COMPLETE, Harness
from rheostat_server.sinks.filesystem import Filesystem
from rheostat_server.sinks.formats import Format
from rheostat_server.sinks.log import Logging
from rheostat_server.sinks.memory import Memory
from rheostat_server.sinks.samples import blocks


def stored(root: Path, about: RequestAbout) -> StoredRequest | None:
    found = [
        one
        for one in open_captures(root)
        if (one.tag, one.request_id) == (about.target.tag, about.request_id)
    ]
    assert len(found) <= 1
    return found[0] if found else None


def read_stored(root: Path, about: RequestAbout) -> list[RowBlock] | None:
    """The rows of a request, a block per capture, site, sample and baseline."""
    request = stored(root, about)
    return None if request is None else blocks_of(request, about)


def blocks_of(request: StoredRequest, about: RequestAbout) -> list[RowBlock]:
    request.verify()
    captures = {capture.capture_index: capture for capture in about.captures}
    found = []
    for table in request.tables:
        arrays = arrays_in(table.part, request.format, f"{table.name}.")
        columns = {
            name.removeprefix(f"{table.name}."): read_rows(
                table.part.path, arrays[name], 0, table.rows
            )
            for name in arrays
        }
        for sample in sorted(set(columns["samples"].tolist())):
            for baseline in (0, 1):
                chosen = (columns["samples"] == sample) & (columns["baseline"] == baseline)
                parts = {
                    part.name: columns[part.name][chosen][None]
                    for part in captures[table.capture_index].parts
                }
                labels = columns["positions"][chosen], columns["token_ids"][chosen]
                site = Site(Point(str(table.point)), table.layer)
                if chosen.any():
                    found.append(
                        RowBlock(
                            table.capture_index, sample, (site,), *labels, parts, bool(baseline)
                        )
                    )
    return found


def artifact_bytes(root: Path, artifact: Artifact) -> bytes:
    with (root / artifact.path).open("rb") as file:
        file.seek(artifact.offset)
        return file.read(artifact.length)


def on_disk(root: Path, **settings: object) -> Harness:
    return Harness(
        lambda: Filesystem(root, **settings),
        read=lambda sink, about: read_stored(root, about),
        read_bytes=lambda sink, artifact: artifact_bytes(root, artifact),
        lasting=True,
    )


def _remembered(sink: Sink, about: RequestAbout) -> list[RowBlock] | None:
    assert isinstance(sink, Memory)
    found = sink.recorded(about.request_id, about.target.tag)
    return None if found is None else list(found.blocks)


def built_in(kind: str, root: Path) -> Harness:
    match kind:
        case "safetensors":
            return on_disk(root)
        case "npz":
            return on_disk(root, kind=Format.NPZ)
        case "spooled":
            return on_disk(root, buffer_bytes=1)
        case "small shards":
            return on_disk(root, layout=Layout.SHARDED, shard_bytes=1)
        case "memory":
            return Harness(lambda: Memory(1 << 20), read=_remembered)
    return Harness(lambda: Logging("log"))


BUILT_IN = ("safetensors", "npz", "spooled", "small shards", "memory", "logging")


def record(
    sink: Sink, about: RequestAbout, seed: int = 0, outcome=COMPLETE, positions: int = 5
) -> list[Artifact]:
    recording = sink.open(about)
    try:
        for block in blocks(about, seed, positions):
            recording.write(block)
        return recording.finish(outcome)
    except BaseException as error:
        recording.abandon(error)
        raise


def same_rows(found: list[RowBlock] | None, about: RequestAbout, seed: int = 0) -> bool:
    from rheostat_server.sinks.conformance import _arrays

    return found is not None and _arrays(found) == _arrays(list(blocks(about, seed)))


def visible(root: Path) -> set[str]:
    """Every file that is not the sink's own business."""
    return {
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith((".lock", ".index."))
    }


def one_row(about: RequestAbout) -> RowBlock:
    capture = about.captures[0]
    parts = {"rows": np.ones((len(capture.sites), 1, capture.width), np.float32)}
    labels = np.zeros(1, np.int32)
    return RowBlock(capture.capture_index, 0, capture.sites, labels, labels, parts)
