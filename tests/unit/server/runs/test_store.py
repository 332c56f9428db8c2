"""The store of runs by itself: what it keeps, what gives way, and whose rows it gives."""

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rheostat_engine import Point, Site
from rheostat_server.errors import RowsLost, RunExists, RunInUse, RunNotFound, StoreFull
from rheostat_server.runs.store import Run, RunDraft, RunStore
from rheostat_server.runs.targets import RunTarget
from rheostat_server.sinks import CaptureAbout, Ending, Outcome, RowBlock
from rheostat_server.tensors import FloatType

SITES = (Site(Point.RESID_POST, 0), Site(Point.RESID_PRE, 2))
WIDTH = 4
ROW = len(SITES) * WIDTH * 4 + 8
"""Bytes of a position: its rows and its labels."""
EMPTY = 4096 + 3 * 4 + 1
"""Bytes of a run without rows, whose id has one letter and whose prompt three tokens."""
WHOLE = Outcome(Ending.COMPLETE, 0, ("length",))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def block(first: int, count: int, *, baseline: bool = False) -> RowBlock:
    positions = np.arange(first, first + count, dtype=np.int32)
    rows = np.arange(len(SITES) * count * WIDTH, dtype="<f4") + 8 * first
    shape = (len(SITES), count, WIDTH)
    return RowBlock(0, 0, SITES, positions, positions, {"rows": rows.reshape(shape)}, baseline)


def begin(store: RunStore, run_id: str, lease: float = 1.0, *, lossless: bool = False) -> RunDraft:
    about = CaptureAbout(0, SITES, FloatType.FLOAT32, WIDTH)
    return store.begin(RunTarget(run_id, lease), about, (5, 6, 7), {}, "run", lossless=lossless)


def make(store: RunStore, run_id: str, positions: int = 1, lease: float = 1.0) -> None:
    draft = begin(store, run_id, lease)
    draft.write(block(0, positions))
    draft.finish(WHOLE)
    assert draft.keep()


def ids(store: RunStore) -> list[str]:
    return [run.id for run in store.page(0, 1000).runs]


def found(store: RunStore, run_id: str) -> Run:
    run = store.hold(run_id, "run")
    store.release(run)
    return run


def test_a_run_holds_the_rows_that_were_written_at_every_site_in_order() -> None:
    store = RunStore(1 << 20, Clock())
    draft = begin(store, "a", lease=60.0)
    blocks = [block(0, 3), block(3, 1), block(7, 2)]
    for one in blocks:
        draft.write(one)
        draft.write(block(0, 1, baseline=True))
    draft.finish(WHOLE)
    assert ids(store) == []
    assert draft.keep() is not None
    run = found(store, "a")
    assert run.positions.tolist() == run.token_ids.tolist() == [0, 1, 2, 3, 7, 8]
    for at, site in enumerate(SITES):
        wanted = np.concatenate([one.parts["rows"][at] for one in blocks])
        assert np.array_equal(run.rows(site), wanted)
    same = Site(Point.RESID_PRE, 1)
    assert np.array_equal(run.rows(same), run.rows(SITES[0]))
    with pytest.raises(KeyError):
        run.rows(Site(Point.RESID_POST, 5))
    assert (run.prompt_token_ids.tolist(), run.create_time, run.lease_expire_time) == (
        [5, 6, 7],
        1000.0,
        1060.0,
    )
    assert run.size == store.used_bytes == EMPTY + 6 * ROW


def test_rows_that_come_one_at_a_time_are_joined() -> None:
    store = RunStore(1 << 30)
    draft = begin(store, "a")
    count = 3 * (1 << 20) // (ROW - 4)
    for position in range(count):
        draft.write(block(position, 1))
    draft.finish(WHOLE)
    draft.keep()
    run = found(store, "a")
    assert len(run.pieces) == 3
    assert run.rows(SITES[1])[:, 0].tolist() == [8 * p + WIDTH for p in range(count)]


def test_a_run_without_rows_has_none() -> None:
    store = RunStore(1 << 20)
    draft = begin(store, "a")
    draft.finish(WHOLE)
    draft.keep()
    assert found(store, "a").rows(SITES[0]).shape == (0, WIDTH)


