"""The sinks of a server: plugins found by entry point, instances by name.

Invariants: every plugin that is configured is made before the server serves, or it does not start;
a name means one sink. What a request may say of its target is decided here and in the sink's
`check`, before anything runs.
"""

import asyncio
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple, NoReturn

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
from rheostat_server.sinks.guarded import ArtifactKey, Found, GuardedRecording, Written
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
from rheostat_server.sinks.settings import SinkConfig
from rheostat_server.sinks.wire import layout_of
from rheostat_server.tasks.offload import offload, on_pool
from rheostat_server.validation import field_path
from rheostat_wire.v1 import capture_pb2

GROUP = "rheostat.capture_sinks"
"""The entry points that plugins are found by; each names a `SinkFactory`."""

BUILT_IN = {
    "filesystem": "rheostat_server.sinks.filesystem:make",
    "logging": "rheostat_server.sinks.log:make",
    "memory": "rheostat_server.sinks.memory:make",
}
"""Ours, which are found in a checkout that is not installed too."""

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Tags of targets."""

_REMEMBERED_BYTES = 16 << 20
"""Memory for what was written for the last requests."""

_WRITERS = 16
_READERS = 2
"""Threads of a sink that write, and that look artefacts up."""

_LOOKUPS = 64
"""Lookups that may wait for the disks of all sinks."""

_ARTIFACT_BYTES = 512
"""What `offload` counts for an artefact."""

_METHODS = ("check", "open", "artifacts", "close")


class Listing(NamedTuple):
    """A sink, as ListSinks says it."""

    name: str
    plugin: str
    layouts: tuple[Layout, ...]
    options: Mapping[str, str]


class Page(NamedTuple):
    """Some of a request's artefacts."""

    found: list[Found]
    """By sink, path and offset."""
    more: bool
    """Whether others follow."""


class _Made(NamedTuple):
    """A sink, and threads that wait for its disk alone."""

    plugin: str
    sink: Sink
    writers: Executor
    readers: Executor


def find_plugins() -> dict[str, EntryPoint]:
    """Every plugin that is installed, by name.

    Raises:
        SinksFailed: two different ones have one name.
    """
    found = {name: EntryPoint(name, value, GROUP) for name, value in BUILT_IN.items()}
    for point in entry_points(group=GROUP):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise SinksFailed(
                f"two packages bring a sink plugin {point.name}: {other.value} and {point.value}; "
                "uninstall one"
            )
    return found


