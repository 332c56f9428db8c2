"""What the worker does, batch by batch, equals what the plans say, position by position."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rheostat_engine import (
    OPEN_END,
    Addition,
    Capture,
    Event,
    Installed,
    Plan,
    Released,
    Rows,
)

from .strategies import DIGESTS, LIMIT, SITES, captured, effect, holds, plans
from .worker import TOKENS, VECTORS, Worker, stream_at

EVERYWHERE = ((0, OPEN_END),)
EMPTY = (0, 0, 0, 0)


def held(worker: Worker) -> tuple[int, int, int, int]:
    """What the worker holds: requests, bank rows, slots, active sites."""
    bank = worker.runtime.bank
    active = int(worker.program.active.mask.sum())
    return worker.runtime.requests, bank.rows_used, bank.slots_used, active


def expected_stream(plan: Plan | None, request_id: str, position: int, site: int) -> np.ndarray:
    """What leaves a site: one float32 addition of the summed vectors."""
    stream = stream_at(request_id, position, site)
    addends = effect(plan, position).get(site, Counter()) if plan else Counter()
    if addends:
        total = np.zeros_like(stream)
        for digest, row, scale in sorted(addends.elements()):
            total += np.float32(scale) * VECTORS[digest][row]
        stream = stream + total
    return stream


class Schedule:
    """Draws batches as a scheduler may make them: chunks, preemptions, padding, mates."""

    def __init__(self, data: st.DataObject, lengths: dict[str, int]) -> None:
        self._data = data
        self._lengths = lengths
        self._next = {i: data.draw(st.integers(0, 4), f"cached of {i}") for i in lengths}
        self.first = dict(self._next)
        self.furthest = dict.fromkeys(lengths, 0)
        self.preemptions: Counter[str] = Counter()
        self.computed: Counter[str] = Counter()
        self._waiting = list(lengths)
        self._running: list[str] = []

    def run(self, worker: Worker, plans_by_id: dict[str, Plan | None]) -> None:
        while self._waiting or self._running:
            while self._waiting and (not self._running or self._data.draw(st.booleans(), "start")):
                request_id = self._waiting.pop(0)
                self._running.append(request_id)
                plan = plans_by_id[request_id]
                if plan is not None:
                    worker.runtime.install(request_id, plan.to_wire())
            victim = self._data.draw(st.sampled_from([None, None, *self._running]), "preempt")
            if victim is not None and self.furthest[victim]:
                worker.runtime.preempt(victim)
                self.preemptions[victim] += 1
                low, high = self.first[victim], self.furthest[victim]
                self._next[victim] = self._data.draw(st.integers(low, high - 1), "restart")
            batch, room = [], TOKENS - 8
            for request_id in self._data.draw(st.permutations(self._running), "batch"):
                start = self._next[request_id]
                left = self._lengths[request_id] - start
                count = min(room, left, self._data.draw(st.integers(1, 9), "chunk"))
                if count > 0:
                    batch.append((request_id, start, count))
                    room -= count
            worker.step(batch, self._data.draw(st.integers(0, 8), "padding"))
            for request_id, start, count in batch:
                self._next[request_id] = start + count
                self.furthest[request_id] = max(self.furthest[request_id], start + count)
                self.computed[request_id] += count
                if start + count == self._lengths[request_id]:
                    worker.runtime.forget(request_id)
                    self._running.remove(request_id)


def check_events(worker: Worker, plan: Plan, request_id: str, schedule: Schedule) -> int:
    """One request's events; returns how many rows it lost."""
    events: list[Event] = [e for e in worker.outlet.events if e.request_id == plan.request_id]
    installed, *between, released = events
    assert installed == Installed(plan.request_id, "")
    start, end = schedule.first[request_id], schedule.furthest[request_id]
    rows: dict[tuple[int, int], np.ndarray] = {}
    for event in between:
        assert isinstance(event, Rows)
        for position, row in zip(event.positions.tolist(), event.data, strict=True):
            assert (event.site, position) not in rows
            rows[event.site, position] = row
    wanted = {(site, p) for p in range(start, end) for site in captured(plan, p)}
    assert rows.keys() <= wanted
    for (site, position), row in rows.items():
        assert row.tolist() == expected_stream(plan, request_id, position, site).tolist()
    assert released == Released(
        request_id=plan.request_id,
        tokens_added=tuple(
            sum(holds(a.spans, p) for p in range(start, end)) for a in plan.additions
        ),
        captured=dict(sorted(Counter(site for site, _ in rows).items())),
        lost_rows=len(wanted) - len(rows),
        preemptions=schedule.preemptions[request_id],
        computed=(start, end),
        recomputed=schedule.computed[request_id] - (end - start),
    )
    return len(wanted) - len(rows)


