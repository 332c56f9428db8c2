"""Records on disk: in order, all or none, gone once they are read."""

import errno
import os
import random
from pathlib import Path

import pytest

from rheostat_server.delivery import spill_directory as module
from rheostat_server.delivery.spill_directory import (
    SpillDirectory,
    SpillDirectoryFull,
    SpillFile,
    SpillFileDamaged,
)
from rheostat_server.errors import SpoolFailed

HEAD = 8
"""Bytes before a record."""


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.spool"))


@pytest.fixture
def spill_directory(tmp_path: Path):
    one = SpillDirectory(tmp_path, 1600)
    yield one
    one.close()


def test_records_come_back_in_order_through_many_files(tmp_path: Path) -> None:
    spill_directory = SpillDirectory(tmp_path, 1 << 20)
    spill_directory.file_bytes = 300
    records, rng = SpillFile(spill_directory), random.Random(1)
    sent: list[bytes] = []
    found: list[bytes] = []
    while len(sent) < 500:
        batch = [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 9))]
        records.append(batch)
        sent += batch
        while len(found) < len(sent) and rng.random() < 0.6:
            found += records.read(rng.randrange(1, 400))
    while len(found) < len(sent):
        found += records.read(1)
    assert found == sent
    assert (files(tmp_path), spill_directory.used) == ([], 0)
    spill_directory.close()


def test_many_readers_share_few_descriptors(tmp_path: Path) -> None:
    spill_directory = SpillDirectory(tmp_path, 1 << 20)
    before = len(os.listdir("/proc/self/fd"))
    readers = [SpillFile(spill_directory) for _ in range(300)]
    for round_ in range(2):
        for number, records in enumerate(readers):
            records.append([f"{round_} of {number}".encode()])
    assert len(os.listdir("/proc/self/fd")) - before <= 64
    for number, records in enumerate(readers):
        found = records.read(1000)
        assert found == [f"{round_} of {number}".encode() for round_ in range(2)]
    assert files(tmp_path) == []
    spill_directory.close()
    assert len(os.listdir("/proc/self/fd")) < before


def test_a_file_goes_as_soon_as_it_was_read(spill_directory: SpillDirectory) -> None:
    records = SpillFile(spill_directory)
    for _ in range(3):
        records.append([b"x" * 192])
    assert (len(files(spill_directory.folder)), spill_directory.used) == (3, 600)
    records.read(1)
    assert (len(files(spill_directory.folder)), spill_directory.used) == (2, 400)


def test_a_full_spool_takes_all_of_an_append_or_nothing(spill_directory: SpillDirectory) -> None:
    one, other = SpillFile(spill_directory), SpillFile(spill_directory)
    one.append([b"a" * 992])
    with pytest.raises(SpillDirectoryFull):
        other.append([b"b" * 300, b"c" * 300])
    assert spill_directory.used == 1000
    other.append([b"b" * 592])
    assert spill_directory.left == 0
    assert one.read(1) == [b"a" * 992]
    one.append([b"d"])
    assert (other.read(1), one.read(1)) == ([b"b" * 592], [b"d"])


@pytest.mark.parametrize("wrong", [errno.ENOSPC, errno.EIO])
def test_what_the_disk_does_not_take_leaves_nothing_behind(
    spill_directory: SpillDirectory, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    write, calls = os.pwrite, []

    def half(file: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(wrong, os.strerror(wrong))
        return write(file, data[: len(data) // 2], offset)

    spill_directory.file_bytes = 100
    records = SpillFile(spill_directory)
    records.append([b"first"])
    monkeypatch.setattr(module.os, "pwrite", half)
    with pytest.raises(OSError, match=os.strerror(wrong)):
        records.append([b"lost" * 9])
    monkeypatch.setattr(module.os, "pwrite", write)
    assert len(calls) == 2
    assert spill_directory.used == HEAD + 5
    records.append([b"second"])
    assert records.read(99) == [b"first", b"second"]


@pytest.mark.parametrize("at", [0, 5, HEAD, HEAD + 4])
def test_what_is_not_what_was_written_is_not_given_out(
    spill_directory: SpillDirectory, at: int
) -> None:
    records = SpillFile(spill_directory)
    records.append([b"a record"])
    (path,) = files(spill_directory.folder)
    held = bytearray(path.read_bytes())
    held[at] ^= 1
    path.write_bytes(held)
    with pytest.raises(SpillFileDamaged):
        records.read(100)


def test_a_file_that_was_cut_is_damaged(spill_directory: SpillDirectory) -> None:
    records = SpillFile(spill_directory)
    records.append([b"a record"])
    os.truncate(files(spill_directory.folder)[0], 9)
    with pytest.raises(SpillFileDamaged):
        records.read(100)


def test_closing_removes_what_was_not_read(spill_directory: SpillDirectory) -> None:
    records = SpillFile(spill_directory)
    records.append([b"x"])
    records.close()
    assert (files(spill_directory.folder), spill_directory.used) == ([], 0)


def test_a_folder_belongs_to_one_server(spill_directory: SpillDirectory) -> None:
    with pytest.raises(SpoolFailed, match="give each its own --spool"):
        SpillDirectory(spill_directory.folder, 100)


def test_what_a_server_left_that_died_is_removed(tmp_path: Path) -> None:
    (tmp_path / "00000007.spool").write_bytes(b"left")
    (tmp_path / "theirs.txt").write_bytes(b"kept")
    spill_directory = SpillDirectory(tmp_path, 100)
    assert files(tmp_path) == []
    SpillFile(spill_directory).append([b"x"])
    spill_directory.close()
    assert files(tmp_path) == []
    assert (tmp_path / "theirs.txt").exists()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SpoolFailed, match="cannot be used: Not a directory"):
        SpillDirectory(tmp_path / "file" / "below", 100)
