"""Objects of shared memory: who can read them, what they hold, and who removes them."""

import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rheostat_server.subscriptions.shared_memory import (
    FOLDER,
    Arena,
    NoSharedMemoryError,
    namespace,
    sweep,
)

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    one = Arena(MIB)
    yield one
    one.close()


def path_of(arena: Arena) -> Path:
    return FOLDER / arena.name


def left_behind(folder: Path) -> Path:
    """An object as a server leaves it that is killed."""
    path = folder / f"rheostat-{secrets.token_hex(16)}"
    path.write_bytes(b"RHEOSHM1" + bytes(56))
    return path


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)


def test_only_its_user_can_open_it_and_its_name_cannot_be_guessed(arena: Arena) -> None:
    found = path_of(arena).stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o600, os.geteuid())
    assert stat.S_ISREG(found.st_mode)
    assert found.st_size == arena.bytes
    other = Arena(MIB)
    assert len(set(arena.name) - set("rheostat-0123456789abcdef")) == 0
    assert len(arena.name) == len("rheostat-") + 32
    assert other.name != arena.name
    other.close()


def test_a_wide_umask_does_not_open_it() -> None:
    before = os.umask(0)
    try:
        one = Arena(MIB)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path_of(one).stat().st_mode) == 0o600
    one.close()


def test_it_begins_with_a_nonce_that_proves_that_it_was_read(arena: Arena) -> None:
    begin = path_of(arena).read_bytes()[:40]
    assert begin[:8] == b"RHEOSHM1"
    assert arena.proven(begin[8:])
    assert not arena.proven(begin[:32])
    assert not arena.proven(b"")


async def test_what_is_placed_lies_where_its_ref_says(arena: Arena) -> None:
    offset = await arena.place(1000)
    assert offset is not None
    arena.view(offset, 1000)[:] = np.arange(1000) % 251
    ref = arena.ref(offset, 1000)
    assert (ref.name, ref.namespace) == (arena.name, namespace())
    data = path_of(arena).read_bytes()[ref.offset : ref.offset + ref.length]
    assert data == bytes(number % 251 for number in range(1000))


async def test_a_full_arena_is_reported_and_has_space_again_later(arena: Arena) -> None:
    placed = []
    while (offset := await arena.place(MIB)) is not None:
        placed.append(offset)
    assert len(placed) == (arena.bytes - mmap.PAGESIZE) // MIB
    arena.free(placed[3])
    assert await arena.place(MIB) == placed[3]


async def test_a_file_system_without_space_is_an_answer(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = await arena.place(MIB)
    assert first is not None
    full(monkeypatch)
    with caplog.at_level("WARNING"):
        assert await arena.place(12 * MIB) is None
        assert await arena.place(12 * MIB) is None
    own = [record for record in caplog.records if record.name.startswith("rheostat")]
    assert [record.getMessage() for record in own] == [
        "shared memory is full, rows travel inline: [Errno 28] No space left on device"
    ]
    assert await arena.place(MIB) is not None  # what is reserved already


def test_where_there_is_none_it_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoSharedMemoryError, match="has no shared memory: No such file"):
        Arena(MIB, tmp_path / "none")
    full(monkeypatch)
    with pytest.raises(NoSharedMemoryError, match="cannot make shared memory: No space left"):
        Arena(MIB, tmp_path)
    assert not list(tmp_path.iterdir())


async def test_memory_that_nothing_is_in_goes_back_to_the_system() -> None:
    one = Arena(64 * MIB)
    offsets = [await one.place(8 * MIB) for _ in range(8)]
    assert path_of(one).stat().st_blocks * 512 >= 64 * MIB
    one.trim()
    assert path_of(one).stat().st_blocks * 512 >= 64 * MIB
    for offset in offsets:
        assert offset is not None
        one.free(offset)
    one.trim()
    assert path_of(one).stat().st_blocks * 512 <= 32 * MIB
    assert await one.place(60 * MIB) is not None
    one.view(mmap.PAGESIZE, 60 * MIB)[:] = 1
    one.close()


async def test_a_reader_keeps_what_it_sees_when_it_is_removed(arena: Arena) -> None:
    offset = await arena.place(MIB)
    assert offset is not None
    arena.view(offset, MIB)[:] = 7
    with path_of(arena).open("rb") as file:
        seen = mmap.mmap(file.fileno(), arena.bytes, access=mmap.ACCESS_READ)
    arena.close()
    assert not path_of(arena).exists()
    assert seen[offset : offset + MIB] == b"\7" * MIB
    assert await arena.place(1) is None
    arena.free(offset)
    arena.close()


def test_a_start_removes_what_killed_servers_left_and_nothing_else(tmp_path: Path) -> None:
    left = [left_behind(tmp_path) for _ in range(3)]
    kept = [tmp_path / "psm_1234", tmp_path / "rheostat-notes", tmp_path / "rheostat-AB"]
    for path in kept:
        path.write_text("another's")
    link = tmp_path / f"rheostat-{secrets.token_hex(16)}"
    link.symlink_to(kept[0])
    folder = tmp_path / f"rheostat-{secrets.token_hex(16)}"
    folder.mkdir()
    alive = Arena(MIB, tmp_path)
    assert sweep(tmp_path) == 3
    assert not any(path.exists() for path in left)
    assert set(tmp_path.iterdir()) == {*kept, link, folder, tmp_path / alive.name}
    assert kept[0].read_text() == "another's"
    alive.close()
    assert sweep(tmp_path / "none") == 0


def test_one_that_a_starting_server_took_for_left_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def swept_first(handle: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        assert sweep(tmp_path) == 1
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", swept_first)
    with pytest.raises(NoSharedMemoryError, match="removed by a server that started"):
        Arena(MIB, tmp_path)
    assert not list(tmp_path.iterdir())
