"""The plugin `memory`: stores recordings in this process, for tests and embedded servers.

All recordings together, unfinished ones included, have at most `limit` bytes of rows. The oldest
finished recordings are dropped first; if that is not enough, the new recording fails.
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
    """A sink of the last recordings, in `limit` bytes of rows."""

    layouts: Sequence[Layout] = ()
    options: Mapping[str, str] = {}

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = Lock()
        self._recordings: OrderedDict[tuple[str, str], Recorded] = OrderedDict()
        self._used = 0

    def check(self, target: Target) -> None:
        """Accepts every target."""

    def open(self, about: RequestAbout) -> "MemoryRecording":
        """Begins a recording. Raises Collision."""
        with self._lock:
            if (about.target.tag, about.request_id) in self._recordings:
                raise _collision(about)
        return MemoryRecording(self, about)

    def artifacts(self, request_id: str) -> list[Artifact]:
        """None, because there are no files."""
        return []

    def recorded(self, request_id: str, tag: str = "default") -> Recorded | None:
        """A finished recording; None if there is none, or if it was dropped."""
        with self._lock:
            return self._recordings.get((tag, request_id))

    def close(self) -> None:
        """Drops all recordings."""
        with self._lock:
            self._recordings.clear()
            self._used = 0

    def reserve(self, size: int) -> None:
        """Reserves bytes, and drops old recordings. Raises SinkError if the limit is too small."""
        with self._lock:
            spare = sum(recorded.size for recorded in self._recordings.values())
            if self._used - spare + size > self._limit:
                raise SinkError(f"the rows exceed the sink's limit of {self._limit} bytes")
            while self._used + size > self._limit:
                _, oldest = self._recordings.popitem(last=False)
                self._used -= oldest.size
            self._used += size

    def release(self, size: int) -> None:
        """Frees bytes of `reserve`."""
        with self._lock:
            self._used -= size

    def store(self, recorded: Recorded) -> None:
        """Stores a finished recording, whose bytes are reserved. Raises Collision."""
        about = recorded.about
        with self._lock:
            if (about.target.tag, about.request_id) in self._recordings:
                raise _collision(about)
            self._recordings[about.target.tag, about.request_id] = recorded


class MemoryRecording:
    """Records one request."""

    pending: Sequence[str] = ()

    def __init__(self, sink: Memory, about: RequestAbout) -> None:
        self._sink = sink
        self._about = about
        self._captures = {capture.capture_index: capture for capture in about.captures}
        self._blocks: list[RowBlock] = []
        self._size = 0

    def write(self, block: RowBlock) -> None:
        """Adds a block. Raises SinkError if it does not fit its capture or the limit."""
        check_block(block, self._captures)
        self._sink.reserve(block.size)
        self._size += block.size
        self._blocks.append(block)

    def finish(self, outcome: Outcome) -> list[Artifact]:
        """Stores the recording."""
        self._sink.store(Recorded(self._about, outcome, tuple(self._blocks)))
        self._size = 0
        return []

    def abandon(self, error: BaseException) -> None:
        """Frees the rows."""
        self._blocks.clear()
        self._sink.release(self._size)
        self._size = 0


def _collision(about: RequestAbout) -> Collision:
    return Collision(f"{about.request_id} is stored already under the tag {about.target.tag}")
