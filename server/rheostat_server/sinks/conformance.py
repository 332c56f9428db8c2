"""What every sink has to do, as checks that its author runs.

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
    def test_my_sink_keeps_the_rule(rule: Rule, tmp_path: Path) -> None:
        rule(Harness(lambda: MySink(tmp_path), read=my_reader))

A rule that is broken raises NotConforming. Every rule goes through all layouts of the sink.
"""

import hashlib
from collections.abc import Callable, Iterator
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
    RequestAbout,
    RowBlock,
    Sink,
    SinkError,
    State,
    Target,
)
from rheostat_server.sinks.samples import blocks, request

COMPLETE = Outcome(Ending.COMPLETE)
"""What most rules end a request with."""


class NotConforming(AssertionError):
    """A sink breaks a rule."""


@dataclass(frozen=True)
class Harness:
    """How the rules reach a sink."""

    make: Callable[[], Sink]
    """Makes a sink on a store that no other has while it is open. The first time the store is
    empty; later it holds what earlier ones left, if it outlasts them."""
    read: Callable[[Sink, RequestAbout], "list[RowBlock] | None"] | None = None
    """The rows of a finished request, as the author's own reader finds them; None: it finds no such
    request. Blocks may be cut in another way. Absent: the sink keeps no rows that can be read."""
    read_bytes: Callable[[Sink, Artifact], bytes] | None = None
    """The bytes of an artefact. Absent: it makes none."""
    lasting: bool = False
    """Whether what was finished outlasts `close`."""


Rule: TypeAlias = Callable[[Harness], None]
"""A check."""


def it_describes_itself(harness: Harness) -> None:
    """Layouts are of ours, each once; options have one line of explanation."""
    with _made(harness) as sink:
        layouts = list(sink.layouts)
        _hold(all(isinstance(one, Layout) for one in layouts), "a layout is none of `Layout`")
        _hold(len(set(layouts)) == len(layouts), "a layout comes twice")
        for name, text in sink.options.items():
            _hold(bool(name and text) and "\n" not in text, f"option {name} needs one line")


def it_takes_targets_without_options(harness: Harness) -> None:
    """`check` takes every layout that the sink names, with no options."""
    with _made(harness) as sink:
        for layout in _layouts(sink):
            sink.check(Target("sink", "default", layout, {}))


def rows_come_back_as_they_were(harness: Harness) -> None:
    """Every bit of every capture, sample, baseline and label."""
    for sink, about in _each(harness, "rows:1"):
        written = _record(sink, about)
        if harness.read is not None:
            _same(harness.read(sink, about), written)


def a_request_without_rows_can_be_finished(harness: Harness) -> None:
    """It is there, and holds nothing."""
    for sink, about in _each(harness, "empty"):
        artifacts = sink.open(about).finish(COMPLETE)
        _hold(sum(one.rows for one in artifacts) == 0, "artefacts count rows that never came")
        if harness.read is not None:
            _same(harness.read(sink, about), [])


def artifacts_say_what_they_hold(harness: Harness) -> None:
    """Rows, bytes, digests, states and relative paths are right, and the same when asked again."""
    for sink, about in _each(harness, "described"):
        written = list(blocks(about))
        recording = sink.open(about)
        for block in written:
            recording.write(block)
        artifacts = recording.finish(COMPLETE)
        for one in artifacts:
            steps = one.path.split("/")
            _hold(not {"", ".", ".."} & set(steps), f"{one.path} is no relative path")
            _hold(one.state is State.COMPLETE, f"{one.path} is {one.state} though it is complete")
            if harness.read_bytes is not None:
                data = harness.read_bytes(sink, one)
                _hold(len(data) == one.length, f"{one.path} has {len(data)} bytes")
                _hold(hashlib.sha256(data).digest() == one.sha256, f"{one.path}: another SHA-256")
        if artifacts:
            rows = sum(block.rows for block in written)
            _hold(sum(one.rows for one in artifacts) == rows, f"{rows} rows are counted otherwise")
            again = sink.artifacts(about.request_id)
            _hold(_places(again) == _places(artifacts), "artifacts() knows others than finish()")
            _hold(sink.artifacts("another") == [], "artifacts() of an unknown request")


def lost_rows_make_a_request_partial(harness: Harness) -> None:
    """After PARTIAL and ABORTED what came is kept, and no artefact calls itself complete."""
    for ending in (Ending.PARTIAL, Ending.ABORTED):
        for sink, about in _each(harness, f"lost-{ending}"):
            written = _record(sink, about, Outcome(ending, dropped_rows=3))
            states = {one.state for one in sink.artifacts(about.request_id)}
            _hold(states <= {State.PARTIAL}, f"after {ending} artefacts are {sorted(states)}")
            if harness.read is not None:
                _same(harness.read(sink, about), written)


def nothing_can_be_found_before_the_end(harness: Harness) -> None:
    """Neither rows nor artefacts, while rows come."""
    for sink, about in _each(harness, "early"):
        recording = sink.open(about)
        for block in blocks(about):
            recording.write(block)
        _absent(harness, sink, about, "before finish()")
        recording.finish(COMPLETE)


def what_is_abandoned_is_gone(harness: Harness) -> None:
    """And its id can be used again."""
    for sink, about in _each(harness, "abandoned"):
        recording = sink.open(about)
        for block in blocks(about):
            recording.write(block)
        recording.abandon(OSError("made up"))
        _absent(harness, sink, about, "after abandon()")
        written = _record(sink, about)
        if harness.read is not None:
            _same(harness.read(sink, about), written)


