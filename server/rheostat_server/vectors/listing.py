"""The sorted, unique keys of the store's entries, so that a page is found by binary search."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import NamedTuple


class Key(NamedTuple):
    """The key of an entry."""

    name: str
    """A name, or empty for a vector without one."""
    digest: bytes
    """The vector."""


FIRST = Key("", b"")
"""Sorts before every entry."""


class Listing:
    """The keys of all entries, by name, then digest."""

    def __init__(self) -> None:
        self._keys: list[Key] = []

    def add(self, name: str, digest: bytes) -> None:
        """Adds a key that is not in the listing."""
        insort(self._keys, Key(name, digest))

    def remove(self, name: str, digest: bytes) -> None:
        """Removes a key that is in the listing."""
        del self._keys[bisect_left(self._keys, Key(name, digest))]

    def after(self, key: Key, prefix: str) -> Iterator[Key]:
        """The keys after `key` whose names begin with `prefix`. `key` itself need not exist."""
        place = max(bisect_right(self._keys, key), bisect_left(self._keys, Key(prefix, b"")))
        while place < len(self._keys) and self._keys[place].name.startswith(prefix):
            yield self._keys[place]
            place += 1
