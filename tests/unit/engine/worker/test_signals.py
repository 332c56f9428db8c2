"""Signals are what probes read and how far gates are open, once per position, in order."""

from collections.abc import Mapping
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import (
    Act,
    Activation,
    Installed,
    Kind,
    Normalise,
    Plan,
    Reading,
    Released,
    SignalRows,
    Signals,
    SignalsWait,
    TokenCondition,
)
from rheostat_engine.plan.gates import MAX_COLUMNS, MAX_GATES, Gate
from rheostat_engine.plan.tables import steering_table
from rheostat_engine.plan.wire import steering_from, steering_to
from rheostat_engine.worker import signals as module
from rheostat_engine.worker.signals import FEW_STEPS, WAITING_STEPS

from ..cpu_worker import NOTHING, Worker, token_at
from ..gated import gated, gated_plans, gates, openness
from ..schedules import Schedule
from ..strategies import DIGESTS, EVERYWHERE, LIMIT, plans


@st.composite
def signalling(draw: st.DrawFn, request_id: str) -> Plan:
    """A plan with probes and gates, of which some leave the worker."""
    plan = draw(gated_plans(request_id))
    acts = [act for act in plan.acts if act.gate is None or not act.gate.late]
    columns = 1 + max(
        act.reading.column + len(act.rows) - 1 for act in acts if act.reading is not None
    )
    more = draw(st.lists(gates(columns), max_size=2))
    extra = tuple(gate for gate in more if not gate.late)
    signals = Signals(draw(st.integers(0, columns)), extra, draw(st.booleans()))
    wait = draw(st.sampled_from(SignalsWait))
    return replace(plan, acts=tuple(acts), signals=signals, signals_wait=wait)


class FromTheStart(Schedule):
    """Nothing is cached, because tokens that are read are always computed."""

    def __init__(self, data: st.DataObject, lengths: dict[str, int]) -> None:
        super().__init__(data, lengths)
        self.first.update(dict.fromkeys(lengths, 0))
        self._next.update(dict.fromkeys(lengths, 0))

    def _preempt(self, worker: Worker) -> None:
        before = self.preemptions.copy()
        super()._preempt(worker)
        for request_id in self.preemptions - before:
            self._next[request_id] = 0


def columns_of(plan: Plan) -> tuple[int, tuple[Gate, ...]]:
    """The number of readings, and the gates whose openness leaves the worker."""
    return plan.signals.readings, plan.packed_acts.gates if plan.signals.openness else ()


def received(worker: Worker) -> dict[str, list[tuple[int, np.ndarray]]]:
    """By request: (position, its readings and openness with the columns of the step)."""
    found: dict[str, list[tuple[int, np.ndarray]]] = {}
    for event in worker.row_sender.events:
        if not isinstance(event, SignalRows):
            continue
        assert event.values is not None
        assert event.values.dtype == np.float32
        row = 0
        for name, start, count in zip(event.request_ids, event.starts, event.counts, strict=True):
            for position in range(start, start + count):
                values = event.values[row]
                full = np.full(MAX_COLUMNS + MAX_GATES, np.nan)
                full[: event.readings] = values[: event.readings]
                full[MAX_COLUMNS:][: len(values) - event.readings] = values[event.readings :]
                found.setdefault(name, []).append((position, full))
                row += 1
        assert row == len(event.values)
    return found


def check(plan: Plan, request_id: str, found: list[tuple[int, np.ndarray]], end: int) -> None:
    """The signals of one request whose positions below `end` were computed."""
    readings, its_gates = columns_of(plan)
    if not readings and not its_gates:
        assert not found
        return
    assert [position for position, _ in found] == list(range(end))
    history = gated(plan, request_id, 0, end).history
    for position, values in found:
        expected = [history[position].get(column, np.nan) for column in range(readings)]
        np.testing.assert_allclose(values[:readings], expected, rtol=1e-3, atol=1e-3)
        for number, gate in enumerate(its_gates):
            opened = openness(gate, history[: position + 1], 0)
            assert abs(values[MAX_COLUMNS + number] - opened) < 1e-3


