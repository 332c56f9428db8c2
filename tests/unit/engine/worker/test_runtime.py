"""What the worker does, batch by batch, equals what the plans say, position by position."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import (
    Act,
    Band,
    Capture,
    Dose,
    Installed,
    Kind,
    Plan,
    Released,
    Rows,
    TokenCondition,
    Window,
)
from rheostat_engine.channel.events import InstalledHead
from rheostat_engine.channel.worker_channel import EventMerger
from rheostat_engine.plan import gates
from rheostat_engine.plan.composition import MAX_STEPS
from rheostat_engine.worker.capture import capture_sets
from rheostat_engine.worker.steering import built_tables

from ..cpu_worker import NOTHING, Worker, stream_at
from ..schedules import Schedule, check_events, check_stream, drawn_plans
from ..strategies import DIGESTS, EVERYWHERE, LIMIT, SITES, ablate, add, windowed
from ..tables import VECTORS, capacity
from ..wires import WIRES, packed

COLUMN = gates.GateCondition((0,), gates.Pool.LAST, gates.Combine.ALL, 0.0, math.inf)
GATE = gates.Gate((COLUMN,), gates.Combine.ALL, gates.Form.STEP, 0.5, 1.0, gates.Hold.TOKEN)


def steer(*acts: Act) -> Plan:
    """Everywhere at one site, if nothing else is said."""
    return Plan("r", acts or (add(2),))


def silent(*, computed: tuple[int, int], request_id: str = "r") -> Released:
    """The end of a request to which nothing was done."""
    return Released(request_id, (), True, {}, 0, 0, computed)


@given(st.data())
def test_every_token_gets_what_its_plan_says_whatever_the_schedule(data: st.DataObject) -> None:
    by_id = drawn_plans(data)
    worker = Worker()
    schedule = Schedule(data, {i: data.draw(st.integers(5, LIMIT + 4), "length") for i in by_id})
    schedule.run(worker, by_id)
    for (request_id, position, site), stream in worker.streams.items():
        check_stream(by_id[request_id], request_id, position, site, stream)
    assert not worker.padding_touched
    lost = [check_events(worker, p, i, schedule) for i, p in by_id.items() if p is not None]
    assert sum(lost) == worker.captures.lost_rows == 0
    assert worker.held() == NOTHING


@given(st.data())
def test_acts_in_a_window_change_the_tokens_there_and_no_other(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4), "requests")
    drawn = {f"v{n}": data.draw(windowed(f"plan {n}"), f"plan {n}") for n in range(count)}
    worker = Worker()
    schedule = Schedule(data, {i: data.draw(st.integers(5, LIMIT + 4), "length") for i in drawn})
    schedule.run(worker, {i: one.plan for i, one in drawn.items()})
    for (request_id, position, site), stream in worker.streams.items():
        check_stream(drawn[request_id].same, request_id, position, site, stream)
    released = [event for event in worker.row_sender.events if isinstance(event, Released)]
    assert [(event.doses, event.measured) for event in released] == [((), False)] * count
    *held, busy, active = worker.held()  # what is not measured shares dose slots, which stay
    assert busy <= MAX_STEPS
    assert (*held, 0, active) == NOTHING


def test_requests_that_differ_in_their_window_share_a_table() -> None:
    worker = Worker()
    acts = tuple(add(1, scale=1.0 + n, where=((n, n + 1),)) for n in range(8))
    plan = Plan("", (add(2), *acts), measured=False, window=Window(0, 1, 1)).pack()
    for number in range(8):
        one = plan.for_request(f"r{number}", 0, Window(number, number + 1, 1))
        worker.add_request(f"v{number}", one)
    worker.step([(f"v{number}", 0, 8) for number in range(8)])
    row = VECTORS[DIGESTS[0]][0]
    built = worker.steering.built_tables.built
    assert built == plan.plan_cost - plan.packed_captures.plan_cost
    for number in range(8):
        for position in range(8):
            scale = 1.0 + number if position == number else 0.0
            expected = stream_at(f"v{number}", position, 1) + np.float32(scale) * row
            assert worker.streams[f"v{number}", position, 1].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("acts", "why"),
    [
        ((add(2, where=(), conditions=(TokenCondition(((0, 9),), (1,), True),)),), "under rules"),
        ((replace(add(2), gate=GATE),), "gated"),
    ],
)
def test_acts_under_rules_or_gates_have_no_window(acts: tuple[Act, ...], why: str) -> None:
    plan = Plan("r", acts, measured=False, window=Window(0, 9, 0))
    with pytest.raises(ValueError, match="have no window"):
        plan.pack()
    with pytest.raises(ValueError, match="have no window"):
        replace(plan, acts=(add(2),), measured=True).pack()
    worker = Worker()
    worker.add_request("v", plan)
    (event,) = worker.row_sender.events
    assert isinstance(event, Installed)
    assert why in event.error
    worker.finish("v")
    assert worker.held() == NOTHING


@given(st.data(), st.integers(1, 20))
def test_what_finds_no_place_in_the_ring_is_counted_as_lost(data: st.DataObject, ring: int) -> None:
    by_id = drawn_plans(data)
    worker = Worker(capacity(capture_rows=ring))
    schedule = Schedule(data, {i: data.draw(st.integers(5, LIMIT + 4), "length") for i in by_id})
    schedule.run(worker, by_id)
    lost = [check_events(worker, p, i, schedule) for i, p in by_id.items() if p is not None]
    assert sum(lost) == worker.captures.lost_rows
    came = (event for event in worker.row_sender.events if isinstance(event, Rows))
    rows = sum(len(event.sites) * len(event.positions) for event in came)
    assert rows == worker.captures.captured_rows
    assert not worker.padding_touched


def test_a_step_in_which_nothing_happens_is_plain() -> None:
    worker = Worker()
    worker.step([("a", 0, 3)])
    worker.add_request("a", steer(add(2, where=((3, 5),))))
    for start in range(0, 6, 2):
        worker.step([("a", start, 2), ("b", start, 2)])
    worker.step([("b", 6, 1)])
    assert worker.buffers.active.steps == {"plain": 3, "active": 2}


def test_a_step_that_acts_on_sites_of_other_ranks_alone_is_plain() -> None:
    worker = Worker(sites=frozenset({0, 1, 2}))
    worker.add_request("a", steer(add(3)))
    worker.step([("a", 0, 2)])
    assert worker.buffers.active.steps == {"plain": 1, "active": 0}
    worker.add_request("b", Plan("s", (add(1), add(3))))
    worker.step([("a", 2, 1), ("b", 0, 2)])
    assert worker.buffers.active.steps == {"plain": 1, "active": 1}
    assert np.array_equal(worker.streams["b", 0, 3], stream_at("b", 0, 3))
    assert not np.array_equal(worker.streams["b", 0, 1], stream_at("b", 0, 1))


UNKNOWN = b"\xee" * 32
STRANGE = f"the plan names a site that is not one of the model's {SITES}"


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (steer(add(2, digest=UNKNOWN)), f"vector {UNKNOWN.hex()} is not in the worker"),
        (steer(ablate(2, digests=(UNKNOWN,))), f"vector {UNKNOWN.hex()} is not in the worker"),
        (steer(add(2, scale=1e39)), "the sum of the vectors is not finite in torch.float32"),
        (steer(add(SITES)), STRANGE),
        (Plan("r", (), (Capture((0, SITES), EVERYWHERE),)), STRANGE),
        (
            steer(*(add(site, scale=1.0 + site) for site in range(4))),
            "every row of the bank is in use",
        ),
        (
            steer(*[add(2), ablate(2)] * 40),
            "80 steps meet at one site; at most 64 can",
        ),
    ],
)
def test_a_plan_that_cannot_be_put_in_force_is_answered_and_touches_nothing(
    plan: Plan, error: str
) -> None:
    worker = Worker(capacity(bank_rows=3))
    worker.add_request("mate", replace(steer(), request_id="mate"))
    worker.add_request("v", plan)
    worker.step([("v", 0, 4), ("mate", 0, 4)])
    for site in range(SITES):
        for position in range(4):
            untouched = stream_at("v", position, site).tolist()
            assert worker.streams["v", position, site].tolist() == untouched
    worker.finish("v")
    assert worker.row_sender.events == [
        Installed("mate", ""),
        Installed("r", error),
        silent(computed=(0, 4)),
    ]
    worker.finish("mate")
    assert worker.held() == NOTHING


def test_a_request_that_comes_back_after_a_preemption_keeps_its_plan() -> None:
    worker = Worker()
    worker.add_request("v", steer())
    worker.steering.drop([DIGESTS[0]])
    worker.runtime.preempt("v")
    worker.add_request("v", steer())
    worker.step([("v", 0, 2)])
    expected = stream_at("v", 1, 2) + VECTORS[DIGESTS[0]][0]
    assert worker.streams["v", 1, 2].tolist() == expected.tolist()
    assert worker.row_sender.events == [Installed("r", "")]


def test_a_vector_that_is_dropped_while_it_is_used_acts_and_is_measured_to_the_end() -> None:
    worker, kept = Worker(), Worker()
    for one in (worker, kept):
        one.add_request("v", steer())
    worker.steering.drop([DIGESTS[0]])
    for one in (worker, kept):
        one.add_request("equal", Plan("equal", steer().acts))
        one.step([("v", 0, 3), ("equal", 0, 1)])
    worker.add_request("other", Plan("other", (add(1),)))
    for one in (worker, kept):
        one.finish("v", "equal", "other")
    other = f"vector {DIGESTS[0].hex()} is not in the worker"
    assert worker.row_sender.events == [
        Installed("r", ""),
        Installed("equal", ""),
        Installed("other", other),
        *kept.row_sender.events[2:],
        silent(computed=(0, 0), request_id="other"),
    ]


def test_doses_of_requests_that_finish_together_are_told_apart() -> None:
    worker = Worker()
    worker.add_request("a", Plan("a", (add(2, where=((1, 3),)),)))
    worker.add_request("b", Plan("b"))
    worker.add_request("c", Plan("c", (ablate(0), add(2, scale=2.0))))
    worker.step([("a", 0, 4), ("b", 0, 4), ("c", 0, 4)])
    worker.finish("c", "b", "a")
    released = [event for event in worker.row_sender.events if isinstance(event, Released)]
    counted = [[dose[:3] for dose in one.doses] for one in released]
    assert [one.request_id for one in released] == ["c", "b", "a"]
    assert counted == [[(0, 0, 4), (1, 2, 4)], [], [(0, 2, 2)]]


def test_a_request_that_wants_no_measurements_takes_no_dose_slots() -> None:
    worker = Worker()
    acts = (add(2, where=((1, 3),)),)
    worker.add_request("a", Plan("a", acts, measured=False))
    worker.add_request("b", Plan("b", acts))
    worker.step([("a", 0, 4), ("b", 0, 4)])
    for position in (1, 2):
        changed = stream_at("a", position, 2) + VECTORS[DIGESTS[0]][0]
        np.testing.assert_allclose(worker.streams["a", position, 2], changed, rtol=1e-6)
    worker.finish("a", "b")
    released = [event for event in worker.row_sender.events if isinstance(event, Released)]
    assert [(one.measured, [dose.rows for dose in one.doses]) for one in released] == [
        (False, []),
        (True, [2]),
    ]


def test_requests_whose_doses_cannot_be_read_are_released_as_unmeasured() -> None:
    worker = Worker()
    for name in ("one", "two"):
        worker.add_request(name, Plan(name, steer().acts))
    worker.step([("one", 0, 2), ("two", 0, 1)])
    worker.finish("one", "two")
    done = [one for one in worker.row_sender.events if isinstance(one, Released)]
    assert all(one.measured and one.doses for one in done)
    unmeasured = EventMerger(1)
    for number, name in ((1, "one"), (2, "two")):
        unmeasured.feed(InstalledHead(0, number, Installed(name, "")))
    events = [e for head in worker.row_sender.fallback for e in unmeasured.feed(head)]
    assert events == [replace(one, measured=False, doses=()) for one in done]


def test_tokens_that_are_computed_again_are_measured_again() -> None:
    worker = Worker()
    worker.add_request("v", steer(add(1, where=((2, 5),))))
    worker.step([("v", 0, 4)])
    worker.runtime.preempt("v")
    worker.step([("v", 0, 5)])
    worker.finish("v")
    released = worker.row_sender.events[-1]
    assert isinstance(released, Released)
    assert [dose.rows for dose in released.doses] == [5]
    assert (released.preemptions, released.computed, released.recomputed) == (1, (0, 5), 4)


def test_a_plan_that_is_too_large_to_be_measured_is_in_force_and_released_so() -> None:
    worker = Worker(capacity(slots=1000, bank_rows=1000))
    many = [add(0, scale=1.0 + n, where=((n, n + 1),)) for n in range(600)]
    worker.add_request("v", steer(*many))
    worker.step([("v", 3, 2)])
    expected = stream_at("v", 4, 0) + 5 * VECTORS[DIGESTS[0]][0]
    assert worker.streams["v", 4, 0].tolist() == expected.tolist()
    worker.finish("v")
    assert worker.row_sender.events[-1] == replace(silent(computed=(3, 5)), measured=False)


def test_a_band_wider_than_the_data_leaves_every_bit_and_is_measured_as_no_change() -> None:
    worker = Worker()
    band = Act(Kind.PULL, DIGESTS[:1], ((1, (0,)),), EVERYWHERE, bands=(Band(-100, 100, 1.0),))
    worker.add_request("v", steer(band))
    worker.step([("v", 0, 3)])
    for position in range(3):
        found = worker.streams["v", position, 1]
        assert found.tobytes() == stream_at("v", position, 1).tobytes()
    worker.finish("v")
    assert worker.row_sender.events[-1] == replace(
        silent(computed=(0, 3)), doses=(Dose(0, 1, 3, 0.0, 0.0, 0.0),)
    )


def test_a_worker_sends_and_counts_rows_of_its_own_sites_alone() -> None:
    worker = Worker(sites=frozenset({0, 1, 2}))
    worker.add_request("v", Plan("r", (), (Capture((1, 3), EVERYWHERE),)))
    worker.step([("v", 0, 2)])
    worker.finish("v")
    _, rows, released = worker.row_sender.events
    assert isinstance(rows, Rows)
    assert (rows.sites, rows.positions.tolist()) == ((1,), [0, 1])
    assert released == replace(silent(computed=(0, 2)), captured={1: 2})


def test_the_number_of_a_finished_request_is_given_out_again() -> None:
    worker = Worker()
    for _ in range(5):
        worker.add_request("one", Plan("one", steer().acts))
        worker.add_request("other", Plan("other", steer().acts))
        worker.finish("one", "other")
    assert worker.row_sender.numbers == {1, 2}


def test_a_plan_that_cannot_be_put_in_force_uses_up_no_number() -> None:
    worker = Worker()
    for _ in range(3):
        worker.add_request("v", steer(add(2, scale=1e39)))
        worker.finish("v")
    assert worker.row_sender.numbers == {1}


def test_a_number_is_not_given_out_before_its_request_has_been_settled() -> None:
    worker = Worker()
    worker.add_request("one", Plan("one"))
    worker.runtime.remove_request("one")
    worker.add_request("other", Plan("other"))
    worker.runtime.send_released()
    assert worker.row_sender.numbers == {1, 2}
    assert worker.row_sender.events == [
        Installed("one", ""),
        Installed("other", ""),
        silent(computed=(0, 0), request_id="one"),
    ]


def test_an_id_that_vllm_gives_out_again_in_one_step_is_another_request() -> None:
    worker = Worker()
    worker.add_request("v", Plan("first", (add(1),)))
    worker.step([("v", 0, 2)])
    worker.finish("v")
    worker.add_request("v", Plan("second", (add(3),)))
    worker.step([("v", 0, 2)])
    for site, steered in ((1, False), (3, True)):
        before = stream_at("v", 0, site)
        expected = before + VECTORS[DIGESTS[0]][0] if steered else before
        assert worker.streams["v", 0, site].tolist() == expected.tolist()


def test_what_nobody_knows_is_forgotten_and_preempted_without_a_word() -> None:
    worker = Worker()
    worker.runtime.preempt("nobody")
    worker.finish("nobody")
    assert worker.row_sender.events == []


def test_a_wire_whose_name_can_be_read_is_answered() -> None:
    worker = Worker()
    worker.runtime.add_request("v", packed({"id": "r", "acts": 5, "capture": []}))
    worker.finish("v")
    installed, released = worker.row_sender.events
    assert isinstance(installed, Installed)
    assert installed.error.startswith("this is no plan")
    assert released == silent(computed=(0, 0))


@given(st.lists(WIRES, min_size=1, max_size=3), st.lists(WIRES, max_size=2))
def test_nothing_that_may_come_in_place_of_a_plan_can_raise_or_stay(
    wires: list[object], changes: list[object]
) -> None:
    worker = Worker(capacity(bank_rows=3, slots=3, directions=2, token_rules=2, capture_rows=8))
    batch = [(f"v{number}", 0, 6) for number in range(len(wires))]
    for (request_id, _, _), wire in zip(batch, wires, strict=True):
        worker.runtime.add_request(request_id, wire)
    worker.step(batch, padding=2)
    for change in changes:
        assert worker.runtime.update_steering("r", change, 0).first in (-1, 6)
    worker.step([(request_id, 6, 3) for request_id, _, _ in batch], padding=2)
    worker.finish(*(request_id for request_id, _, _ in batch))
    assert worker.held() == NOTHING
    assert not worker.padding_touched


def test_rows_that_the_server_is_too_slow_for_are_lost_counted_and_logged_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker()
    worker.row_sender.free_bytes = 0
    worker.add_request("v", Plan("r", (), (Capture((1, 2), ((0, 2),)),)))
    worker.step([("v", 0, 1)])
    worker.step([("v", 1, 2)])
    worker.finish("v")
    (warning,) = [record.getMessage() for record in caplog.records if "are lost" in record.msg]
    assert warning.startswith("2 captured rows of a step are lost: the ring has")
    assert "the staging area has 0 bytes free" in warning
    (released,) = [event for event in worker.row_sender.events if isinstance(event, Released)]
    assert (released.captured, released.lost_rows) == ({}, 4)


@pytest.mark.parametrize("part", ["acts", "captures"])
def test_a_plan_that_would_hold_up_a_step_is_refused(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built_tables, "MAX_PLAN_COST", 30)
    monkeypatch.setattr(capture_sets, "MAX_CAPTURE_COST", 30)
    worker = Worker()
    nested = [((i, 90 - i),) for i in range(40)]
    many: dict[str, tuple[object, ...]] = {
        "acts": tuple(add(1, scale=1.0 + i, where=one) for i, one in enumerate(nested)),
        "captures": tuple(Capture((1,), one) for one in nested),
    }
    worker.add_request("v", replace(Plan("r"), **{part: many[part]}))
    (installed,) = [event for event in worker.row_sender.events if isinstance(event, Installed)]
    assert "too fragmented" in installed.error
    assert "over 30" in installed.error
    worker.finish("v")
    assert worker.held() == NOTHING


def test_samples_with_one_plan_put_nothing_together_but_their_own() -> None:
    """What a step pays for 64 samples of a fragmented request is what it pays for one."""
    windows = tuple((100 + 2 * i, 101 + 2 * i) for i in range(4000))
    plan = Plan(
        "s0",
        tuple(add(site, where=windows) for site in range(SITES)),
        (Capture(tuple(range(SITES)), windows),),
    ).pack()
    worker = Worker()
    worker.add_request("v0", plan)
    put_together = worker.steering.built_tables, worker.captures.sets
    built = [one.built for one in put_together]
    written = [intervals_written(worker)]
    assert all(built)
    for number in range(1, 64):
        worker.add_request(f"v{number}", replace(plan, request_id=f"s{number}"))
    assert [one.built for one in put_together] == built
    worker.step([(f"v{number}", 3, 1) for number in range(60)])
    worker.finish(*(f"v{number}" for number in range(63)))
    assert intervals_written(worker) == written[0]
    assert [one.built for one in put_together] == built
    assert worker.held()[0] == 1
    worker.finish("v63")
    assert worker.held() == NOTHING


def intervals_written(worker: Worker) -> int:
    """How many pieces all tables have copied so far."""
    functions = (worker.steering.built_tables.functions, worker.captures.sets.functions)
    return sum(one.written for one in functions)


def test_a_prepared_plan_is_put_in_force_at_no_cost() -> None:
    worker = Worker(capacity(slots=500, bank_rows=3000))
    many = tuple(add(*range(SITES), scale=1.0 + n, where=((n, n + 1),)) for n in range(400))
    plan = Plan("r", many, (Capture((1, 2), ((3, 9),)),))
    preparations, built = worker.runtime.preparations, []
    wire: object = plan.to_wire()
    while True:
        before = worker.steering.built_tables.built
        done, error = preparations.build_part("ahead", wire, 100)
        built.append(worker.steering.built_tables.built - before)
        wire = None
        if done:
            break
    assert error == ""
    assert len(built) > 10
    assert max(built) <= 110
    total = worker.steering.built_tables.built
    worker.add_request("v", plan)
    worker.step([("v", 0, 5)])
    assert worker.steering.built_tables.built == total
    preparations.release("ahead")
    worker.finish("v")
    assert len(preparations) == 0
    assert worker.held() == NOTHING


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_a_preparation_that_is_given_up_leaves_nothing(calls: int) -> None:
    worker = Worker()
    many = tuple(add(*range(SITES), scale=1.0 + n, where=((n, n + 1),)) for n in range(24))
    wire = Plan("r", many, (Capture((1, 2), ((3, 9),)),)).to_wire()
    for _ in range(calls):
        assert worker.runtime.preparations.build_part("ahead", wire, 3) == (False, "")
    worker.runtime.preparations.release("ahead")
    worker.runtime.preparations.release("never was")
    assert worker.held() == NOTHING
    assert len(worker.captures.sets.functions) == 0


@given(WIRES)
def test_nothing_that_may_come_to_be_prepared_can_raise_or_stay(wire: object) -> None:
    worker = Worker(capacity(bank_rows=3, slots=3, directions=2, token_rules=2, capture_rows=8))
    preparations = worker.runtime.preparations
    for _ in range(100):
        done, error = preparations.build_part("ahead", wire, 1)
        if done:
            break
    assert done
    assert bool(error) == (len(preparations) == 0)
    preparations.release("ahead")
    assert worker.held() == NOTHING


def test_who_waits_for_a_table_that_cannot_be_completed_hears_of_it() -> None:
    worker = Worker(capacity(bank_rows=5))
    many = tuple(add(*range(SITES), scale=1.0 + n, where=((n, n + 1),)) for n in range(24))
    wire = Plan("r", many).to_wire()
    preparations = worker.runtime.preparations
    assert preparations.build_part("one", wire, 2) == (False, "")
    assert preparations.build_part("other", wire, 2) == (False, "")
    full = (True, "every row of the bank is in use")
    assert preparations.build_part("one", None, 100) == full
    assert preparations.build_part("other", None, 100) == full
    assert len(preparations) == 0
    assert worker.held() == NOTHING
