"""Each token gets the gains of its position, whatever the schedule; 1 and 0 change no bit."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import (
    Act,
    Activation,
    Gained,
    GainsUpdate,
    Kind,
    Normalise,
    Plan,
    Reading,
    Released,
    SignalRows,
    Signals,
)
from rheostat_engine.plan.gains import (
    MAX_GAINS,
    merged_gains,
    updates_from,
    updates_to,
)
from rheostat_engine.plan.tables import steering_table
from rheostat_engine.plan.wire import steering_from, steering_to
from rheostat_engine.worker.runtime import UpdateResult
from rheostat_engine.worker.steering.gain_states import GainedTable, GainStates

from ...cpu_worker import NOTHING, TOKENS, Worker, stream_at, token_at
from ...gated import gated, gated_plans
from ...naive import applied
from ...no_gates import no_gates
from ...schedules import check_doses, check_stream, expected_doses
from ...strategies import DIGESTS, EVERYWHERE, LAST, LIMIT, ablate, add, plans, selects
from ...tables import VECTORS, capacity
from ...wires import packed

GAINS = (0.0, 0.25, 1.0, 2.0, 16.0)


def with_gains(plan: Plan) -> Plan:
    """The plan that gives each act of a plan a gain."""
    acts = [
        act if act.kind is Kind.READ else replace(act, gain=index)
        for index, act in enumerate(plan.acts)
    ]
    kept = Signals(kept=plan.packed_acts.gates, means_kept=True)
    return Plan("gains", tuple(acts), signals=kept, gained=True)


def give_gains(worker: Worker, plan: Plan) -> None:
    """Has the gains of a running request made."""
    wire = with_gains(plan).to_wire()
    found = worker.runtime.update_steering(plan.request_id, wire, 0)
    assert not found.error


def expected_stream(
    plan: Plan, gains: dict[int, float], request_id: str, position: int, site: int
) -> np.ndarray:
    """One act after the other in float64, each as strong as its gain says."""
    x = stream_at(request_id, position, site).astype(np.float64)
    token = token_at(request_id, position)
    order = sorted(enumerate(plan.acts), key=lambda pair: pair[1].kind in LAST)
    for index, act in order:
        rows = dict(act.rows).get(site)
        if rows is not None and selects(act, position, token):
            x = applied(act, x, rows, VECTORS, gains.get(index, 1.0))
    return x


class Sample:
    """A request, and the gains that each of its positions should have."""

    def __init__(self, name: str, plan: Plan) -> None:
        self.name = name
        self.plan = plan
        self.done = self.furthest = self.changes = 0
        self.now: dict[int, float] = {}
        self.at: dict[int, dict[int, float]] = {}

    def compute(self, chunk: int) -> tuple[str, int, int]:
        """The next positions, which get the present gains unless they are computed again."""
        start, self.done = self.done, self.done + chunk
        for position in range(start, self.done):
            self.at.setdefault(position, dict(self.now))
        self.furthest = max(self.furthest, self.done)
        return self.name, start, chunk


@given(st.data())
def test_each_token_gets_the_gains_of_its_position_whatever_the_schedule(
    data: st.DataObject,
) -> None:
    samples = {
        f"v{n}": Sample(f"v{n}", data.draw(plans(f"p{n}")))
        for n in range(data.draw(st.integers(1, 3), "samples"))
    }
    mate = data.draw(plans("mate"))
    samples["mate"] = Sample("mate", mate)
    lengths = {name: data.draw(st.integers(1, LIMIT + 4), "length") for name in samples}
    worker = Worker(capacity(slots=256, bank_rows=64, steps=512))
    for name, sample in samples.items():
        worker.add_request(name, sample.plan)
        if name != "mate" and sample.plan.acts:
            give_gains(worker, sample.plan)
    while any(sample.done < lengths[name] for name, sample in samples.items()):
        again = data.draw(st.sampled_from([None] * 6 + list(samples)), "preempt")
        if again is not None:
            worker.runtime.preempt(again)
            samples[again].done = 0
        updates = []
        for name, sample in samples.items():
            count = len(sample.plan.acts)
            if name == "mate" or not count or not data.draw(st.booleans(), "gain"):
                continue
            chosen = data.draw(st.dictionaries(st.integers(0, count - 1), st.sampled_from(GAINS)))
            sample.changes += 1
            sample.now |= chosen
            updates.append(GainsUpdate(sample.plan.request_id, sample.changes, 0, chosen))
            worker.runtime.set_gains(updates_from(updates_to(updates[-1:])))
            worker.runtime.send_gained()
            assert worker.row_sender.events[-1] == Gained(
                sample.plan.request_id, sample.changes, sample.furthest
            )
        batch, room = [], TOKENS - 4
        for name in data.draw(st.permutations(list(samples)), "batch"):
            left = lengths[name] - samples[name].done
            chunk = min(room, left, data.draw(st.sampled_from((1, 2, 5, 30)), "chunk"))
            if chunk > 0:
                batch.append(samples[name].compute(chunk))
                room -= chunk
        if batch:
            worker.step(batch, data.draw(st.integers(0, 4), "padding"))
    for (name, position, site), stream in worker.streams.items():
        plan, gains = samples[name].plan, samples[name].at[position]
        if all(gain == 1 for gain in gains.values()):
            check_stream(plan, name, position, site, stream)
        else:
            expected = expected_stream(plan, gains, name, position, site)
            np.testing.assert_allclose(stream, expected, rtol=1e-3, atol=2e-3)
    worker.finish(*samples)
    assert worker.held() == NOTHING
    assert not len(worker.steering.gains)
    assert not worker.padding_touched


@given(plans(), st.integers(0, 3), st.integers(1, 4))
def test_a_gain_of_1_changes_no_bit_and_0_is_off_to_the_bit(
    plan: Plan, before: int, after: int
) -> None:
    streams = {}
    for gain in (None, 1.0, 0.0):
        worker = Worker(capacity(slots=256, bank_rows=64, steps=512))
        worker.add_request("v", plan)
        worker.step([("v", 0, 1 + before)])
        if gain is not None and plan.acts:
            give_gains(worker, plan)
            gains = dict.fromkeys(range(len(plan.acts)), gain)
            worker.runtime.set_gains([GainsUpdate(plan.request_id, 1, 0, gains)])
        worker.step([("v", 1 + before, after)])
        streams[gain] = worker.streams
    for (name, position, site), stream in streams[0.0].items():
        unchanged = streams[None][name, position, site]
        assert streams[1.0][name, position, site].tobytes() == unchanged.tobytes()
        off = stream_at(name, position, site) if position > before else unchanged
        assert stream.tobytes() == off.tobytes()


def test_additions_of_others_keep_their_bits_if_a_gain_is_0() -> None:
    """The sum of two additions is rounded once, so the other must be added alone."""
    both = Plan("r", (add(1), add(1, digest=DIGESTS[1], scale=3.0)))
    alone = Plan("r", (add(1, digest=DIGESTS[1], scale=3.0),))
    found = []
    for plan in (both, alone):
        worker = Worker()
        worker.add_request("v", plan)
        if plan is both:
            give_gains(worker, plan)
            worker.runtime.set_gains([GainsUpdate("r", 1, 0, {0: 0.0})])
        worker.step([("v", 0, 3)])
        found.append([worker.streams["v", position, 1].tobytes() for position in range(3)])
    assert found[0] == found[1]


def test_what_is_changed_is_measured_and_what_is_off_is_not_counted() -> None:
    plan = Plan("r", (add(1, scale=0.5), ablate(2)))
    worker = Worker()
    worker.add_request("v", plan)
    worker.step([("v", 0, 2)])
    give_gains(worker, plan)
    expected: dict[tuple[int, int], list[float]] = defaultdict(list)
    for position, gains in enumerate(
        [{}, {}, {0: 2.0}, {0: 0.0, 1: 0.5}, {0: 1.0, 1: 1.0}, {0: 16.0}]
    ):
        if position >= 2:
            worker.runtime.set_gains([GainsUpdate("r", position, 0, gains)])
            worker.step([("v", position, 1)])
    now: dict[int, float] = {}
    for position, gains in enumerate(
        [{}, {}, {0: 2.0}, {0: 0.0, 1: 0.5}, {0: 1.0, 1: 1.0}, {0: 16.0}]
    ):
        now |= gains
        for index, act in enumerate(plan.acts):
            site = act.rows[0][0]
            x = stream_at("v", position, site).astype(np.float64)
            moved = applied(act, x, act.rows[0][1], VECTORS, now.get(index, 1.0)) - x
            if now.get(index, 1.0):
                expected[index, site].append(float(np.linalg.norm(moved)))
    worker.finish("v")
    released = worker.row_sender.events[-1]
    assert isinstance(released, Released)
    assert released.measured
    found: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0, 0.0])
    for dose in released.doses:
        found[dose.act, dose.site][0] += dose.rows
        found[dose.act, dose.site][1] += dose.change
    assert found.keys() == expected.keys()
    for key, moved in expected.items():
        assert found[key][0] == len(moved)
        assert found[key][1] == pytest.approx(sum(moved), rel=1e-4)


@given(gated_plans("p"), st.integers(0, LIMIT), st.lists(st.sampled_from(GAINS), min_size=9))
def test_gains_multiply_what_gates_open(plan: Plan, first: int, gains: list[float]) -> None:
    count, length = len(plan.acts), LIMIT + 2
    chosen = {index: gains[index % len(gains)] for index in range(count)}
    worker = Worker(capacity(slots=256, bank_rows=64, steps=512))
    worker.add_request("v", plan)
    for position in range(length):
        if position == first:
            held = worker.steering.gates.used
            give_gains(worker, plan)
            assert with_gains(plan).packed_acts.gate_states == 0
            assert worker.steering.gates.used == held
            worker.runtime.set_gains([GainsUpdate("p", 1, 0, chosen)])
        worker.step([("v", position, 1)])

    def gain_at(index: int, position: int) -> float:
        return chosen[index] if position >= first else 1.0

    for (position, site), stream in gated(plan, "v", 0, length, gain_at=gain_at).streams.items():
        found = worker.streams["v", position, site]
        np.testing.assert_allclose(found, stream, rtol=1e-3, atol=5e-3)
    worker.finish("v")
    assert worker.held() == NOTHING


def test_an_update_begins_with_gains_of_1_and_keeps_those_of_earlier_positions() -> None:
    first, second = Plan("r", (add(1), add(2))), Plan("r", (add(1, scale=-1.0),))
    worker = Worker()
    worker.add_request("v", first)
    give_gains(worker, first)
    worker.runtime.set_gains([GainsUpdate("r", 1, 0, {0: 0.0, 1: 2.0})])
    worker.step([("v", 0, 2)])
    assert worker.runtime.update_steering("r", second.to_wire(), 0) == UpdateResult(2, "")
    worker.runtime.set_gains([GainsUpdate("r", 2, 0, {0: 16.0})])  # the new list has no gains yet
    worker.step([("v", 2, 1)])
    give_gains(worker, second)
    worker.runtime.set_gains([GainsUpdate("r", 3, 4, {0: 0.5})])
    worker.step([("v", 3, 3)])
    worker.runtime.preempt("v")
    worker.step([("v", 0, 6)])
    for (_, position, site), stream in worker.streams.items():
        if position < 2:
            gains, plan = {0: 0.0, 1: 2.0}, first
        else:
            gains, plan = ({0: 0.5} if position >= 4 else {}), second
        expected = expected_stream(plan, gains, "v", position, site)
        np.testing.assert_allclose(stream, expected, rtol=1e-5, atol=1e-5)
    worker.finish("v")
    assert worker.held() == NOTHING
    assert not len(worker.steering.gains)


def test_gains_that_cannot_be_made_leave_the_request_as_it_was() -> None:
    worker = Worker(capacity(bank_rows=2))
    plan = Plan("r", (add(2, scale=2.0), add(2, scale=3.0)))
    worker.add_request("v", plan)
    held = worker.held()
    wire = with_gains(plan).to_wire()
    for other in (Plan("r", (replace(add(2), gain=0),), gained=True).to_wire(), wire):
        found = worker.runtime.update_steering("r", other, 0)
        assert found.error in {
            "the acts with gains are not those of the request",
            "every row of the bank is in use",
        }
    assert worker.held() == held
    worker.runtime.set_gains([GainsUpdate("r", 1, 0, {0: 0.0})])
    worker.step([("v", 0, 2)])
    for (_, position, site), stream in worker.streams.items():
        check_stream(plan, "v", position, site, stream)
    worker.finish("v")
    released = worker.row_sender.events[-1]
    assert isinstance(released, Released)
    check_doses(released.doses, expected_doses(plan, "v", [0, 1]))
    assert worker.held() == NOTHING


def test_gains_are_reported_just_behind_the_signals_of_their_step() -> None:
    worker = Worker()
    reading = Reading(Normalise.NONE, Activation.IDENTITY, 0.0, 0.0, 0)
    probe = Act(Kind.READ, (DIGESTS[0],), ((0, (0,)),), EVERYWHERE, reading=reading)
    plan = Plan("r", (add(1), probe), signals=Signals(1))
    worker.add_request("v", plan)
    give_gains(worker, plan)
    worker.step([("v", 0, 2)])
    before = len(worker.row_sender.events)
    worker.runtime.set_gains([GainsUpdate("r", 1, 0, {0: 2.0})])
    worker.runtime.set_gains([GainsUpdate("r", 2, 0, {0: 3.0})])
    assert len(worker.row_sender.events) == before
    worker.step([("v", 2, 1)])
    signals, *gained = worker.row_sender.events[before:]
    assert isinstance(signals, SignalRows)
    assert gained == [Gained("r", 1, 2), Gained("r", 2, 2)]


def test_gains_of_a_request_that_ends_are_reported_before_its_end() -> None:
    worker = Worker()
    plan = Plan("r", (add(1),))
    worker.add_request("v", plan)
    give_gains(worker, plan)
    worker.step([("v", 0, 2)])
    worker.runtime.set_gains([GainsUpdate("r", 1, 0, {0: 2.0})])
    worker.finish("v")
    assert worker.row_sender.events[-2] == Gained("r", 1, 2)
    assert isinstance(worker.row_sender.events[-1], Released)


def test_gains_of_nobody_and_of_acts_that_are_missing_are_ignored() -> None:
    worker = Worker()
    plan = Plan("r", (add(1),))
    worker.add_request("v", plan)
    give_gains(worker, plan)
    worker.runtime.set_gains([GainsUpdate("gone", 1, 0, {0: 2.0})])
    worker.runtime.send_gained()
    assert not any(isinstance(event, Gained) for event in worker.row_sender.events)
    worker.runtime.set_gains([GainsUpdate("r", 2, 0, {MAX_GAINS - 1: 2.0})])
    worker.step([("v", 0, 2)])
    for (_, position, site), stream in worker.streams.items():
        check_stream(plan, "v", position, site, stream)


def test_a_step_without_gains_does_not_use_the_second_table() -> None:
    worker = Worker()
    plan = Plan("r", (add(1),))
    worker.add_request("v", plan)
    give_gains(worker, plan)
    positions, numbers = np.arange(3), np.ones(3, np.int64)
    fused = worker.steering.lookup(numbers, positions)
    assert fused.gained is None
    worker.runtime.set_gains([GainsUpdate("r", 1, 1, {0: 2.0})])
    found = worker.steering.lookup(numbers, positions)
    assert found.gained is not None
    assert found.gained.tokens.tolist() == [1, 2]
    assert found.slot[0] == fused.slot[0] != found.slot[1]


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.integers(0, 3), st.dictionaries(st.integers(0, 3), st.sampled_from(GAINS))),
        max_size=20,
    ),
    st.data(),
)
def test_the_gains_at_a_position_are_those_set_last_up_to_it(
    count: int, changes: list[tuple[int, dict[int, float]]], data: st.DataObject
) -> None:
    states = GainStates(no_gates(4))
    others = [states.acquire(2) for _ in range(data.draw(st.integers(0, 40)))]
    state = states.acquire(count)
    states.set_table(state, GainedTable(7, 8, 9))
    at, first = [], 0
    for step, gains in changes:
        first += step
        states.set(state, first, gains)
        at.append((first, {i: gain for i, gain in gains.items() if i < count}))
    start = data.draw(st.integers(0, first + 3))
    positions = np.arange(start, start + data.draw(st.integers(1, 9)))
    functions = np.full(len(positions), 3)
    bases = np.full(len(positions), 1), np.full(len(positions), 2)
    found = states.choose(np.full(len(positions), state), positions, functions, bases)
    rows = np.ones((len(positions), count))
    for begin, gains in at:
        for index, gain in gains.items():
            rows[positions >= begin, index] = gain
    strong = (rows != 1).any(axis=1)
    assert functions.tolist() == np.where(strong, 7, 3).tolist()
    assert bases[0].tolist() == np.where(strong, 8, 1).tolist()
    assert bases[1].tolist() == np.where(strong, 9, 2).tolist()
    if found is None:
        assert not strong.any()
    else:
        assert found.tokens.tolist() == np.flatnonzero(strong).tolist()
        assert found.gains.tolist() == rows[strong].tolist()
    for other in (*others, state):
        states.release(other)
    assert not len(states)
    assert states.acquire(4) in (*others, state)


def test_gains_of_all_samples_at_once_are_those_set_one_by_one() -> None:
    rng = np.random.default_rng(0)
    together, apart = GainStates(no_gates(1)), GainStates(no_gates(1))
    counts = [1, 4, 2, 3, 4]
    states = np.array([together.acquire(count) for count in counts])
    assert [apart.acquire(count) for count in counts] == states.tolist()
    for first in range(1, 200):
        rows = np.sort(rng.choice(len(counts), rng.integers(1, 6), replace=False))
        gains = np.ones((len(rows), 4), np.float32)
        for row, own in zip(rows.tolist(), gains, strict=True):
            own[: counts[row]] = rng.choice(GAINS, counts[row])
            apart.set(int(states[row]), first, dict(enumerate(own[: counts[row]].tolist())))
        together.set_all(states[rows], np.full(len(rows), first), gains)
        assert together.values(states, 4).tolist() == apart.values(states, 4).tolist()
    for state in states:
        positions = np.arange(200)
        zeros = np.zeros(200, np.int64)
        found = [
            one.choose(zeros + state, positions, zeros.copy(), (zeros.copy(), zeros.copy()))
            for one in (together, apart)
        ]
        assert found[0] is not None
        assert found[1] is not None
        assert found[0].tokens.tolist() == found[1].tokens.tolist()
        assert found[0].gains.tolist() == found[1].gains.tolist()


def test_thousands_of_changes_are_found_again() -> None:
    rng = np.random.default_rng(0)
    states = GainStates(no_gates(1))
    state = states.acquire(2)
    rows = np.ones((9000, 2), np.float32)
    for position in range(1, 9000):
        gains = {int(rng.integers(2)): float(rng.choice(GAINS))}
        states.set(state, position, gains)
        rows[position] = rows[position - 1]
        for index, gain in gains.items():
            rows[position, index] = gain
    positions = np.arange(100, 8292)
    zeros = np.zeros(len(positions), np.int64)
    found = states.choose(zeros + state, positions, zeros.copy(), (zeros.copy(), zeros.copy()))
    assert found is not None
    got = np.ones((len(positions), 2), np.float32)
    got[found.tokens] = found.gains
    assert got.tolist() == rows[100:8292].tolist()


def test_later_gains_of_a_step_replace_earlier_ones() -> None:
    one = GainsUpdate("a", 1, 5, {0: 2.0, 1: 3.0})
    assert merged_gains(None, one) == one
    assert merged_gains(one, GainsUpdate("a", 2, 4, {1: 0.5})) == GainsUpdate(
        "a", 2, 5, {0: 2.0, 1: 0.5}
    )


@pytest.mark.parametrize(
    "gains", [{-1: 1.0}, {MAX_GAINS: 1.0}, {0: -0.5}, {0: 16.5}, {0: float("nan")}, {0: "2"}]
)
def test_what_are_no_gains_is_refused(gains: dict[int, object]) -> None:
    with pytest.raises(ValueError, match=r"^these are no gains: "):
        updates_from(packed([["a", 1, 0, gains]]))


@given(plans())
def test_a_plan_with_gains_travels(plan: Plan) -> None:
    table = steering_table(with_gains(plan).acts)
    if table is not None:
        again = steering_from(steering_to(table))
        assert steering_to(again) == steering_to(table)
        assert [act.gain for act in again.acts] == list(range(len(plan.acts)))
        assert again.gains == len(plan.acts)


@pytest.mark.parametrize(
    "act",
    [
        replace(add(1), gain=MAX_GAINS),
        replace(add(1), gain=-1),
    ],
)
def test_a_gain_that_is_none_is_no_plan(act: Act) -> None:
    table = steering_table((act,))
    assert table is not None
    with pytest.raises(ValueError, match=r"^this is no plan: "):
        steering_from(steering_to(table))
