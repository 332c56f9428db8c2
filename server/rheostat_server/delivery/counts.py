"""How requests ended."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass
class Counts:
    """Requests by how they ended."""

    admitted: int = 0
    completed: int = 0
    aborted: int = 0
    refused: int = 0
    failed: int = 0

    def end(self, *, completed: bool, failed: bool) -> None:
        """A request that was admitted has ended: `completed`, `failed`, or else aborted."""
        if completed:
            self.completed += 1
        elif failed:
            self.failed += 1
        else:
            self.aborted += 1


class Drained(NamedTuple):
    """How requests ended while the server drained."""

    finished: int
    aborted: int