def drawn_plans(data: st.DataObject) -> dict[str, Plan | None]:
    """Plans by vLLM's id; some requests have none."""
    count = data.draw(st.integers(1, 4), "requests")
    strategies = [st.one_of(st.none(), plans(f"plan {n}")) for n in range(count)]
    return {f"v{n}": data.draw(one, f"plan {n}") for n, one in enumerate(strategies)}


@settings(max_examples=60)
@given(st.data())
def test_every_token_gets_what_its_plan_says_whatever_the_schedule(data: st.DataObject) -> None:
    by_id = drawn_plans(data)
    worker = Worker()
    schedule = Schedule(data, {i: data.draw(st.integers(5, LIMIT + 4), "length") for i in by_id})
    schedule.run(worker, by_id)
    for (request_id, position, site), stream in worker.streams.items():
        expected = expected_stream(by_id[request_id], request_id, position, site)
        assert stream.tolist() == expected.tolist()
    assert not worker.padding_touched
    lost = [check_events(worker, p, i, schedule) for i, p in by_id.items() if p is not None]
    assert sum(lost) == worker.runtime.lost_rows == 0
    assert held(worker) == EMPTY


@settings(max_examples=60)
@given(st.data(), st.integers(1, 20))
def test_what_finds_no_place_in_the_ring_is_counted_as_lost(data: st.DataObject, ring: int) -> None:
    by_id = drawn_plans(data)
    worker = Worker(ring=ring)
    schedule = Schedule(data, {i: data.draw(st.integers(5, LIMIT + 4), "length") for i in by_id})
    schedule.run(worker, by_id)
    lost = [check_events(worker, p, i, schedule) for i, p in by_id.items() if p is not None]
    assert sum(lost) == worker.runtime.lost_rows
    rows = sum(len(e.positions) for e in worker.outlet.events if isinstance(e, Rows))
    assert rows == worker.runtime.captured_rows
    assert not worker.padding_touched


def steer(site: int = 2, digest: bytes = DIGESTS[0], scale: float = 1.0) -> Plan:
    """Everywhere at one site."""
    return Plan("r", (Addition(digest, ((site, 0),), scale, EVERYWHERE),))


def test_a_step_in_which_nothing_happens_is_idle() -> None:
    worker = Worker()
    worker.step([("a", 0, 3)])
    plan = Plan("r", (Addition(DIGESTS[0], ((2, 0),), 1.0, ((3, 5),)),))
    worker.runtime.install("a", plan.to_wire())
    for start in range(0, 6, 2):
        worker.step([("a", start, 2), ("b", start, 2)])
    worker.step([("b", 6, 1)])
    assert worker.runtime.steps == {"plain": 3, "light": 2}


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (steer(digest=b"\xee" * 32), f"vector {'ee' * 32} is not in the worker"),
        (steer(scale=1e39), "the sum of the vectors is not finite in torch.float32"),
        (steer(site=SITES), f"the plan names a site that is not one of the model's {SITES}"),
        (
            Plan("r", (), (Capture((0, SITES), EVERYWHERE),)),
            f"the plan names a site that is not one of the model's {SITES}",
        ),
        (
            Plan("r", tuple(steer(s, scale=1.0 + s).additions[0] for s in range(4))),
            "every row of the bank is in use",
        ),
    ],
)
def test_a_plan_that_cannot_be_put_in_force_is_answered_and_touches_nothing(
    plan: Plan, error: str
) -> None:
    worker = Worker(rows=3)
    worker.runtime.install("mate", Plan("mate", steer().additions).to_wire())
    worker.runtime.install("v", plan.to_wire())
    worker.step([("v", 0, 4), ("mate", 0, 4)])
    for site in range(SITES):
        for position in range(4):
            untouched = stream_at("v", position, site).tolist()
            assert worker.streams["v", position, site].tolist() == untouched
    worker.runtime.forget("v")
    assert worker.outlet.events == [
        Installed("mate", ""),
        Installed("r", error),
        Released("r", (), {}, 0, 0, (0, 4)),
    ]
    worker.runtime.forget("mate")
    assert held(worker) == EMPTY


