"""Stored rows under test: three requests, and what was written of each."""

from pathlib import Path

import numpy as np

from rheostat.captures import RowBatch, StoredCaptures, open_captures
from rheostat_server.sinks import (
    CaptureAbout,
    Ending,
    FloatType,
    Layout,
    Outcome,
    RequestAbout,
    RowBlock,
)
from rheostat_server.sinks.filesystem import Filesystem
from rheostat_server.sinks.formats import Format
from rheostat_server.sinks.samples import SITES, blocks, request

WIDTH = 4
CAPTURE = CaptureAbout(0, SITES, FloatType.FLOAT32, WIDTH)
COMPLETE = Outcome(Ending.COMPLETE)


def write(sink: Filesystem, about: RequestAbout, rows: list[RowBlock], outcome=COMPLETE) -> None:
    recording = sink.open(about)
    for block in rows:
        recording.write(block)
    recording.finish(outcome)


def make_request(name: str, layout: Layout, capture: CaptureAbout = CAPTURE, tag: str = "t"):
    return request(name, layout, [capture], tag=tag)


def expected(rows: list[RowBlock], site: int, sample: int | None, baseline: bool | None):
    chosen = [
        one for one in rows if sample in (None, one.sample) and baseline in (None, one.baseline)
    ]
    return (
        np.concatenate([one.parts["rows"][site] for one in chosen]),
        np.concatenate([one.positions for one in chosen]),
        np.concatenate([one.token_ids for one in chosen]),
    )


def same(batch: RowBatch, wanted: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    # As bits: random ones hold numbers that are none.
    np.testing.assert_array_equal(batch.values.view(np.uint32), wanted[0].view(np.uint32))
    np.testing.assert_array_equal(batch.positions, wanted[1])
    np.testing.assert_array_equal(batch.token_ids, wanted[2])


def three_requests(
    root: Path, layout: Layout, kind: Format
) -> tuple[StoredCaptures, dict[str, list[RowBlock]]]:
    sink = Filesystem(root, kind=kind, buffer_bytes=500)
    rows = {}
    for seed, name in enumerate(("a", ".b", "c:1")):
        about = make_request(name, layout)
        rows[name] = list(blocks(about, seed))
        write(sink, about, rows[name])
    sink.close()
    return open_captures(root), rows
