"""Records that wait on disk, in files that are written once and read once.

Invariants:

* Records are read as they were written and in the same order, or the read raises an error.
* An append writes all of its records, or none.
* A file is deleted as soon as all of it was read.
* All files together stay within the limit, and few of them are open.
* A folder belongs to one server.

Every function blocks.
"""

import os
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from rheostat_server.errors import SpoolFailed
from rheostat_server.tasks.open_files import OpenFiles, lock_file

_FILES = 256
"""The limit is divided into this many files, because only whole files are deleted."""

_DESCRIPTORS = 64
"""Files that stay open while they are not used. Each reader that spills has at least one."""

_OLD = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = ".lock"
_SUFFIX = ".spool"
_HEAD = struct.Struct("<II")
"""Before each record: its length and its CRC-32C."""


class SpillDirectoryFull(Exception):
    """The records do not fit within the limit."""


class SpillFileDamaged(Exception):
    """A file does not contain the records that were written to it."""


class SpillDirectory:
    """A folder that this server has locked until `close`. Any thread may use it."""

    def __init__(self, folder: Path, limit: int) -> None:
        """Makes the folder if it is missing, locks it, and removes the files of a server that died.

        Args:
            folder: contains the files.
            limit: bytes that all files together may have.

        Raises:
            SpoolFailed: another server uses it, or it cannot be used.
        """
        self.folder = folder
        self.limit = limit
        self.used = 0
        """Bytes of all files."""
        self.file_bytes = limit // _FILES
        """No record is added to a file of at least this size."""
        self.files = OpenFiles(_DESCRIPTORS)
        """The open files of all readers."""
        self._guard = threading.Lock()
        self._made = 0
        with ExitStack() as resources:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock_file(folder / _LOCK, 0o600, resources)
                self._sweep()
            except BlockingIOError as error:
                raise SpoolFailed(
                    f"another server spools to {folder}: give each its own --spool"
                ) from error
            except OSError as error:
                raise SpoolFailed(
                    f"the folder {folder} of --spool cannot be used: {error.strerror or error}"
                ) from error
            self._resources = resources.pop_all()
        self._open = True

    @property
    def left(self) -> int:
        """Bytes that still fit."""
        return self.limit - self.used

    def claim(self, size: int) -> None:
        """Counts bytes that are about to be written.

        Raises:
            SpillDirectoryFull: they do not fit.
        """
        with self._guard:
            if self.used + size > self.limit:
                raise SpillDirectoryFull
            self.used += size

    def release(self, size: int) -> None:
        """Stops counting bytes of a deleted file, or of a failed write."""
        with self._guard:
            self.used -= size

    def create(self) -> Path:
        """Makes a file, and returns its path. Raises OSError."""
        with self._guard:
            self._made += 1
            path = self.folder / f"{self._made:08}{_SUFFIX}"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return path

    def open(self, path: Path) -> AbstractContextManager[int]:
        """The descriptor of a file that `create` made. Raises OSError."""
        return self.files.use(path, lambda: os.open(path, _OLD))

    def remove(self, path: Path) -> None:
        """Deletes a file. Raises OSError."""
        self.files.close_file(path)
        path.unlink(missing_ok=True)

    def close(self) -> None:
        """Removes all files, and unlocks the folder."""
        if self._open:
            self._open = False
            self.files.close()
            with suppress(OSError):
                self._sweep()
            self._resources.close()

    def _sweep(self) -> None:
        for path in self.folder.glob(f"*{_SUFFIX}"):
            path.unlink()


@dataclass
class _File:
    """A file of records."""

    path: Path
    end: int = 0
    """Bytes that were written."""
    begin: int = 0
    """Bytes that were read."""


class SpillFile:
    """The records of one reader, first in, first out. One thread at a time may use it."""

    def __init__(self, spool: SpillDirectory) -> None:
        """There are no records, and no file."""
        self._spool = spool
        self._files: deque[_File] = deque()

    def append(self, records: Sequence[bytes]) -> None:
        """Appends all records, or none.

        Raises:
            SpillDirectoryFull: they do not fit.
            OSError: they cannot be written.
        """
        heads = (_HEAD.pack(len(record), google_crc32c.value(record)) for record in records)
        data = b"".join(part for pair in zip(heads, records, strict=True) for part in pair)
        self._spool.claim(len(data))
        try:
            file = self._last()
            with self._spool.open(file.path) as descriptor:
                _write(descriptor, data, file.end)
        except BaseException:
            self._spool.release(len(data))
            raise
        file.end += len(data)

    def read(self, most: int) -> list[bytes]:
        """Removes and returns the oldest records: about `most` bytes, and at least one record.

        There must be a record.

        Raises:
            SpillFileDamaged: they are not the records that were written.
            OSError: they cannot be read.
        """
        file = self._files[0]
        with self._spool.open(file.path) as descriptor:
            records = _next(file, descriptor, most)
        if file.begin == file.end:
            self._drop(self._files.popleft())
        return records

    def close(self) -> None:
        """Deletes all files. No record may be written or read any more."""
        while self._files:
            with suppress(OSError):
                self._drop(self._files.popleft())

    def _last(self) -> _File:
        """The file to which records are appended."""
        if not self._files or self._files[-1].end >= self._spool.file_bytes:
            self._files.append(_File(self._spool.create()))
        return self._files[-1]

    def _drop(self, file: _File) -> None:
        self._spool.release(file.end)
        self._spool.remove(file.path)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    """Writes all of `data` at `offset`; if it fails, it cuts the file back to `offset`."""
    view = memoryview(data)
    at = offset
    try:
        while view:
            count = os.pwrite(descriptor, view, at)
            at += count
            view = view[count:]
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, offset)
        raise


def _next(file: _File, descriptor: int, most: int) -> list[bytes]:
    """The next records of a file: about `most` bytes, and at least one record.

    Raises:
        SpillFileDamaged: they are not the records that were written.
        OSError: they cannot be read.
    """
    data, at = _read(file, descriptor, max(most, _HEAD.size)), 0
    records: list[bytes] = []
    while len(data) - at >= _HEAD.size:
        length, checksum = _HEAD.unpack_from(data, at)
        past = at + _HEAD.size + length
        if past > len(data):
            if records:
                break
            data = _read(file, descriptor, past)
        record = data[at + _HEAD.size : past]
        if len(record) < length or google_crc32c.value(record) != checksum:
            raise SpillFileDamaged
        records.append(record)
        at = past
    if not records:
        raise SpillFileDamaged
    file.begin += at
    return records


def _read(file: _File, descriptor: int, most: int) -> bytes:
    """The next bytes of a file, at most `most`."""
    size = min(most, file.end - file.begin)
    data = os.pread(descriptor, size, file.begin)
    if len(data) < size:
        raise SpillFileDamaged
    return data
