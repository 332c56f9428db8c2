"""A change of a running request acts from its next step on, or leaves all as it was."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import (
    OPEN_END,
    Act,
    Band,
    Capture,
    Installed,
    Kind,
    Plan,
    Released,
    TokenCondition,
)
from rheostat_engine.worker.runtime import UpdateResult

from ..cpu_worker import NOTHING, Worker
from ..schedules import check_doses, check_stream, expected_doses
from ..strategies import DIGESTS, EVERYWHERE, ablate, add, plans
from ..tables import capacity
from ..updates import update_steering
from ..wires import packed


def change(worker: Worker, *acts: Act, not_before: int = 0) -> UpdateResult:
    """Changes request "r"."""
    return worker.runtime.update_steering("r", Plan("r", acts).to_wire(), not_before)


def released(worker: Worker) -> Released:
    """The last event."""
    event = worker.row_sender.events[-1]
    assert isinstance(event, Released)
    return event


@given(
    plans(),
    st.lists(st.tuples(plans(), st.integers(1, 5), st.integers(0, 25)), max_size=4),
    st.integers(1, 5),
)
def test_each_token_gets_what_was_in_force_at_its_position_and_all_of_it_is_measured(
    plan: Plan, changes: list[tuple[Plan, int, int]], rest: int
) -> None:
    worker = Worker(capacity(slots=256))
    worker.add_request("v", plan)
    expected, end = plan, 0
    for new, count, not_before in changes:
        worker.step([("v", end, count)])
        end += count
        first = max(end, not_before)
        found = worker.runtime.update_steering("r", new.to_wire(), not_before)
        assert found == UpdateResult(first, "")
        expected = update_steering(expected, new.acts, first)
    worker.step([("v", end, rest)])
    # A preempted request computes everything again, each token under what it had.
    worker.runtime.preempt("v")
    worker.step([("v", 0, end + rest)])
    for (_, position, site), stream in worker.streams.items():
        check_stream(expected, "v", position, site, stream)
    worker.finish("v")
    computed = [*range(end + rest)] * 2
    check_doses(released(worker).doses, expected_doses(expected, "v", computed))
    assert released(worker).measured
    assert worker.held() == NOTHING


def test_a_request_that_is_not_here_is_said_to_be_nowhere() -> None:
    worker = Worker()
    assert change(worker, add(0)) == UpdateResult(-1, "")
    worker.add_request("v", Plan("r"))
    worker.finish("v")
    assert change(worker, add(0)) == UpdateResult(-1, "")
    assert worker.held() == NOTHING
    worker.add_request("v", Plan("another"))
    assert change(worker, add(0)) == UpdateResult(-1, "")


def test_a_request_is_known_by_the_name_in_its_plan() -> None:
    worker = Worker()
    worker.add_request("v", Plan("r"))
    assert worker.runtime.update_steering("v", Plan("v", (add(0),)).to_wire(), 0) == UpdateResult(
        -1, ""
    )
    assert worker.runtime.update_steering(
        "r", Plan("another", (add(0),)).to_wire(), 0
    ) == UpdateResult(0, "")


UNKNOWN = b"\xee" * 32


@pytest.mark.parametrize(
    ("acts", "error"),
    [
        ((add(1), add(3, digest=UNKNOWN)), f"vector {UNKNOWN.hex()} is not in the worker"),
        ((add(1), ablate(3, digests=(DIGESTS[0],) * 2)), "vector .* has no direction of its own"),
        ((add(1, 3, scale=2.0), add(4, scale=3.0)), "every row of the bank is in use"),
        ((add(5),), "the plan names a site that is not one of the model's 5"),
        ((ablate(1),) * 65, "65 steps meet at one site; at most 64 can"),
        (
            (replace(add(1), spans=(), conditions=(TokenCondition(EVERYWHERE, (99,), True),)),),
            "a token id is not below the vocabulary's size, 6",
        ),
    ],
)
def test_a_change_that_cannot_be_put_in_force_leaves_the_old_in_force(
    acts: tuple[Act, ...], error: str
) -> None:
    worker = Worker(capacity(bank_rows=2))
    plan = Plan("r", (add(2), ablate(0)), (Capture((2,), EVERYWHERE),))
    worker.add_request("v", plan)
    worker.step([("v", 0, 3)])
    held = worker.held()
    found = change(worker, *acts)
    assert found.first == 3
    assert re.fullmatch(error, found.error)
    assert worker.held() == held
    worker.step([("v", 3, 3)])
    for (_, position, site), stream in worker.streams.items():
        check_stream(plan, "v", position, site, stream)
    worker.finish("v")
    check_doses(released(worker).doses, expected_doses(plan, "v", [*range(6)]))
    assert released(worker).captured == {2: 6}
    assert worker.held() == NOTHING


def test_a_wire_that_is_no_plan_is_answered_and_changes_nothing() -> None:
    worker = Worker()
    worker.add_request("v", Plan("r", (add(2),)))
    held = worker.held()
    found = worker.runtime.update_steering("r", packed({"id": "r", "acts": 7}), 4)
    assert found.first == 4
    assert found.error.startswith("this is no plan: ")
    assert worker.held() == held


def test_a_change_does_not_act_before_the_position_it_is_given() -> None:
    worker = Worker()
    worker.add_request("v", Plan("r", (add(2),)))
    worker.step([("v", 0, 2)])
    assert change(worker, not_before=4) == UpdateResult(4, "")
    worker.step([("v", 2, 4)])
    worker.finish("v")
    assert [dose[:3] for dose in released(worker).doses] == [(0, 2, 4)]


def test_captures_of_a_change_are_not_taken_up() -> None:
    worker = Worker()
    worker.add_request("v", Plan("r"))
    wire = Plan("r", (), (Capture((1,), EVERYWHERE),)).to_wire()
    assert worker.runtime.update_steering("r", wire, 0) == UpdateResult(0, "")
    worker.step([("v", 0, 2)])
    worker.finish("v")
    assert worker.row_sender.events == [
        Installed("r", ""),
        Released("r", (), True, {}, 0, 0, (0, 2)),
    ]


def test_a_request_that_was_changed_too_often_is_told_so() -> None:
    worker = Worker()
    # Acts that hold nowhere cost what it takes to read them.
    directions = 400_000
    bands = (Band(0.0, 0.0, 1.0),) * directions
    many = (Act(Kind.PULL, DIGESTS[:1] * directions, ((0, (0,) * directions),), (), bands=bands),)
    worker.add_request("v", Plan("r", (add(0),)))
    wire = Plan("r", many).to_wire()
    assert worker.runtime.update_steering("r", wire, 9) == UpdateResult(9, "")
    found = worker.runtime.update_steering("r", wire, 19)
    assert found == UpdateResult(19, "the request has been changed too often")
    assert change(worker, add(1), not_before=20) == UpdateResult(20, "")


def test_a_change_after_a_vector_was_dropped_keeps_what_was_measured_before() -> None:
    worker = Worker()
    worker.add_request("v", Plan("r", (add(2),)))
    worker.step([("v", 0, 2)])
    worker.steering.drop([DIGESTS[0]])
    assert change(worker, add(1, digest=DIGESTS[1])) == UpdateResult(2, "")
    worker.step([("v", 2, 2)])
    worker.finish("v")
    expected = Plan(
        "r", (add(2, where=((0, 2),)), add(1, digest=DIGESTS[1], where=((2, OPEN_END),)))
    )
    check_doses(released(worker).doses, expected_doses(expected, "v", [*range(4)]))
