"""What was written is found again without looking everywhere, whatever happened in between."""

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rheostat_server.sinks import Collision, Layout, SinkError
from rheostat_server.sinks import index as index_module
from rheostat_server.sinks.filesystem import Filesystem
from rheostat_server.sinks.index import ArtifactIndex, Place
from rheostat_server.sinks.samples import CAPTURES, request

from .sink_kit import record

SMALL = CAPTURES[:1]
LAYOUTS = [*Layout]
Change = Callable[[Path], None]


def write(sink: Filesystem, name: str, layout: Layout, tag: str = "default"):
    return record(sink, request(name, layout, SMALL, tag=tag))


def lose_index(root: Path) -> None:
    for path in root.glob(".index.sqlite*"):
        path.unlink()


def scribble(root: Path) -> None:
    (root / ".index.sqlite").write_bytes(b"scribble" * 1000)


def other_version(root: Path) -> None:
    with sqlite3.connect(root / ".index.sqlite") as database:
        database.execute("PRAGMA user_version = 99")


def scribble_within(root: Path) -> None:
    with (root / ".index.sqlite").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 8192)


def leave_link(root: Path) -> None:
    lose_index(root)
    (root / ".index.sqlite").symlink_to(root.parent / "elsewhere")


@pytest.mark.parametrize(
    "change", [lose_index, scribble, scribble_within, other_version, leave_link]
)
def test_an_index_that_cannot_be_used_is_made_anew_from_the_files(
    change: Change, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    sink = Filesystem(root)
    made = {
        (layout, n): write(sink, f"{layout}{n}", layout, tag=f"t{n}")
        for layout in LAYOUTS
        for n in range(3)
    }
    made[Layout.PACKED, 3] = write(sink, f".{Layout.PACKED}3", Layout.PACKED)
    sink.close()
    change(root)
    sink = Filesystem(root)
    for (layout, n), artifacts in made.items():
        name = f"{'.' if n == 3 else ''}{layout}{n}"
        assert sink.artifacts(name) == artifacts
        with pytest.raises(Collision):
            sink.open(request(name, layout, tag=f"t{n}" if n < 3 else "default"))
    sink.close()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_crash_kept_out_of_the_index_is_entered_at_the_next_start(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Filesystem(tmp_path)
    first = write(sink, "a", layout)
    sink.close()
    sink = Filesystem(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(ArtifactIndex, "add", lambda *_: None)
        second = write(sink, "b", layout)
        sink.close()
    sink = Filesystem(tmp_path)
    assert (sink.artifacts("a"), sink.artifacts("b")) == (first, second)
    with pytest.raises(Collision):
        sink.open(request("b", layout))
    sink.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_somebody_deleted_is_not_there_now_and_not_after_a_start(
    layout: Layout, tmp_path: Path
) -> None:
    sink = Filesystem(tmp_path)
    write(sink, "a", layout)
    write(sink, "b", layout, tag="other")
    shutil.rmtree(tmp_path / "default")
    assert sink.artifacts("a") == []
    sink.close()
    sink = Filesystem(tmp_path)
    assert sink.artifacts("a") == []
    assert sink.artifacts("b") != []
    write(sink, "a", layout)
    assert sink.artifacts("a") != []
    sink.close()


def test_requests_of_deleted_folders_can_come_again(tmp_path: Path) -> None:
    sink = Filesystem(tmp_path)
    for name in "ab":
        write(sink, name, Layout.PACKED)
    shutil.rmtree(tmp_path / "default/requests/a")
    assert sink.artifacts("a") == []
    sink.close()
    sink = Filesystem(tmp_path)
    assert (sink.artifacts("a"), len(sink.artifacts("b"))) == ([], 2)
    write(sink, "a", Layout.PACKED)
    sink.close()


def test_a_lookup_opens_as_many_files_with_a_hundred_tags_as_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    real = os.open

    def counting(path, *args, **kwargs) -> int:
        opened.append(path)
        return real(path, *args, **kwargs)

    sink = Filesystem(tmp_path)
    write(sink, "first", Layout.SHARDED, tag="t0")
    counts = []
    for number in range(100):
        if number in (0, 99):
            with monkeypatch.context() as patched:
                patched.setattr(os, "open", counting)
                opened.clear()
                assert len(sink.artifacts("first")) == 1
                counts.append(len(opened))
        write(sink, f"r{number}", LAYOUTS[number % 3], tag=f"t{number}")
    assert counts[0] == counts[1] <= 3
    sink.close()


def test_a_start_reads_nothing_of_shards_that_are_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Filesystem(tmp_path)
    for number in range(6):
        write(sink, f"r{number}", LAYOUTS[number % 3], tag=f"t{number % 2}")
    sink.close()

    def unexpected(*args: object) -> bytes:
        raise AssertionError(args)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", unexpected)
        patched.setattr(os, "scandir", unexpected)
        sink = Filesystem(tmp_path)
    assert all(sink.artifacts(f"r{number}") for number in range(6))
    sink.close()


def test_opening_does_not_wait_for_one_who_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, gate = threading.Event(), threading.Event()
    real = os.pread

    def slow(*args: int) -> bytes:
        reading.set()
        gate.wait(20)
        return real(*args)

    sink = Filesystem(tmp_path)
    write(sink, "a", Layout.SHARDED)
    with ThreadPoolExecutor(2) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(os, "pread", slow)
            found = pool.submit(sink.artifacts, "a")
            assert reading.wait(10)
            recording = pool.submit(sink.open, request("b", Layout.SHARDED, SMALL)).result(10)
            gate.set()
        assert len(found.result(10)) == 1
    recording.abandon(OSError("made up"))
    sink.close()


class Full(sqlite3.Connection):
    """A database on a disk that is full while `full` is set."""

    full = False

    def execute(self, sql: str, *args: object) -> sqlite3.Cursor:
        if Full.full and sql.startswith("INSERT"):
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(sql, *args)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Full, "full", False)
    real = sqlite3.connect
    monkeypatch.setattr(
        index_module.sqlite3,
        "connect",
        lambda *args, **kwargs: real(*args, factory=Full, **kwargs),
    )
    return lambda on: monkeypatch.setattr(Full, "full", on)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_cannot_be_entered_is_published_and_found_all_the_same(
    layout: Layout, full: Callable[[bool], None], tmp_path: Path
) -> None:
    sink = Filesystem(tmp_path)
    full(True)
    made = {name: write(sink, name, layout, tag=f"t{name}") for name in "ab"}
    for name, artifacts in made.items():
        assert sink.artifacts(name) == artifacts
        with pytest.raises(Collision):
            sink.open(request(name, layout, tag=f"t{name}"))
    full(False)
    made["c"] = write(sink, "c", layout)
    sink.close()
    sink = Filesystem(tmp_path)
    assert {name: sink.artifacts(name) for name in made} == made
    sink.close()


def test_too_many_that_cannot_be_entered_refuse_the_next(
    full: Callable[[bool], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_MAX_PENDING", 2)
    sink = Filesystem(tmp_path)
    full(True)
    for name in "ab":
        write(sink, name, Layout.PACKED)
    with pytest.raises(SinkError, match="index cannot be written"):
        sink.open(request("c", Layout.PACKED))
    sink.close()
    full(False)
    sink = Filesystem(tmp_path)
    assert all(sink.artifacts(name) for name in "ab")
    sink.close()


def test_readers_and_writers_of_an_index_see_all_that_was_entered(tmp_path: Path) -> None:
    index = ArtifactIndex(tmp_path)

    def enter(thread: int) -> None:
        for number in range(40):
            name = f"{thread}-{number}"
            index.add(name, Place(f"t{number}", 1, number, 1), number)
            assert index.find(name) == [Place(f"t{number}", 1, number, 1)]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(enter, range(6)))
    assert not index.has_pending
    index.close()
