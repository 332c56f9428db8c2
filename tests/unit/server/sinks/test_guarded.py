"""Recordings keep to their life cycle, whatever plugins do, and what was written is remembered."""

import asyncio
import tracemalloc
from pathlib import Path

import pytest

from rheostat_server import errors
from rheostat_server.sinks import Artifact, Ending, Layout, Outcome, Point, SinkError, Site, State
from rheostat_server.sinks.guarded import RecentArtifacts, SinkArtifact, SinkFailed
from rheostat_server.sinks.registry import Sinks
from rheostat_server.sinks.samples import CAPTURES, blocks, request
from rheostat_server.sinks.settings import parse_sink

from ..sink_plugins import Broken, failing, recorded, with_plugin

COMPLETE = Outcome(Ending.COMPLETE)


@pytest.fixture
def sinks(tmp_path: Path):
    found = Sinks([parse_sink(f"disk=filesystem:root={tmp_path}"), parse_sink("m=memory")])
    yield found
    found.close()


def looked_up(sinks: Sinks, request_id: str, sink: str = "") -> list[SinkArtifact]:
    return asyncio.run(sinks.lookup(request_id, sink, most=1000)).artifacts


def test_artifacts_are_asked_for_by_request_and_sink(sinks: Sinks) -> None:
    made = recorded(sinks, request("a", Layout.PACKED, sink="disk"))
    recorded(sinks, request("a", None, sink="m"))
    expected = sorted(
        (SinkArtifact("disk", one) for one in made), key=lambda one: one.artifact.path
    )
    assert looked_up(sinks, "a") == looked_up(sinks, "a", "disk") == expected
    for name, sink in (("b", ""), ("a", "m")):
        with pytest.raises(errors.ArtifactNotFound):
            looked_up(sinks, name, sink)
    with pytest.raises(errors.SinkNotFound):
        looked_up(sinks, "a", "x")


def test_what_is_being_written_is_pending_and_what_failed_says_so(sinks: Sinks) -> None:
    recording = sinks.open(request("a", Layout.PACKED, sink="disk"))
    paths = ["default/requests/a/manifest.json", "default/requests/a/rows.safetensors"]
    found = [(one.artifact.path, one.artifact.state) for one in looked_up(sinks, "a")]
    assert found == [(path, State.PENDING) for path in paths]
    recording.abandon(OSError("made up"))
    found = [(one.artifact.path, one.artifact.state) for one in looked_up(sinks, "a")]
    assert found == [(path, State.FAILED) for path in paths]
    recorded(sinks, request("a", Layout.PACKED, sink="disk"))
    assert {one.artifact.state for one in looked_up(sinks, "a")} == {State.COMPLETE}


def test_a_collision_takes_nothing_from_the_request_that_is_there(sinks: Sinks) -> None:
    about = request("a", Layout.PACKED, sink="disk")
    recorded(sinks, about)
    with pytest.raises(errors.ArtifactExists, match="is not overwritten"):
        sinks.open(about)
    assert {one.artifact.state for one in looked_up(sinks, "a")} == {State.COMPLETE}


def test_a_sink_that_remembers_nothing_is_remembered_for() -> None:
    sinks = with_plugin(Broken)
    recording = sinks.open(request("a", None, sink="s"))
    assert [one.artifact.state for one in looked_up(sinks, "a")] == [State.PENDING]
    (made,) = recording.finish(COMPLETE)
    assert looked_up(sinks, "a") == [SinkArtifact("s", made)]


def test_a_request_that_is_refused_takes_nothing_from_what_is_remembered() -> None:
    sinks = with_plugin(Broken)
    about = request("a", None, sink="s")
    (made,) = sinks.open(about).finish(COMPLETE)
    sink = sinks.sink("s")
    assert isinstance(sink, Broken)
    sink.fails = {"open": SinkError("it is there")}
    with pytest.raises(SinkFailed):
        sinks.open(about)
    assert looked_up(sinks, "a") == [SinkArtifact("s", made)]


def artifacts(count: int, state: State = State.COMPLETE) -> list[Artifact]:
    return [
        Artifact(
            path=f"default/requests/x/resid_post.{number}.safetensors",
            media_type="x/y",
            state=state,
            sites=(Site(Point.RESID_POST, number),),
            sha256=bytes([number % 256]) * 32,
        )
        for number in range(count)
    ]


