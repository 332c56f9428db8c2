"""Gates open at each token as the readings up to it say, whatever the schedule."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Act, Kind, Plan, Signals
from rheostat_engine.channel.events import Installed
from rheostat_engine.plan.gate_table import (
    RECORDED,
    Head,
    Held,
    Ints,
    State,
    gate_rows,
    states_of,
)
from rheostat_engine.plan.gates import (
    Activation,
    Combine,
    Form,
    Gate,
    GateCondition,
    Hold,
    Normalise,
    Pool,
    Reading,
)
from rheostat_engine.plan.tables import steering_table
from rheostat_engine.plan.wire import steering_from, steering_to
from rheostat_engine.sites import reference
from rheostat_engine.worker.runtime import UpdateResult
from rheostat_engine.worker.state.buffers import FoldColumn, GateBuffers, SiteBuffers, TokenColumn
from rheostat_engine.worker.steering import gate_states
from rheostat_engine.worker.steering.gate_reference import fold_step
from rheostat_engine.worker.steering.gate_states import GateStates

from ...cpu_worker import NOTHING, TOKENS, Worker
from ...gated import gated, gated_plans, gates, openness
from ...schedules import check_stream
from ...strategies import DIGESTS, EVERYWHERE, LIMIT, SITES, acts, add, plans
from ...tables import capacity
from ...updates import update_steering


def undecided(plan: Plan, done: int) -> int:
    """The end of the next step under late gates: later tokens are sampled after it."""
    ends = [undecided_gate(act.gate, done) for act in plan.acts if act.gate]
    return min(ends, default=LIMIT + 99)


def undecided_gate(gate: Gate, done: int) -> int:
    """The end of the next step under a gate."""
    if gate.late > done:
        return gate.late
    return done + 1 if gate.recorded else LIMIT + 99


@given(st.data())
def test_gates_open_as_the_readings_up_to_a_token_say_whatever_the_schedule(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 3), "requests")
    by_id: dict[str, Plan] = {f"v{n}": data.draw(gated_plans(f"p{n}")) for n in range(count)}
    by_id["mate"] = data.draw(plans("mate"))
    lengths = {i: data.draw(st.integers(1, LIMIT + 4), "length") for i in by_id}
    worker = Worker()
    for request_id, plan in by_id.items():
        worker.add_request(request_id, plan)
    done, furthest = dict.fromkeys(by_id, 0), dict.fromkeys(by_id, 0)
    while any(done[i] < lengths[i] for i in by_id):
        again = data.draw(st.sampled_from([None] * 8 + list(by_id)), "preempt")
        if again is not None:
            worker.runtime.preempt(again)
            done[again] = 0
        batch, room = [], TOKENS - 4
        for request_id in data.draw(st.permutations(list(by_id)), "batch"):
            left = lengths[request_id] - done[request_id]
            chunk = min(room, left, data.draw(st.sampled_from((1, 2, 5, 30)), "chunk"))
            chunk = min(
                chunk, undecided(by_id[request_id], furthest[request_id]) - done[request_id]
            )
            if chunk > 0:
                batch.append((request_id, done[request_id], chunk))
                done[request_id] += chunk
                furthest[request_id] = max(furthest[request_id], done[request_id])
                room -= chunk
        if batch:
            worker.step(batch, data.draw(st.integers(0, 4), "padding"))
    for request_id, plan in by_id.items():
        if request_id == "mate":
            continue
        expected = gated(plan, request_id, 0, lengths[request_id]).streams
        for (position, site), stream in expected.items():
            found = worker.streams[request_id, position, site]
            np.testing.assert_allclose(found, stream, rtol=1e-3, atol=1e-3)
    for (request_id, position, site), stream in worker.streams.items():
        if request_id == "mate":
            check_stream(by_id["mate"], request_id, position, site, stream)
    worker.finish(*by_id)
    assert worker.held() == NOTHING


def test_the_gates_of_a_site_are_opened_together(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, 0)
    read = Act(Kind.READ, (DIGESTS[0],), ((0, (0,)),), EVERYWHERE, reading=reading)
    steered = []
    for number in range(12):
        condition = GateCondition((0,), Pool.LAST, Combine.ANY, number / 12 - 0.5, math.inf, 1)
        gate = Gate((condition,), Combine.ALL, Form.STEP, 0.5, 0.0, Hold.TOKEN, 1, False)
        steered.append(replace(add(2, digest=DIGESTS[1]), gate=gate))
    worker, requests = Worker(), {f"p{n}": Plan("p", (*steered[n:], read)) for n in range(3)}
    for request_id, plan in requests.items():
        worker.add_request(request_id, plan)
    calls: list[int] = []
    stock = reference.open_gates

    def counted(gates: GateBuffers, *opened: torch.Tensor) -> None:
        calls.append(len(opened[0]))
        stock(gates, *opened)

    monkeypatch.setattr(reference, "open_gates", counted)
    worker.step([(request_id, 0, 4) for request_id in requests])
    assert calls == [4 * (12 + 11 + 10)]
    for request_id, plan in requests.items():
        for (position, site), stream in gated(plan, request_id, 0, 4).streams.items():
            found = worker.streams[request_id, position, site]
            np.testing.assert_allclose(found, stream, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("hold", [hold for hold in Hold if hold is not Hold.TOKEN])
@given(invert=st.booleans())
def test_tokens_that_are_computed_again_get_the_openness_that_they_had(
    hold: Hold, invert: bool
) -> None:
    prompt, length = 6, 80
    reading = Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, 0)
    read = Act(Kind.READ, (DIGESTS[0],), ((2, (0,)),), EVERYWHERE, reading=reading)
    condition = GateCondition((0,), Pool.LAST, Combine.ANY, 0.8, math.inf, 2)
    gate = Gate(
        (condition,), Combine.ALL, Form.STEP, 0.5, 0.0, hold, 3, invert, late=prompt, end=length
    )
    plan = Plan("p", (replace(add(0, digest=DIGESTS[1]), gate=gate), read))
    worker = Worker()
    worker.add_request("p", plan)
    worker.step([("p", 0, 4)])
    worker.step([("p", 4, prompt - 4)])
    for position in range(prompt, length - 3):
        worker.step([("p", position, 1)])
    expected = gated(plan, "p", 0, length)
    opened = [one[0] for one in expected.opened[prompt:]]
    assert set(opened) == ({float(not invert)} if hold is Hold.REST else {0.0, 1.0})
    for begin in (0, prompt + 30):  # the second keeps blocks, as if they came from a cache
        worker.runtime.preempt("p")
        worker.step([("p", begin, 40)])
        worker.step([("p", begin + 40, length - 2 - begin - 40)])
        for (position, site), stream in expected.streams.items():
            if begin <= position < length - 2:
                found = worker.streams["p", position, site]
                np.testing.assert_allclose(found, stream, rtol=1e-3, atol=1e-3)
    for position in range(length - 2, length):
        worker.step([("p", position, 1)])
        for site in range(SITES):
            found, stream = worker.streams["p", position, site], expected.streams[position, site]
            np.testing.assert_allclose(found, stream, rtol=1e-3, atol=1e-3)
    worker.finish("p")
    assert worker.held() == NOTHING


@given(st.data())
def test_gates_go_on_as_if_acts_beside_them_had_not_changed(data: st.DataObject) -> None:
    plan = data.draw(gated_plans("r"))
    kept = Signals(kept=plan.packed_acts.gates, means_kept=True)
    reads = tuple(act for act in plan.acts if act.reading is not None)
    behind = [act for act in plan.acts if act.gate is not None]
    worker = Worker(capacity(slots=512))
    worker.add_request("v", plan)
    states = worker.steering.gates
    held = states.used, states.row_sums.used
    expected, done, furthest, length = plan, 0, 0, data.draw(st.integers(2, LIMIT + 4), "length")
    changes = data.draw(st.integers(1, 3), "changes")
    while done < length:
        most = undecided(plan, furthest) - done
        chunk = min(most, length - done, data.draw(st.sampled_from((1, 2, 5, 30)), "chunk"))
        worker.step([("v", done, chunk)])
        done += chunk
        furthest = max(done, furthest)
        if changes and done == furthest and done < length and data.draw(st.booleans(), "change"):
            changes -= 1
            left = [act for act in behind if data.draw(st.integers(0, 3), "stays")]
            new = (*data.draw(st.lists(acts(), max_size=2), "new"), *left, *reads)
            update = Plan("r", new, signals=kept).pack()
            assert update.packed_acts.gate_states == update.packed_acts.row_sums == 0
            found = worker.runtime.update_steering("r", update.to_wire(), 0)
            assert found == UpdateResult(done, "")
            assert (states.used, states.row_sums.used) == held
            expected = update_steering(expected, new, done)
        elif data.draw(st.integers(0, 8), "preempt") == 8:
            worker.runtime.preempt("v")
            done = 0
    for (position, site), stream in gated(expected, "v", 0, length).streams.items():
        found = worker.streams["v", position, site]
        np.testing.assert_allclose(found, stream, rtol=1e-3, atol=1e-3)
    worker.finish("v")
    assert worker.held() == NOTHING


def test_an_act_keeps_its_gate_if_the_act_of_an_earlier_gate_goes() -> None:
    def gate(pool: Pool) -> Gate:
        condition = GateCondition((0,), pool, Combine.ALL, -0.5, math.inf, 1)
        return Gate((condition,), Combine.ALL, Form.STEP, 0.1, 0.6, Hold.TOKEN, 0, False)

    reading = Reading(Normalise.NONE, Activation.IDENTITY, 0.0, 0.0, 0)
    read = Act(Kind.READ, (DIGESTS[0],), ((0, (0,)),), EVERYWHERE, reading=reading)
    earlier, later = (replace(add(2), gate=gate(pool)) for pool in (Pool.LAST, Pool.MEAN))
    plan = Plan("r", (earlier, later, read))
    worker = Worker()
    worker.add_request("v", plan)
    worker.step([("v", 0, 3)])
    new = (later, read)
    update = Plan("r", new, signals=Signals(kept=plan.packed_acts.gates)).pack()
    assert worker.runtime.update_steering("r", update.to_wire(), 0) == UpdateResult(3, "")
    worker.step([("v", 3, 5)])
    assert any(one != other for one, other in gated(plan, "v", 0, 8).opened[3:])
    for (position, site), stream in gated(update_steering(plan, new, 3), "v", 0, 8).streams.items():
        found = worker.streams["v", position, site]
        np.testing.assert_allclose(found, stream, rtol=1e-3, atol=1e-3)


def test_a_gate_that_the_first_acts_did_not_open_opens_once_an_update_needs_it() -> None:
    gate = mean_gate(0)
    acting = replace(add(2, digest=DIGESTS[1]), gate=gate)
    first = (replace(acting, spans=()), reading_to(0))
    plan, new = Plan("r", first), (acting, reading_to(0))
    worker = Worker()
    worker.add_request("v", plan)
    worker.step([("v", 0, 3)])
    update = Plan("r", new, signals=Signals(kept=plan.packed_acts.gates)).pack()
    assert worker.runtime.update_steering("r", update.to_wire(), 0) == UpdateResult(3, "")
    for position in range(3, 14):
        worker.step([("v", position, 1)])
    expected = gated(update_steering(plan, new, 3), "v", 0, 14)
    assert len({tuple(opened) for opened in expected.opened[3:]}) == 2
    for (position, site), stream in expected.streams.items():
        found = worker.streams["v", position, site]
        np.testing.assert_allclose(found, stream, rtol=1e-3, atol=1e-3)


def mean_gate(*columns: int) -> Gate:
    """Open while the mean of what was read to each column is positive."""
    conditions = tuple(
        GateCondition((column,), Pool.MEAN, Combine.ANY, 0.0, math.inf, 1) for column in columns
    )
    return Gate(conditions, Combine.ALL, Form.STEP, 0.5, 0.0, Hold.TOKEN)


def reading_to(column: int) -> Act:
    """Reads every token at the first site to a column."""
    reading = Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, column)
    return Act(Kind.READ, (DIGESTS[0],), ((0, (0,)),), EVERYWHERE, reading=reading)


def test_steps_and_folds_say_which_gates_have_one_term(monkeypatch: pytest.MonkeyPatch) -> None:
    folds: list[torch.Tensor] = []
    monkeypatch.setattr(gate_states, "fold_step", lambda _, step: folds.append(step.clone()))
    worker, single, double = Worker(), mean_gate(0), mean_gate(0, 0)
    for name, own in (("a", (single,)), ("b", (double, single)), ("c", (double,))):
        acting = [replace(add(2, digest=DIGESTS[1]), gate=gate) for gate in own]
        worker.add_request(name, Plan(name, (*acting, reading_to(0))))
    worker.step([("a", 0, 2), ("b", 0, 1), ("c", 0, 3)])
    buffers = worker.buffers.gates
    terms = buffers.ints[:, Ints.HEAD, Head.TERMS]
    (fold,) = folds
    assert sorted(fold[:, FoldColumn.ONE_TERM].tolist()) == [0, 0, 1, 1]
    assert torch.equal(fold[:, FoldColumn.ONE_TERM] == 1, terms[fold[:, FoldColumn.GATE]] == 1)
    ints = worker.steering.bank.programs.ints
    opening = ints[(ints[:, 0] == Kind.GATE).nonzero().squeeze(1)]
    # Of "a", of "b", whose gates have two terms and one, and of "c".
    assert sorted(opening[:, 4].tolist()) == [0, 0, 1, 1]


@pytest.mark.parametrize("states", [5, 6, 7, 8])
@pytest.mark.parametrize("gates", [1, 2, 3, 5])
def test_folds_begin_at_a_multiple_of_16_bytes_and_end_before_the_tokens(
    states: int, gates: int
) -> None:
    table = (torch.from_numpy(rows)[None].repeat(2, 1, 1) for rows in gate_rows(mean_gate(0)))
    buffers = GateBuffers.allocate(6, states, *table)
    empty = torch.zeros(0)
    samples = GateStates(SiteBuffers(*[empty] * 7, buffers, empty, empty))
    start = samples.acquire([1] * gates, [mean_gate(0)] * gates)
    samples.begin(np.full(3, start), np.zeros(3, np.int64), np.arange(7, 10))
    folds = samples.folds
    assert folds is not None
    base, size = buffers.step.data_ptr(), buffers.step.element_size()
    assert (folds.data_ptr() - base) % 16 == 0
    assert (buffers.tokens.data_ptr() - base) % 16 == 0
    assert folds.data_ptr() + folds.numel() * size <= buffers.tokens.data_ptr()
    assert folds[:, FoldColumn.NUMBER].tolist() == list(range(gates))
    assert set(folds[:, FoldColumn.POSITION].tolist()) == {7}
    assert buffers.tokens[:3].tolist() == [[start, 0, at, 0] for at in (7, 8, 9)]


def test_acts_with_other_gates_take_states_of_their_own() -> None:
    def plan(*bounds: float, kept: tuple[Gate, ...] = ()) -> Plan:
        reading = Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, 0)
        read = Act(Kind.READ, (DIGESTS[0],), ((0, (0,)),), EVERYWHERE, reading=reading)
        found = [
            Gate(
                (GateCondition((0,), Pool.LAST, Combine.ANY, bound, math.inf),),
                Combine.ALL, Form.STEP, 0.5, 0.0, Hold.REST,
            )
            for bound in bounds
        ]  # fmt: skip
        added = [replace(add(2, digest=DIGESTS[1]), gate=gate) for gate in found]
        return Plan("r", (*added, read), signals=Signals(kept=kept)).pack()

    worker, first = Worker(), plan(0.0)
    worker.add_request("v", first)
    assert plan(1.0, kept=first.packed_acts.gates).packed_acts.gate_states == 1
    for number, new in enumerate((plan(1.0), plan(0.0), plan(0.0)), 1):
        assert worker.steering.gates.used == number
        worker.step([("v", number, 1)])
        assert worker.runtime.update_steering("r", new.to_wire(), 0) == UpdateResult(number + 1, "")
    assert worker.steering.gates.used == 3
    worker.finish("v")
    assert worker.held() == NOTHING


def test_requests_whose_gates_differ_in_numbers_share_all_but_their_gates() -> None:
    read = reading_to(0)
    names = [f"p{n}" for n in range(4)]
    bounds = dict(zip(names, (-9.0, 0.0, 0.25, 9.0), strict=True))

    def plan(name: str) -> Plan:
        condition = GateCondition((0,), Pool.LAST, Combine.ANY, bounds[name], math.inf)
        gate = Gate((condition,), Combine.ALL, Form.STEP, 0.5, 0.0, Hold.TOKEN)
        return Plan(name, (replace(add(2, digest=DIGESTS[1]), gate=gate), read))

    plans = {name: plan(name) for name in names}
    (gate,) = plans["p0"].packed_acts.gates
    (other,) = plans["p1"].packed_acts.gates
    plans["p1"] = plans["p0"].pack().with_gates({gate: other}).for_request("p1", 0)
    worker, held = Worker(), []
    for name in names:
        worker.add_request(name, plans[name])
        held.append(worker.held())
    alone, *_, together = held
    rows, directions, steps, slots, gates, states = (together[n] for n in range(1, 7))
    assert (rows, directions, steps, slots) == alone[1:5]
    assert (gates, states) == (4, 4)
    for position in range(6):
        worker.step([(name, position, 1) for name in names])
    opened = set()
    for name in names:
        expected = gated(plan(name), name, 0, 6)
        opened.add(tuple(number for (number,) in expected.opened))
        for (position, site), stream in expected.streams.items():
            found = worker.streams[name, position, site]
            np.testing.assert_allclose(found, stream, rtol=1e-3, atol=1e-3)
    assert len(opened) > 2
    worker.finish(*names)
    assert worker.held() == NOTHING


@given(gates(3), gates(3), st.data())
def test_gates_have_one_shape_if_they_differ_in_numbers_alone(
    one: Gate, other: Gate, data: st.DataObject
) -> None:
    assert one.has_shape_of(other) == (one.shape == other.shape)
    assert one.has_shape_of(one.numbered(data.draw(st.integers(0, 9))))
    field = data.draw(st.sampled_from(Gate._fields[1:]))
    changed = one._replace(**{field: getattr(other, field)})
    assert one.has_shape_of(changed) == (one.shape == changed.shape)
    at = data.draw(st.integers(0, len(one.conditions) - 1))
    field = data.draw(st.sampled_from(GateCondition._fields))
    condition = one.conditions[at]._replace(**{field: getattr(other.conditions[0], field)})
    changed = one._replace(conditions=(*one.conditions[:at], condition, *one.conditions[at + 1 :]))
    assert one.has_shape_of(changed) == (one.shape == changed.shape)


def test_gates_that_are_not_those_of_the_acts_are_refused() -> None:
    worker = Worker()
    plan = Plan("r", (replace(add(2, digest=DIGESTS[1]), gate=mean_gate(0)), reading_to(0)))
    acts = plan.packed_acts.encoded
    other = mean_gate(0, 0)
    for wrong in ((), (other,), plan.packed_acts.gates * 2):
        with pytest.raises(ValueError, match="its gates are not those of its acts"):
            worker.steering.set_acts(1, acts, gates=wrong)
    applied = worker.steering.set_acts(1, acts, gates=plan.packed_acts.gates)
    worker.steering.remove(1, applied)
    assert worker.held() == NOTHING


def test_an_update_that_keeps_gates_may_read_to_further_columns() -> None:
    read_once = replace(reading_to(1), spans=((2, 3),))
    acting = replace(add(2, digest=DIGESTS[1]), gate=mean_gate(0))
    plan = Plan("r", (acting, reading_to(0))).pack()
    worker = Worker()
    worker.add_request("v", plan)
    worker.step([("v", 0, 2)])
    signals = Signals(kept=plan.packed_acts.gates)
    update = Plan("r", (acting, reading_to(0), read_once), signals=signals).pack()
    assert worker.runtime.update_steering("r", update.to_wire(), 0) == UpdateResult(2, "")
    seen = []
    for position in range(2, 5):
        worker.step([("v", position, 1)])
        seen.append(bool(worker.buffers.gates.readings[0, 1].isfinite()))
    assert seen == [True, False, False]


def test_a_gate_whose_position_no_table_can_hold_is_refused_and_changes_nothing() -> None:
    late = mean_gate(0)._replace(hold=Hold.REST, late=1 << 40, end=5)
    plan = Plan("r", (replace(add(2, digest=DIGESTS[1]), gate=late), reading_to(0)))
    worker = Worker()
    worker.add_request("v", plan)
    (installed,) = (event for event in worker.row_sender.events if isinstance(event, Installed))
    assert installed.error.startswith("this is no plan: ")
    worker.step([("v", 0, 2)])
    worker.finish("v")
    assert worker.held() == NOTHING


def test_records_are_those_of_their_samples_alone() -> None:
    worker, capacity_used = Worker(), []
    gate = Gate(
        (GateCondition((0,), Pool.LAST, Combine.ANY, 0.0, math.inf),),
        Combine.ALL, Form.STEP, 0.5, 0.0, Hold.REST, late=4, end=4 + RECORDED + 1,
    )  # fmt: skip
    assert states_of(gate) == 3
    reading = Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, 0)
    read = Act(Kind.READ, (DIGESTS[0],), ((2, (0,)),), EVERYWHERE, reading=reading)
    plan = Plan("p", (replace(add(0, digest=DIGESTS[1]), gate=gate), read))
    assert plan.packed_acts.gate_states == 3
    for request_id in ("a", "b"):
        worker.add_request(request_id, plan)
        capacity_used.append(worker.steering.gates.used)
    assert capacity_used == [3, 6]
    worker.finish("a", "b")
    assert worker.held() == NOTHING


@pytest.mark.parametrize("hold", Hold)
@given(data=st.data(), seed=st.integers(0, 2**32), missing=st.sampled_from((0.0, 0.3, 0.8)))
def test_a_gate_is_open_as_its_definition_says_whatever_the_chunks(
    data: st.DataObject, hold: Hold, seed: int, missing: float
) -> None:
    gate, first = data.draw(gates(3, holds=[hold])), data.draw(st.integers(0, 3))
    generator = np.random.default_rng(seed)
    numbers = generator.normal(size=(12, 3)).astype(np.float32)
    numbers[generator.uniform(size=numbers.shape) < missing] = np.nan
    history = [
        {column: float(z) for column, z in enumerate(row) if not np.isnan(z)} for row in numbers
    ]
    table = (torch.from_numpy(rows)[None] for rows in gate_rows(gate))
    buffers = GateBuffers.allocate(len(numbers), 2, *table)
    buffers.states[1, State.HEAD, Held.RECORD] = 1
    done = 0
    while done < len(numbers):
        left = min(len(numbers), undecided_gate(gate, first + done) - first) - done
        count = data.draw(st.integers(1, left), "chunk")
        buffers.readings[:count, :3] = torch.from_numpy(numbers[done : done + count])
        buffers.tokens[:, TokenColumn.STATE] = 1
        buffers.tokens[:count, TokenColumn.POSITION] = first + done + torch.arange(count)
        folds = torch.tensor([[1, 0, 0, 0, count, first + done, 0]], dtype=torch.int32)
        fold_step(buffers, folds)
        for n, found in enumerate(buffers.openness[:count, 0].tolist(), done):
            assert abs(found - openness(gate, history[: n + 1], first)) < 1e-4
        done += count


@given(gated_plans())
def test_a_plan_with_gates_travels(plan: Plan) -> None:
    table = steering_table(plan.acts)
    if table is not None:
        assert steering_to(steering_from(steering_to(table))) == steering_to(table)
        assert steering_from(steering_to(table)).gates == table.gates
