"""The prefix cache after a plan that was not in force."""

import asyncio

import grpc
import pytest

from rheostat_engine import Installed
from rheostat_server.engine.backend import Job

from ..conftest import Refusal, rest
from ..fakes import ScriptedBackend
from ..messages import add, capture, request
from ..streams import kinds, settled, until

Code = grpc.StatusCode


class Forgetful(ScriptedBackend):
    """Cannot take up plans of requests whose id begins with "bad"."""

    async def generate(self, job: Job):
        bad = job.plan.request_id.startswith("bad")
        self.install_error = "no such vector" if bad else ""
        async for delta in super().generate(job):
            yield delta


async def started(running, **fields: object):
    """A request that has given out its first token."""
    call = running.client.generation.Generate(request(**fields))
    while kinds([await call.read()]) != ["tokens"]:
        pass
    return call


async def test_requests_that_may_have_read_a_spoilt_block_are_told_to_come_again(starter) -> None:
    running = await starter(Forgetful(hold=asyncio.Event()))
    steered = await started(running, steer=[add()])
    plain = await started(running)
    captured = await started(running, captures=[capture()])
    refusal = await running.client.refusal(request(request_id="bad", steer=[add()]))
    assert (refusal.code, refusal.reason) == (Code.INTERNAL, "REASON_INTERNAL")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(steered)
    told = Refusal.of(caught.value)
    assert (told.code, told.reason, told.retry) == (
        Code.UNAVAILABLE,
        "REASON_CACHE_SUSPECT",
        True,
    )
    running.backend.hold.set()
    for call in (plain, captured):
        assert (await rest(call))[-1].HasField("receipt")
    stats = await settled(running)
    assert (stats.requests.failed_count, stats.requests.completed_count, stats.leaked_count) == (
        2,
        2,
        0,
    )


async def test_later_requests_look_under_other_keys(starter) -> None:
    running = await starter(Forgetful())
    await running.client.generate(request(steer=[add()]))
    for _ in range(2):
        await running.client.refusal(request(request_id="bad", steer=[add()]))
        await settled(running)
        await running.client.generate(request(steer=[add()]))
    assert [job.plan.epoch for job in running.backend.jobs] == [0, 0, 1, 1, 2]


async def test_a_request_that_waits_meanwhile_starts_under_other_keys(starter) -> None:
    class Gated(Forgetful):
        gate = asyncio.Event()

        async def load_vectors(self, vectors) -> None:
            await super().load_vectors(vectors)
            await self.gate.wait()

    running = await starter(Gated())
    waiting = asyncio.create_task(running.client.generate(request(steer=[add()])))
    await until(lambda: bool(running.backend.loaded))
    running.backend.deliver(Installed("somebody", "no such vector"))
    running.backend.gate.set()
    assert kinds(await waiting)[-1] == "receipt"
    assert [job.plan.epoch for job in running.backend.jobs] == [1]
