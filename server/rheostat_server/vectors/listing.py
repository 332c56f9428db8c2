"""The order in which the store is listed, kept as vectors and names come and go.

Invariant: keys ascend and each is there once, so a page is found without going over the others.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import NamedTuple


class Key(NamedTuple):
    """A line of a listing."""

    name: str
    """A name, or empty for a vector without one."""
    digest: bytes
    """The vector."""


FIRST = Key("", b"")
"""Before every line."""


class Listing:
    """The lines of the store, by name, then digest."""

    def __init__(self) -> None:
        """An empty one."""
        self._keys: list[Key] = []

    def add(self, name: str, digest: bytes) -> None:
        """Adds a line that is not there."""
        insort(self._keys, Key(name, digest))

    def remove(self, name: str, digest: bytes) -> None:
        """Removes a line that is there."""
        del self._keys[bisect_left(self._keys, Key(name, digest))]

    def after(self, key: Key, prefix: str) -> Iterator[Key]:
        """The lines after a key, there or not, whose names begin with `prefix`."""
        place = max(bisect_right(self._keys, key), bisect_left(self._keys, Key(prefix, b"")))
        while place < len(self._keys) and self._keys[place].name.startswith(prefix):
            yield self._keys[place]
            place += 1
