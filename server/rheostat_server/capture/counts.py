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


class Drained(NamedTuple):
    """How requests ended while the host drained."""

    finished: int
    aborted: int
