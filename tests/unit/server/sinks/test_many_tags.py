"""Thousands of tags and recordings take few descriptors, and a crash leaves their files right."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rheostat.captures import open_captures
from rheostat_server.sinks import Layout
from rheostat_server.sinks.filesystem import Filesystem
from rheostat_server.sinks.samples import CAPTURES, request

from ....effort import at_length, some
from .sink_kit import one_row, read_stored, record, same_rows

SMALL = CAPTURES[:1]

WRITER = """
import os, resource, sys
from pathlib import Path
from rheostat_server.sinks import Layout
from rheostat_server.sinks.conformance import COMPLETE
from rheostat_server.sinks.filesystem import Filesystem
from rheostat_server.sinks.samples import CAPTURES, request
sys.path.insert(0, sys.argv[3])
from tests.unit.server.sinks.sink_kit import one_row

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
os.fsync = os.fdatasync = lambda file: None  # a process that is killed loses nothing without them
tags = int(sys.argv[2])
sink = Filesystem(Path(sys.argv[1]))
for number in range(tags + tags // 4):
    tag = f"t{number % tags}"
    about = request(f"r{number}", Layout.SHARDED, CAPTURES[:1], tag=tag)
    recording = sink.open(about)
    recording.write(one_row(about))
    recording.finish(COMPLETE)
open_ones = [sink.open(request(f"o{n}", Layout.PACKED, CAPTURES[:1])) for n in range(500)]
for recording in open_ones:
    recording.write(one_row(request("o", Layout.PACKED, CAPTURES[:1])))
print(len(os.listdir("/proc/self/fd")), flush=True)
sys.stdin.read()
"""


@at_length
@pytest.mark.parametrize("tags", some((600, 2000), 600))
def test_thousands_of_tags_fit_into_256_descriptors_and_outlast_a_kill(
    tags: int, tmp_path: Path
) -> None:
    here = str(Path(__file__).parents[4])
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), str(tags), here],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    opened = child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    for pipe in (child.stdout, child.stdin):
        pipe.close()
    assert int(opened) < 128
    store = open_captures(tmp_path)
    assert store.verify() == tags + tags // 4
    sink = Filesystem(tmp_path)
    for number in (0, tags // 4, tags, tags + tags // 4 - 1):
        (artifact,) = sink.artifacts(f"r{number}")
        assert artifact.path == f"t{number % tags}/shards/shard-000001.rows"
    assert sink.artifacts("o0") == []
    sink.close()


def test_recordings_that_overflow_hold_few_descriptors(tmp_path: Path) -> None:
    sink = Filesystem(tmp_path, buffer_bytes=1)
    before = len(os.listdir("/proc/self/fd"))
    abouts = [request(f"r{number}", Layout.PACKED) for number in range(300)]
    recordings = [sink.open(about) for about in abouts]
    for _ in range(2):
        for about, recording in zip(abouts, recordings, strict=True):
            recording.write(one_row(about))
    assert len(os.listdir("/proc/self/fd")) - before <= 80
    for recording in recordings[1:]:
        recording.abandon(OSError("made up"))
    assert len(os.listdir("/proc/self/fd")) - before <= 2
    sink.close()


def test_a_tag_that_was_forgotten_goes_on_in_its_shard(tmp_path: Path) -> None:
    sink = Filesystem(tmp_path)
    for round_ in range(3):
        for number in range(150):
            about = request(f"r{round_}-{number}", Layout.SHARDED, SMALL, tag=f"t{number}")
            record(sink, about, seed=round_)
    sink.close()
    assert len(list(tmp_path.rglob("*.rows"))) == 150
    assert open_captures(tmp_path).verify() == 450
    for round_ in range(3):
        about = request(f"r{round_}-7", Layout.SHARDED, SMALL, tag="t7")
        assert same_rows(read_stored(tmp_path, about), about, seed=round_)


@pytest.mark.parametrize("others", [0, 100], ids=["still open", "closed meanwhile"])
@pytest.mark.parametrize("ending", ["rows", "jsonl"])
def test_a_shard_that_somebody_deleted_is_followed_by_the_next(
    ending: str, others: int, tmp_path: Path
) -> None:
    sink = Filesystem(tmp_path)
    record(sink, request("first", Layout.SHARDED, SMALL, tag="gone"))
    (tmp_path / f"gone/shards/shard-000001.{ending}").unlink()
    for number in range(others):
        record(sink, request(f"r{number}", Layout.SHARDED, SMALL, tag=f"t{number}"))
    (made,) = record(sink, request("second", Layout.SHARDED, SMALL, tag="gone"))
    assert made.path == "gone/shards/shard-000002.rows"
    sink.close()
