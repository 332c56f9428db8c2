"""Numbers of cells that share a request and need captured rows."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from rheostat_engine import Rows
from rheostat_server.engine.backend import Delta, Job
from rheostat_server.requests.manager import RequestManager
from rheostat_wire.v1 import gate_pb2, sweep_service_pb2

from ..fakes import INFO, WIDTH, sites_with
from .patched import PatchedBackend, order, pair, probe, prompt, swept

LENGTH = 16


@dataclass
class Roomy(PatchedBackend):
    """An engine that runs the cells of a row in one request."""

    sites: object = field(
        default_factory=lambda: sites_with(
            bank_rows=1000, steps=1000, slots=1000, capture_rows=10_000
        )
    )
    info: object = field(default_factory=lambda: replace(INFO, running_samples=64))


def request(pool: gate_pb2.Pool.ValueType) -> sweep_service_pb2.SweepRequest:
    clean, corrupt = prompt(*range(20, 20 + LENGTH)), prompt(*range(23, 23 + LENGTH))
    return order(pair(prompt=clean, corrupt=corrupt), grades=[probe(pool=pool)])


@dataclass
class SuspectOnce(Roomy):
    """Sends some rows of one cell, after which the prefix cache counts as wrong."""

    manager: RequestManager | None = None

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        window, manager = job.plan.window, self.manager
        if manager is not None and job.plan.captures and window is not None and window.start:
            self.manager = None
            rows = np.full((1, 4, WIDTH), 9999.0, np.float32)
            for capture in job.plan.captures:
                for site in capture.sites:
                    at = np.arange(4, dtype=np.int32)
                    self.deliver(Rows(job.plan.request_id, (site,), at, rows))
            await asyncio.sleep(0.02)
            manager._invalidate_cache()
            await asyncio.sleep(0)
        async for delta in super().generate(job):
            yield delta


@pytest.mark.parametrize("pool", [gate_pb2.POOL_MEAN, gate_pb2.POOL_MAX])
async def test_rows_of_an_attempt_that_failed_are_not_read(starter, pool) -> None:
    expected, _ = await swept(await starter(Roomy()), request(pool))
    backend = SuspectOnce()
    running = await starter(backend)
    backend.manager = running.manager
    found, _ = await swept(running, request(pool))
    assert backend.manager is None
    values = {index: list(cell.values) for index, cell in found.items()}
    assert values == {index: pytest.approx(list(cell.values)) for index, cell in expected.items()}


async def test_cells_that_capture_share_requests_only_as_far_as_the_ring_has_room(starter) -> None:
    few = sites_with(bank_rows=1000, steps=1000, slots=1000, capture_rows=60)
    info = replace(INFO, running_samples=64, step_tokens=64)
    cells, _ = await swept(await starter(Roomy(sites=few, info=info)), request(gate_pb2.POOL_MEAN))
    assert not any(cell.HasField("error") for cell in cells.values())
