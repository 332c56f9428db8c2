"""Grades of sweeps that are read from the stream: probes and divergences."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rheostat_wire.v1 import (
    gate_pb2,
    selector_pb2,
    sweep_pb2,
    types_pb2,
    vector_pb2,
)

from ..fakes import (
    OFFSETS,
    SCALE,
    UNEMBEDDING,
    WIDTH,
)
from ..messages import selector, window
from ..streams import settled
from .patched import (
    CLEAN,
    CORRUPT,
    Code,
    PatchedBackend,
    answer,
    grade,
    logprob,
    order,
    pair,
    probe,
    prompt,
    refused,
    site,
    swept,
)


def kl(clean: float, other: float) -> float:
    """KL of the scripted engine's distributions behind two constant rows."""
    logits = [
        SCALE * row * UNEMBEDDING.astype(np.float64).sum(1) + OFFSETS for row in (clean, other)
    ]
    one, two = (values - np.logaddexp.reduce(values) for values in logits)
    return float((np.exp(one) * (one - two)).sum())


@pytest.mark.parametrize("direction", ["DENOISE", "NOISE"])
async def test_divergence_from_the_clean_prompt_in_nats(starter, direction: str) -> None:
    backend = PatchedBackend()
    running = await starter(backend)
    clean, corrupt = 120, 1
    one = pair(prompt=prompt(5, 6, clean), corrupt=prompt(5, 9, corrupt), answer=None, foil=None)
    names = [grade("KL"), grade("KL", recovered=True)]
    request = order(
        one,
        grades=names,
        direction=sweep_pb2.SweepDirection.Value(f"SWEEP_DIRECTION_{direction}"),
        max_concurrent_cells=6,
    )
    cells, summary = await swept(running, request)
    base, source = (corrupt, clean) if direction == "DENOISE" else (clean, corrupt)
    reach = kl(clean, corrupt)
    assert reach > 1e-4
    for cell in cells.values():
        last = base + (cell.column == 2) * (source - base) / (1 + site(cell.row))
        assert cell.values[0] == pytest.approx(kl(clean, last), abs=1e-8)
        assert cell.values[1] == pytest.approx(1 - kl(clean, last) / reach, abs=1e-3)
        assert cell.top_token_id > 0
    assert summary.grades[0].clean == pytest.approx(0, abs=1e-6)
    assert summary.grades[0].corrupt == pytest.approx(reach)
    assert max(backend.lens_calls) > 1, "rows that wait are read together"
    await settled(running)


async def test_a_probe_reads_cells(starter) -> None:
    running = await starter(PatchedBackend())
    every, width = selector(selector_pb2.Range(phase=types_pb2.PHASE_PROMPT)), math.sqrt(WIDTH)
    relu = {"activation": vector_pb2.ACTIVATION_RELU, "bias": -4.0}
    jump = {"activation": vector_pb2.ACTIVATION_JUMP_RELU, "theta": 3.75}
    grades = [
        probe(),
        probe(pool=gate_pb2.POOL_MEAN),
        probe(pool=gate_pb2.POOL_MAX, recovered=True),
        probe(where=selector(window(1, 2)), **relu),
        probe(where=selector(window(1, 2)), **jump),
        probe(normalise=vector_pb2.NORMALISE_UNIT),
        probe(normalise=vector_pb2.NORMALISE_COSINE, where=every),
        probe(activation=vector_pb2.ACTIVATION_TANH, bias=-4.0),
    ]
    request = order(grades=grades, pair_values=True)
    request.pairs[0].ClearField("answer")
    cells, summary = await swept(running, request)
    for cell in cells.values():
        values = [float(token) for token in CORRUPT]
        values[cell.column] += (CLEAN[cell.column] - CORRUPT[cell.column]) / (1 + site(cell.row))
        second = values[1] / 2
        assert list(cell.values) == pytest.approx(
            [
                values[-1] / 2,
                sum(values) / len(values) / 2,
                (max(values) - max(CORRUPT)) / (max(CLEAN) - max(CORRUPT)),
                max(second - 4, 0),
                second if second > 3.75 else 0,
                values[-1],
                1 / width,
                math.tanh(values[-1] / 2 - 4),
            ]
        )
    assert summary.grades[0].clean == CLEAN[-1] / 2
    assert [one.noise.max for one in summary.grades] == [0] * len(grades)
    await settled(running)


async def test_probes_divergence_and_answers_of_several_tokens_together(starter) -> None:
    backend = PatchedBackend()
    running = await starter(backend)
    grades = [grade(), probe(), grade("KL"), probe(pool=gate_pb2.POOL_MAX)]
    one = pair(answer=answer((3, 10)))
    cells, _ = await swept(running, order(one, grades=grades, where=selector(window(1, 2))))
    for cell in cells.values():
        second = 9 - 3 / (1 + site(cell.row))
        base = sum(CORRUPT) - 9 + second
        assert list(cell.values) == pytest.approx(
            [
                logprob(base, 3) + logprob(base + 3, 10),
                CORRUPT[-1] / 2,
                0.0,
                max(second, *CORRUPT[2:]) / 2,
            ],
            abs=1e-6,
        )
    assert all(not job.plan.captures for job in backend.asked if len(job.prompt) > len(CLEAN))
    await settled(running)


async def test_a_model_without_lens_has_no_divergence(starter) -> None:
    backend = PatchedBackend()
    backend.sites = replace(backend.sites, no_lens="its norm is strange")
    running = await starter(backend)
    refusal = await refused(running, order(grades=[grade("KL")]))
    assert (refusal.code, refusal.field) == (Code.FAILED_PRECONDITION, "grades[0].token.metric")
    assert "its norm is strange" in refusal.message
