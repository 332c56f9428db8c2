"""Controllers see each position once and act at the next, whatever the schedule; none can harm."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import (
    Act,
    ControllerDisabled,
    ControllerStep,
    Kind,
    Plan,
    Reading,
    Released,
)
from rheostat_engine.plan.gates import Activation, Normalise
from rheostat_engine.plan.plan import Control, PackedActs, read_plan
from rheostat_engine.worker import controllers
from rheostat_engine.worker.controllers import ControllerHost

from ..cpu_worker import NOTHING, Worker, stream_at
from ..strategies import DIGESTS, EVERYWHERE, LIMIT
from ..tables import VECTORS
from .test_signals import FromTheStart

Floats = npt.NDArray[np.float32]
Law = Callable[[ControllerStep], object]

PROMPT = 3
READ, PUSH = 0, 1
"""The sites."""


class Plugin:
    """Notes what it sees, and decides by a law."""

    def __init__(self, law: Law) -> None:
        self.steps: list[ControllerStep] = []
        self._law = law

    def decide(self, step: ControllerStep) -> Floats:
        self.steps.append(step)
        return self._law(step)  # type: ignore[return-value]  # what is wrong is tested too

    @property
    def seen(self) -> dict[int, list[int]]:
        """The positions that it saw, by sample."""
        found: dict[int, list[int]] = {}
        for step in self.steps:
            for sample, position in zip(
                step.samples.tolist(), step.positions.tolist(), strict=True
            ):
                found.setdefault(sample, []).append(position)
        return found


def by_position(step: ControllerStep) -> Floats:
    """Gains that name the position that they were decided at."""
    gains = step.gains.copy()
    gains[:] = ((step.positions % 13) / 4 + 0.25)[:, None]
    return gains


def plan(request_id: str, name: str = "one") -> Plan:
    """A push whose gain a controller sets."""
    reading = Reading(Normalise.NONE, Activation.IDENTITY, 0.0, 0.0, 0)
    read = Act(Kind.READ, (DIGESTS[0],), ((READ, (0,)),), EVERYWHERE, reading=reading)
    push = Act(Kind.ADD, (DIGESTS[1],), ((PUSH, (0,)),), EVERYWHERE, 2.0)
    gained = PackedActs((replace(push, gain=0), read))
    control = Control(name, gained, (0, 1), 1, PROMPT)
    return Plan(request_id, (push, read), control=control)


def worker_with(budget: float = 10.0, **plugins: Plugin) -> Worker:
    """A worker with controllers."""
    return Worker(
        controllers={name: ControllerHost(plugin, budget) for name, plugin in plugins.items()}
    )


def gain_at(worker: Worker, request_id: str, position: int) -> float:
    """By what the push was multiplied, from what left the site."""
    moved = worker.streams[request_id, position, PUSH] - stream_at(request_id, position, PUSH)
    vector = VECTORS[DIGESTS[1]][0].astype(np.float64) * 2.0
    return float(moved @ vector / (vector @ vector))


@given(st.data())
def test_each_position_is_seen_once_and_decides_the_next(data: st.DataObject) -> None:
    plugin = Plugin(by_position)
    worker = worker_with(one=plugin)
    ids = [f"v{n}" for n in range(data.draw(st.integers(1, 3), "requests"))]
    lengths = {i: data.draw(st.integers(1, LIMIT + 4), "length") for i in [*ids, "plain"]}
    schedule = FromTheStart(data, lengths)
    schedule.run(worker, {**{i: plan(i) for i in ids}, "plain": None})
    worker.step([("mate", 0, 1)])  # decides about the last step
    ends = {tuple(positions) for positions in plugin.seen.values()}
    assert {positions[-1] for positions in ends} == {
        lengths[i] - 1 for i in ids if lengths[i] >= PROMPT
    }
    for sample in plugin.seen.values():
        assert sample == sorted(set(sample))
        assert sample[0] >= PROMPT - 1
    for one in worker.row_sender.events:
        if isinstance(one, Released):
            end = lengths[one.request_id]
            gains = dict(one.gains)
            assert len(gains) <= 32
            assert list(gains) == sorted(p for p in gains if PROMPT <= p < end)
            held = (1.0,)
            for position in range(max(PROMPT, end - 16), end):
                earlier = max((p for p in gains if p <= position), default=None)
                held = held if earlier is None else gains[earlier]
                assert gain_at(worker, one.request_id, position) == pytest.approx(held[0], abs=1e-3)
            for position in range(min(PROMPT, end)):
                assert gain_at(worker, one.request_id, position) == pytest.approx(1, abs=1e-3)
    assert worker.held() == NOTHING
    assert not len(worker.runtime.controllers)


def run(worker: Worker, *request_ids: str, end: int = 8) -> None:
    """Generates up to a position, one step for each, without an end."""
    worker.step([(i, 0, PROMPT) for i in request_ids])
    for position in range(PROMPT, end):
        worker.step([(i, position, 1) for i in request_ids])


def test_the_latency_is_one_position() -> None:
    plugin = Plugin(by_position)
    worker = worker_with(one=plugin)
    worker.add_request("v", plan("v"))
    run(worker, "v")
    assert gain_at(worker, "v", PROMPT - 1) == pytest.approx(1, abs=1e-5)
    for position in range(PROMPT, 8):
        expected = ((position - 1) % 13) / 4 + 0.25
        assert gain_at(worker, "v", position) == pytest.approx(expected, abs=1e-4)
    vector = VECTORS[DIGESTS[0]][0].astype(np.float64)
    for step in plugin.steps:
        (position,) = step.positions.tolist()
        read = stream_at("v", position, READ).astype(np.float64) @ vector
        assert step.readings[0, 0] == pytest.approx(read, abs=1e-3)


def raises(step: ControllerStep) -> object:
    raise RuntimeError("broken")


WRONG: dict[str, tuple[Law, str]] = {
    "raises": (raises, "broken"),
    "no array": (lambda step: None, "NoneType"),
    "shape": (lambda step: np.ones((1, 7), np.float32), "shape"),
    "integers": (lambda step: np.ones(step.gains.shape, np.int64), "int64"),
    "not a number": (lambda step: np.full_like(step.gains, np.nan), "nan"),
    "negative": (lambda step: np.full_like(step.gains, -1), "-1"),
    "too large": (lambda step: np.full_like(step.gains, 17), "17"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_controller_is_disabled_and_its_neighbour_goes_on(name: str) -> None:
    law, reason = WRONG[name]
    wrong, right = Plugin(law), Plugin(by_position)
    worker = worker_with(wrong=wrong, right=right)
    worker.add_request("w", plan("w", "wrong"))
    worker.add_request("r", plan("r", "right"))
    run(worker, "w", "r")
    assert len(wrong.steps) == 1
    assert len(right.steps) == 5
    (event,) = [e for e in worker.row_sender.events if isinstance(e, ControllerDisabled)]
    assert (event.request_id, event.controller, event.first) == ("w", "wrong", PROMPT)
    assert reason in event.reason
    assert gain_at(worker, "w", 7) == pytest.approx(1, abs=1e-5)
    assert gain_at(worker, "r", 7) == pytest.approx(6 / 4 + 0.25, abs=1e-4)
    stats = worker.runtime.controllers.stats()
    assert reason in stats["wrong"][-1]
    assert (stats["right"][-1], stats["right"][0]) == ("", 5)


def test_gains_are_reported_only_for_positions_that_were_decided() -> None:
    def fails_later(step: ControllerStep) -> object:
        return by_position(step) if step.positions.max() <= PROMPT else raises(step)

    worker = worker_with(one=Plugin(fails_later))
    worker.add_request("v", plan("v"))
    worker.add_request("w", plan("w"))
    run(worker, "v")
    worker.add_request("late", plan("late"))
    run(worker, "late")
    worker.finish("v", "w", "late")
    reported = [e.gains for e in worker.row_sender.events if isinstance(e, Released)]
    decided = ((PROMPT, (0.75,)), (PROMPT + 1, (1.0,)))
    assert reported == [decided, (), ()]


def test_a_sample_that_was_not_in_the_failing_step_keeps_its_last_decision() -> None:
    def fails_about_the_second(step: ControllerStep) -> object:
        return raises(step) if step.positions.max() > PROMPT + 1 else by_position(step)

    worker = worker_with(one=Plugin(fails_about_the_second))
    for name in ("v", "w"):
        worker.add_request(name, plan(name))
    run(worker, "v", "w", end=PROMPT + 2)  # both decide about the next position
    worker.step([("w", PROMPT + 2, 1)])
    for position in range(PROMPT + 2, PROMPT + 40):
        worker.step([("v", position, 1)])
    worker.finish("v")
    events = worker.row_sender.events
    decided = [gain_at(worker, "v", position) for position in range(PROMPT, PROMPT + 3)]
    (reported,) = [event.gains for event in events if isinstance(event, Released)]
    assert reported == tuple((PROMPT + n, (pytest.approx(gain),)) for n, gain in enumerate(decided))
    firsts = {e.request_id: e.first for e in events if isinstance(e, ControllerDisabled)}
    assert firsts == {"v": PROMPT + 3, "w": PROMPT + 3}


def test_a_request_of_a_disabled_controller_is_told_at_once() -> None:
    worker = worker_with(wrong=Plugin(raises))
    worker.add_request("v", plan("v", "wrong"))
    run(worker, "v")
    worker.add_request("w", plan("w", "wrong"))
    found = [e for e in worker.row_sender.events if isinstance(e, ControllerDisabled)]
    assert [(e.request_id, e.first) for e in found] == [("v", PROMPT), ("w", PROMPT)]


def test_a_sample_that_was_never_decided_lacks_the_first_generated_position() -> None:
    worker = worker_with(wrong=Plugin(raises))
    for name in ("v", "w"):
        worker.add_request(name, plan(name, "wrong"))
    run(worker, "v")
    found = [e for e in worker.row_sender.events if isinstance(e, ControllerDisabled)]
    assert {e.request_id: e.first for e in found} == {"v": PROMPT, "w": PROMPT}


def test_a_slow_controller_is_disabled_after_ten_overruns() -> None:
    slow = Plugin(by_position)
    worker = worker_with(budget=0.0, one=slow)
    worker.add_request("v", plan("v"))
    run(worker, "v", end=30)
    assert len(slow.steps) == 10
    (event,) = [e for e in worker.row_sender.events if isinstance(e, ControllerDisabled)]
    assert "computed longer" in event.reason
    # The last gain stays.
    assert gain_at(worker, "v", 29) == pytest.approx(gain_at(worker, "v", 20), abs=1e-4)


def waits(seconds: float) -> Law:
    """Decides after a wait in which it computes nothing, as for Python's lock."""

    def law(step: ControllerStep) -> object:
        time.sleep(seconds)
        return by_position(step)

    return law