def test_the_run_that_was_used_longest_ago_gives_way() -> None:
    clock = Clock()
    store = RunStore(3 * (EMPTY + ROW), clock)
    for run_id in "abc":
        make(store, run_id)
    clock.now += 2
    found(store, "a")
    make(store, "d")
    assert ids(store) == ["a", "c", "d"]


def test_a_lease_keeps_a_run_until_it_ends_and_is_never_shortened() -> None:
    clock = Clock()
    store = RunStore(EMPTY + ROW, clock)
    make(store, "a", lease=10.0)
    assert store.renew("a", 2.0, "run").lease_expire_time == 1010.0
    assert store.renew("a", 20.0, "run").lease_expire_time == 1020.0
    clock.now = 1019.9
    with pytest.raises(StoreFull, match="--runs-mib"):
        begin(store, "b")
    clock.now = 1020.0
    make(store, "b")
    assert ids(store) == ["b"]


def test_nothing_is_evicted_for_a_run_that_finds_no_room_all_the_same() -> None:
    clock = Clock()
    store = RunStore(2 * (EMPTY + ROW), clock)
    make(store, "a")
    make(store, "b", lease=99.0)
    clock.now += 2
    draft = begin(store, "c")
    assert ids(store) == ["b"]
    with pytest.raises(StoreFull):
        draft.write(block(0, 2))
    draft.abandon(StoreFull("full"))
    assert (ids(store), store.used_bytes, store.unfinished) == (["b"], EMPTY + ROW, 0)


def test_a_run_that_is_held_neither_gives_way_nor_can_be_deleted() -> None:
    clock = Clock()
    store = RunStore(EMPTY + ROW, clock)
    make(store, "a")
    clock.now += 2
    run = store.hold("a", "run")
    with pytest.raises(StoreFull):
        begin(store, "b")
    with pytest.raises(RunInUse):
        store.delete("a", "run")
    store.release(run)
    assert store.delete("a", "run") == EMPTY + ROW
    with pytest.raises(RunNotFound):
        store.delete("a", "run")


def test_an_id_names_one_run_or_one_that_is_made() -> None:
    store = RunStore(1 << 20)
    draft = begin(store, "a")
    with pytest.raises(RunExists, match="being made"):
        store.check("a", 0, "run")
    with pytest.raises(RunExists):
        begin(store, "a")
    with pytest.raises(RunInUse, match="making"):
        store.delete("a", "run")
    with pytest.raises(RunNotFound, match="still runs"):
        store.renew("a", 1.0, "run")
    draft.finish(WHOLE)
    draft.keep()
    with pytest.raises(RunExists, match="stored"):
        store.check("a", 0, "run")


def test_a_run_that_was_given_up_takes_no_more_and_frees_its_id_at_once() -> None:
    store = RunStore(1 << 20)
    draft = begin(store, "a")
    draft.write(block(0, 1))
    draft.drop()
    assert (store.used_bytes, store.unfinished) == (0, 0)
    make(store, "a")
    draft.write(block(1, 1))
    draft.finish(WHOLE)
    assert not draft.keep()
    draft.drop()
    assert (ids(store), store.used_bytes) == (["a"], EMPTY + ROW)


def test_an_aborted_run_is_none() -> None:
    store = RunStore(1 << 20)
    draft = begin(store, "a")
    draft.write(block(0, 1))
    draft.finish(Outcome(Ending.ABORTED, 0, ("aborted",)))
    assert (draft.keep(), ids(store), store.used_bytes) == (None, [], 0)


def test_a_run_is_not_kept_before_its_last_row_has_come() -> None:
    store = RunStore(1 << 20)
    draft = begin(store, "a")
    draft.write(block(0, 1))
    assert (draft.keep(), ids(store), store.unfinished) == (None, [], 1)


def test_a_run_that_lost_rows_has_the_others() -> None:
    store = RunStore(1 << 20)
    draft = begin(store, "a")
    draft.write(block(4, 1))
    draft.finish(Outcome(Ending.PARTIAL, 3, ("length",)))
    assert draft.keep()
    assert found(store, "a").positions.tolist() == [4]