def test_the_last_requests_are_remembered_and_no_more() -> None:
    written = RecentArtifacts(6000)
    for name in ("a", "b", "a", "c"):
        written.record(request(name, None), artifacts(3))
    assert [len(written.get(name)) for name in "abc"] == [3, 0, 3]
    written.record(request("d", None), artifacts(100))  # more than all may take
    assert [len(written.get(name)) for name in "abcd"] == [0, 0, 0, 100]


def test_what_is_remembered_takes_bounded_memory_however_many_files_requests_have() -> None:
    written = RecentArtifacts(1 << 20)
    tracemalloc.start()
    for number in range(300):
        written.record(request(f"r{number}", None), artifacts(200, State.PENDING))
        written.record(request(f"r{number}", None), artifacts(200))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2 << 20
    assert len(written.get("r299")) == 200


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_artifacts_come_in_pages(sinks: Sinks, size: int) -> None:
    for tag in ("x", "y"):
        recorded(sinks, request("a", Layout.PER_FILE, sink="disk", tag=tag))
    sinks.open(request("a", Layout.PACKED, sink="disk", tag="z"))
    whole = looked_up(sinks, "a")
    assert {one.artifact.state for one in whole} == {State.COMPLETE, State.PENDING}
    pages, after = [], None
    while True:
        page = asyncio.run(sinks.lookup("a", after=after, most=size))
        pages.append(page.artifacts)
        if not page.more:
            break
        after = page.artifacts[-1].key
    assert [one for page in pages for one in page] == whole
    assert {len(page) for page in pages[:-1]} <= {size}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SinkError("the rows do not fit"), "the rows do not fit"),
        (OSError(28, "No space left on device", "/secret/path"), "No space left on device"),
        (KeyError("secret"), "KeyError"),
    ],
)
@pytest.mark.parametrize("where", ["open", "write", "finish"])
def test_what_a_plugin_raises_is_a_typed_failure_that_gives_nothing_away(
    where: str, error: Exception, words: str
) -> None:
    sinks = with_plugin(failing(**{where: error}))
    with pytest.raises(SinkFailed) as caught:
        recorded(sinks, request("a", None, sink="s", captures=CAPTURES[:1]))
    assert caught.value.message == f"the sink s could not store the rows: {words}"
    assert caught.value.code == "DATA_LOSS"
    sink = sinks.sink("s")
    assert isinstance(sink, Broken)
    assert sink.calls.count("abandon") == (where != "open")


@pytest.mark.parametrize(
    ("error", "blamed"),
    [
        (errors.CaptureOverflow("rows came faster than they were read"), False),
        (errors.Defect("the request went away"), False),
        (SinkError("it is there"), False),
        (KeyError("a plugin's own"), True),
    ],
)
def test_the_log_blames_a_sink_for_its_own_failures_alone(
    error: Exception, blamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    recording = with_plugin(Broken).open(request("a", None, sink="s"))
    with caplog.at_level("INFO"):
        recording.abandon(error)
    records = [one for one in caplog.records if "sink s" in one.getMessage()]
    assert [one.levelname for one in records] == (["ERROR"] if blamed else [])
    assert not any(one.exc_info for one in records) or blamed


def test_after_a_failure_the_plugin_is_given_nothing_more() -> None:
    sinks = with_plugin(failing(write=SinkError("full"), abandon=KeyError("worse")))
    about = request("a", None, sink="s")
    recording = sinks.open(about)
    (first, *_) = blocks(about)
    for call in (lambda: recording.write(first), lambda: recording.finish(COMPLETE)) * 2:
        with pytest.raises(SinkFailed, match="full"):
            call()
    recording.abandon(OSError("late"))
    sink = sinks.sink("s")
    assert isinstance(sink, Broken)
    assert sink.calls == ["make", "open", "write", "abandon"]
    assert recording.failure is not None


def test_a_recording_that_is_over_takes_nothing() -> None:
    recording = with_plugin(Broken).open(about := request("a", None, sink="s"))
    recording.finish(COMPLETE)
    recording.abandon(OSError("late"))
    for call in (lambda: recording.finish(COMPLETE), lambda: recording.write(next(blocks(about)))):
        with pytest.raises(SinkFailed, match="has ended"):
            call()


def test_a_plugin_that_cannot_say_what_it_has_is_a_defect() -> None:
    class Vague(Broken):
        def artifacts(self, request_id: str) -> list[Artifact]:
            raise KeyError(request_id)

    with pytest.raises(errors.Defect):
        looked_up(with_plugin(Vague), "a")