@given(st.data())
def test_signals_are_what_was_read_whatever_the_schedule(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3), "requests")
    drawn: dict[str, Plan] = {f"v{n}": data.draw(signalling(f"p{n}")) for n in range(count)}
    by_id: Mapping[str, Plan | None] = {**drawn, "mate": data.draw(plans("mate")), "plain": None}
    worker = Worker()
    lengths = {i: data.draw(st.integers(1, LIMIT + 4), "length") for i in by_id}
    schedule = FromTheStart(data, lengths)
    with patch.object(module, "FEW_REQUESTS", data.draw(st.integers(0, 2), "few")):
        schedule.run(worker, by_id)
    found = received(worker)
    assert found.keys() <= {plan.request_id for plan in drawn.values()}
    for request_id, plan in drawn.items():
        check(plan, request_id, found.get(plan.request_id, []), schedule.furthest[request_id])
    assert worker.held() == NOTHING
    assert worker.row_sender.kept_free == 0


def test_signals_come_between_installed_and_released() -> None:
    worker = Worker()
    plan = _probing("r")
    worker.add_request("v", plan)
    worker.step([("v", 0, 3)])
    worker.step([("v", 3, 1)])
    assert worker.row_sender.kept_free > 0
    worker.finish("v")
    kinds = [type(event) for event in worker.row_sender.events]
    assert kinds == [Installed, SignalRows, SignalRows, Released]


def test_signals_that_nobody_needs_before_the_end_wait_for_later_steps() -> None:
    worker = Worker()
    for name in ("v", "w"):
        worker.add_request(name, _waiting(name, SignalsWait.MANY_STEPS))
    worker.step([("v", 0, 3), ("w", 0, 2)])
    for step in range(WAITING_STEPS + 2):
        worker.step([("v", 3 + step, 1), ("w", 2 + step, 1)])
    counts = [event.counts for event in _signals(worker)]
    assert counts == [(3, 2), (WAITING_STEPS, WAITING_STEPS)]
    worker.finish("v")
    kinds = [type(event) for event in worker.row_sender.events]
    assert kinds == [Installed] * 2 + [SignalRows] * 3 + [Released]
    worker.step([("w", 4 + WAITING_STEPS, 1)])
    worker.add_request("x", _probing("x"))
    worker.step([("w", 5 + WAITING_STEPS, 1), ("x", 0, 2)])
    worker.step([("w", 6 + WAITING_STEPS, 1)])
    worker.finish("w")
    counts = [event.counts for event in _signals(worker)]
    assert counts[2:] == [(2, 2), (1,), (1, 2), (1,)]
    found = received(worker)
    assert [position for position, _ in found["v"]] == [*range(5 + WAITING_STEPS)]
    assert [position for position, _ in found["w"]] == [*range(7 + WAITING_STEPS)]


@pytest.mark.parametrize(("few", "sent"), [(1, [8, 8, 6]), (2, [2] * 11)])
def test_signals_to_which_nothing_reacts_wait_a_few_steps_if_many_requests_are_read(
    few: int, sent: list[int]
) -> None:
    assert FEW_STEPS == 4
    worker = Worker()
    with patch.object(module, "FEW_REQUESTS", few):
        for name, wait in (("v", SignalsWait.FEW_STEPS), ("w", SignalsWait.MANY_STEPS)):
            worker.add_request(name, _waiting(name, wait))
        for step in range(11):
            worker.step([("v", step, 1), ("w", step, 1)])
        worker.finish("v")
    assert [sum(event.counts) for event in _signals(worker)] == sent
    for positions in received(worker).values():
        assert [position for position, _ in positions] == [*range(11)]


