"""The sinks of a server: plugins found by entry point, sinks by name.

If a configured sink cannot be made, the server does not start. Targets are checked here and in the
sink's `check`, before the request runs.
"""

import asyncio
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from rheostat_server import validation
from rheostat_server.errors import (
    ArtifactNotFound,
    Defect,
    InvalidValue,
    QueueFull,
    Resource,
    SinkNotFound,
    SinksFailed,
)
from rheostat_server.limits import ID_BYTES, SINK_OPTION_BYTES, SINK_OPTIONS
from rheostat_server.sinks.guarded import (
    ArtifactKey,
    GuardedRecording,
    RecentArtifacts,
    SinkArtifact,
)
from rheostat_server.sinks.protocol import (
    Artifact,
    Layout,
    RequestAbout,
    Sink,
    SinkRefusal,
    SinkSettingsError,
    State,
    Target,
)
from rheostat_server.sinks.settings import EXAMPLE, SinkConfig
from rheostat_server.sinks.wire import layout_of
from rheostat_server.tasks.offload import offload, on_pool
from rheostat_server.validation import field_path
from rheostat_wire.v1 import capture_pb2

GROUP = "rheostat.capture_sinks"
"""The entry point group of plugins; each entry point names a `SinkFactory`."""

BUILT_IN = {
    "filesystem": "rheostat_server.sinks.filesystem:make",
    "logging": "rheostat_server.sinks.log:make",
    "memory": "rheostat_server.sinks.memory:make",
}
"""Plugins of the server, which are also found in a checkout that is not installed."""

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Tags of targets."""

_RECENT_BYTES = 16 << 20
"""Memory for the artefacts of the last requests."""

_WRITERS = 16
_READERS = 2
"""Threads of a sink for writing rows, and for looking up artefacts."""

_LOOKUPS = 64
"""Lookups that may wait at the same time, for all sinks."""

_ARTIFACT_BYTES = 512
"""Bytes of an artefact for `offload`."""

_METHODS = ("check", "open", "artifacts", "close")


class SinkListing(NamedTuple):
    """A sink in the answer of ListSinks."""

    name: str
    plugin: str
    layouts: tuple[Layout, ...]
    options: Mapping[str, str]


class Page(NamedTuple):
    """A page of a request's artefacts."""

    artifacts: list[SinkArtifact]
    """By sink, path and offset."""
    more: bool
    """Whether further artefacts follow."""


class _OpenSink(NamedTuple):
    """A sink, and its own threads, because its disk may be slow."""

    plugin: str
    sink: Sink
    writers: Executor
    readers: Executor


def find_plugins() -> dict[str, EntryPoint]:
    """Every installed plugin, by name.

    Raises:
        SinksFailed: two different plugins have one name.
    """
    plugins = {name: EntryPoint(name, value, GROUP) for name, value in BUILT_IN.items()}
    for point in entry_points(group=GROUP):
        other = plugins.setdefault(point.name, point)
        if other.value != point.value:
            raise SinksFailed(
                f"two packages have a sink plugin {point.name}: {other.value} and {point.value}; "
                "uninstall one"
            )
    return plugins