class Sinks:
    """The sinks of a server. `open` and `close` may wait for a disk."""

    def __init__(
        self,
        configs: Sequence[SinkConfig],
        *,
        plugins: Callable[[], Mapping[str, EntryPoint]] = find_plugins,
    ) -> None:
        """Makes every sink, or none.

        Raises:
            SinksFailed: one cannot be made.
        """
        self._written = Written(_REMEMBERED_BYTES)
        self._lookups = 0
        """Those that wait."""
        self._made: dict[str, _Made] = {}
        known = plugins() if configs else {}
        try:
            for config in configs:
                if config.name in self._made:
                    raise SinksFailed(f"two sinks are called {config.name}")
                self._made[config.name] = _Made(
                    config.plugin,
                    _make(config, known),
                    ThreadPoolExecutor(_WRITERS, f"sink-{config.name}"),
                    ThreadPoolExecutor(_READERS, f"sink-{config.name}-read"),
                )
        except SinksFailed:
            self.close()
            raise

    def listed(self) -> list[Listing]:
        """Every sink, by name."""
        return [
            Listing(name, made.plugin, tuple(made.sink.layouts), dict(made.sink.options))
            for name, made in sorted(self._made.items())
        ]

    def sink(self, name: str) -> Sink:
        """A sink itself, for those who embed the server.

        Raises:
            SinkNotFound: there is none of this name.
        """
        return self._get(name, "").sink

    def check(self, target: capture_pb2.SinkTarget, path: str) -> Target:
        """The target of a capture, `path` being that of the message.

        Raises:
            SinkNotFound: there is no such sink.
            InvalidArgument: the sink does not take it.
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
                there = (
                    f"it has {', '.join(sorted(sink.options))}" if sink.options else "it has none"
                )
                raise InvalidValue(
                    f"{target.sink_name} has no option {name}; {there}",
                    field=field_path(field, name),
                )
        found = Target(target.sink_name, tag, layout, dict(target.options))
        try:
            sink.check(found)
        except SinkRefusal as refusal:
            raise InvalidValue(str(refusal), field=field_path(path, refusal.field)) from refusal
        except Exception as error:  # a plugin may raise anything
            raise Defect(f"the sink {target.sink_name} failed to check its options") from error
        return found

    def open(self, about: RequestAbout) -> GuardedRecording:
        """Begins to record a request whose target `check` gave.

        Raises:
            ArtifactExists: the sink holds rows under the request's id and tag.
            SinkFailed: the sink does not take it.
        """
        return GuardedRecording(self._made[about.target.sink].sink, about, self._written)

    def threads(self, name: str) -> Executor:
        """The threads that a sink's recordings are opened and written on."""
        return self._made[name].writers

    async def lookup(
        self, request_id: str, sink: str = "", *, after: ArtifactKey | None = None, most: int
    ) -> Page:
        """What was written for a request, by sink, path and offset, unfinished files among it.

        Each sink is asked on threads of its own, because it may wait for a disk.

        Args:
            request_id: the request.
            sink: the sink that is asked; empty: all are.
            after: only artefacts after this one count; None: all do.
            most: artefacts that are returned at most.

        Raises:
            SinkNotFound: there is no sink of this name.
            ArtifactNotFound: there is nothing.
            QueueFull: too many lookups wait for slow sinks.
        """
        if self._lookups >= _LOOKUPS:
            raise QueueFull(
                f"{self._lookups} lookups wait for sinks; try again later", retry_after=1.0
            )
        asked = {sink: self._get(sink, "sink_name")} if sink else self._made
        self._lookups += 1
        try:
            known = await asyncio.gather(
                *(
                    on_pool(made.readers, self._known, name, request_id)
                    for name, made in asked.items()
                )
            )
            by_name = dict(zip(asked, known, strict=True))
            size = sum(_ARTIFACT_BYTES * len(some) for some in known)
            return await offload(size, self._page, request_id, by_name, after, most)
        finally:
            self._lookups -= 1

    def _page(
        self,
        request_id: str,
        known: Mapping[str, Sequence[Artifact]],
        after: ArtifactKey | None,
        most: int,
    ) -> Page:
        """A page of what sinks know of a request, and of what is remembered for them."""
        listed = [Found(name, artifact) for name, some in known.items() for artifact in some]
        found = {one.key: one for one in listed}
        for one in self._written.of(request_id):
            complete = one.artifact.state is State.COMPLETE
            if one.sink in known and (one.key not in found or complete):
                found[one.key] = one
        if not found:
            raise ArtifactNotFound(
                f"nothing was written for the request {request_id}",
                resource=Resource("artifact", request_id),
            )
        keys = sorted(found)
        start = 0 if after is None else bisect_right(keys, after)
        page = [found[key] for key in keys[start : start + most]]
        return Page(page, start + most < len(keys))

    def _known(self, name: str, request_id: str) -> list[Artifact]:
        try:
            return list(self._made[name].sink.artifacts(request_id))
        except Exception as error:  # a plugin may raise anything
            raise Defect(f"the sink {name} cannot say what it has") from error

    def close(self) -> None:
        """Closes every sink, once their recordings are over."""
        for made in self._made.values():
            made.sink.close()
            for threads in (made.writers, made.readers):
                threads.shutdown(wait=False)

    def _get(self, name: str, field: str) -> _Made:
        validation.text_bytes(name, ID_BYTES, field)
        if name not in self._made:
            there = (
                f"there are {', '.join(sorted(self._made))}"
                if self._made
                else "the server was started without --sink"
            )
            raise SinkNotFound(
                f'there is no sink "{name}"; {there}', field=field, resource=Resource("sink", name)
            )
        return self._made[name]


def _make(config: SinkConfig, known: Mapping[str, EntryPoint]) -> Sink:
    if config.plugin not in known:
        raise SinksFailed(
            f"the sink {config.name} wants a plugin {config.plugin}; there are "
            f"{', '.join(sorted(known))}"
        )
    try:
        sink: Sink = known[config.plugin].load()(config.name, config.settings)
        _check_shape(config, sink)
    except SinkSettingsError as error:
        raise SinksFailed(f"the sink {config.name} cannot be made: {error}") from error
    except SinksFailed:
        raise
    except Exception as error:  # a plugin may raise anything
        raise SinksFailed(
            f"the plugin {config.plugin} of the sink {config.name} is broken: "
            f"{type(error).__name__}: {error}"
        ) from error
    return sink


def _check_shape(config: SinkConfig, sink: Sink) -> None:
    def broken(why: str) -> NoReturn:
        raise SinksFailed(f"the plugin {config.plugin} of the sink {config.name} is broken: {why}")

    for method in _METHODS:
        if not callable(getattr(sink, method, None)):
            broken(f"its sink has no {method}()")
    if not all(isinstance(layout, Layout) for layout in sink.layouts):
        broken("its layouts are none of ours")
    if not all(isinstance(text, str) for pair in sink.options.items() for text in pair):
        broken("its options are not texts")
