"""Plugins of somebody else, in every way that one can be broken."""

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint

from rheostat_server.sinks import (
    GROUP,
    Artifact,
    Layout,
    Outcome,
    RequestAbout,
    RowBlock,
    SinkConfig,
    Sinks,
    State,
    Target,
)
from rheostat_server.sinks.conformance import COMPLETE
from rheostat_server.sinks.samples import blocks


class Broken:
    """A sink of somebody else's; raises what its class says, where it says."""

    layouts: Sequence[Layout] = ()
    options: Mapping[str, str] = {}
    fails: Mapping[str, Exception] = {}
    pending: Sequence[str] = ("default/rows",)

    def __init__(self, name: str, settings: Mapping[str, str]) -> None:
        self.calls: list[str] = []
        self._do("make")

    def _do(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fails:
            raise self.fails[call]

    def check(self, target: Target) -> None:
        self._do("check")

    def open(self, about: RequestAbout) -> "Broken":
        self._do("open")
        return self

    def write(self, block: RowBlock) -> None:
        self._do("write")

    def finish(self, outcome: Outcome) -> list[Artifact]:
        self._do("finish")
        return [Artifact(path="default/rows", media_type="x/y", state=State.COMPLETE, rows=3)]

    def abandon(self, error: BaseException) -> None:
        self._do("abandon")

    def artifacts(self, request_id: str) -> list[Artifact]:
        return []

    def close(self) -> None:
        self._do("close")


def failing(**fails: Exception) -> type[Broken]:
    return type("Failing", (Broken,), {"fails": fails})


class Plugin(EntryPoint):
    """An entry point that leads to an object at hand."""

    def __new__(cls, made: object) -> "Plugin":
        found = super().__new__(cls)
        vars(found)["made"] = made
        return found

    def __init__(self, made: object) -> None:
        vars(self).update(name="theirs", value="their:sink", group=GROUP)

    def load(self) -> object:
        if isinstance(made := vars(self)["made"], Exception):
            raise made
        return made


def with_plugin(made: object, name: str = "theirs") -> Sinks:
    return Sinks([SinkConfig("s", name, {})], plugins=lambda: {"theirs": Plugin(made)})


def recorded(sinks: Sinks, about: RequestAbout) -> list[Artifact]:
    recording = sinks.open(about)
    for one in blocks(about):
        recording.write(one)
    return recording.finish(COMPLETE)
