"""Samples that a full KV cache preempts are steered as if they had not been preempted.

The small server's cache holds 16 blocks of 128 tokens: too few for any five of these samples. Those
of a request begin together, so some are preempted. Each sample needs a third block after 26 tokens
and a fourth one after 154, so it may be preempted twice.
"""

import asyncio

import numpy as np
import pytest

import rheostat
from rheostat import Point, Site, generated, window

from ..engine.reference import Add, HfReference
from .conftest import Server
from .naive import (
    OPS,
    TOLERANCE,
    Op,
    Placed,
    compare,
    number_of,
    positions_of,
    put_stored,
    replace_by_rows,
    replace_by_run,
)

pytestmark = pytest.mark.integration

REQUESTS = 3
SAMPLES = 6
LENGTH = 230
OPTIONS = {"max_tokens": 170, "n": SAMPLES, "seed": 1, "ignore_eos": True, "logprobs": 0}


ROWS = [
    (replace_by_run(), replace_by_rows(range(LENGTH + 7, LENGTH + 150), 1)),
    (OPS["replace"], replace_by_run()),
    (replace_by_rows(range(90, LENGTH), 1), OPS["replace"]),
]
"""Replacements on the prompt, and on generated tokens."""


@pytest.mark.parametrize(
    "pairs", [[*zip(OPS.values(), [*OPS.values()][1:], strict=False)], ROWS], ids=["ops", "rows"]
)
def test_preempted_samples_are_steered_on_the_same_tokens_as_others(
    small_server: Server,
    small: rheostat.Engine,
    reference: HfReference,
    pairs: list[tuple[Op, Op]],
) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 1900, LENGTH).tolist() for _ in range(REQUESTS)]
    put_stored(small, [1, 4])
    many = [
        [
            Placed(first, [1], window(90), lambda p, token, n: 90 <= p < n),
            Placed(second, [4], generated(7, 150), lambda p, token, n: n + 7 <= p < n + 150),
        ]
        for first, second in pairs[:REQUESTS]
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
    small.delete_run("stored")
    assert all(out.receipt.preemption_count for out in outs)
    assert any(out.receipt.recomputed_token_count for out in outs)
    for placed, out in zip(many, outs, strict=True):
        samples = compare(reference, out, placed)
        for number, applied in enumerate(out.receipt.interventions):
            computed = 0
            for rows in applied.rows:
                (want,) = samples[rows.sample].moved[number].values()
                assert positions_of([*rows.cached_positions, *rows.positions]) == want.positions
                computed += len(positions_of(rows.positions))
            assert [rows.sample for rows in applied.rows] == list(range(SAMPLES))
            (site,) = applied.sites
            assert site.row_count >= computed


def test_preempted_samples_that_capture_deliver_each_row_once(
    small_server: Server, small: rheostat.Engine, reference: HfReference
) -> None:
    rng = np.random.default_rng(6)
    prompts = [rng.integers(3, 1900, LENGTH).tolist() for _ in range(REQUESTS)]
    first, end = (0, 180, 220), LENGTH + 100
    direction = rng.normal(size=(1, 128)).astype(np.float32)
    forms = ({}, {"encoding": "full8"}, {"projection": direction})

    async def run() -> list[rheostat.Generation]:
        async with rheostat.aio.connect(small_server.target) as client:
            return await asyncio.gather(
                *(
                    client.generate(
                        prompt,
                        capture=rheostat.Capture("resid_post", 2, window(start, end), **form),
                        **OPTIONS,
                    )
                    for prompt, start, form in zip(prompts, first, forms, strict=True)
                )
            )

    outs = asyncio.run(run())
    assert sum(out.receipt.preemption_count for out in outs) > 0
    for prompt, start, form, out in zip(prompts, first, forms, outs, strict=True):
        for sample in out.samples:
            rows = sample.activations
            assert rows.positions("resid_post", 2).tolist() == list(range(start, end))
            tokens = prompt + list(sample.token_ids)
            site = number_of(Site(Point.RESID_POST, 2))
            stream = reference.run(tokens).streams[site][start:end]
            wanted = stream @ direction.T if "projection" in form else stream
            coded = rows.max_error("resid_post", 2)[:, None]
            slack = 1e-3 * np.maximum(1.0, np.abs(wanted))
            if "projection" in form:
                slack = 1e-3 * np.linalg.norm(stream, axis=1, keepdims=True)
            assert (np.abs(rows["resid_post", 2] - wanted) <= coded + slack).all()


def test_a_late_rule_steers_tokens_that_are_computed_again_as_it_did(
    small_server: Server, small: rheostat.Engine, reference: HfReference
) -> None:
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, 1900, LENGTH).tolist() for _ in range(REQUESTS)]
    mood, push = rng.normal(size=(2, 1, 128)).astype(np.float32)
    push /= np.linalg.norm(push) / 3
    read = rheostat.probe(
        rheostat.inline(mood), points="resid_post", layers=4, where="generated", name="mood"
    )
    plain = small.generate(prompts[0], probes=read, max_tokens=64, ignore_eos=True, seed=1)
    steer = rheostat.Steer(rheostat.inline(push).at(points="resid_post", layers=1))
    when = read.above(float(np.median(plain.signals["mood"])))
    rule = rheostat.Rule("cheer", when, steer, hold="next_token")

    async def run() -> list[rheostat.Generation]:
        async with rheostat.aio.connect(small_server.target) as client:
            return await asyncio.gather(
                *(client.generate(prompt, rules=rule, **OPTIONS) for prompt in prompts)
            )

    outs = asyncio.run(run())
    assert sum(out.receipt.preemption_count for out in outs) > 0
    assert sum(out.receipt.recomputed_token_count for out in outs) > 0
    for prompt, out in zip(prompts, outs, strict=True):
        for sample in out.samples:
            tokens = [*prompt, *sample.token_ids[:-1]]
            fired = sample.signals.firings["cheer"]
            steered = [position + 1 for position in fired.tolist() if position + 1 < len(tokens)]
            assert 0 < len(steered) < len(sample.token_ids) - 1
            add = Add(number_of(Site(Point.RESID_POST, 1)), push[0], steered)
            logprobs = reference.run(tokens, [add]).logprobs[LENGTH - 1 :]
            want = [row[token] for row, token in zip(logprobs, sample.token_ids, strict=True)]
            got = [step.token.logprob for step in sample.logprobs]
            np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