def test_a_request_that_comes_back_after_a_preemption_keeps_its_plan() -> None:
    worker = Worker()
    worker.runtime.install("v", steer().to_wire())
    worker.runtime.drop_vectors([DIGESTS[0]])
    worker.runtime.preempt("v")
    worker.runtime.install("v", steer().to_wire())
    worker.step([("v", 0, 2)])
    expected = stream_at("v", 1, 2) + VECTORS[DIGESTS[0]][0]
    assert worker.streams["v", 1, 2].tolist() == expected.tolist()
    assert worker.outlet.events == [Installed("r", "")]


def test_a_worker_sends_and_counts_rows_of_its_own_sites_alone() -> None:
    worker = Worker(sites=frozenset({0, 1, 2}))
    worker.runtime.install("v", Plan("r", (), (Capture((1, 3), EVERYWHERE),)).to_wire())
    worker.step([("v", 0, 2)])
    worker.runtime.forget("v")
    _, rows, released = worker.outlet.events
    assert isinstance(rows, Rows)
    assert (rows.site, rows.positions.tolist()) == (1, [0, 1])
    assert released == Released("r", (), {1: 2}, 0, 0, (0, 2))


def test_the_number_of_a_finished_request_is_given_out_again() -> None:
    worker = Worker()
    for _ in range(5):
        worker.runtime.install("one", steer().to_wire())
        worker.runtime.install("other", steer().to_wire())
        worker.runtime.forget("one")
        worker.runtime.forget("other")
    assert worker.outlet.numbers == {1, 2}


def test_what_nobody_knows_is_forgotten_and_preempted_without_a_word() -> None:
    worker = Worker()
    worker.runtime.preempt("nobody")
    worker.runtime.forget("nobody")
    assert worker.outlet.events == []


def test_a_wire_whose_name_can_be_read_is_answered() -> None:
    worker = Worker()
    worker.runtime.install("v", {"id": "r", "add": 5, "capture": []})
    worker.runtime.forget("v")
    installed, released = worker.outlet.events
    assert isinstance(installed, Installed)
    assert installed.error.startswith("this is no plan")
    assert released == Released("r", (), {}, 0, 0, (0, 0))


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 9),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.sampled_from(DIGESTS),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def mostly(likely: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """What is meant, or anything at all."""
    return st.one_of(likely, likely, likely, ANYTHING)


INTEGERS = mostly(st.integers(-1, LIMIT))
PAIRS = mostly(st.lists(mostly(st.lists(INTEGERS, min_size=2, max_size=2)), max_size=3))
ADDITIONS = st.lists(
    mostly(
        st.tuples(
            mostly(st.sampled_from(DIGESTS)),
            PAIRS,
            mostly(st.sampled_from([1.0, -0.5])),
            PAIRS,
        ).map(list)
    ),
    max_size=3,
)
CAPTURES = st.lists(
    mostly(st.tuples(mostly(st.lists(INTEGERS, max_size=3)), PAIRS).map(list)), max_size=3
)
WIRES = st.one_of(
    ANYTHING,
    st.fixed_dictionaries(
        {
            "id": mostly(st.just("r")),
            "add": mostly(ADDITIONS),
            "capture": mostly(CAPTURES),
        }
    ),
)


@settings(max_examples=200)
@given(st.lists(WIRES, min_size=1, max_size=3))
def test_nothing_that_may_come_in_place_of_a_plan_can_raise_or_stay(wires: list[object]) -> None:
    worker = Worker(rows=3, slots=3, ring=8)
    batch = [(f"v{number}", 0, 6) for number in range(len(wires))]
    for (request_id, _, _), wire in zip(batch, wires, strict=True):
        worker.runtime.install(request_id, wire)
    worker.step(batch, padding=2)
    for request_id, _, _ in batch:
        worker.runtime.forget(request_id)
    assert held(worker) == EMPTY
    assert not worker.padding_touched


def test_rows_that_the_server_is_too_slow_for_are_lost_and_counted() -> None:
    worker = Worker()
    worker.outlet.free_bytes = 0
    worker.runtime.install("v", Plan("r", (), (Capture((1, 2), ((0, 2),)),)).to_wire())
    worker.step([("v", 0, 3)])
    worker.runtime.forget("v")
    (released,) = [event for event in worker.outlet.events if isinstance(event, Released)]
    assert (released.captured, released.lost_rows) == ({}, 4)


def test_a_plan_that_would_hold_up_a_step_is_refused() -> None:
    worker = Worker()
    spans = tuple((2 * i, 2 * i + 1) for i in range(150_000))
    worker.runtime.install("v", Plan("r", (), (Capture((1,), spans),)).to_wire())
    (installed,) = [event for event in worker.outlet.events if isinstance(event, Installed)]
    assert installed.error.startswith("the plan is too fragmented")
