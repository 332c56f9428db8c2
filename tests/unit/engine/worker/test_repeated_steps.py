"""A step that repeats the last one does what it would do if everything were looked up again."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import (
    Act,
    Activation,
    Event,
    Kind,
    Normalise,
    Plan,
    Reading,
    Released,
    Rows,
    SignalRows,
    Signals,
    SignalsWait,
)
from rheostat_engine.plan.gains import GainsUpdate
from rheostat_engine.worker import signals
from rheostat_engine.worker.capture.captures import CapturesUpdate
from rheostat_engine.worker.state.position_functions import Int64
from rheostat_engine.worker.step_tokens import StepTokens, TokensOfSteps

from ..cpu_worker import NOTHING, Worker
from ..strategies import DIGESTS, EVERYWHERE, LIMIT, plans
from ..tables import capacity

ROW_BYTES = 8 * 4
"""Bytes of a captured row."""


class NeverRepeated(TokensOfSteps):
    """Says of no step that it repeats the last one."""

    def find(self, numbers: Int64, computed: Int64, scheduled: Int64) -> StepTokens:
        return super().find(numbers, computed, scheduled)._replace(repeated=False)


def content(event: Event) -> object:
    """What two equal events have in common."""
    if isinstance(event, SignalRows):
        assert event.values is not None
        labels = event.request_ids, event.starts, event.counts, event.readings
        return labels, event.values.tobytes()
    if not isinstance(event, Rows):
        return event
    data = event.data.tobytes()
    return event.request_id, event.sites, event.positions.tolist(), data, event.encoding


def assert_equal(found: Worker, expected: Worker) -> None:
    """Both have computed the same, and sent the same events."""
    for key, stream in expected.streams.items():
        assert found.streams[key].tobytes() == stream.tobytes()
    events = [[content(event) for event in one.row_sender.events] for one in (found, expected)]
    assert events[0] == events[1]


@given(st.data())
def test_what_changes_between_two_steps_acts_in_the_second(data: st.DataObject) -> None:
    ring = data.draw(st.sampled_from((5, 1000)), "ring rows")
    workers = [Worker(capacity(slots=256, capture_rows=ring)) for _ in range(2)]
    workers[1].runtime._tokens = NeverRepeated()
    names = [f"v{n}" for n in range(data.draw(st.integers(1, 3), "requests"))]
    for name in names:
        plan = data.draw(plans(name), "plan")
        for worker in workers:
            worker.add_request(name, plan)
    actions = st.sampled_from(["nothing"] * 6 + ["acts", "captures", "captures", "space"])
    for position in range(LIMIT + 4):
        action, name = data.draw(actions), data.draw(st.sampled_from(names))
        if action == "acts":
            wire = data.draw(plans(name), "acts").to_wire()
            not_before = data.draw(st.integers(0, position + 6), "not before")
            for worker in workers:
                worker.runtime.update_steering(name, wire, not_before)
        elif action == "captures":
            wire = replace(data.draw(plans("new"), "captures"), acts=()).to_wire()
            not_before = data.draw(st.integers(0, position + 6), "not before")
            for worker in workers:
                update = CapturesUpdate(position, wire, not_before)
                worker.runtime.update_captures({name: update})
        elif action == "space":
            rows = data.draw(st.sampled_from((0, 3, 1000)), "rows that fit")
            for worker in workers:
                worker.row_sender.free_bytes = rows * ROW_BYTES
        for worker in workers:
            worker.step([(name, position, 1) for name in names])
    for worker in workers:
        worker.finish(*names)
        assert worker.held() == NOTHING
    assert_equal(*workers)


def reading(name: str, columns: int, wait: SignalsWait) -> Plan:
    """A plan with a steered site, and with probes whose readings leave the worker."""
    act = Act(Kind.READ, DIGESTS[:1], ((1, (0,)),), EVERYWHERE)
    probe = Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, 0)
    probes = [replace(act, reading=probe._replace(column=column)) for column in range(columns)]
    steering = Act(Kind.ADD, DIGESTS[:1], ((3, (0,)),), EVERYWHERE)
    return Plan(name, (*probes, steering), signals=Signals(columns), signals_wait=wait)


@given(st.data())
def test_signals_are_the_same_if_nothing_is_recognized_as_a_repetition(
    data: st.DataObject,
) -> None:
    workers = [Worker(capacity(slots=256)) for _ in range(2)]
    workers[1].runtime._tokens = NeverRepeated()
    following: dict[str, int] = {}
    made = 0

    def begin() -> None:
        nonlocal made
        name, made = f"v{made}", made + 1
        plan = reading(name, data.draw(st.integers(0, 2)), data.draw(st.sampled_from(SignalsWait)))
        for worker in workers:
            worker.add_request(name, plan)
        following[name] = 0

    for _ in range(data.draw(st.integers(1, 3), "requests")):
        begin()
    actions = st.sampled_from(
        ["nothing"] * 12 + ["end", "begin", "absent", "again", "idle", "gains", "acts", "captures"]
    )
    with patch.object(signals, "FEW_REQUESTS", data.draw(st.integers(0, 2), "few")):
        for number in range(40):
            action, name = data.draw(actions), data.draw(st.sampled_from([*following]))
            present = dict.fromkeys(following, 1)
            if action == "end" and len(following) > 1:
                for worker in workers:
                    worker.finish(name)
                del following[name], present[name]
            elif action == "begin" and len(following) < 4:
                begin()
            elif action == "absent":
                del present[name]
            elif action == "again" and following[name]:
                back = data.draw(st.integers(0, following[name] - 1), "position")
                present[name] = data.draw(st.integers(1, following[name] - back + 1), "tokens")
                following[name] = back
                for worker in workers:
                    worker.runtime.preempt(name)
            elif action == "idle":
                for worker in workers:
                    worker.runtime.end()
            elif action == "gains":
                for worker in workers:
                    worker.runtime.set_gains([GainsUpdate(name, number, 0, {0: 0.5})])
            elif action == "acts":
                wait, columns = (
                    data.draw(st.sampled_from(SignalsWait)),
                    data.draw(st.integers(0, 2)),
                )
                wire = reading(name, columns, wait).to_wire()
                for worker in workers:
                    worker.runtime.update_steering(name, wire, 0)
            elif action == "captures":
                wire = replace(data.draw(plans("new"), "captures"), acts=()).to_wire()
                for worker in workers:
                    worker.runtime.update_captures({name: CapturesUpdate(number, wire, 0)})
            if not present:
                continue
            padding = data.draw(st.sampled_from((0, 0, 0, 1)), "padding")
            for worker in workers:
                worker.step(
                    [(one, following[one], present.get(one, 1)) for one in present], padding
                )
            for one, count in present.items():
                following[one] += count
    for worker in workers:
        worker.finish(*following)
        assert worker.held() == NOTHING
    assert_equal(*workers)


@pytest.mark.parametrize(
    ("wait", "sent"),
    [
        (SignalsWait.NEVER, [(step, 1) for step in range(10)]),
        (SignalsWait.FEW_STEPS, [(0, 4), (4, 4), (8, 2)]),
        (SignalsWait.MANY_STEPS, [(0, 10)]),
    ],
)
def test_a_step_that_repeats_the_last_one_looks_nothing_up(
    wait: SignalsWait, sent: list[tuple[int, int]]
) -> None:
    worker = Worker()
    with patch.object(signals, "FEW_REQUESTS", 1):
        for name in ("v", "w"):
            worker.add_request(name, reading(name, 2, wait))
        for position in range(3):  # the first of them fills the caches, the last is recognized
            worker.step([("v", position, 1), ("w", position, 1)])
        with patch.object(worker.runtime, "_tokens", None):
            for position in range(3, 10):
                worker.step([("v", position, 1), ("w", position, 1)])
        worker.finish("v", "w")
    events = [event for event in worker.row_sender.events if isinstance(event, SignalRows)]
    assert [(event.starts, event.counts) for event in events] == [
        ((first, first), (count, count)) for first, count in sent
    ]
    released = [event for event in worker.row_sender.events if isinstance(event, Released)]
    assert [(one.computed, one.recomputed) for one in released] == [((0, 10), 0)] * 2
