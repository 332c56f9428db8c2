"""Reference-counted ids for content, and ranges of consecutive numbers.

Invariant: an id belongs to one content while the content has users. Id 0 is never allocated.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class BankError(Exception):
    """A plan can't be put into the worker's tables; the request that needs it must fail."""


class Exhausted(BankError):
    """A resource is exhausted until unused tables are released."""


class Taken(NamedTuple):
    """The result of `RefCountedIds.take`."""

    number: int
    fresh: bool
    """Whether the content is new, so the caller must write it."""


@dataclass(slots=True)
class _Entry:
    number: int
    users: int


class RefCountedIds(Generic[K]):
    """Ids for content. Equal content has one id, which is reused once it has no users."""

    def __init__(self, count: int, kind: str) -> None:
        """The ids are 1 to `count`; `kind` names the content in errors."""
        self._kind = kind
        self._free = list(range(count, 0, -1))
        self._entries: dict[K, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def grow(self, count: int) -> None:
        """Raises the largest id to `count`. Every id must be in use."""
        self._free = list(range(count, len(self._entries), -1))

    def __contains__(self, content: K) -> bool:
        return content in self._entries

    @property
    def more_than_half_used(self) -> bool:
        """Whether more than half of the ids are in use."""
        return len(self._entries) > len(self._free)

    def take(self, content: K) -> Taken:
        """Adds a use of content; returns its id.

        Raises:
            Exhausted: the content is new, and no id is free.
        """
        entry = self._entries.get(content)
        if entry is not None:
            entry.users += 1
            return Taken(entry.number, fresh=False)
        if not self._free:
            raise Exhausted(f"every {self._kind} is in use")
        number = self._free.pop()
        self._entries[content] = _Entry(number, 1)
        return Taken(number, fresh=True)

    def take_all(self, contents: Sequence[K]) -> list[Taken]:
        """As `take`, for several contents. If it raises, nothing is taken."""
        taken: list[Taken] = []
        try:
            for content in contents:
                taken.append(self.take(content))
        except Exhausted:
            for content in contents[: len(taken)]:
                self.give(content)
            raise
        return taken

    def give(self, content: K) -> int:
        """Ends one use; returns the id if it was the last use, else 0."""
        entry = self._entries[content]
        entry.users -= 1
        if entry.users:
            return 0
        del self._entries[content]
        self._free.append(entry.number)
        return entry.number


class RangeAllocator:
    """Allocates ranges of consecutive numbers of [start, end)."""

    def __init__(self, start: int, end: int) -> None:
        self._free = [(start, end)]

    def take(self, count: int) -> int | None:
        """Allocates `count` consecutive numbers; returns the first, or None if there are none."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= count:
                if end - start == count:
                    del self._free[index]
                else:
                    self._free[index] = (start + count, end)
                return start
        return None

    def give(self, start: int, count: int) -> None:
        """Frees a range."""
        merged: list[tuple[int, int]] = []
        for first, end in sorted([*self._free, (start, start + count)]):
            if merged and merged[-1][1] == first:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((first, end))
        self._free = merged
