"""Sinks of somebody else: broken in every way, or slow; and captures that go to them."""

import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint

from rheostat_server.sinks import (
    Artifact,
    Layout,
    Outcome,
    RequestAbout,
    RowBlock,
    State,
    Target,
    registry,
)
from rheostat_server.sinks.conformance import COMPLETE
from rheostat_server.sinks.registry import GROUP, Sinks
from rheostat_server.sinks.samples import blocks
from rheostat_server.sinks.settings import SinkConfig
from rheostat_wire.v1 import capture_pb2

from .messages import site_set
from .subscribers import POST


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


class Slow:
    """A sink that waits at one of its calls until its gate is opened."""

    layouts: Sequence[Layout] = ()
    options: Mapping[str, str] = {}
    pending: Sequence[str] = ()
    at = ""
    made: "Slow"

    def __init__(self, name: str, settings: Mapping[str, str]) -> None:
        self.gate = threading.Event()
        self.calls: list[str] = []
        Slow.made = self

    def _do(self, call: str) -> None:
        self.calls.append(call)
        if call == self.at:
            self.gate.wait(20)

    def check(self, target: Target) -> None:
        pass

    def open(self, about: RequestAbout) -> "Slow":
        self._do("open")
        return self

    def write(self, block: RowBlock) -> None:
        self._do("write")

    def finish(self, outcome: Outcome) -> list[Artifact]:
        self._do("finish")
        return []

    def abandon(self, error: BaseException) -> None:
        self._do("abandon")

    def artifacts(self, request_id: str) -> list[Artifact]:
        return []

    def close(self) -> None:
        pass


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


async def with_slow(starter, monkeypatch, at: str):
    """A server with such a sink, which waits at the call `at`; and the sink."""
    monkeypatch.setattr(registry, "entry_points", lambda **_: [Plugin(Slow)])
    running = await starter(sinks=("mem=theirs",))
    Slow.made.at = at
    return running, Slow.made


def stored(*layers: int, **fields: object) -> capture_pb2.CaptureSpec:
    """A capture for a sink."""
    sink = capture_pb2.SinkTarget(sink_name=fields.pop("sink", "mem"))
    return capture_pb2.CaptureSpec(sites=site_set(POST, layers=layers or (1,)), sink=sink, **fields)
