"""Sweeps that subscriptions observe."""

import asyncio
from collections.abc import Mapping

import pytest

from rheostat_server.engine.backend import CapturesUpdate, Job
from rheostat_server.requests import late_attachment

from ..conftest import rest
from ..streams import settled, until
from ..subscribers import EVERY, Subscriber, opening, wanted
from .patched import PatchedBackend, order


def request_id(job: Job) -> str:
    """The id of the request of a sample."""
    return job.plan.request_id.partition("#")[0]


async def test_observers_attach_to_every_prompt_that_a_sweep_runs(starter) -> None:
    backend = PatchedBackend()
    running = await starter(backend)
    observer = await Subscriber.open(running, opening(EVERY, [wanted(1)]))
    await rest(running.client.sweep.Sweep(order()))
    await observer.rest()
    ended = [event for event in observer.events if event.HasField("end_of_request")]
    assert len(ended) == len({request_id(job) for job in backend.jobs})
    changed = {name for changes in backend.capture_updates for name in changes}
    assert changed == {job.plan.request_id for job in backend.jobs}
    await settled(running)


class LateForCells(PatchedBackend):
    """Takes up no change of captures until `gate` is set."""

    gate: asyncio.Event

    async def update_captures(self, changes: Mapping[str, CapturesUpdate | None]) -> None:
        await self.gate.wait()
        await super().update_captures(changes)


async def test_cells_that_end_before_they_are_captured_say_so(
    starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_attachment, "PATIENCE", 0.05)
    backend = LateForCells(room=asyncio.Event())
    backend.gate = asyncio.Event()
    running = await starter(backend)
    sweep = running.client.sweep.Sweep(order())
    await until(lambda: backend.asked)
    observer = await Subscriber.open(running, opening(EVERY, [wanted(1)]))
    backend.room.set()
    await rest(sweep)
    await observer.rest()
    backend.gate.set()
    ends = [event.end_of_request for event in observer.events if event.HasField("end_of_request")]
    assert len(ends) >= len({request_id(job) for job in backend.asked}) > 1
    for end in ends:
        assert (end.row_count, end.dropped_row_count) == (0, 0)
        assert end.attached  # a report for each cell
        assert not any(attached.HasField("first_position") for attached in end.attached)
        assert "or before the sweep of which it is a cell" in end.missed_reason
    await settled(running)
