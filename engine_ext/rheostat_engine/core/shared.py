"""Numbers for content: equal content has one number, counted by users, recycled.

Invariant: a number belongs to one content as long as somebody uses it; number 0 belongs to nobody.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class Full(Exception):
    """Every number is in use."""


class Taken(NamedTuple):
    """A number that was taken."""

    number: int
    fresh: bool
    """Whether the content was not there before: whoever takes it must write it."""


@dataclass(slots=True)
class _Entry:
    number: int
    users: int


class Shared(Generic[K]):
    """Hands out the numbers 1 to `count`."""

    def __init__(self, count: int) -> None:
        """All numbers are free."""
        self._free = list(range(count, 0, -1))
        self._entries: dict[K, _Entry] = {}

    def __len__(self) -> int:
        """Numbers in use."""
        return len(self._entries)

    def __contains__(self, content: K) -> bool:
        """Whether content has a number."""
        return content in self._entries

    def take(self, content: K) -> Taken:
        """The content's number, used once more.

        Raises:
            Full: it has none, and none is free.
        """
        entry = self._entries.get(content)
        if entry is not None:
            entry.users += 1
            return Taken(entry.number, fresh=False)
        if not self._free:
            raise Full
        number = self._free.pop()
        self._entries[content] = _Entry(number, 1)
        return Taken(number, fresh=True)

    def give(self, content: K) -> int:
        """Ends one use; the number if it was the last one, else 0."""
        entry = self._entries[content]
        entry.users -= 1
        if entry.users:
            return 0
        del self._entries[content]
        self._free.append(entry.number)
        return entry.number


class Runs:
    """Hands out runs of consecutive numbers of [start, end)."""

    def __init__(self, start: int, end: int) -> None:
        """All numbers are free."""
        self._free = [(start, end)]

    def take(self, count: int) -> int | None:
        """The first of `count` consecutive numbers; None where no such run is free."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= count:
                if end - start == count:
                    del self._free[index]
                else:
                    self._free[index] = (start + count, end)
                return start
        return None

    def give(self, start: int, count: int) -> None:
        """Gives a run back."""
        merged: list[tuple[int, int]] = []
        for one in sorted([*self._free, (start, start + count)]):
            if merged and merged[-1][1] == one[0]:
                merged[-1] = (merged[-1][0], one[1])
            else:
                merged.append(one)
        self._free = merged
