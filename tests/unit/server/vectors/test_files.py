"""The folder of vectors: what is written is read, what is damaged is not, and it has one owner."""

import errno
import json
import logging
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from safetensors.numpy import load_file, save_file

from rheostat_server.errors import NotSupported, VectorDirFailed
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.files import Contents, Saved, VectorFiles
from rheostat_server.vectors.names import NameFile
from rheostat_server.vectors.store import Name, Vector, make_vector
from rheostat_wire.v1 import types_pb2


def vector(value: float = 1.0, kind: FloatType = FloatType.FLOAT32) -> Vector:
    data = np.full((2, 3), value, "<f4" if kind is FloatType.FLOAT32 else "<f2").tobytes()
    return make_vector(kind, 2, 3, data, "v")


def file_of(folder: Path, one: Vector) -> Path:
    return folder / f"{one.digest.hex()}.safetensors"


SITES = text_format.Parse(
    "points: POINT_RESID_POST range { start: 1 stop: 3 }", types_pb2.SiteSet()
)


@pytest.fixture
def files(tmp_path: Path) -> VectorFiles:
    opened = VectorFiles(tmp_path / "a" / "vectors")
    yield opened
    opened.close()


@pytest.mark.parametrize("kind", [*FloatType])
def test_a_vector_is_read_as_it_was_written(files: VectorFiles, kind: FloatType) -> None:
    files.write(vector(1.5, kind), 12.25)
    assert files.read() == Contents([Saved(vector(1.5, kind), 12.25)], {})


def test_any_reader_of_safetensors_reads_the_file(files: VectorFiles) -> None:
    files.write(vector(1.5), 12.25)
    (found,) = load_file(file_of(files.folder, vector(1.5))).items()
    assert (found[0], found[1].dtype, found[1].tolist()) == ("vector", "float32", [[1.5] * 3] * 2)


def test_vectors_come_oldest_first_and_names_with_what_was_said(files: VectorFiles) -> None:
    for age, value in ((3.0, 1.0), (1.0, 2.0), (2.0, 3.0)):
        files.write(vector(value), age)
    names = {"b/2": Name(vector(1).digest, "ünï", SITES), "a": Name(vector(2).digest, "", None)}
    files.set_name("gone", Name(vector(3).digest, "", None))
    for name, label in names.items():
        files.set_name(name, label)
    files.delete_name("gone")
    expected = [Saved(vector(2), 1.0), Saved(vector(3), 2.0), Saved(vector(1), 3.0)]
    assert files.read() == Contents(expected, names)


def test_a_removed_vector_is_gone_and_may_be_removed_again(files: VectorFiles) -> None:
    files.write(vector(), 1.0)
    files.remove(vector().digest)
    files.remove(vector().digest)
    assert files.read() == Contents([], {})


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def another(path: Path) -> None:
    save_file({"a": np.ones(3, np.int8)}, path, metadata={"store_time": "1.0"})


def without_its_age(path: Path) -> None:
    save_file({"vector": np.full((2, 3), 1, np.float32)}, path)


@pytest.mark.parametrize("damage", [flip, cut, empty, another, without_its_age])
def test_a_damaged_file_is_set_aside_whole_and_reported_by_name(
    files: VectorFiles, caplog: pytest.LogCaptureFixture, damage
) -> None:
    files.write(vector(1), 1.0)
    files.write(vector(2), 2.0)
    path = file_of(files.folder, vector(1))
    for number in (1, 2):
        files.write(vector(1), 1.0)
        damage(path)
        content = path.read_bytes()
        assert files.read() == Contents([Saved(vector(2), 2.0)], {})
        aside = path.with_name(f"{path.name}.damaged-{number}")
        assert (path.exists(), aside.read_bytes()) == (False, content)
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert all(path.name in error for error in errors)


def test_a_vector_under_another_s_name_is_damage(files: VectorFiles) -> None:
    files.write(vector(1), 1.0)
    file_of(files.folder, vector(1)).rename(file_of(files.folder, vector(2)))
    assert files.read() == Contents([], {})


def test_names_of_an_earlier_version_are_reported_and_its_vectors_read(
    files: VectorFiles, caplog: pytest.LogCaptureFixture
) -> None:
    one = vector(1.5)
    files.write(one, 12.25)
    tensors = load_file(file_of(files.folder, one))
    save_file(tensors, file_of(files.folder, one), metadata={"stored_at": "12.25"})
    names = files.folder / "names.json"
    names.write_text(json.dumps({"honest": {"digest": one.digest.hex(), "description": ""}}))
    found = files.read()
    assert found == Contents([Saved(one, 12.25)], {})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in (str(names), "earlier version", "rheostat vectors name"):
        assert part in record.getMessage()
    assert names.exists()


