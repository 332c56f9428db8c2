"""What is captured of a running request changes from its next step on, with or without a plan."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import (
    OPEN_END,
    Attached,
    Capture,
    Event,
    Installed,
    Plan,
    Released,
    Rows,
)
from rheostat_engine.channel.events import AttachedHead
from rheostat_engine.channel.worker_channel import EventMerger
from rheostat_engine.worker import runtime
from rheostat_engine.worker.capture import capture_sets
from rheostat_engine.worker.capture.captures import CapturesUpdate

from ..cpu_worker import NOTHING, Worker, server_request_id, stream_at
from ..strategies import EVERYWHERE, LIMIT, POSITIONS, SITES, add, captured, plans
from ..updates import update_captures
from ..wires import WIRES


def everything(*sites: int) -> Plan:
    """A plan that captures at some sites, or at all."""
    return Plan("new", (), (Capture(sites or tuple(range(SITES)), EVERYWHERE),))


def change(worker: Worker, name: str, new: Plan, number: int = 1) -> None:
    """Asks for captures."""
    worker.runtime.update_captures({name: CapturesUpdate(number, new.to_wire())})


def rows_of(events: list[Event]) -> set[tuple[int, int]]:
    """(site, position) of all rows, each of which came once."""
    found: set[tuple[int, int]] = set()
    for event in events:
        if isinstance(event, Rows):
            for one in product(event.sites, event.positions.tolist()):
                assert one not in found
                found.add(one)
    return found


@given(plans(), plans(), st.integers(0, LIMIT + 2))
def test_the_old_captures_hold_before_the_change_and_the_new_ones_after_it(
    old: Plan, new: Plan, first: int
) -> None:
    changed = update_captures(old, new.captures, first)
    assert replace(changed, captures=()) == replace(old, captures=())
    for position in POSITIONS:
        assert captured(changed, position) == captured(old if position < first else new, position)


@given(st.data())
def test_rows_come_from_the_position_that_is_named_and_each_once_through_preemption(
    data: st.DataObject,
) -> None:
    planned = data.draw(st.booleans(), "planned")
    plan = data.draw(plans(), "plan") if planned else Plan(server_request_id("v"))
    worker, name = Worker(), plan.request_id
    if planned:
        worker.add_request("v", plan)
    wanted: set[tuple[int, int]] = set()
    current, at, furthest, seen, number = plan, 0, 0, planned, 0
    pending: Plan | None = None
    expected: list[Event] = [Installed(name, "")] if planned else []
    while furthest < LIMIT:
        action = data.draw(st.sampled_from(["step", "step", "change", "preempt"]))
        if action == "change":
            number += 1
            pending = data.draw(plans("new"), "change")
            change(worker, name, pending, number)
        elif action == "preempt":
            worker.runtime.preempt("v")
            at = data.draw(st.integers(0, furthest), "restart")
        else:
            count = data.draw(st.integers(1, 6), "chunk")
            if pending is not None:
                first = max(at, furthest if seen else 0)
                current = update_captures(current, pending.captures, first)
                expected += [] if seen else [Installed(name, "")]
                furthest = max(furthest, first) if seen else first
                expected.append(Attached(name, number, first, ""))
                pending, seen = None, True
            worker.step([("v", at, count), ("mate", at, 1)])
            if seen:
                new = range(max(at, furthest), at + count)
                wanted |= {(site, p) for p in new for site in captured(current, p)}
            at += count
            furthest = max(furthest, at)
    worker.finish("v")
    mine = [event for event in worker.row_sender.events if event.request_id == name]
    assert rows_of(mine) == wanted
    told = [event for event in mine if isinstance(event, Installed | Attached)]
    assert told == expected
    if seen:
        assert isinstance(mine[-1], Released)
        assert sum(mine[-1].captured.values()) == len(wanted)
    assert worker.held() == NOTHING


def test_a_request_that_computes_its_tokens_again_is_captured_once_it_generates() -> None:
    worker, name = Worker(), server_request_id("v")
    worker.step([("v", 0, 4)])
    worker.runtime.preempt("v")
    worker.runtime.update_captures({name: CapturesUpdate(1, everything(2).to_wire(), 6)})
    worker.step([("v", 0, 5), ("mate", 0, 1)])  # it had computed 8 positions
    worker.step([("v", 5, 4), ("mate", 1, 1)])
    worker.step([("v", 9, 1), ("mate", 2, 1)])
    assert rows_of(worker.row_sender.events) == {(2, 9)}
    (told,) = [event for event in worker.row_sender.events if isinstance(event, Attached)]
    assert told.first == 9


def test_rows_are_those_of_the_stream() -> None:
    worker = Worker()
    worker.step([("v", 0, 4)])
    change(worker, server_request_id("v"), everything(2))
    worker.step([("mate", 0, 2), ("v", 4, 3)])
    (rows,) = [event for event in worker.row_sender.events if isinstance(event, Rows)]
    assert rows.positions.tolist() == [4, 5, 6]
    assert rows.sites == (2,)
    for position, row in zip([4, 5, 6], rows.data[0], strict=True):
        assert row.tolist() == stream_at("v", position, 2).tolist()


def test_a_change_waits_for_a_request_that_is_not_scheduled_and_goes_with_it() -> None:
    worker = Worker()
    for name in ("r", server_request_id("v"), server_request_id("gone"), "never"):
        change(worker, name, everything(1))
    worker.step([("mate", 0, 2)])
    worker.runtime.remove_request("gone")
    worker.runtime.update_captures({"never": None})
    worker.add_request("late", Plan("r", (add(0),)))
    worker.step([("late", 3, 2), ("mate", 2, 1)])
    worker.step([("v", 5, 2), ("gone", 0, 1)])
    worker.add_request("w", Plan("never"))
    worker.step([("w", 0, 1)])
    told = [event for event in worker.row_sender.events if isinstance(event, Attached)]
    assert told == [
        Attached(server_request_id("gone"), 1, OPEN_END, ""),
        Attached("r", 1, 3, ""),
        Attached(server_request_id("v"), 1, 5, ""),
    ]


def test_a_later_change_takes_the_place_of_one_that_waits() -> None:
    worker = Worker()
    worker.add_request("v", Plan("r"))
    change(worker, "r", everything(1))
    change(worker, "r", everything(3), number=2)
    worker.step([("v", 0, 2)])
    assert [e for e in worker.row_sender.events if isinstance(e, Attached)] == [
        Attached("r", 2, 0, "")
    ]
    assert rows_of(worker.row_sender.events) == {(3, 0), (3, 1)}


def test_what_nobody_wants_any_more_is_not_copied() -> None:
    worker = Worker()
    worker.step([("v", 0, 2)])
    change(worker, server_request_id("v"), everything())
    worker.step([("v", 2, 2)])
    change(worker, server_request_id("v"), Plan("new"), number=2)
    worker.step([("v", 4, 2)])
    assert {position for _, position in rows_of(worker.row_sender.events)} == {2, 3}
    assert worker.captures.captured_rows == 2 * SITES
    assert worker.buffers.active.steps == {"plain": 2, "active": 1}


@given(WIRES)
def test_whatever_comes_in_place_of_a_change_is_answered_and_what_is_wrong_changes_nothing(
    wire: object,
) -> None:
    worker = Worker()
    worker.add_request("v", everything(1))
    worker.runtime.update_captures({"new": CapturesUpdate(7, wire)})
    worker.step([("v", 0, 2)])
    (told,) = [event for event in worker.row_sender.events if isinstance(event, Attached)]
    if told.error:
        assert rows_of(worker.row_sender.events) == {(1, 0), (1, 1)}
    worker.finish("v")
    assert worker.held() == NOTHING


@pytest.mark.parametrize(
    "wire", [None, b"", "text", Plan("new", (), (Capture((99,), EVERYWHERE),))]
)
def test_a_change_that_cannot_be_is_refused(wire: object) -> None:
    worker = Worker()
    worker.add_request("v", everything(1))
    bytes_of = wire.to_wire() if isinstance(wire, Plan) else wire
    worker.runtime.update_captures({"new": CapturesUpdate(7, bytes_of)})
    worker.step([("v", 0, 2)])
    (told,) = [event for event in worker.row_sender.events if isinstance(event, Attached)]
    assert told.error
    assert rows_of(worker.row_sender.events) == {(1, 0), (1, 1)}


def nested(count: int, first: int = 0) -> Plan:
    """A plan whose captures cost about their number."""
    spans = [((first + i, first + 3 * count - i),) for i in range(count)]
    return Plan("new", (), tuple(Capture((i % SITES,), one) for i, one in enumerate(spans)))


def test_a_change_that_costs_too_much_is_refused_and_the_request_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker()
    worker.add_request("v", everything(1))
    monkeypatch.setattr(capture_sets, "MAX_CAPTURE_COST", 30)
    worker.runtime.update_captures({"new": CapturesUpdate(1, nested(40).to_wire())})
    worker.step([("v", 0, 1)])
    (told,) = [event for event in worker.row_sender.events if isinstance(event, Attached)]
    assert told.error == "captures are too fragmented: their cost is over 30"
    assert rows_of(worker.row_sender.events) == {(1, 0)}


def test_a_step_takes_up_no_more_changes_than_it_may_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "STEP_COST", 150)
    worker = Worker()
    names = [f"r{number}" for number in range(6)]
    for number, name in enumerate(names):
        change(worker, server_request_id(name), nested(60, number))
    told, firsts = 0, []
    for position in range(1, 7):
        built = worker.captures.sets.built
        worker.step([(name, position, 1) for name in names])
        heard = [one for one in worker.row_sender.events if isinstance(one, Attached)]
        firsts += [one.first for one in heard[told:]]
        assert worker.captures.sets.built - built <= 150 + nested(60).plan_cost
        told = len(heard)
    assert firsts == sorted(firsts)
    assert (len(set(firsts)), len(firsts)) == (3, 6)


def test_equal_changes_are_put_together_once_and_ended_ones_are_let_go_of() -> None:
    worker = Worker()
    names = [f"r{number}" for number in range(30)]
    for name in names:
        change(worker, server_request_id(name), nested(60))
    for position in range(40):
        worker.step([(name, position, 1) for name in names])
    assert sum(isinstance(one, Attached) for one in worker.row_sender.events) == len(names)
    assert worker.captures.sets.built == nested(60).plan_cost
    for name in names:
        change(worker, server_request_id(name), Plan("new"), number=2)
    for position in range(40, 60):
        worker.step([(name, position, 1) for name in names])
    assert len(worker.captures.sets.functions) == 0


def test_a_request_holds_little_however_often_what_is_captured_of_it_changes() -> None:
    worker = Worker()
    wanted: set[tuple[int, int]] = set()
    for position in range(60):
        sites = {position % SITES, (position * 2) % SITES}
        change(worker, server_request_id("v"), everything(*sorted(sites)), number=position)
        worker.step([("v", position, 1)])
        wanted |= {(site, position) for site in sites}
        assert len(worker.captures.sets.functions) == 1
    worker.finish("v")
    assert rows_of(worker.row_sender.events) == wanted
    released = worker.row_sender.events[-1]
    assert isinstance(released, Released)
    assert sum(released.captured.values()) == len(wanted)


def test_a_change_acts_from_the_position_that_is_named_on() -> None:
    worker = Worker()
    worker.step([("v", 0, 3)])
    worker.runtime.update_captures(
        {server_request_id("v"): CapturesUpdate(1, everything(2).to_wire(), 4)}
    )
    for position in (3, 4, 5):
        worker.step([("v", position, 1)])
    (told,) = [event for event in worker.row_sender.events if isinstance(event, Attached)]
    assert told.first == 4
    assert rows_of(worker.row_sender.events) == {(2, 4), (2, 5)}


def test_all_workers_have_to_say_it() -> None:
    merger = EventMerger(2)
    one, other = (AttachedHead(rank, 3, Attached("r", 1, 5 + rank, "")) for rank in (0, 1))
    assert merger.feed(one) == []
    assert merger.feed(other) == [Attached("r", 1, 6, "")]


def test_open_ended_captures_stay_open_ended() -> None:
    plan = update_captures(everything(1), everything(2).captures, 9)
    assert plan.captures == (Capture((1,), ((0, 9),)), Capture((2,), ((9, OPEN_END),)))
