"""A step that repeats the last one does what it would do if everything were looked up again."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Event, Rows
from rheostat_engine.worker.runtime import CapturesUpdate
from rheostat_engine.worker.state.position_functions import Int64
from rheostat_engine.worker.step_tokens import StepTokens, TokensOfSteps

from ..cpu_worker import NOTHING, Worker
from ..strategies import LIMIT, plans
from ..tables import capacity

ROW_BYTES = 8 * 4
"""Bytes of a captured row."""


class NeverRepeated(TokensOfSteps):
    """Says of no step that it repeats the last one."""

    def find(self, numbers: Int64, computed: Int64, scheduled: Int64) -> StepTokens:
        return super().find(numbers, computed, scheduled)._replace(repeated=False)


def content(event: Event) -> object:
    """What two equal events have in common."""
    if not isinstance(event, Rows):
        return event
    data = event.data.tobytes()
    return event.request_id, event.sites, event.positions.tolist(), data, event.encoding


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
    found, expected = workers
    for key, stream in expected.streams.items():
        assert found.streams[key].tobytes() == stream.tobytes()
    events = [[content(event) for event in worker.row_sender.events] for worker in workers]
    assert events[0] == events[1]
