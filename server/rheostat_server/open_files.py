"""Descriptors of files that are used now and again, at most so many at a time.

Why a limit: clients choose how many files there are. A sink has a pair of files for each tag, a
recording or a slow reader has a file of its own. Without a limit, one client's tags take the
descriptors that everybody's connections need.

Invariant: a descriptor is never closed while somebody uses it. The limit is exceeded only by files
that are in use, of which each thread has a few.
"""

import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Lock

_DESCRIPTORS = 1 << 16
"""Descriptors that a process asks for at most; some libraries keep a table of all of them."""


def raise_descriptor_limit() -> int:
    """Raises this process's soft limit on descriptors as far as it may; the limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class _File:
    """A descriptor, and how many use it."""

    __slots__ = ("descriptor", "forgotten", "users")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.users = 0
        self.forgotten = False


class OpenFiles:
    """A cache of descriptors that closes those used longest ago. For any thread."""

    def __init__(self, most: int) -> None:
        """Nothing is open.

        Args:
            most: descriptors that stay open while nobody uses them.
        """
        self._most = most
        self._lock = Lock()
        self._files: OrderedDict[Hashable, _File] = OrderedDict()

    def __len__(self) -> int:
        """How many are open."""
        return len(self._files)

    @contextmanager
    def use(self, key: Hashable, reopen: Callable[[], int]) -> Iterator[int]:
        """A file's descriptor, which stays open while the context lasts. It may stand anywhere.

        Args:
            key: names the file.
            reopen: opens it where it is not open. Raises OSError.
        """
        file = self._taken(key)
        if file is None:
            opened = _File(reopen())
            file = self._taken(key, opened)
            assert file is not None
            if file is not opened:  # another thread was quicker
                os.close(opened.descriptor)
        try:
            yield file.descriptor
        finally:
            self._give_back(file)

    def forget(self, key: Hashable) -> None:
        """Closes a file; one that is in use, once it is not."""
        with self._lock:
            file = self._files.pop(key, None)
            if file is not None:
                file.forgotten = True
                if not file.users:
                    os.close(file.descriptor)

    def close(self) -> None:
        """Closes all of them, as `forget` does."""
        for key in list(self._files):
            self.forget(key)

    def _taken(self, key: Hashable, opened: _File | None = None) -> _File | None:
        """The file of a key, or `opened` if there is none, which then counts as in use."""
        with self._lock:
            file = self._files.get(key, opened)
            if file is not None:
                file.users += 1
                self._files[key] = file
                self._files.move_to_end(key)
            return file

    def _give_back(self, file: _File) -> None:
        with self._lock:
            file.users -= 1
            if file.forgotten and not file.users:
                os.close(file.descriptor)
            if len(self._files) > self._most:
                unused = [key for key, one in self._files.items() if not one.users]
                for key in unused[: max(0, len(unused) - self._most)]:
                    os.close(self._files.pop(key).descriptor)
