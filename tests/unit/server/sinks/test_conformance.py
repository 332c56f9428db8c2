"""The suite for authors: our own sinks keep every rule, and each rule finds who breaks it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rheostat_server.sinks import (
    Artifact,
    Ending,
    Layout,
    Outcome,
    RequestAbout,
    RowBlock,
    SinkRefusal,
    State,
    Target,
)
from rheostat_server.sinks import conformance as rules
from rheostat_server.sinks.conformance import RULES, Harness, NotConforming, Rule

from .sink_kit import BUILT_IN, built_in


@pytest.mark.parametrize("kind", BUILT_IN)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_our_own_sinks_keep_the_rule(rule: Rule, kind: str, tmp_path: Path) -> None:
    rule(built_in(kind, tmp_path))


class Kept:
    """What outlasts the sinks of a store."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str], tuple[list[RowBlock], list[Artifact]]] = {}


class Plain:
    """A sink that keeps the rules, for others to break one."""

    layouts: Sequence[Layout] = (Layout.PACKED,)
    options: Mapping[str, str] = {"colour": "a word"}

    def __init__(self, store: Kept) -> None:
        self.store = store

    def check(self, target: Target) -> None:
        pass

    def key(self, about: RequestAbout) -> tuple[str, str]:
        return about.target.tag, about.request_id

    def open(self, about: RequestAbout) -> "PlainRecording":
        return PlainRecording(self, about)

    def artifacts(self, request_id: str) -> list[Artifact]:
        return [
            artifact
            for (_, request), (_, artifacts) in self.store.requests.items()
            if request == request_id
            for artifact in artifacts
        ]

    def close(self) -> None:
        pass


class PlainRecording:
    pending: Sequence[str] = ()

    def __init__(self, sink: Plain, about: RequestAbout) -> None:
        self.sink = sink
        self.about = about
        self.blocks: list[RowBlock] = []

    def write(self, block: RowBlock) -> None:
        rules_check(block, self.about)
        self.blocks.append(block)

    def artifact(self, outcome: Outcome) -> Artifact:
        return Artifact(
            path=f"{self.about.target.tag}/rows",
            media_type="application/x-rows",
            state=State.COMPLETE if outcome.ending is Ending.COMPLETE else State.PARTIAL,
            rows=sum(block.rows for block in self.blocks),
            sha256=b"\0" * 32,
        )

    def finish(self, outcome: Outcome) -> list[Artifact]:
        key = self.sink.key(self.about)
        if key in self.sink.store.requests:
            raise rules.Collision("it is there")
        artifacts = [self.artifact(outcome)]
        self.sink.store.requests[key] = (self.blocks, artifacts)
        return artifacts

    def abandon(self, error: BaseException) -> None:
        self.blocks = []


def rules_check(block: RowBlock, about: RequestAbout) -> None:
    from rheostat_server.sinks.tables import check_block

    check_block(block, {capture.capture_index: capture for capture in about.captures})


def harness(make: type[Plain]) -> Harness:
    store = Kept()

    def read(sink: Plain, about: RequestAbout) -> list[RowBlock] | None:
        found = store.requests.get(sink.key(about))
        return None if found is None else found[0]

    return Harness(lambda: make(store), read=read, lasting=True)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_plain_sink_keeps_the_rule(rule: Rule) -> None:
    rule(harness(Plain))


class TwoLayouts(Plain):
    layouts = (Layout.PACKED, Layout.PACKED)


class LongOption(Plain):
    options: Mapping[str, str] = {"colour": "a word\nor two"}


class Choosy(Plain):
    def check(self, target: Target) -> None:
        raise SinkRefusal("no")


class Rounds(Plain):
    def open(self, about: RequestAbout) -> PlainRecording:
        class Rounding(PlainRecording):
            def write(self, block: RowBlock) -> None:
                rules_check(block, self.about)
                parts = {
                    name: part if part.dtype == np.uint8 else part & np.uint16(0xFFF0)
                    for name, part in block.parts.items()
                    if part.dtype in (np.uint8, np.uint16)
                }
                self.blocks.append(replace(block, parts={**block.parts, **parts}))

        return Rounding(self, about)


class NeedsRows(Plain):
    def open(self, about: RequestAbout) -> PlainRecording:
        class Needing(PlainRecording):
            def finish(self, outcome: Outcome) -> list[Artifact]:
                return super().finish(outcome) if self.blocks else []

        return Needing(self, about)


class Miscounts(Plain):
    def open(self, about: RequestAbout) -> PlainRecording:
        class Counting(PlainRecording):
            def artifact(self, outcome: Outcome) -> Artifact:
                return replace(super().artifact(outcome), rows=len(self.blocks))

        return Counting(self, about)