def test_a_name_without_its_vector_is_dropped_and_reported(
    files: VectorFiles, caplog: pytest.LogCaptureFixture
) -> None:
    files.write(vector(1), 1.0)
    here = {"here": Name(vector(1).digest, "", None)}
    files.set_name("here", here["here"])
    files.set_name("lost", Name(vector(2).digest, "", None))
    assert files.read() == Contents([Saved(vector(1), 1.0)], here)
    (record,) = caplog.records
    assert f'"lost" is dropped: its vector {vector(2).digest.hex()}' in record.message


@pytest.mark.parametrize("content", [b"names", b"SQLite format 3\0" + b"z" * 4096])
def test_names_that_no_server_wrote_end_the_start_and_stay(
    files: VectorFiles, content: bytes
) -> None:
    path = files.folder / "names.sqlite"
    path.write_bytes(content)
    with pytest.raises(VectorDirFailed, match=r"names\.sqlite is not a table of names"):
        files.read()
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE names SET sites = X'FFFF'",
        "UPDATE names SET sites = 'text'",
        "ALTER TABLE names RENAME TO others",
        "PRAGMA user_version = 7",
    ],
)
def test_names_that_cannot_be_read_end_the_start(tmp_path: Path, change: str) -> None:
    first = VectorFiles(tmp_path)
    first.set_name("a", Name(vector(1).digest, "", SITES))
    first.close()
    with sqlite3.connect(tmp_path / "names.sqlite") as names:
        names.execute(change)
    names.close()
    second = VectorFiles(tmp_path)
    with pytest.raises(VectorDirFailed, match=r"names\.sqlite is not a table of names"):
        second.read()
    second.close()


