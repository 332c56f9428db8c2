"""Requests that lose their place in a full KV cache and come back are steered as if nothing was.

The small server's cache holds 16 blocks of 128 tokens: too few for any five of these requests.
"""

import asyncio

import numpy as np
import pytest

import rheostat
from rheostat import generated, window

from ..engine.reference import HfReference
from .conftest import Server
from .naive import OPS, Placed, compare, positions_of

pytestmark = pytest.mark.integration

REQUESTS = 12
LENGTH = 150
OPTIONS = {"max_tokens": 340, "temperature": 0, "ignore_eos": True, "logprobs": 0}


def test_preempted_requests_are_steered_on_the_same_tokens_as_others(
    small_server: Server, small: rheostat.Engine, reference: HfReference
) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 1900, LENGTH).tolist() for _ in range(REQUESTS)]
    ops = [*OPS.values()] * 2
    many = [
        [
            Placed(ops[i], [1], window(90), lambda p, token, n: 90 <= p < n),
            Placed(ops[i + 1], [4], generated(7, 150), lambda p, token, n: n + 7 <= p < n + 150),
        ]
        for i in range(REQUESTS)
    ]

    async def run() -> list[rheostat.Generation]:
        async with rheostat.aio.connect(small_server.target) as client:
            return await asyncio.gather(
                *(
                    client.generate(prompt, steering=[one.ours for one in placed], **OPTIONS)
                    for prompt, placed in zip(prompts, many, strict=True)
                )
            )

    outs = asyncio.run(run())
    preempted = [out.receipt.preemptions for out in outs]
    assert 0 < sum(map(bool, preempted)) < REQUESTS
    for placed, out in zip(many, outs, strict=True):
        (found,) = compare(reference, out, placed)
        for applied, moved in zip(out.receipt.interventions, found.moved, strict=True):
            (want,) = moved.values()
            (rows,) = applied.rows
            assert positions_of([*rows.cached_positions, *rows.positions]) == want.positions
            (site,) = applied.sites
            again = site.rows - len(positions_of(rows.positions))
            assert again >= 0 if out.receipt.preemptions else again == 0
    assert any(out.receipt.recomputed_tokens for out in outs)