def test_waits_for_other_threads_are_no_overruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "_LONG_WAIT", 60.0)  # however busy the machine is
    waiting = Plugin(waits(0.06))
    worker = worker_with(budget=0.05, one=waiting)
    worker.add_request("v", plan("v"))
    run(worker, "v", end=20)
    assert len(waiting.steps) == 17
    assert worker.runtime.controllers.stats()["one"][1] == 0


def test_long_waits_are_overruns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "_LONG_WAIT", 0.005)
    waiting = Plugin(waits(0.02))
    worker = worker_with(budget=0.01, one=waiting)
    worker.add_request("v", plan("v"))
    run(worker, "v", end=30)
    assert len(waiting.steps) == 10
    (event,) = [e for e in worker.row_sender.events if isinstance(e, ControllerDisabled)]
    assert "waited" in event.reason


def test_a_call_that_does_not_return_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "_LONGEST", 0.05)

    def sleeps(step: ControllerStep) -> object:
        time.sleep(0.5)
        return step.gains

    worker = worker_with(one=Plugin(sleeps))
    worker.add_request("v", plan("v"))
    run(worker, "v")
    (event,) = [e for e in worker.row_sender.events if isinstance(e, ControllerDisabled)]
    assert "did not return" in event.reason


def test_an_unknown_controller_leaves_nothing_behind() -> None:
    worker = worker_with()
    worker.add_request("v", plan("v", "none"))
    worker.step([("v", 0, PROMPT)])
    worker.finish("v")
    assert worker.held() == NOTHING
    assert not len(worker.steering.gains)


def test_a_plan_with_a_controller_travels() -> None:
    sent = plan("r")
    received = read_plan(sent.to_wire()).control
    assert received is not None
    assert sent.control is not None
    assert received[2:] == ((0, 1), 1, PROMPT)
    assert received.acts == sent.control.acts.encoded
