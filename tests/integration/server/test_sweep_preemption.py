"""Cells of a sweep that vLLM preempts because the KV cache is full, and computes again.

The server runs in the test's process, because only its engine reports that cells were preempted.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

import rheostat
from rheostat_engine import Event, Point, Released, Site
from rheostat_server.config import ServerConfig
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.sequence import EngineSequence
from rheostat_server.serve import RunningServer, bring_up, start
from rheostat_wire.v1 import sweep_pb2, types_pb2

from ..engine.reference import HfReference
from .conftest import ONE_PROCESS
from .test_sweeps import (
    Swept,
    connected_to,
    hooks,
    logprobs,
    positions,
    sites,
    sweep,
)

pytestmark = pytest.mark.integration

LENGTH = 450
"""Tokens of a prompt: four of the cache's 16 blocks."""
STREAMS = 8
"""Streams beside the sweep. Each takes one block of the cache, and another one after some steps."""
LAYERS = range(6)
ROUNDS = 5
"""The most sweeps that are run until a cell is preempted."""
FIRST = (30, 100, 150, 200, 250, 300, 350, 400)
"""The first position of each column. The other one is the last token, which is computed at the end:
a cell that lost its replacements when it was preempted would get another value."""


@asynccontextmanager
async def little_memory() -> AsyncIterator[RunningServer]:
    """A server with a KV cache of 16 blocks of 128 tokens. A prompt takes many steps."""
    config = ServerConfig(
        model="demo",
        port=0,
        front_ends=0,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        enforce_eager=True,
        kv_cache_memory_bytes=6 << 20,
        bank_bytes=16 << 20,
        capture_bytes=16 << 20,
        distributed_executor_backend=ONE_PROCESS,
    )
    server = await start(config, bring_up)
    try:
        yield server
    finally:
        await server.stop(0)


def run_sweep(
    target: str, clean: Sequence[int], corrupt: Sequence[int], right: int, wrong: int
) -> Swept:
    """Runs a sweep of normal priority, so that its cells do not wait for other requests."""
    answer, foil = (
        sweep_pb2.Answer(alternatives=[types_pb2.TokenIds(ids=[token])]) for token in (right, wrong)
    )
    pair = sweep_pb2.SweepPair(
        prompt=types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=clean)),
        corrupt=types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=corrupt)),
        answer=answer,
        foil=foil,
        groups=[positions(*((at, at + 1) for at in (first, LENGTH - 1))) for first in FIRST],
    )
    with connected_to(target) as services:
        return sweep(
            services,
            pair,
            sites=sites("resid_post", layers=LAYERS),
            group_labels=map(str, FIRST),
            priority=sweep_pb2.SWEEP_PRIORITY_NORMAL,
            max_concurrent_cells=8,
        )


async def stream_for_ever(client: rheostat.aio.Engine, seed: int) -> None:
    """Generates from prompts of random lengths."""
    rng = np.random.default_rng(seed)
    while True:
        prompt = rng.integers(3, 1900, rng.integers(20, 120)).tolist()
        await client.generate(prompt, max_tokens=130, ignore_eos=True)


async def test_preempted_cells_equal_hooks_in_hugging_face(
    reference: HfReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    preemptions = []
    deliver = ActiveRequest.deliver

    def note(self: ActiveRequest, sequence: EngineSequence, event: Event) -> None:
        if isinstance(event, Released) and self.admitted.sampling.only_token is not None:
            preemptions.append(event.preemptions)
        deliver(self, sequence, event)

    monkeypatch.setattr(ActiveRequest, "deliver", note)
    async with little_memory() as server:
        target = f"127.0.0.1:{server.port}"
        async with rheostat.aio.connect(target) as client, asyncio.TaskGroup() as group:
            streams = [group.create_task(stream_for_ever(client, seed)) for seed in range(STREAMS)]
            for seed in range(ROUNDS):
                await asyncio.to_thread(check_cells, target, reference, seed)
                if sum(preemptions):
                    break
            for stream in streams:
                stream.cancel()
    assert sum(preemptions) > 0


def check_cells(target: str, reference: HfReference, seed: int) -> None:
    """Checks that each cell of a sweep of random prompts equals hooks in Hugging Face's model."""
    rng = np.random.default_rng(seed)
    clean, corrupt = rng.integers(3, 1900, (2, LENGTH)).tolist()
    right, wrong = rng.integers(3, 1900, 2).tolist()
    swept = run_sweep(target, clean, corrupt, right, wrong)
    assert len(swept.cells) == len(LAYERS) * len(FIRST)
    for cell in swept.cells.values():
        site = Site(Point.RESID_POST, LAYERS[cell.row])
        placed = [(at, at) for at in (FIRST[cell.column], LENGTH - 1)]
        after = logprobs(reference, corrupt, hooks(reference, clean, site, placed))
        assert cell.values[0] == pytest.approx(after[right] - after[wrong], abs=2e-3)