def test_what_a_broken_write_left_is_neither_read_nor_kept(
    files: VectorFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(vector(1), 1.0)
    files.read()
    before = sorted(files.folder.iterdir())
    part = files.folder / f".{file_of(files.folder, vector(2)).name}.part"
    part.write_bytes(b"half")
    assert files.read() == Contents([Saved(vector(1), 1.0)], {})
    assert sorted(files.folder.iterdir()) == before


def test_a_write_that_fails_changes_nothing(
    files: VectorFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"a": Name(vector(1).digest, "", None)}
    files.write(vector(1), 1.0)
    files.set_name("a", old["a"])
    before = sorted(files.folder.iterdir())

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        files.write(vector(2), 2.0)
    assert sorted(files.folder.iterdir()) == before
    assert files.read() == Contents([Saved(vector(1), 1.0)], old)


@pytest.fixture
def broken_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder can be synced; files can."""
    sync = os.fsync

    def fail(number: int) -> None:
        if Path(f"/proc/self/fd/{number}").is_dir():
            raise OSError(5, "Input/output error")
        sync(number)

    monkeypatch.setattr(os, "fsync", fail)


def test_what_moved_into_place_but_is_not_known_to_last_moves_back(
    files: VectorFiles, request: pytest.FixtureRequest
) -> None:
    old = {"a": Name(vector(1).digest, "", None)}
    files.write(vector(1), 1.0)
    files.set_name("a", old["a"])
    before = {path.name: path.read_bytes() for path in files.folder.iterdir()}
    request.getfixturevalue("broken_folder")
    for change in (
        lambda: files.write(vector(1), 2.0),
        lambda: files.write(vector(2), 2.0),
    ):
        with pytest.raises(OSError, match="Input/output"):
            change()
    assert {path.name: path.read_bytes() for path in files.folder.iterdir()} == before


@pytest.mark.usefixtures("broken_folder")
def test_what_cannot_be_moved_back_is_said_to_be_there(
    files: VectorFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unlink = Path.unlink

    def fail(path: Path, missing_ok: bool = False) -> None:
        if not missing_ok:
            raise OSError(30, "Read-only file system")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(NotSupported) as caught:
        files.write(vector(1), 1.0)
    assert caught.value.message == (
        "the server's --vector-dir cannot be written (Input/output error); a restart may bring the "
        "change"
    )
    assert files.read().vectors == [Saved(vector(1), 1.0)]
    assert file_of(files.folder, vector(1)).name in caplog.text


def test_a_dropped_name_stays_away_from_a_vector_that_comes_back(files: VectorFiles) -> None:
    files.write(vector(1), 1.0)
    here = {"here": Name(vector(1).digest, "", None)}
    files.set_name("here", here["here"])
    files.set_name("lost", Name(vector(2).digest, "", None))
    files.read()
    files.write(vector(2), 2.0)
    assert files.read().names == here


def test_reading_alone_changes_no_name_on_the_disk(files: VectorFiles) -> None:
    lost = {"lost": Name(vector(1).digest, "", None)}
    files.set_name("lost", lost["lost"])
    assert files.read().names == {}
    assert NameFile(files.folder).read() == lost


def test_a_name_is_written_without_the_others(files: VectorFiles) -> None:
    names = {f"n{number}": Name(vector(1).digest, "d" * 1024, None) for number in range(2000)}
    for name, label in names.items():
        files.set_name(name, label)
    before = bytes_moved()
    files.set_name("one more", Name(vector(2).digest, "d" * 1024, None))
    files.delete_name("n7")
    moved = bytes_moved() - before
    assert moved < 200_000  # all names have 2 MB


def bytes_moved() -> int:
    """Bytes that this process has read and written."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])


def test_names_that_cannot_be_written_are_as_they_were(
    files: VectorFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(vector(1), 1.0)
    old = Name(vector(1).digest, "", None)
    files.set_name("a", old)
    files.close()
    connect = sqlite3.connect

    def small(*args: object, **options: object) -> sqlite3.Connection:
        database = connect(*args, **options)
        database.execute("PRAGMA max_page_count = 1")  # as many as there are: the disk is full
        return database

    monkeypatch.setattr(sqlite3, "connect", small)
    again = VectorFiles(files.folder)
    with pytest.raises(OSError, match="full") as caught:
        again.set_name("b", Name(vector(1).digest, "d" * 65536, None))
    assert caught.value.errno == errno.ENOSPC
    assert again.read().names == {"a": old}
    again.close()


def test_names_that_were_set_outlive_a_process_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from rheostat_server.vectors.files import VectorFiles\n"
        "from rheostat_server.vectors.store import Name\n"
        "files = VectorFiles(pathlib.Path(sys.argv[1]))\n"
        "for number in range(1 << 20):\n"
        "    files.set_name(f'n{number}', Name(bytes(32), 'd' * 4096, None))\n"
        "    print(number, flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for _ in range(50):
            last = int(child.stdout.readline())
        child.kill()
    names = NameFile(tmp_path).read()
    assert {f"n{number}" for number in range(last + 1)} <= names.keys()
    assert set(names.values()) == {Name(bytes(32), "d" * 4096, None)}


def test_file_and_folder_are_on_the_disk_before_a_write_returns(
    files: VectorFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(number: int) -> None:
        done.append(Path(f"/proc/self/fd/{number}").readlink().name)
        sync(number)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("moved"), replace(a, b)))
    files.write(vector(1), 1.0)
    assert done == [f".{file_of(files.folder, vector(1)).name}.part", "moved", "vectors"]


def test_two_servers_cannot_share_a_folder_until_one_gives_it_up(files: VectorFiles) -> None:
    with pytest.raises(
        VectorDirFailed, match=f"another server keeps its vectors in {files.folder}"
    ):
        VectorFiles(files.folder)
    files.close()
    files.close()
    VectorFiles(files.folder).close()


def test_the_lock_goes_with_the_process_that_held_it(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib\n"
        "from rheostat_server.vectors.files import VectorFiles\n"
        "VectorFiles(pathlib.Path(sys.argv[1]))\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout.readline() == "locked\n"
        with pytest.raises(VectorDirFailed, match="another server"):
            VectorFiles(tmp_path)
        child.kill()
    VectorFiles(tmp_path).close()


def test_a_process_that_was_forked_does_not_keep_a_folder_that_was_given_up(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib\n"
        "from rheostat_server.vectors.files import VectorFiles\n"
        "files = VectorFiles(pathlib.Path(sys.argv[1]))\n"
        "if os.fork() == 0:\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "files.close()\n"
        "print('given up', flush=True)\n"
        "os.wait()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "given up\n"
        VectorFiles(tmp_path).close()
        assert child.poll() is None
        child.stdin.close()


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VectorDirFailed, match=f"cannot be kept in {tmp_path / 'file'}"):
        VectorFiles(tmp_path / "file")
