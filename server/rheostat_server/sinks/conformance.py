"""The rules that every sink must keep, as checks that its author runs.

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
    def test_my_sink_keeps_the_rule(rule: Rule, tmp_path: Path) -> None:
        rule(Harness(lambda: MySink(tmp_path), read=my_reader))

A broken rule raises NotConforming. Every rule checks all layouts of the sink.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rheostat_server.sinks.protocol import (
    Artifact,
    Collision,
    Ending,
    Layout,
    Outcome,
    Recording,
    RequestAbout,
    RowBlock,
    Sink,
    SinkError,
    State,
    Target,
)
from rheostat_server.sinks.samples import blocks, request

COMPLETE = Outcome(Ending.COMPLETE)


class NotConforming(AssertionError):
    """A sink breaks a rule."""


@dataclass(frozen=True)
class Harness:
    """Gives the rules access to a sink."""

    make: Callable[[], Sink]
    """Makes a sink on a store that no other open sink uses. At the first call the store is empty.
    Later it has the rows of earlier sinks, if it is lasting."""
    read: Callable[[Sink, RequestAbout], "list[RowBlock] | None"] | None = None
    """Reads the rows of a finished request with the author's reader, in blocks of any size; None if
    there is no such request. None: rows of this sink cannot be read."""
    read_bytes: Callable[[Sink, Artifact], bytes] | None = None
    """Reads the bytes of an artefact. None: the sink makes no artefacts."""
    lasting: bool = False
    """Whether finished requests are still there after `close`."""


Rule: TypeAlias = Callable[[Harness], None]


def it_describes_itself(harness: Harness) -> None:
    """Layouts are of type `Layout`, each once; options have one line of explanation."""
    with _open_sink(harness) as sink:
        layouts = list(sink.layouts)
        _check(all(isinstance(layout, Layout) for layout in layouts), "a layout is not a `Layout`")
        _check(len(set(layouts)) == len(layouts), "a layout is listed twice")
        for name, text in sink.options.items():
            _check(bool(name and text) and "\n" not in text, f"option {name} needs one line")


def it_takes_targets_without_options(harness: Harness) -> None:
    """`check` accepts every layout of the sink without options."""
    with _open_sink(harness) as sink:
        for layout in _layouts(sink):
            sink.check(Target("sink", "default", layout, {}))


def rows_come_back_as_they_were(harness: Harness) -> None:
    """Every bit of every capture, sample, baseline and label is read back."""
    for sink, about in _each_layout(harness, "rows:1"):
        written = _record(sink, about)
        _check_read(harness, sink, about, written)


def a_request_without_rows_can_be_finished(harness: Harness) -> None:
    """It can be read, and has no rows."""
    for sink, about in _each_layout(harness, "empty"):
        artifacts = sink.open(about).finish(COMPLETE)
        row_count = sum(artifact.rows for artifact in artifacts)
        _check(row_count == 0, "artefacts count rows that were never written")
        _check_read(harness, sink, about, [])


def artifacts_say_what_they_hold(harness: Harness) -> None:
    """Rows, bytes, digests, states and relative paths are right, also in `artifacts()`."""
    for sink, about in _each_layout(harness, "described"):
        artifacts = _open_with(sink, about, blocks(about)).finish(COMPLETE)
        for artifact in artifacts:
            path = artifact.path
            _check(not {"", ".", ".."} & set(path.split("/")), f"{path} is not a relative path")
            _check(artifact.state is State.COMPLETE, f"{path} is {artifact.state}, not complete")
            if harness.read_bytes is not None:
                data = harness.read_bytes(sink, artifact)
                _check(len(data) == artifact.length, f"{path} has {len(data)} bytes")
                _check(hashlib.sha256(data).digest() == artifact.sha256, f"{path}: wrong SHA-256")
        if artifacts:
            rows = sum(block.rows for block in blocks(about))
            counted = sum(artifact.rows for artifact in artifacts)
            _check(counted == rows, f"artefacts count {counted} rows of {rows}")
            listed = sink.artifacts(about.request_id)
            _check(_keys(listed) == _keys(artifacts), "artifacts() and finish() differ")
            _check(sink.artifacts("another") == [], "artifacts() of an unknown request")


def lost_rows_make_a_request_partial(harness: Harness) -> None:
    """After PARTIAL and ABORTED the written rows are stored, and no artefact is complete."""
    for ending in (Ending.PARTIAL, Ending.ABORTED):
        for sink, about in _each_layout(harness, f"lost-{ending}"):
            written = _record(sink, about, Outcome(ending, dropped_rows=3))
            states = {artifact.state for artifact in sink.artifacts(about.request_id)}
            _check(states <= {State.PARTIAL}, f"after {ending} artefacts are {sorted(states)}")
            _check_read(harness, sink, about, written)


def nothing_can_be_found_before_the_end(harness: Harness) -> None:
    """Before `finish`, neither rows nor artefacts can be found."""
    for sink, about in _each_layout(harness, "early"):
        recording = _open_with(sink, about, blocks(about))
        _check_absent(harness, sink, about, "before finish()")
        recording.finish(COMPLETE)


def what_is_abandoned_is_gone(harness: Harness) -> None:
    """After `abandon`, nothing can be found, and the id can be used again."""
    for sink, about in _each_layout(harness, "abandoned"):
        recording = _open_with(sink, about, blocks(about))
        recording.abandon(OSError("made up"))
        _check_absent(harness, sink, about, "after abandon()")
        written = _record(sink, about)
        _check_read(harness, sink, about, written)


def a_block_that_does_not_fit_is_refused(harness: Harness) -> None:
    """An unknown capture or site, or another width, raises SinkError; nothing is stored."""
    for sink, about in _each_layout(harness, "misfit"):
        (first, *_) = blocks(about)
        narrow = {name: part[..., :-1] for name, part in first.parts.items()}
        for wrong in (
            RowBlock(3, 0, first.sites, first.positions, first.token_ids, first.parts),
            RowBlock(1, 0, first.sites, first.positions, first.token_ids, first.parts),
            RowBlock(0, 0, first.sites, first.positions, first.token_ids, narrow),
            RowBlock(0, 0, first.sites, first.positions[1:], first.token_ids, first.parts),
        ):
            recording = sink.open(about)
            try:
                recording.write(wrong)
            except SinkError as error:
                recording.abandon(error)
            else:
                raise NotConforming("a block that does not fit its capture is accepted")
            _check_absent(harness, sink, about, "after a wrong block")


def nothing_is_overwritten(harness: Harness) -> None:
    """A second request with the same id and tag raises Collision; the first is unchanged."""
    if harness.read is None:
        return
    for sink, about in _each_layout(harness, "twice"):
        written = _record(sink, about)
        try:
            _record(sink, about, seed=1)
        except Collision:
            pass
        else:
            raise NotConforming("the same request is stored twice")
        _check_read(harness, sink, about, written)


def one_id_under_two_tags_is_two_requests(harness: Harness) -> None:
    """Requests of one id under two tags are different requests."""
    for sink, about in _each_layout(harness, "tagged"):
        other = request(about.request_id, about.target.layout, tag="other")
        written = _record(sink, about), _record(sink, other, seed=1)
        _check_read(harness, sink, about, written[0])
        _check_read(harness, sink, other, written[1])


def recordings_go_on_side_by_side(harness: Harness) -> None:
    """Eight threads record different requests, and no row is in the wrong request."""
    with _open_sink(harness) as sink, ThreadPoolExecutor(8) as pool:
        for layout in _layouts(sink):
            abouts = [request(f"beside-{layout}-{number}", layout) for number in range(24)]
            records = pool.map(lambda pair: _record(sink, pair[1], seed=pair[0]), enumerate(abouts))
            for about, written in zip(abouts, list(records), strict=True):
                _check_read(harness, sink, about, written)


def ids_are_no_paths(harness: Harness) -> None:
    """Every id that a request may have works, and none is mistaken for another."""
    ids = (".", "..", "...", ".hidden", "a:b", "-", "manifest.json", "x" * 128, "." * 128, "2E")
    with _open_sink(harness) as sink:
        for layout in _layouts(sink):
            abouts = [request(name, layout, tag=f"t-{layout}") for name in ids]
            records = [_record(sink, about, seed=seed) for seed, about in enumerate(abouts)]
            for about, written in zip(abouts, records, strict=True):
                _check_read(harness, sink, about, written)


def rows_are_left_as_they_are(harness: Harness) -> None:
    """The sink changes no array that it receives."""
    for sink, about in _each_layout(harness, "kept"):
        given, untouched = list(blocks(about)), list(blocks(about))
        for block in given:
            for part in block.parts.values():
                part.setflags(write=False)
        _open_with(sink, about, given).finish(COMPLETE)
        _check_equal(given, untouched)


def what_is_finished_outlasts_the_sink(harness: Harness) -> None:
    """If the sink is lasting, a new sink has the requests. `close` may be called twice."""
    recorded: list[tuple[RequestAbout, list[RowBlock]]] = []
    sink = harness.make()
    for layout in _layouts(sink):
        about = request(f"lasting-{layout}", layout)
        recorded.append((about, _record(sink, about)))
    sink.close()
    sink.close()
    if harness.lasting:
        with _open_sink(harness) as again:
            for about, written in recorded:
                _check_read(harness, again, about, written)
                if harness.read_bytes is not None:
                    _check(again.artifacts(about.request_id) != [], "artefacts are not found again")


RULES: tuple[Rule, ...] = (
    it_describes_itself,
    it_takes_targets_without_options,
    rows_come_back_as_they_were,
    a_request_without_rows_can_be_finished,
    artifacts_say_what_they_hold,
    lost_rows_make_a_request_partial,
    nothing_can_be_found_before_the_end,
    what_is_abandoned_is_gone,
    a_block_that_does_not_fit_is_refused,
    nothing_is_overwritten,
    one_id_under_two_tags_is_two_requests,
    recordings_go_on_side_by_side,
    ids_are_no_paths,
    rows_are_left_as_they_are,
    what_is_finished_outlasts_the_sink,
)


@contextmanager
def _open_sink(harness: Harness) -> Iterator[Sink]:
    sink = harness.make()
    try:
        yield sink
    finally:
        sink.close()


def _layouts(sink: Sink) -> list[Layout | None]:
    return [*sink.layouts] or [None]


def _each_layout(harness: Harness, name: str) -> Iterator[tuple[Sink, RequestAbout]]:
    with _open_sink(harness) as sink:
        for layout in _layouts(sink):
            yield sink, request(f"{name}.{layout}", layout)


def _open_with(sink: Sink, about: RequestAbout, rows: Iterable[RowBlock]) -> Recording:
    """A new recording to which rows were written."""
    recording = sink.open(about)
    for block in rows:
        recording.write(block)
    return recording


def _record(
    sink: Sink, about: RequestAbout, outcome: Outcome = COMPLETE, seed: int = 0
) -> list[RowBlock]:
    written = list(blocks(about, seed))
    recording = sink.open(about)
    try:
        for block in written:
            recording.write(block)
        recording.finish(outcome)
    except BaseException as error:
        recording.abandon(error)
        raise
    return written


def _check_absent(harness: Harness, sink: Sink, about: RequestAbout, when: str) -> None:
    _check(sink.artifacts(about.request_id) == [], f"artefacts can be found {when}")
    if harness.read is not None:
        _check(harness.read(sink, about) is None, f"rows can be read {when}")


_Key: TypeAlias = tuple[int, int, bool, str, int, str]


def _arrays(rows: Sequence[RowBlock]) -> dict[_Key, bytes]:
    """The bytes of every column, by capture, sample, baseline, site and name."""
    parts: dict[_Key, list[bytes]] = {}
    for block in rows:
        for number, site in enumerate(block.sites):
            key = (block.capture_index, block.sample, block.baseline, site.point.value, site.layer)
            columns = {name: part[number] for name, part in block.parts.items()}
            columns |= {"positions": block.positions, "token_ids": block.token_ids}
            for name, values in columns.items():
                data = np.ascontiguousarray(values).tobytes()
                if data:
                    parts.setdefault((*key, name), []).append(data)
    return {key: b"".join(datas) for key, datas in parts.items()}


def _check_read(
    harness: Harness, sink: Sink, about: RequestAbout, written: Sequence[RowBlock]
) -> None:
    """Checks the stored rows of a request, if rows of this sink can be read."""
    if harness.read is not None:
        stored = harness.read(sink, about)
        if stored is None:
            raise NotConforming("a finished request cannot be read")
        _check_equal(stored, written)


def _check_equal(stored: Sequence[RowBlock], written: Sequence[RowBlock]) -> None:
    left, right = _arrays(stored), _arrays(written)
    differing = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
    _check(not differing, f"stored rows differ from written rows: {differing[:3]}")


def _keys(artifacts: list[Artifact]) -> set[tuple[str, int, bytes]]:
    return {(artifact.path, artifact.offset, artifact.sha256) for artifact in artifacts}


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise NotConforming(problem)
