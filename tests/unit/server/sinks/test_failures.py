"""Disks that fill up, servers that are killed: nothing torn is ever seen, and writing goes on."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rheostat.captures import open_captures
from rheostat_server.sinks import Layout, SinkError
from rheostat_server.sinks import disk as disk_module
from rheostat_server.sinks.filesystem import Filesystem
from rheostat_server.sinks.samples import CAPTURES, request

from .sink_kit import read_stored, record, same_rows

SMALL = CAPTURES[:2]


class Disk:
    """Stands for `os` where files are written: room for so many bytes, then none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self.written = 0
        self.broken_sync = 0
        self.syncs = 0
        monkeypatch.setattr(os, "write", self._wrapped(os.write))
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._syncing(getattr(os, name)))

    def _wrapped(self, write):
        def limited(file: int, data: memoryview) -> int:
            if self.room is not None:
                left = self.room - self.written
                if left <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                data = memoryview(data)[:left]
            done = write(file, data)
            self.written += done
            return done

        return limited

    def _syncing(self, sync):
        def counted(file: int) -> None:
            self.syncs += 1
            if self.syncs == self.broken_sync:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(file)

        return counted


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(time, "time", lambda: 1.75e9)  # equally long in every manifest
    return Disk(monkeypatch)


def after_failure(sink: Filesystem, root: Path, layout: Layout) -> None:
    """What must hold once the request "b" has failed."""
    first = request("a", layout, SMALL)
    assert [one.request_id for one in open_captures(root)] == ["a"]
    assert same_rows(read_stored(root, first), first)
    assert sink.artifacts("b") == []
    assert list((root / ".parts").iterdir()) == []
    again = request("b", layout, SMALL)
    record(sink, again, seed=1)
    assert same_rows(read_stored(root, again), again, seed=1)


def cost(disk: Disk, root: Path, layout: Layout, buffer: int) -> tuple[int, int]:
    """Bytes that a request takes, and how often it is made safe."""
    sink = Filesystem(root, buffer_bytes=buffer)
    record(sink, request("a", layout, SMALL))
    disk.written = disk.syncs = 0
    record(sink, request("b", layout, SMALL), seed=1)
    sink.close()
    return disk.written, disk.syncs


@pytest.mark.parametrize("buffer", [1, 1 << 20], ids=["spooled", "in memory"])
@pytest.mark.parametrize("layout", [*Layout])
def test_a_disk_that_fills_up_at_any_byte_fails_one_request_and_no_other(
    layout: Layout, buffer: int, disk: Disk, tmp_path: Path
) -> None:
    total, _ = cost(disk, tmp_path / "measured", layout, buffer)
    sink = Filesystem(tmp_path / "root", buffer_bytes=buffer)
    record(sink, request("a", layout, SMALL))
    # Every place near the beginning and the end, and some between them.
    for room in sorted({*range(12), *range(12, total, 397), *range(total - 12, total)}):
        disk.room, disk.written = room, 0
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            record(sink, request("b", layout, SMALL), seed=1)
        assert [one.request_id for one in open_captures(tmp_path / "root")] == ["a"]
        assert list((tmp_path / "root/.parts").iterdir()) == []
    disk.room = None
    after_failure(sink, tmp_path / "root", layout)
    sink.close()


@pytest.mark.parametrize("layout", [*Layout])
def test_a_disk_that_fails_to_make_anything_safe_fails_the_request(
    layout: Layout, disk: Disk, tmp_path: Path
) -> None:
    _, syncs = cost(disk, tmp_path / "measured", layout, 1 << 20)
    assert syncs >= 2
    for number in range(1, syncs + 1):
        root = tmp_path / str(number)
        sink = Filesystem(root)
        record(sink, request("a", layout, SMALL))
        disk.syncs, disk.broken_sync = 0, number
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            record(sink, request("b", layout, SMALL), seed=1)
        disk.broken_sync = 0
        after_failure(sink, root, layout)
        sink.close()


@pytest.mark.parametrize("layout", [*Layout])
def test_a_first_request_that_cannot_be_made_safe_leaves_nothing(
    layout: Layout, disk: Disk, tmp_path: Path
) -> None:
    for number in range(1, 30):
        root = tmp_path / str(number)
        sink = Filesystem(root)
        disk.syncs, disk.broken_sync = 0, number
        try:
            record(sink, request("b", layout, SMALL))
        except OSError:
            assert list(open_captures(root)) == []
        disk.broken_sync = 0
        if disk.syncs < number:
            break
        about = request("b", layout, SMALL)
        record(sink, about)
        assert same_rows(read_stored(root, about), about)
        sink.close()
    assert number > 4
    sink.close()


def test_a_shard_is_cut_back_to_where_it_was(disk: Disk, tmp_path: Path) -> None:
    sink = Filesystem(tmp_path)
    record(sink, request("a", Layout.SHARDED, SMALL))
    shard = tmp_path / "default/shards/shard-000001.rows"
    before = shard.read_bytes()
    disk.room, disk.written = 1000, 0
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        record(sink, request("b", Layout.SHARDED, SMALL))
    assert shard.read_bytes() == before
    sink.close()


