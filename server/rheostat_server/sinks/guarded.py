"""A recording that enforces the life cycle, whatever its plugin does.

Every exception of the plugin becomes SinkFailed, or ArtifactExists if its `open` raises Collision.
After a failure the recording is abandoned once and receives no further calls. Every request that
was opened here ends in `RecentArtifacts` as complete, partial or failed. Callers make one call at a
time per recording.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import NamedTuple, TypeAlias

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
"""Approximate memory of a request, of each of its targets and artefacts in `RecentArtifacts`."""
_SITE_BYTES = 80
"""Approximate memory of a site of an artefact."""


class SinkFailed(RowsLost):
    """A sink could not store the rows of a request; it has none of them."""


class ArtifactKey(NamedTuple):
    """The order of a request's artefacts."""

    sink: str
    path: str
    offset: int


class SinkArtifact(NamedTuple):
    """An artefact and its sink."""

    sink: str
    artifact: Artifact

    @property
    def key(self) -> ArtifactKey:
        """The sort key."""
        return ArtifactKey(self.sink, self.artifact.path, self.artifact.offset)


_ByTarget: TypeAlias = Mapping[tuple[str, str], Sequence[Artifact]]
"""The artefacts of a request, by sink and tag."""


class RecentArtifacts:
    """The artefacts of the last requests, in about `most_bytes` of memory, at least one request.

    Sinks list their published artefacts. This class adds pending and failed artefacts, and those of
    sinks that list none.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = Lock()
        self._size = 0
        self._requests: OrderedDict[str, _ByTarget] = OrderedDict()

    def record(self, about: RequestAbout, artifacts: Sequence[Artifact]) -> None:
        """Replaces the artefacts of a request's target."""
        name, target = about.request_id, (about.target.sink, about.target.tag)
        with self._lock:
            old = self._requests.pop(name, {})
            self._requests[name] = {**old, target: tuple(artifacts)}
            self._size += _size(self._requests[name]) - _size(old)
            while self._size > self._most and len(self._requests) > 1:
                self._size -= _size(self._requests.popitem(last=False)[1])

    def get(self, request_id: str) -> list[SinkArtifact]:
        """The artefacts of a request."""
        with self._lock:
            by_target = self._requests.get(request_id, {})
        return [
            SinkArtifact(sink, artifact)
            for (sink, _), artifacts in by_target.items()
            for artifact in artifacts
        ]


def _size(by_target: _ByTarget) -> int:
    entries = 1 + len(by_target) if by_target else 0
    return _ENTRY_BYTES * entries + sum(
        _ENTRY_BYTES + len(artifact.path) + _SITE_BYTES * len(artifact.sites)
        for artifacts in by_target.values()
        for artifact in artifacts
    )


class GuardedRecording:
    """A recording of a plugin; see the module's docstring."""

    def __init__(self, sink: Sink, about: RequestAbout, recent: RecentArtifacts) -> None:
        """Opens the recording.

        Raises:
            ArtifactExists: the sink has rows under this request id and tag.
            SinkFailed: the sink failed.
        """
        self.about = about
        self.rows = 0
        """Rows that the sink has accepted."""
        self.failure: SinkFailed | None = None
        self._recent = recent
        self._ended = False
        self._pending: list[Artifact] | None = None
        try:
            self._recording: Recording = sink.open(about)
        except Collision as error:
            # The client chose the id and the tag, and no row exists yet, so no sink has failed.
            raise ArtifactExists(
                str(error),
                field=f"captures[{about.captures[0].capture_index}].sink",
                metadata={"sink": about.target.sink, "tag": about.target.tag},
            ) from error
        except Exception as error:  # a plugin may raise anything
            raise self._record_failure(error) from error
        with self._calling():
            self._pending = [_pending_artifact(path) for path in self._recording.pending]
        recent.record(about, self._pending)

    @property
    def memory(self) -> int:
        """Bytes of rows that the sink has in memory and can move to a disk."""
        recording = self._recording
        return 0 if self._ended or not isinstance(recording, Buffering) else recording.memory

    def flush(self) -> None:
        """Makes the sink move rows from memory to a disk.

        Raises:
            SinkFailed: the sink failed, now or before.
        """
        with self._calling():
            if isinstance(self._recording, Buffering):
                self._recording.flush()

    def write(self, block: RowBlock) -> None:
        """Passes rows to the sink.

        Raises:
            SinkFailed: the sink failed, now or before.
        """
        with self._calling():
            self._recording.write(block)
        self.rows += block.rows

    def finish(self, outcome: Outcome) -> list[Artifact]:
        """Publishes the request, and returns its artefacts.

        Raises:
            SinkFailed: the sink failed, now or before, and has none of the rows.
        """
        with self._calling():
            artifacts = list(self._recording.finish(outcome))
        self._ended = True
        self._recent.record(self.about, artifacts)
        return artifacts

    def abandon(self, error: BaseException) -> None:
        """Ends the recording without publishing; does nothing if it has ended."""
        if not self._ended:
            self._abandon(error)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Makes any error of a call of the recording a failure. Raises SinkFailed."""
        if self.failure is not None:
            raise self.failure
        if self._ended:
            raise SinkFailed("the recording has ended")
        try:
            yield
        except Exception as error:  # a plugin may raise anything
            raise self._abandon(error) from error

    def _abandon(self, error: BaseException) -> SinkFailed:
        self._ended = True
        try:
            self._recording.abandon(error)
        except Exception:  # it must not hide the first failure
            _LOG.exception("the sink %s failed to abandon a request", self.about.target.sink)
        return self._record_failure(error)

    def _record_failure(self, error: BaseException) -> SinkFailed:
        self._ended = True
        if self._pending is not None:  # otherwise this would replace those of another recording
            failed = [replace(artifact, state=State.FAILED) for artifact in self._pending]
            self._recent.record(self.about, failed)
        self.failure = SinkFailed(
            f"the sink {self.about.target.sink} could not store the rows: {_public_text(error)}",
            metadata={"rows": str(self.rows), "sink": self.about.target.sink},
        )
        # With a RheostatError the server itself ended the request, so the sink has no defect.
        if not isinstance(error, SinkError | OSError | RheostatError):
            _LOG.error("the sink %s has a defect", self.about.target.sink, exc_info=error)
        return self.failure


def _pending_artifact(path: str) -> Artifact:
    ending = path.rpartition(".")[2]
    media_type = f"application/{'json' if ending == 'json' else f'x-{ending}'}"
    return Artifact(path=path, media_type=media_type, state=State.PENDING)


def _public_text(error: BaseException) -> str:
    """The text of an error for clients, without paths and internals of the server."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error) if isinstance(error, SinkError) else type(error).__name__