class LeadsOut(Plain):
    def open(self, about: RequestAbout) -> PlainRecording:
        class Leading(PlainRecording):
            def artifact(self, outcome: Outcome) -> Artifact:
                return replace(super().artifact(outcome), path="../rows")

        return Leading(self, about)


class Optimist(Plain):
    def open(self, about: RequestAbout) -> PlainRecording:
        class Always(PlainRecording):
            def finish(self, outcome: Outcome) -> list[Artifact]:
                return super().finish(Outcome(Ending.COMPLETE))

        return Always(self, about)


class Hasty(Plain):
    def open(self, about: RequestAbout) -> PlainRecording:
        class Early(PlainRecording):
            def write(self, block: RowBlock) -> None:
                super().write(block)
                self.sink.store.requests[self.sink.key(self.about)] = (self.blocks, [])

            def finish(self, outcome: Outcome) -> list[Artifact]:
                self.sink.store.requests.pop(self.sink.key(self.about), None)
                return super().finish(outcome)

        return Early(self, about)


class Clings(Plain):
    def open(self, about: RequestAbout) -> PlainRecording:
        class Clinging(PlainRecording):
            def abandon(self, error: BaseException) -> None:
                self.finish(Outcome(Ending.PARTIAL))

        return Clinging(self, about)


class Trusting(Plain):
    def open(self, about: RequestAbout) -> PlainRecording:
        class TakesAll(PlainRecording):
            def write(self, block: RowBlock) -> None:
                self.blocks.append(block)

        return TakesAll(self, about)


class Overwrites(Plain):
    def open(self, about: RequestAbout) -> PlainRecording:
        class Replacing(PlainRecording):
            def finish(self, outcome: Outcome) -> list[Artifact]:
                self.sink.store.requests.pop(self.sink.key(self.about), None)
                return super().finish(outcome)

        return Replacing(self, about)


class Tagless(Plain):
    def key(self, about: RequestAbout) -> tuple[str, str]:
        return "", about.request_id

    def open(self, about: RequestAbout) -> PlainRecording:
        class Merging(PlainRecording):
            def finish(self, outcome: Outcome) -> list[Artifact]:
                before = self.sink.store.requests.pop(self.sink.key(self.about), ([], []))
                self.blocks = [*before[0], *self.blocks]
                return super().finish(outcome)

        return Merging(self, about)


class Mixes(Plain):
    """All its recordings share one list."""

    def open(self, about: RequestAbout) -> PlainRecording:
        found = PlainRecording(self, about)
        found.blocks = self.__dict__.setdefault("shared", [])
        return found


class CutsIds(Plain):
    def key(self, about: RequestAbout) -> tuple[str, str]:
        return about.target.tag, about.request_id.strip(".")


class Scribbles(Plain):
    def open(self, about: RequestAbout) -> PlainRecording:
        class Scribbling(PlainRecording):
            def write(self, block: RowBlock) -> None:
                super().write(block)
                block.positions[:] = 0

        return Scribbling(self, about)


class Forgets(Plain):
    def close(self) -> None:
        self.store.requests.clear()


class ClosesOnce(Plain):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise NotConforming("closed twice")
        self.closed = True


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        (rules.it_describes_itself, TwoLayouts),
        (rules.it_describes_itself, LongOption),
        (rules.it_takes_targets_without_options, Choosy),
        (rules.rows_come_back_as_they_were, Rounds),
        (rules.a_request_without_rows_can_be_finished, NeedsRows),
        (rules.artifacts_say_what_they_hold, Miscounts),
        (rules.artifacts_say_what_they_hold, LeadsOut),
        (rules.lost_rows_make_a_request_partial, Optimist),
        (rules.nothing_can_be_found_before_the_end, Hasty),
        (rules.what_is_abandoned_is_gone, Clings),
        (rules.a_block_that_does_not_fit_is_refused, Trusting),
        (rules.nothing_is_overwritten, Overwrites),
        (rules.one_id_under_two_tags_is_two_requests, Tagless),
        (rules.recordings_go_on_side_by_side, Mixes),
        (rules.ids_are_no_paths, CutsIds),
        (rules.rows_are_left_as_they_are, Scribbles),
        (rules.what_is_finished_outlasts_the_sink, Forgets),
        (rules.what_is_finished_outlasts_the_sink, ClosesOnce),
    ],
    ids=lambda one: one.__name__,
)
def test_the_rule_finds_a_sink_that_breaks_it(rule: Rule, broken: type[Plain]) -> None:
    with pytest.raises((NotConforming, rules.Collision, SinkRefusal)):
        rule(harness(broken))


def test_every_rule_has_been_seen_to_fail() -> None:
    (mark,) = test_the_rule_finds_a_sink_that_breaks_it.pytestmark
    assert {rule for rule, _ in mark.args[1]} == set(RULES)