def test_a_run_of_which_no_row_may_be_lost_is_none_where_one_is() -> None:
    store = RunStore(1 << 20)
    draft = begin(store, "a", lossless=True)
    draft.write(block(4, 1))
    with pytest.raises(RowsLost) as caught:
        draft.finish(Outcome(Ending.PARTIAL, 3, ("length",)))
    draft.abandon(caught.value)
    assert (caught.value.metadata, draft.keep(), store.used_bytes) == ({"rows": "3"}, None, 0)


class Store(RuleBasedStateMachine):
    """Whatever is done, the bytes stay within the budget and what is protected stays."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = RunStore(4 * EMPTY + 20 * ROW, self.clock)
        self.names = map(str, itertools.count(10))
        self.drafts: list[RunDraft] = []
        self.held: list[Run] = []
        self.sizes: dict[str, int] = {}
        self.protected: dict[str, float] = {}

    @rule(lease=st.sampled_from([1.0, 5.0, 50.0]))
    def begin(self, lease: float) -> None:
        with contextlib.suppress(StoreFull):
            self.drafts.append(begin(self.store, next(self.names), lease))

    @precondition(lambda self: self.drafts)
    @rule(count=st.integers(1, 25), at=st.integers(0))
    def write(self, count: int, at: int) -> None:
        draft = self.drafts[at % len(self.drafts)]
        before = ids(self.store)
        try:
            draft.write(block(draft.rows, count))
        except StoreFull:
            assert ids(self.store) == before

    @precondition(lambda self: self.drafts)
    @rule(at=st.integers(0), kept=st.booleans())
    def end(self, at: int, kept: bool) -> None:
        draft = self.drafts.pop(at % len(self.drafts))
        draft.finish(WHOLE)
        if kept:
            assert draft.keep()
            self.protected[draft.id] = self.clock.now + draft.target.lease
        draft.drop()

    @precondition(lambda self: len(self.store))
    @rule(at=st.integers(0))
    def hold(self, at: int) -> None:
        here = ids(self.store)
        self.held.append(self.store.hold(here[at % len(here)], "run"))

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0))
    def release(self, at: int) -> None:
        self.store.release(self.held.pop(at % len(self.held)))

    @precondition(lambda self: len(self.store))
    @rule(at=st.integers(0), lease=st.sampled_from([1.0, 30.0]))
    def renew(self, at: int, lease: float) -> None:
        here = ids(self.store)
        run = self.store.renew(here[at % len(here)], lease, "run")
        self.protected[run.id] = max(self.protected[run.id], self.clock.now + lease)
        assert run.lease_expire_time == self.protected[run.id]

    @precondition(lambda self: len(self.store))
    @rule(at=st.integers(0))
    def delete(self, at: int) -> None:
        here = ids(self.store)
        run_id = here[at % len(here)]
        try:
            self.store.delete(run_id, "run")
            del self.protected[run_id]
            assert run_id not in [run.id for run in self.held]
        except RunInUse:
            assert run_id in [run.id for run in self.held]

    @rule(seconds=st.sampled_from([0.5, 3.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def bytes_are_those_of_the_runs_and_within_the_budget(self) -> None:
        runs = self.store.page(0, 1000).runs
        made = sum(run.size for run in runs) + sum(draft.size for draft in self.drafts)
        assert self.store.used_bytes == made <= self.store.capacity
        assert (len(self.store), self.store.unfinished) == (len(runs), len(self.drafts))

    @invariant()
    def what_is_held_or_leased_is_there(self) -> None:
        here = set(ids(self.store))
        assert {run.id for run in self.held} <= here
        assert {one for one, until in self.protected.items() if until > self.clock.now} <= here

    @invariant()
    def pages_are_oldest_first(self) -> None:
        runs = self.store.page(0, 1000).runs
        numbers = [run.number for run in runs]
        assert numbers == sorted(set(numbers))
        if numbers:
            first = self.store.page(0, 1)
            assert (first.runs, first.more) == (runs[:1], len(runs) > 1)
            assert self.store.page(numbers[0], 1000).runs == runs[1:]


Store.TestCase.settings = settings(stateful_step_count=40)
TestStore = Store.TestCase
