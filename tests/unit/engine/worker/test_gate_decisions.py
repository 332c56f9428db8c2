"""A worker reports a request only if all asked gates are shut at the position, in this step."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rheostat_engine import Act, Activation, Kind, Normalise, Plan, Reading
from rheostat_engine.plan.gate_decisions import DecidedOnce, decided_once
from rheostat_engine.plan.gates import Combine, Form, Gate, GateCondition, Hold, Pool
from rheostat_engine.worker.gate_decisions import DecisionReport

from ..cpu_worker import Worker
from ..strategies import DIGESTS, EVERYWHERE

END = 6
SHUT, OPEN = 1e6, -1e6


def gated(*bounds: float, end: int = END, late: bool = False) -> Plan:
    """A plan with a gate for each bound, decided by the last token of the prompt."""
    where = ((end - 1, end),)
    reading = Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, 0)
    acts = [Act(Kind.READ, (DIGESTS[0],), ((0, (0,)),), where, reading=reading)]
    for above in bounds:
        condition = GateCondition((0,), Pool.LAST, Combine.ANY, above, math.inf, 1, end - 1)
        gate = Gate((condition,), Combine.ALL, Form.STEP, 0.5, 0.0, Hold.REST)
        gate = gate._replace(late=end if late else 0)
        acts.append(Act(Kind.ADD, (DIGESTS[1],), ((4, (0,)),), EVERYWHERE, gate=gate))
    return Plan("r", tuple(acts))


def question(plan: Plan) -> DecidedOnce:
    table = plan.packed_acts.table
    assert table is not None
    found = decided_once(table)
    assert found is not None
    return found


def reported(
    worker: Worker, questions: dict[str, DecidedOnce], *scheduled: tuple[str, int, int]
) -> Sequence[str] | None:
    """What a step reports; None: nothing."""
    worker.runtime.decisions.ask(questions)
    worker.step(scheduled)
    report = worker.runtime.decisions.take()
    assert worker.runtime.decisions.take() is None
    return None if report is None else report.shut()


@pytest.mark.parametrize(
    ("bounds", "shut"),
    [((SHUT,), True), ((OPEN,), False), ((SHUT, 2e6), True), ((SHUT, OPEN), False)],
)
@pytest.mark.parametrize("pieces", [[(0, 6)], [(0, 3), (3, 3)], [(0, 5), (5, 1)]])
def test_a_request_is_reported_if_all_its_gates_are_shut(
    bounds: tuple[float, ...], shut: bool, pieces: list[tuple[int, int]]
) -> None:
    worker, plan = Worker(), gated(*bounds)
    worker.add_request("a", replace(plan, request_id="a"))
    *before, last = [("a", start, count) for start, count in pieces]
    for piece in before:
        assert reported(worker, {}, piece) is None
    assert reported(worker, {"a": question(plan)}, last) == ["a"] * shut


def test_each_request_of_a_step_is_reported_for_itself() -> None:
    worker = Worker()
    plans = {name: gated(above) for name, above in zip("abc", (SHUT, OPEN, SHUT), strict=True)}
    for name, plan in plans.items():
        worker.add_request(name, replace(plan, request_id=name))
    questions = {name: question(plan) for name, plan in plans.items()}
    steps = [("x", 0, 2), ("c", 0, 6), ("b", 0, 6), ("a", 0, 6)]
    assert reported(worker, questions, *steps) == ["c", "a"]


@pytest.mark.parametrize("above", [SHUT, OPEN])
def test_a_late_gate_is_asked_for_at_the_first_generated_token(above: float) -> None:
    """Even if this step repeats the one before, as behind a prompt of one token."""
    worker, plan = Worker(), gated(above, end=1, late=True)
    worker.add_request("a", replace(plan, request_id="a"))
    assert question(plan).position == 1
    assert reported(worker, {}, ("a", 0, 1)) is None
    assert reported(worker, {"a": question(plan)}, ("a", 1, 1)) == ["a"] * (above == SHUT)


def test_nothing_is_reported_of_what_the_step_does_not_compute() -> None:
    worker, plan = Worker(), gated(SHUT)
    asked = {"a": question(plan)}
    assert reported(worker, asked, ("a", 0, 6)) is None  # it has no plan
    worker.add_request("a", replace(plan, request_id="a"))
    assert reported(worker, asked, ("a", 0, 5)) is None
    assert reported(worker, asked, ("b", 0, 6)) is None
    assert reported(worker, {}, ("a", 5, 1)) is None  # nobody asked


def test_what_is_not_a_number_is_not_shut() -> None:
    asked = {name: DecidedOnce(0, (0, 2)) for name in "abc"}
    openness = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, math.nan], [1e-38, 0.0, 0.0]])
    assert DecisionReport(asked, openness).shut() == ["a"]
