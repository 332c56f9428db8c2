"""The plugin `memory`: recordings kept in this process, for tests and for who embeds the server.

Invariant: all recordings together, open ones included, hold at most `limit` bytes of rows; the
oldest finished ones give way, and where that is not enough the newest fails.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from rheostat_server.sinks.protocol import (
    Artifact,
    Collision,
    Layout,
    Outcome,
    RequestAbout,
    RowBlock,
    SinkError,
    Target,
)
from rheostat_server.sinks.settings import only_known, size_setting
from rheostat_server.sinks.tables import check_block

_MIB = 1 << 20


def make(name: str, settings: Mapping[str, str]) -> "Memory":
    """The sink, from `limit` (bytes, default 256MiB).

    Raises:
        SinkSettingsError: a setting is wrong.
    """
    only_known(settings, ("limit",))
    return Memory(size_setting(settings, "limit", 256 * _MIB))


@dataclass(frozen=True, slots=True)
class Recorded:
    """A finished recording."""

    about: RequestAbout
    outcome: Outcome
    blocks: tuple[RowBlock, ...]

    @property
    def size(self) -> int:
        """Bytes of the rows."""
        return sum(block.size for block in self.blocks)


class Memory:
    """The last recordings."""

    layouts: Sequence[Layout] = ()
    """It writes no files."""
    options: Mapping[str, str] = {}
    """It has none."""

    def __init__(self, limit: int) -> None:
        """Room for `limit` bytes of rows."""
        self._limit = limit
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, str], Recorded] = OrderedDict()
        self._used = 0

    def check(self, target: Target) -> None:
        """Takes everything."""

    def open(self, about: RequestAbout) -> "MemoryRecording":
        """Begins a recording. Raises Collision."""
        with self._lock:
            if (about.target.tag, about.request_id) in self._kept:
                raise _taken(about)
        return MemoryRecording(self, about)

    def artifacts(self, request_id: str) -> list[Artifact]:
        """None: there are no files."""
        return []

    def recorded(self, request_id: str, tag: str = "default") -> Recorded | None:
        """A finished recording; None: it never was, or has given way."""
        with self._lock:
            return self._kept.get((tag, request_id))

    def close(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._kept.clear()
            self._used = 0

    def take(self, size: int) -> None:
        """Makes room. Raises SinkError where there is none, and takes nothing."""
        with self._lock:
            spare = sum(recorded.size for recorded in self._kept.values())
            if self._used - spare + size > self._limit:
                raise SinkError(f"the rows exceed the sink's limit of {self._limit} bytes")
            while self._used + size > self._limit:
                _, oldest = self._kept.popitem(last=False)
                self._used -= oldest.size
            self._used += size

    def give_back(self, size: int) -> None:
        """Frees what `take` took."""
        with self._lock:
            self._used -= size

    def keep(self, recorded: Recorded) -> None:
        """Keeps a finished recording, whose bytes have been taken. Raises Collision."""
        about = recorded.about
        with self._lock:
            if (about.target.tag, about.request_id) in self._kept:
                raise _taken(about)
            self._kept[about.target.tag, about.request_id] = recorded


class MemoryRecording:
    """A request on its way into memory."""

    pending: Sequence[str] = ()
    """No files."""

    def __init__(self, sink: Memory, about: RequestAbout) -> None:
        """An empty recording."""
        self._sink = sink
        self._about = about
        self._captures = {capture.capture_index: capture for capture in about.captures}
        self._blocks: list[RowBlock] = []
        self._size = 0

    def write(self, block: RowBlock) -> None:
        """Keeps a block. Raises SinkError where it does not fit."""
        check_block(block, self._captures)
        self._sink.take(block.size)
        self._size += block.size
        self._blocks.append(block)

    def finish(self, outcome: Outcome) -> list[Artifact]:
        """Makes the recording one that can be found."""
        self._sink.keep(Recorded(self._about, outcome, tuple(self._blocks)))
        self._size = 0
        return []

    def abandon(self, error: BaseException) -> None:
        """Frees the rows."""
        self._blocks.clear()
        self._sink.give_back(self._size)
        self._size = 0


def _taken(about: RequestAbout) -> Collision:
    return Collision(f"{about.request_id} is kept already under the tag {about.target.tag}")