class Sinks:
    """The sinks of a server. `open` and `close` may wait for a disk."""

    def __init__(
        self,
        configs: Sequence[SinkConfig],
        *,
        plugins: Callable[[], Mapping[str, EntryPoint]] = find_plugins,
    ) -> None:
        self._recent = RecentArtifacts(_RECENT_BYTES)
        self._lookups = 0
        """Number of running lookups."""
        self._sinks: dict[str, _OpenSink] = {}
        installed = plugins() if configs else {}
        try:
            for config in configs:
                if config.name in self._sinks:
                    raise SinksFailed(f"two sinks are called {config.name}: give each its own name")
                self._sinks[config.name] = _OpenSink(
                    config.plugin,
                    _make(config, installed),
                    ThreadPoolExecutor(_WRITERS, f"sink-{config.name}"),
                    ThreadPoolExecutor(_READERS, f"sink-{config.name}-read"),
                )
        except SinksFailed:
            self.close()
            raise

    def listed(self) -> list[SinkListing]:
        """Every sink, by name."""
        return [
            SinkListing(name, entry.plugin, tuple(entry.sink.layouts), dict(entry.sink.options))
            for name, entry in sorted(self._sinks.items())
        ]

    def sink(self, name: str) -> Sink:
        """The sink object, for programs that embed the server.

        Raises:
            SinkNotFound: there is no sink of this name.
        """
        return self._get(name, "").sink

    def check(self, target: capture_pb2.SinkTarget, path: str) -> Target:
        """The target of a capture; `path` is that of the message.

        Raises:
            SinkNotFound: there is no such sink.
            InvalidArgument: the target is invalid, or the sink refuses it.
        """
        sink = self._get(target.sink_name, field_path(path, "sink_name")).sink
        tag = target.tag if target.HasField("tag") else "default"
        validation.matches(tag, TAG, field_path(path, "tag"))
        layout = layout_of(target, sink.layouts, path)
        field = field_path(path, "options")
        validation.check_count(len(target.options), SINK_OPTIONS, field, "options")
        for name in sorted(target.options):
            validation.text_bytes(name, ID_BYTES, field)
            validation.text_bytes(target.options[name], SINK_OPTION_BYTES, field_path(field, name))
            if name not in sink.options:
                options = ", ".join(sorted(sink.options)) or "none"
                raise InvalidValue(
                    f"{target.sink_name} has no option {name}; it has {options}",
                    field=field_path(field, name),
                )
        checked = Target(target.sink_name, tag, layout, dict(target.options))
        try:
            sink.check(checked)
        except SinkRefusal as refusal:
            raise InvalidValue(str(refusal), field=field_path(path, refusal.field)) from refusal
        except Exception as error:  # a plugin may raise anything
            raise Defect(f"the sink {target.sink_name} failed to check its options") from error
        return checked

    def open(self, about: RequestAbout) -> GuardedRecording:
        """Begins to record a request whose target `check` returned.

        Raises:
            ArtifactExists: the sink has rows under the request's id and tag.
            SinkFailed: the sink failed.
        """
        return GuardedRecording(self._sinks[about.target.sink].sink, about, self._recent)

    def threads(self, name: str) -> Executor:
        """The threads for opening and writing the recordings of a sink."""
        return self._sinks[name].writers

    async def lookup(
        self, request_id: str, sink: str = "", *, after: ArtifactKey | None = None, most: int
    ) -> Page:
        """At most `most` artefacts of a request in one sink, or in all, that follow `after`.

        They are sorted by sink, path and offset, and include unfinished files.

        Raises:
            SinkNotFound: there is no sink of this name.
            ArtifactNotFound: there are no artefacts.
            QueueFull: too many lookups wait for slow sinks.
        """
        if self._lookups >= _LOOKUPS:
            raise QueueFull(
                f"{self._lookups} lookups wait for sinks; try again later", retry_after=1.0
            )
        sinks = {sink: self._get(sink, "sink_name")} if sink else self._sinks
        self._lookups += 1
        try:
            published = await asyncio.gather(
                *(
                    on_pool(entry.readers, self._published, name, request_id)
                    for name, entry in sinks.items()
                )
            )
            by_name = dict(zip(sinks, published, strict=True))
            size = sum(_ARTIFACT_BYTES * len(artifacts) for artifacts in published)
            return await offload(size, self._page, request_id, by_name, after, most)
        finally:
            self._lookups -= 1

    def _page(
        self,
        request_id: str,
        published: Mapping[str, Sequence[Artifact]],
        after: ArtifactKey | None,
        most: int,
    ) -> Page:
        """A page of the artefacts that sinks list and of recent ones."""
        by_key = {
            entry.key: entry
            for name, artifacts in published.items()
            for entry in (SinkArtifact(name, artifact) for artifact in artifacts)
        }
        for entry in self._recent.get(request_id):
            complete = entry.artifact.state is State.COMPLETE
            if entry.sink in published and (entry.key not in by_key or complete):
                by_key[entry.key] = entry
        if not by_key:
            raise ArtifactNotFound(
                f"nothing was written for the request {request_id}",
                resource=Resource("artifact", request_id),
            )
        keys = sorted(by_key)
        start = 0 if after is None else bisect_right(keys, after)
        page = [by_key[key] for key in keys[start : start + most]]
        return Page(page, start + most < len(keys))

    def _published(self, name: str, request_id: str) -> list[Artifact]:
        try:
            return list(self._sinks[name].sink.artifacts(request_id))
        except Exception as error:  # a plugin may raise anything
            raise Defect(f"the sink {name} failed to list artefacts") from error

    def close(self) -> None:
        """Closes every sink. All recordings must have ended."""
        for entry in self._sinks.values():
            entry.sink.close()
            for threads in (entry.writers, entry.readers):
                threads.shutdown(wait=False)

    def _get(self, name: str, field: str) -> _OpenSink:
        validation.text_bytes(name, ID_BYTES, field)
        if name not in self._sinks:
            names = ", ".join(sorted(self._sinks))
            advice = (
                f"there are {names}"
                if names
                else f"the server was started without one: rheostat serve MODEL --sink {EXAMPLE}"
            )
            raise SinkNotFound(
                f'there is no sink "{name}"; {advice}', field=field, resource=Resource("sink", name)
            )
        return self._sinks[name]


def _make(config: SinkConfig, plugins: Mapping[str, EntryPoint]) -> Sink:
    if config.plugin not in plugins:
        raise SinksFailed(
            f"the sink {config.name} needs a plugin {config.plugin}; there are "
            f"{', '.join(sorted(plugins))}; a sink is given as in {EXAMPLE}"
        )
    broken = f"the plugin {config.plugin} of the sink {config.name} is broken"
    try:
        sink: Sink = plugins[config.plugin].load()(config.name, config.settings)
        problem = _problem_of(sink)
    except SinkSettingsError as error:
        raise SinksFailed(f"the sink {config.name} cannot be made: {error}") from error
    except Exception as error:  # a plugin may raise anything
        raise SinksFailed(f"{broken}: {type(error).__name__}: {error}") from error
    if problem:
        raise SinksFailed(f"{broken}: {problem}")
    return sink


def _problem_of(sink: Sink) -> str:
    """What a sink lacks of the protocol; empty if it has everything."""
    for method in _METHODS:
        if not callable(getattr(sink, method, None)):
            return f"its sink has no {method}()"
    if not all(isinstance(layout, Layout) for layout in sink.layouts):
        return "its layouts are not of type Layout"
    if not all(isinstance(text, str) for pair in sink.options.items() for text in pair):
        return "its options are not texts"
    return ""
