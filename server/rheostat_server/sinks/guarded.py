"""A recording that keeps to its life cycle, whatever its plugin does.

Invariants: whatever the plugin raises becomes SinkFailed, or ArtifactExists if its `open` raises
Collision. After a failure the recording is abandoned once and given nothing more. Every request
that was opened here ends in `Written` as complete, partial or failed. Callers keep to one call at a
time per recording.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

from rheostat_server.errors import ArtifactExists, RheostatError, RowsLost
from rheostat_server.sinks.protocol import (
    Artifact,
    Buffering,
    Collision,
    Outcome,
    Recording,
    RequestAbout,
    RowBlock,
    Sink,
    SinkError,
    State,
)

_LOG = logging.getLogger(__name__)

_ENTRY_BYTES = 512
_ARTIFACT_BYTES = 512
_SITE_BYTES = 80
"""What a request and each of its targets take in `Written`, an artefact, and a site of one."""


class SinkFailed(RowsLost):
    """A sink could not keep a request's rows; none of them can be found in it."""


class ArtifactKey(NamedTuple):
    """The order of a request's artefacts."""

    sink: str
    path: str
    offset: int


class Found(NamedTuple):
    """An artefact and the sink that has it."""

    sink: str
    artifact: Artifact

    @property
    def key(self) -> ArtifactKey:
        """Its place in the order."""
        return ArtifactKey(self.sink, self.artifact.path, self.artifact.offset)


_Target = tuple[str, str]
"""A sink and a tag."""


class _Entry(NamedTuple):
    """What was written for a request."""

    by_target: dict[_Target, tuple[Artifact, ...]]
    size: int


class Written:
    """What was written for the last requests, in bounded memory.

    A sink that can be asked for its artefacts knows those that are published. What is remembered
    here are those that are not, and those of sinks that remember nothing.
    """

    def __init__(self, most_bytes: int) -> None:
        """Remembers about so many bytes, and always the request that was written last."""
        self._most = most_bytes
        self._lock = Lock()
        self._size = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def note(self, about: RequestAbout, artifacts: Sequence[Artifact]) -> None:
        """Takes the place of what was known of a request's target."""
        name, target = about.request_id, (about.target.sink, about.target.tag)
        with self._lock:
            known = self._entries.pop(name, _Entry({}, 0))
            by_target = {**known.by_target, target: tuple(artifacts)}
            entry = _Entry(by_target, _size(by_target))
            self._entries[name] = entry
            self._size += entry.size - known.size
            while self._size > self._most and len(self._entries) > 1:
                self._size -= self._entries.popitem(last=False)[1].size

    def of(self, request_id: str) -> list[Found]:
        """What is known of a request."""
        with self._lock:
            entry = self._entries.get(request_id)
        if entry is None:
            return []
        return [
            Found(sink, artifact)
            for (sink, _), artifacts in entry.by_target.items()
            for artifact in artifacts
        ]


def _size(by_target: Mapping[_Target, Sequence[Artifact]]) -> int:
    """Bytes that an entry takes, about."""
    artifacts = [one for some in by_target.values() for one in some]
    return _ENTRY_BYTES * (1 + len(by_target)) + sum(
        _ARTIFACT_BYTES + len(one.path) + _SITE_BYTES * len(one.sites) for one in artifacts
    )


class GuardedRecording:
    """A recording, guarded."""

    def __init__(self, sink: Sink, about: RequestAbout, written: Written) -> None:
        """Opens it.

        Raises:
            ArtifactExists: the sink holds rows under this request id and tag.
            SinkFailed: the sink does not take it.
        """
        self.about = about
        self.rows = 0
        """Rows that the sink has taken."""
        self.failure: SinkFailed | None = None
        self._written = written
        self._over = False
        self._pending: list[Artifact] | None = None
        try:
            self._recording: Recording = sink.open(about)
        except Collision as error:
            # The client chose the id and the tag, and no row has been made: no sink has failed.
            raise ArtifactExists(
                str(error),
                field=f"captures[{about.captures[0].capture_index}].sink",
                metadata={"sink": about.target.sink, "tag": about.target.tag},
            ) from error
        except Exception as error:  # a plugin may raise anything
            raise self._failed(error) from error
        try:
            self._pending = _announced(self._recording.pending)
        except Exception as error:  # as above
            raise self._abandon(error) from error
        written.note(about, self._pending)

    @property
    def memory(self) -> int:
        """Bytes of rows that the sink holds in memory and can move elsewhere."""
        recording = self._recording
        return 0 if self._over or not isinstance(recording, Buffering) else recording.memory

    def flush(self) -> None:
        """Lets the sink move them.

        Raises:
            SinkFailed: the sink failed, now or before.
        """
        self._check_open()
        if isinstance(self._recording, Buffering):
            try:
                self._recording.flush()
            except Exception as error:  # as above
                raise self._abandon(error) from error

    def write(self, block: RowBlock) -> None:
        """Hands rows over.

        Raises:
            SinkFailed: the sink failed, now or before.
        """
        self._check_open()
        try:
            self._recording.write(block)
        except Exception as error:  # as above
            raise self._abandon(error) from error
        self.rows += block.rows

    def finish(self, outcome: Outcome) -> list[Artifact]:
        """Publishes everything; what can be found from now on.

        Raises:
            SinkFailed: the sink failed, now or before, and nothing can be found.
        """
        self._check_open()
        try:
            artifacts = list(self._recording.finish(outcome))
        except Exception as error:  # as above
            raise self._abandon(error) from error
        self._over = True
        self._written.note(self.about, artifacts)
        return artifacts

    def abandon(self, error: BaseException) -> None:
        """Ends the recording without publishing; does nothing where it is over."""
        if not self._over:
            self._abandon(error)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._over:
            raise SinkFailed("the recording is over")

    def _abandon(self, error: BaseException) -> SinkFailed:
        self._over = True
        try:
            self._recording.abandon(error)
        except Exception:  # it must not hide the first failure
            _LOG.exception("the sink %s failed to abandon a request", self.about.target.sink)
        return self._failed(error)

    def _failed(self, error: BaseException) -> SinkFailed:
        self._over = True
        if self._pending is not None:  # else another recording's artefacts may be known
            failed = [replace(one, state=State.FAILED) for one in self._pending]
            self._written.note(self.about, failed)
        self.failure = SinkFailed(
            f"the sink {self.about.target.sink} could not keep the rows: {_words(error)}",
            metadata={"rows": str(self.rows), "sink": self.about.target.sink},
        )
        # A RheostatError is why the server gives the request up, which is no fault of the sink.
        if not isinstance(error, SinkError | OSError | RheostatError):
            _LOG.error("the sink %s is at fault", self.about.target.sink, exc_info=error)
        return self.failure


def _announced(paths: Sequence[str]) -> list[Artifact]:
    return [
        Artifact(path=path, media_type=_media_type(path), state=State.PENDING) for path in paths
    ]


def _media_type(path: str) -> str:
    ending = path.rpartition(".")[2]
    return f"application/{'json' if ending == 'json' else f'x-{ending}'}"


def _words(error: BaseException) -> str:
    """What a client may read of an error: no paths of the server, no internals."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error) if isinstance(error, SinkError) else type(error).__name__
