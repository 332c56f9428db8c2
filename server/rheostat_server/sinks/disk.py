"""A root folder outside of which nothing is written, and files that appear complete or not at all.

Each subfolder is opened relative to its parent, and links are not followed. Only new files are
created. Unfinished files are in `.parts`, which is emptied at start. A published file never
changes. One process at a time has the folder.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from rheostat_server.sinks.protocol import Collision, SinkError, SinkSettingsError
from rheostat_server.tasks.open_files import lock_file

REQUEST = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Ids of requests."""

_PARTS = ".parts"
_LOCK = ".lock"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME_EXISTS = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


class NoFolder(SinkError):
    """There is a link or a file in place of a folder."""


class Root:
    """The root folder, which is locked until `close`."""

    def __init__(self, path: Path) -> None:
        """Makes the folder if necessary, locks it, and removes the unfinished files of a crash.

        Raises:
            SinkSettingsError: another process has locked it, or it cannot be used.
        """
        self.path = path
        with ExitStack() as resources:
            try:
                path.mkdir(parents=True, exist_ok=True)
                self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                resources.callback(os.close, self._folder)
                lock_file(_LOCK, 0o644, resources, folder=self._folder)
                self._open = True
                with self.folder(_PARTS, make=True) as parts:
                    for name in os.listdir(parts):
                        _remove(name, parts)
            except BlockingIOError as error:
                raise SinkSettingsError(
                    f"another server writes to {path}: give each server its own folder"
                ) from error
            except (OSError, SinkError) as error:
                why = error.strerror if isinstance(error, OSError) and error.strerror else error
                raise SinkSettingsError(f"{path} cannot be written to: {why}") from error
            self._resources = resources.pop_all()

    def close(self) -> None:
        """Unlocks the folder."""
        self._open = False
        self._resources.close()

    @contextmanager
    def folder(self, *names: str, make: bool = False) -> Iterator[int]:
        """A descriptor of a folder below the root.

        Raises:
            FileNotFoundError: it does not exist, and `make` is not set.
            NoFolder: a link or a file is in its place.
            SinkError: the root is closed.
        """
        if not self._open:
            raise SinkError("the sink is closed")
        folder = os.dup(self._folder)
        try:
            for name in names:
                child = _open_child(name, folder, make=make)
                os.close(folder)
                folder = child
            yield folder
        finally:
            os.close(folder)

    def names(self, *folder: str) -> list[str]:
        """The sorted names in a folder; none if it does not exist or is not a folder."""
        try:
            with self.folder(*folder) as descriptor:
                return sorted(os.listdir(descriptor))
        except (FileNotFoundError, NoFolder):
            return []


class Scratch:
    """A folder in `.parts`, which is published or discarded."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.name = uuid4().hex
        self.spooled = False
        """Whether it has a file `spool`."""
        with root.folder(_PARTS) as parts:
            os.mkdir(self.name, 0o755, dir_fd=parts)
        self._open = True

    def create(self, name: str) -> int:
        """The descriptor of a new file."""
        with self._root.folder(_PARTS, self.name) as folder:
            return create_file(name, folder)

    def spool(self) -> int:
        """The descriptor of the file `spool`, which the first call creates."""
        open_file = reopen_file if self.spooled else create_file
        with self._root.folder(_PARTS, self.name) as folder:
            file = open_file("spool", folder)
        self.spooled = True
        return file

    def remove_spool(self) -> None:
        """Deletes the file `spool`."""
        with self._root.folder(_PARTS, self.name) as folder:
            os.unlink("spool", dir_fd=folder)

    def publish(self, name: str, *folder: str) -> None:
        """Moves the folder to its final name. Its files must be on the disk already.

        Raises:
            Collision: the name exists.
        """
        with self._root.folder(_PARTS, self.name) as itself:
            os.fsync(itself)
        with self._root.folder(*folder, make=True) as target, self._root.folder(_PARTS) as parts:
            try:
                os.rename(self.name, name, src_dir_fd=parts, dst_dir_fd=target)
            except OSError as error:
                if error.errno in _NAME_EXISTS:
                    raise collision(name) from error
                raise
            try:
                os.fsync(target)
            except OSError:
                os.rename(name, self.name, src_dir_fd=target, dst_dir_fd=parts)
                raise
        self._open = False

    def discard(self) -> None:
        """Deletes the folder; if that fails, the next start of the server deletes it."""
        if self._open:
            self._open = False
            with suppress(OSError, SinkError), self._root.folder(_PARTS) as parts:
                _remove(self.name, parts)


class Writer:
    """Writes to a file, and counts and hashes the bytes."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.count = 0

    def write(self, data: "bytes | bytearray | memoryview") -> int:
        """Writes all bytes."""
        view = memoryview(data).cast("B")
        write_all(self._file, view)
        self._hash.update(view)
        self.count += len(view)
        return len(view)

    @property
    def sha256(self) -> bytes:
        """SHA-256 of the bytes written so far."""
        return self._hash.digest()


def write_all(file: int, view: memoryview) -> None:
    """Writes all bytes, because `os.write` may write only some."""
    while view:
        view = view[os.write(file, view) :]


def read_file(name: str, folder: int, offset: int = 0, length: int | None = None) -> bytes:
    """`length` bytes of a file from `offset`, or all. Raises OSError, also if it is a link."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        end = os.fstat(file).st_size if length is None else offset + length
        data = bytearray()
        while part := os.pread(file, end - offset - len(data), offset + len(data)):
            data += part
        return bytes(data)
    finally:
        os.close(file)


def create_file(name: str, folder: int) -> int:
    """The descriptor of a new file. Raises FileExistsError."""
    return os.open(name, _READ_WRITE | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder)


def reopen_file(name: str, folder: int) -> int:
    """The descriptor of an existing file, for reading and writing. Raises OSError."""
    return os.open(name, _READ_WRITE, dir_fd=folder)


def file_name(request_id: str) -> str:
    """A unique file name for a request's id, which is never ".", ".." or hidden."""
    return f"%2E{request_id[1:]}" if request_id.startswith(".") else request_id


def request_of(name: str) -> str | None:
    """The request with this `file_name`; None if there is none."""
    request = f".{name[3:]}" if name.startswith("%2E") else name
    return request if REQUEST.fullmatch(request) and file_name(request) == name else None


def collision(name: str) -> Collision:
    """The error of a name that exists."""
    return Collision(f"{name} exists already and is not overwritten: use another id or tag")


def _open_child(name: str, parent: int, *, make: bool) -> int:
    if "/" in name or name in ("", ".", ".."):
        raise SinkError(f'"{name}" cannot be the name of a folder')
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=parent)
            os.fsync(parent)
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NoFolder(f"{name} is a link or a file, not a folder") from error
        raise


def _remove(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(name, dir_fd=folder)
