"""A folder that nothing written below it can leave, and files that appear whole or not at all.

Invariants: every step down is taken from the folder above it and follows no link; a file is made
where there was none; what is not finished lies in `.parts`, which is emptied at start; a published
name never changes what it holds. One process has the folder at a time.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from rheostat_server.sinks.protocol import Collision, SinkError, SinkSettingsError

REQUEST = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Ids of requests."""

_PARTS = ".parts"
_LOCK = ".lock"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


class NoFolder(SinkError):
    """There is a link or a file where a folder has to be."""


class Root:
    """The folder, this process's own until `close`."""

    def __init__(self, path: Path) -> None:
        """Makes the folder if need be, locks it, and removes what a crash left unfinished.

        Raises:
            SinkSettingsError: another process has it, or it cannot be used.
        """
        self.path = path
        self._lock: int | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable(path, error) from error
        self._open = True
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(_LOCK, flags, 0o644, dir_fd=self._folder)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self.folder(_PARTS, make=True) as parts:
                for name in os.listdir(parts):
                    _remove(name, parts)
        except BlockingIOError as error:
            self._close()
            raise SinkSettingsError(
                f"another server writes to {path}: give each its own"
            ) from error
        except (OSError, SinkError) as error:
            self._close()
            raise _unusable(path, error) from error

    def close(self) -> None:
        """Gives the folder up."""
        if self._open:
            if self._lock is not None:
                # Closing alone would leave it locked while a process that was forked lives.
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        self._open = False
        os.close(self._folder)
        if self._lock is not None:
            os.close(self._lock)

    @contextmanager
    def folder(self, *names: str, make: bool = False) -> Iterator[int]:
        """A descriptor of a folder below the root.

        Raises:
            FileNotFoundError: it is not there, and is not to be made.
            NoFolder: a link or a file is in its place.
            SinkError: the root is closed.
        """
        if not self._open:
            raise SinkError("the sink is closed")
        at = os.dup(self._folder)
        try:
            for name in names:
                below = _step(name, at, make=make)
                os.close(at)
                at = below
            yield at
        finally:
            os.close(at)

    def names(self, *folder: str) -> list[str]:
        """What a folder holds, in order; nothing where it is not there or no folder."""
        try:
            with self.folder(*folder) as at:
                return sorted(os.listdir(at))
        except (FileNotFoundError, NoFolder):
            return []

    def scratch(self) -> "Scratch":
        """A folder for what is not finished."""
        return Scratch(self)


class Scratch:
    """A folder in `.parts` that becomes a published one, or nothing."""

    def __init__(self, root: Root) -> None:
        """Makes it."""
        self._root = root
        self.name = uuid4().hex
        with root.folder(_PARTS) as parts:
            os.mkdir(self.name, 0o755, dir_fd=parts)
        self._open = True

    def create(self, name: str) -> int:
        """The descriptor of a new file."""
        with self._root.folder(_PARTS, self.name) as folder:
            return os.open(name, _NEW, 0o644, dir_fd=folder)

    def reopen(self, name: str) -> int:
        """The descriptor of a file that was created, for reading and writing."""
        with self._root.folder(_PARTS, self.name) as folder:
            return reopen_file(name, folder)

    def remove(self, name: str) -> None:
        """Deletes a file."""
        with self._root.folder(_PARTS, self.name) as folder:
            os.unlink(name, dir_fd=folder)

    def publish(self, name: str, *folder: str) -> None:
        """Gives the folder a name that none has; its files are on the disk already.

        Raises:
            Collision: the name is taken.
        """
        with self._root.folder(_PARTS, self.name) as itself:
            os.fsync(itself)
        with self._root.folder(*folder, make=True) as above, self._root.folder(_PARTS) as parts:
            try:
                os.rename(self.name, name, src_dir_fd=parts, dst_dir_fd=above)
            except OSError as error:
                if error.errno in _TAKEN:
                    raise taken(name) from error
                raise
            try:
                os.fsync(above)
            except OSError:
                os.rename(name, self.name, src_dir_fd=above, dst_dir_fd=parts)
                raise
        self._open = False

    def discard(self) -> None:
        """Deletes it; what cannot be deleted goes when the server next starts."""
        if self._open:
            self._open = False
            with suppress(OSError, SinkError), self._root.folder(_PARTS) as parts:
                _remove(self.name, parts)


class Writer:
    """Bytes on their way to a file: all of them written, counted and hashed."""

    def __init__(self, file: int) -> None:
        """Writes from where the descriptor stands."""
        self._file = file
        self._hash = hashlib.sha256()
        self.count = 0

    def write(self, data: "bytes | bytearray | memoryview") -> int:
        """Writes all of it."""
        view = memoryview(data).cast("B")
        write_all(self._file, view)
        self._hash.update(view)
        self.count += len(view)
        return len(view)

    @property
    def sha256(self) -> bytes:
        """Of the bytes until now."""
        return self._hash.digest()


def write_all(file: int, view: memoryview) -> None:
    """Writes every byte, however many calls it takes."""
    while view:
        view = view[os.write(file, view) :]


def read_file(name: str, folder: int) -> bytes:
    """All of a file, which is no link. Raises OSError."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(file, "rb") as opened:
        return opened.read()


def create_file(name: str, folder: int) -> int:
    """The descriptor of a new file. Raises FileExistsError."""
    return os.open(name, _NEW, 0o644, dir_fd=folder)


def reopen_file(name: str, folder: int) -> int:
    """The descriptor of a file that is there, for reading and writing. Raises OSError."""
    return os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def exists(name: str, folder: int) -> bool:
    """Whether a name is taken, be it by a link that leads nowhere."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def file_name(request_id: str) -> str:
    """A request's id as the name of a file: its own alone, and never "." or ".." or hidden."""
    return f"%2E{request_id[1:]}" if request_id.startswith(".") else request_id


def request_of(name: str) -> str | None:
    """The request whose `file_name` this is; None: no request's."""
    request = f".{name[3:]}" if name.startswith("%2E") else name
    return request if REQUEST.fullmatch(request) and file_name(request) == name else None


def taken(name: str) -> Collision:
    """The error of a name that is taken."""
    return Collision(f"{name} is there already and is not overwritten: use another id or tag")


def _step(name: str, above: int, *, make: bool) -> int:
    if "/" in name or name in ("", ".", ".."):
        raise SinkError(f'"{name}" cannot be the name of a folder')
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=above)
            os.fsync(above)
    try:
        return os.open(name, _FOLDER, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NoFolder(f"{name} is a link or a file where a folder has to be") from error
        raise


def _remove(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(name, dir_fd=folder)


def _unusable(path: Path, error: Exception) -> SinkSettingsError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return SinkSettingsError(f"{path} cannot be written to: {why}")
