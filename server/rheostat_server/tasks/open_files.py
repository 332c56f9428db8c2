"""A cache of descriptors of files that are used repeatedly, with a limit; and locked files.

Why a limit: clients choose the number of files. A sink has two files for each tag, and each
recording and each slow reader has a file. Without a limit, the tags of one client would take the
descriptors that the connections of all clients need.

Invariant: a descriptor in use is never closed. Only files in use can exceed the limit, and each
thread uses a few at a time.
"""

import fcntl
import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

_DESCRIPTORS = 1 << 16
"""The most descriptors that a process requests, because some libraries make a table of all."""


def raise_descriptor_limit() -> int:
    """Raises this process's soft limit on descriptors as far as possible. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def lock_file(
    path: Path | str, mode: int, resources: ExitStack, *, folder: int | None = None
) -> None:
    """Locks a file until `resources` are closed. The file is made if it does not exist.

    Args:
        path: the file.
        mode: its permissions if it is made.
        resources: closes and unlocks it.
        folder: descriptor of the folder of a relative `path`. With it a symbolic link is refused,
            because clients may choose the path. None: the current folder.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: it cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if folder is None else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, mode, dir_fd=folder)
    resources.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # `os.close` alone would leave it locked while a forked process has the descriptor.
    resources.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)


@dataclass(eq=False, slots=True)
class _File:
    """A descriptor, and the number of its users."""

    descriptor: int
    users: int = 0
    closing: bool = False


class OpenFiles:
    """A cache that closes the least recently used descriptors. Any thread may use it."""

    def __init__(self, most: int) -> None:
        """Makes an empty cache.

        Args:
            most: unused descriptors that stay open.
        """
        self._most = most
        self._lock = Lock()
        self._files: OrderedDict[Hashable, _File] = OrderedDict()

    def __len__(self) -> int:
        """Number of open descriptors."""
        return len(self._files)

    @contextmanager
    def use(self, key: Hashable, reopen: Callable[[], int]) -> Iterator[int]:
        """A file's descriptor, which stays open while the context lasts. Its offset is undefined.

        Args:
            key: identifies the file.
            reopen: opens the file if it is not open. May raise OSError.
        """
        file = self._acquire(key)
        if file is None:
            opened = _File(reopen())
            file = self._acquire(key, opened)
            assert file is not None
            if file is not opened:  # another thread has opened it meanwhile
                os.close(opened.descriptor)
        try:
            yield file.descriptor
        finally:
            self._release(file)

    def close_file(self, key: Hashable) -> None:
        """Closes a file, at once or after its last use."""
        with self._lock:
            file = self._files.pop(key, None)
            if file is not None:
                file.closing = True
                if not file.users:
                    os.close(file.descriptor)

    def close(self) -> None:
        """Closes all files, as `close_file` does."""
        for key in list(self._files):
            self.close_file(key)

    def _acquire(self, key: Hashable, opened: _File | None = None) -> _File | None:
        """The file of a key, or `opened` if there is none, which then counts as in use."""
        with self._lock:
            file = self._files.get(key, opened)
            if file is not None:
                file.users += 1
                self._files[key] = file
                self._files.move_to_end(key)
            return file

    def _release(self, file: _File) -> None:
        with self._lock:
            file.users -= 1
            if file.closing and not file.users:
                os.close(file.descriptor)
            if len(self._files) > self._most:
                unused = [key for key, file in self._files.items() if not file.users]
                for key in unused[: max(0, len(unused) - self._most)]:
                    os.close(self._files.pop(key).descriptor)
