"""Sweeps that subscriptions observe."""

from ..conftest import rest
from ..streams import settled
from ..subscribers import EVERY, Subscriber, opening, wanted
from .patched import PatchedBackend, order


async def test_observers_attach_to_every_prompt_that_a_sweep_runs(starter) -> None:
    backend = PatchedBackend()
    running = await starter(backend)
    observer = await Subscriber.open(running, opening(EVERY, [wanted(1)]))
    await rest(running.client.sweep.Sweep(order()))
    await observer.rest()
    ended = [event for event in observer.events if event.HasField("end_of_request")]
    assert len(ended) == len(backend.jobs)
    changed = {name for changes in backend.capture_updates for name in changes}
    assert changed == {job.plan.request_id for job in backend.jobs}
    await settled(running)