def a_block_that_does_not_fit_is_refused(harness: Harness) -> None:
    """Of an unknown capture, an unknown site, or another width: SinkError, and nothing is kept."""
    for sink, about in _each(harness, "misfit"):
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
                raise NotConforming("a block that does not fit its capture is taken")
            _absent(harness, sink, about, "after a wrong block")


def nothing_is_overwritten(harness: Harness) -> None:
    """A second request of the same id and tag is a Collision, and the first stays as it is."""
    if harness.read is None:
        return
    for sink, about in _each(harness, "twice"):
        written = _record(sink, about)
        try:
            _record(sink, about, seed=1)
        except Collision:
            pass
        else:
            raise NotConforming("the same request is taken twice")
        _same(harness.read(sink, about), written)


def one_id_under_two_tags_is_two_requests(harness: Harness) -> None:
    """Tags tell requests apart."""
    for sink, about in _each(harness, "tagged"):
        other = request(about.request_id, about.target.layout, tag="other")
        written = _record(sink, about), _record(sink, other, seed=1)
        if harness.read is not None:
            _same(harness.read(sink, about), written[0])
            _same(harness.read(sink, other), written[1])


def recordings_go_on_side_by_side(harness: Harness) -> None:
    """Eight threads, each with requests of its own, and no row in the wrong place."""
    with _made(harness) as sink, ThreadPoolExecutor(8) as pool:
        for layout in _layouts(sink):
            abouts = [request(f"beside-{layout}-{number}", layout) for number in range(24)]
            records = pool.map(lambda pair: _record(sink, pair[1], seed=pair[0]), enumerate(abouts))
            for about, written in zip(abouts, list(records), strict=True):
                if harness.read is not None:
                    _same(harness.read(sink, about), written)


def ids_are_no_paths(harness: Harness) -> None:
    """Every id that a request may have works, and none is mistaken for another."""
    ids = (
        ".",
        "..",
        "...",
        ".hidden",
        "a:b",
        "-",
        "manifest.json",
        "x" * 128,
        "." * 128,
        "2E",
    )
    with _made(harness) as sink:
        for layout in _layouts(sink):
            abouts = [request(name, layout, tag=f"t-{layout}") for name in ids]
            records = [_record(sink, one, seed=seed) for seed, one in enumerate(abouts)]
            for about, written in zip(abouts, records, strict=True):
                if harness.read is not None:
                    _same(harness.read(sink, about), written)


def rows_are_left_as_they_are(harness: Harness) -> None:
    """The sink changes no array that it is given."""
    for sink, about in _each(harness, "kept"):
        given, untouched = list(blocks(about)), list(blocks(about))
        recording = sink.open(about)
        for block in given:
            for part in block.parts.values():
                part.setflags(write=False)
            recording.write(block)
        recording.finish(COMPLETE)
        _same(given, untouched)


def what_is_finished_outlasts_the_sink(harness: Harness) -> None:
    """Where the sink is lasting; and `close` may come twice."""
    made: list[tuple[RequestAbout, list[RowBlock]]] = []
    sink = harness.make()
    for layout in _layouts(sink):
        about = request(f"lasting-{layout}", layout)
        made.append((about, _record(sink, about)))
    sink.close()
    sink.close()
    if harness.lasting:
        with _made(harness) as again:
            for about, written in made:
                if harness.read is not None:
                    _same(harness.read(again, about), written)
                if harness.read_bytes is not None:
                    _hold(again.artifacts(about.request_id) != [], "artefacts are not found again")


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
"""Every check."""


@contextmanager
def _made(harness: Harness) -> Iterator[Sink]:
    sink = harness.make()
    try:
        yield sink
    finally:
        sink.close()


def _layouts(sink: Sink) -> list[Layout | None]:
    return [*sink.layouts] or [None]


def _each(harness: Harness, name: str) -> Iterator[tuple[Sink, RequestAbout]]:
    with _made(harness) as sink:
        for layout in _layouts(sink):
            yield sink, request(f"{name}.{layout}", layout)


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


def _absent(harness: Harness, sink: Sink, about: RequestAbout, when: str) -> None:
    _hold(sink.artifacts(about.request_id) == [], f"artefacts can be found {when}")
    if harness.read is not None:
        _hold(harness.read(sink, about) is None, f"rows can be read {when}")


_Key: TypeAlias = tuple[int, int, bool, str, int, str]


def _arrays(rows: list[RowBlock]) -> dict[_Key, bytes]:
    """The bytes of every column, by capture, sample, baseline, site and name."""
    pieces: dict[_Key, list[bytes]] = {}
    for block in rows:
        for number, site in enumerate(block.sites):
            key = (block.capture_index, block.sample, block.baseline, site.point.value, site.layer)
            columns = {name: part[number] for name, part in block.parts.items()}
            columns |= {"positions": block.positions, "token_ids": block.token_ids}
            for name, values in columns.items():
                data = np.ascontiguousarray(values).tobytes()
                if data:
                    pieces.setdefault((*key, name), []).append(data)
    return {key: b"".join(found) for key, found in pieces.items()}


def _same(found: "list[RowBlock] | None", written: list[RowBlock]) -> None:
    _hold(found is not None, "a finished request cannot be read")
    assert found is not None
    one, other = _arrays(found), _arrays(written)
    differing = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    _hold(not differing, f"rows come back otherwise: {differing[:3]}")


def _places(artifacts: list[Artifact]) -> set[tuple[str, int, bytes]]:
    return {(one.path, one.offset, one.sha256) for one in artifacts}


def _hold(truth: bool, why: str) -> None:
    if not truth:
        raise NotConforming(why)