def test_waiting_signals_are_sent_after_a_step_without_signals() -> None:
    worker = Worker()
    worker.add_request("v", _waiting("v", SignalsWait.MANY_STEPS))
    worker.step([("v", 0, 1)])
    worker.step([("v", 1, 1)])
    assert not _signals(worker)
    worker.runtime.preempt("v")
    worker.step([("plain", 0, 1)])
    assert [event.counts for event in _signals(worker)] == [(2,)]
    worker.step([("v", 0, 3)])
    worker.finish("v")
    assert [position for position, _ in received(worker)["v"]] == [0, 1, 2]


def test_no_signals_of_a_step_wait_if_one_of_its_requests_allows_no_wait() -> None:
    worker = Worker()
    worker.add_request("v", _waiting("v", SignalsWait.MANY_STEPS))
    worker.add_request("w", _probing("w"))
    for step in range(3):
        worker.step([("v", step, 1), ("w", step, 1)])
    assert [event.counts for event in _signals(worker)] == [(1, 1)] * 3


def _signals(worker: Worker) -> list[SignalRows]:
    return [event for event in worker.row_sender.events if isinstance(event, SignalRows)]


def test_requests_that_end_want_no_signals_for_their_successors() -> None:
    worker = Worker()
    worker.add_request("v", _probing("r"))
    worker.step([("v", 0, 2)])
    worker.finish("v")
    worker.add_request("w", replace(_probing("s"), signals=Signals()))
    worker.step([("w", 0, 2)])
    assert received(worker).keys() == {"r"}


@given(signalling("r"))
def test_a_plan_with_signals_travels(plan: Plan) -> None:
    table = steering_table(plan.acts, plan.signals)
    assert table is not None
    again = steering_from(steering_to(table))
    assert (again.gates, again.signals) == (table.gates, table.signals)
    assert steering_to(again) == steering_to(table)


def test_signals_of_missing_gates_are_no_plan() -> None:
    table = _probing("r").packed_acts.table
    assert table is not None
    with pytest.raises(ValueError, match="a reading or a gate that is missing"):
        steering_from(steering_to(replace(table, signals=Signals(MAX_COLUMNS + 1))))


def test_signals_are_part_of_a_tables_digest() -> None:
    plan = _probing("r")
    silent = replace(plan, signals=Signals())
    assert plan.packed_acts.encoded != silent.packed_acts.encoded


def test_a_probe_reads_only_its_tokens_however_alike_the_steps_are() -> None:
    worker = Worker()
    token = token_at("v", 1)
    where = TokenCondition(EVERYWHERE, (token,), among=True)
    plan = _probing("r")
    worker.add_request(
        "v", replace(plan, acts=(replace(plan.acts[0], spans=(), conditions=(where,)),))
    )
    for position in range(8):
        worker.step([("v", position, 1)])
    read = [position for position, values in received(worker)["r"] if not np.isnan(values[0])]
    assert read == [position for position in range(8) if token_at("v", position) == token]
    assert 1 in read
    assert 2 not in read


def test_positions_that_are_computed_again_one_by_one_have_no_signals_until_a_new_one() -> None:
    worker = Worker()
    for request_id in ("v", "w"):
        worker.add_request(request_id, _probing(request_id))
    worker.step([("v", 0, 4), ("w", 0, 1)])
    worker.runtime.preempt("v")
    for step in range(6):
        worker.step([("v", step, 1), ("w", 1 + step, 1)])
    found = received(worker)
    assert [position for position, _ in found["v"]] == list(range(6))
    assert [position for position, _ in found["w"]] == list(range(7))


def _waiting(request_id: str, wait: SignalsWait) -> Plan:
    return replace(_probing(request_id), signals_wait=wait)


def _probing(request_id: str) -> Plan:
    """A plan with one probe, whose readings leave the worker."""
    reading = Reading(Normalise.NONE, Activation.IDENTITY, 0.0, 0.0, 0)
    act = Act(Kind.READ, (DIGESTS[0],), ((0, (0,)),), EVERYWHERE, reading=reading)
    return Plan(request_id, (act,), signals=Signals(1))
