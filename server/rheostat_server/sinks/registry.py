"""The sinks of a server: plugins found by entry point, instances by name.

Invariants: every plugin that is configured is made before the server serves, or it does not start;
a name means one sink. What a request may say of its target is decided here and in the sink's
`check`, before anything runs.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple, NoReturn

from rheostat._proto.v1 import capture_pb2
from rheostat_server import checks
from rheostat_server.checks import join
from rheostat_server.errors import (
    ArtifactNotFound,
    Defect,
    InvalidValue,
    Resource,
    SinkNotFound,
    SinksFailed,
)
from rheostat_server.sinks.guarded import Found, GuardedRecording, Written
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

_OPTIONS = 32
_REMEMBERED = 4096
_METHODS = ("check", "open", "artifacts", "close")


class Listing(NamedTuple):
    """A sink, as ListSinks says it."""

    name: str
    plugin: str
    layouts: tuple[Layout, ...]
    options: Mapping[str, str]


class _Made(NamedTuple):
    plugin: str
    sink: Sink


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
    """The sinks of a server. Everything but `listed` and `check` may wait for a disk."""

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
        self._written = Written(_REMEMBERED)
        self._made: dict[str, _Made] = {}
        known = plugins() if configs else {}
        try:
            for config in configs:
                if config.name in self._made:
                    raise SinksFailed(f"two sinks are called {config.name}")
                self._made[config.name] = _Made(config.plugin, _make(config, known))
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
        sink = self._get(target.sink, join(path, "sink")).sink
        tag = target.tag if target.HasField("tag") else "default"
        checks.matches(tag, TAG, join(path, "tag"))
        layout = layout_of(target, sink.layouts, path)
        field = join(path, "options")
        checks.at_most(len(target.options), _OPTIONS, field, "options")
        for name in sorted(target.options):
            if name not in sink.options:
                there = (
                    f"it has {', '.join(sorted(sink.options))}" if sink.options else "it has none"
                )
                raise InvalidValue(
                    f"{target.sink} has no option {name}; {there}", field=join(field, name)
                )
        found = Target(target.sink, tag, layout, dict(target.options))
        try:
            sink.check(found)
        except SinkRefusal as refusal:
            raise InvalidValue(str(refusal), field=join(path, refusal.field)) from refusal
        except Exception as error:  # a plugin may raise anything
            raise Defect(f"the sink {target.sink} failed to check its options") from error
        return found

    def open(self, about: RequestAbout) -> GuardedRecording:
        """Begins to record a request whose target `check` gave.

        Raises:
            SinkFailed: the sink does not take it.
        """
        return GuardedRecording(self._made[about.target.sink].sink, about, self._written)

    def artifacts(self, request_id: str, sink: str = "") -> list[Found]:
        """What was written for a request, by sink and path; unfinished and failed files too.

        Raises:
            SinkNotFound: `sink` is not empty, and there is none of this name.
            ArtifactNotFound: there is nothing.
        """
        if sink:
            self._get(sink, "sink")
        names = [sink] if sink else list(self._made)
        found: dict[tuple[str, str, int], Artifact] = {}
        for name in names:
            for artifact in self._known(name, request_id):
                found[name, artifact.path, artifact.offset] = artifact
        for one in self._written.of(request_id):
            key = (one.sink, one.artifact.path, one.artifact.offset)
            if one.sink in names and (key not in found or one.artifact.state is State.COMPLETE):
                found[key] = one.artifact
        if not found:
            raise ArtifactNotFound(
                f"nothing was written for the request {request_id}",
                resource=Resource("artifact", request_id),
            )
        return [Found(key[0], artifact) for key, artifact in sorted(found.items())]

    def _known(self, name: str, request_id: str) -> list[Artifact]:
        try:
            return list(self._made[name].sink.artifacts(request_id))
        except Exception as error:  # a plugin may raise anything
            raise Defect(f"the sink {name} cannot say what it has") from error

    def close(self) -> None:
        """Closes every sink, once their recordings are over."""
        for made in self._made.values():
            made.sink.close()

    def _get(self, name: str, field: str) -> _Made:
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