def test_a_shard_that_may_have_been_seen_is_not_written_again(disk: Disk, tmp_path: Path) -> None:
    sink = Filesystem(tmp_path)
    record(sink, request("a", Layout.SHARDED, SMALL))
    disk.syncs, disk.broken_sync = 0, 2
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        record(sink, request("b", Layout.SHARDED, SMALL))
    (found,) = record(sink, request("c", Layout.SHARDED, SMALL))
    assert found.path == "default/shards/shard-000002.rows"
    sink.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with 1 MiB of room."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("buffer", [1, 1 << 30], ids=["spooled", "in memory"])
@pytest.mark.parametrize("layout", [*Layout])
def test_a_real_disk_that_is_full_fails_requests_until_there_is_room(
    layout: Layout, buffer: int, small_disk: Path
) -> None:
    sink = Filesystem(small_disk / "root", buffer_bytes=buffer)
    whole = []

    def fill() -> None:
        for number in range(100):
            record(sink, request(str(number), layout), number, positions=100)
            whole.append(str(number))

    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        fill()
    assert whole
    store = open_captures(small_disk / "root")
    assert sorted(one.request_id for one in store) == sorted(whole)
    assert store.verify() == len(whole)
    if layout is not Layout.SHARDED:
        folder = small_disk / "root/default/requests" / whole[0]
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        record(sink, request("late", layout), positions=40)
        assert "late" in store
    sink.close()


WRITER = """
import itertools, sys
from pathlib import Path
from rheostat_server.sinks import Layout, SinkError
from rheostat_server.sinks.filesystem import Filesystem
from rheostat_server.sinks.samples import CAPTURES, blocks, request
from rheostat_server.sinks.conformance import COMPLETE

sink = Filesystem(Path(sys.argv[1]), shard_bytes=100_000, buffer_bytes=int(sys.argv[3]))
layouts = [Layout(sys.argv[2])]
for number in itertools.count(int(sys.argv[4])):
    about = request(str(number), layouts[0])
    recording = sink.open(about)
    for block in blocks(about, number):
        recording.write(block)
    recording.finish(COMPLETE)
    print(number, flush=True)
"""


@pytest.mark.parametrize("layout", [*Layout])
def test_a_killed_server_leaves_whole_requests_and_the_next_one_goes_on(
    layout: Layout, tmp_path: Path
) -> None:
    told: list[int] = []
    for round_ in range(4):
        first = told[-1] + 2 if told else 0
        buffer = "1" if round_ % 2 else "1000000"
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(layout), buffer, str(first)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        for _ in range(3 + round_):
            told.append(int(child.stdout.readline()))
        child.send_signal(signal.SIGKILL)
        told += [int(line) for line in child.stdout.read().split()]
        child.wait()
        child.stdout.close()
        store = open_captures(tmp_path)
        found = sorted(int(one.request_id) for one in store)
        # The last one may have been published before it could be told.
        assert set(told) <= set(found) <= {*told, told[-1] + 1}
        assert store.verify() == len(found)
        told = found
    sink = Filesystem(tmp_path)
    assert list((tmp_path / ".parts").iterdir()) == []
    about = request("after", layout)
    record(sink, about)
    assert same_rows(read_stored(tmp_path, about), about)
    for number in told:
        one = request(str(number), layout)
        assert same_rows(read_stored(tmp_path, one), one, number)
    sink.close()


@pytest.mark.parametrize("cut", [1, 2, 50])
def test_a_line_that_was_not_finished_is_no_request_and_is_removed(
    cut: int, tmp_path: Path
) -> None:
    sink = Filesystem(tmp_path)
    for name in "ab":
        record(sink, request(name, Layout.SHARDED))
    sink.close()
    index = tmp_path / "default/shards/shard-000001.jsonl"
    rows = index.with_suffix(".rows")
    whole = index.read_bytes()
    first = whole.index(b"\n") + 1
    index.write_bytes(whole[:-cut])
    assert [one.request_id for one in open_captures(tmp_path)] == ["a"]
    sink = Filesystem(tmp_path)
    record(sink, request("b", Layout.SHARDED), seed=3)
    sink.close()
    assert index.read_bytes() == whole[:first]
    (request_a,) = (one for one in open_captures(tmp_path) if one.request_id == "a")
    assert rows.stat().st_size == request_a.digests[0][0].length
    assert open_captures(tmp_path).verify() == 2


def test_writing_goes_on_where_the_system_takes_less_than_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, memoryview(data)[:7]))
    assert disk_module.os is os
    sink = Filesystem(tmp_path)
    about = request("a", Layout.SHARDED)
    record(sink, about)
    assert same_rows(read_stored(tmp_path, about), about)
    sink.close()


def test_a_damaged_index_is_refused_and_not_appended_to(tmp_path: Path) -> None:
    sink = Filesystem(tmp_path)
    record(sink, request("a", Layout.SHARDED))
    sink.close()
    index = tmp_path / "default/shards/shard-000001.jsonl"
    index.write_bytes(b"scribble\n" + index.read_bytes())
    sink = Filesystem(tmp_path)
    with pytest.raises(SinkError, match="damaged"):
        sink.open(request("b", Layout.SHARDED))
    sink.close()
