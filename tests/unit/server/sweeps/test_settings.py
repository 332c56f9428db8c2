"""Requests of sweeps that are refused, each by the field at fault."""

import math

import pytest

from rheostat_server.sweeps import grid as grids
from rheostat_server.sweeps import pairs
from rheostat_wire.v1 import (
    gate_pb2,
    replace_pb2,
    selector_pb2,
    steering_pb2,
    sweep_pb2,
    tensor_pb2,
    types_pb2,
    vector_pb2,
)

from ..fakes import (
    LAYERS,
    VOCABULARY,
    WIDTH,
)
from ..messages import GENERATED, above, add, selector, site_set, window
from ..streams import settled
from ..uploads import chunk, header, put, values
from .patched import (
    POST,
    Code,
    PatchedBackend,
    answer,
    grade,
    order,
    pair,
    pb,
    probe,
    prompt,
    refused,
    swept,
)

REFUSED = {
    "no pair": (lambda: order().__class__(sites=site_set(POST), grades=[grade()]), "pairs"),
    "no grade": (lambda: order(grades=[]), "grades"),
    "no sites": (lambda: pb.SweepRequest(pairs=[pair()], grades=[grade()]), "sites"),
    "no prompt": (
        lambda: order(sweep_pb2.SweepPair(answer=answer((1,)), corrupt=prompt(1))),
        "pairs[0].prompt",
    ),
    "empty prompt": (lambda: order(pair(prompt=prompt())), "pairs[0].prompt.token_ids.ids"),
    "no corruption": (
        lambda: order(sweep_pb2.SweepPair(prompt=prompt(1), answer=answer((1,)))),
        "pairs[0]",
    ),
    "unknown token": (
        lambda: order(pair(corrupt=prompt(VOCABULARY))),
        "pairs[0].corrupt.token_ids.ids[0]",
    ),
    "no answer": (lambda: order(pair(answer=answer())), "pairs[0].answer"),
    "empty answer": (
        lambda: order(pair(answer=answer(()))),
        "pairs[0].answer.alternatives[0].ids",
    ),
    "repeated answer": (
        lambda: order(pair(answer=answer((1,), (1,)))),
        "pairs[0].answer.alternatives",
    ),
    "too long an answer": (
        lambda: order(pair(answer=answer((1,) * 17))),
        "pairs[0].answer.alternatives[0].ids",
    ),
    "no foil": (
        lambda: order(pair(foil=answer()), grades=[grade("LOGIT_DIFFERENCE")]),
        "pairs[0].foil",
    ),
    "no metric": (
        lambda: order(grades=[sweep_pb2.Grade(token=sweep_pb2.TokenGrade())]),
        "grades[0].token.metric",
    ),
    "probe without sites": (
        lambda: order(grades=[probe(sites=None)]),
        "grades[0].probe.probe.sites",
    ),
    "probe without vector": (
        lambda: order(grades=[probe(vector=None)]),
        "grades[0].probe.probe.read.vector",
    ),
    "probe of several sites": (
        lambda: order(grades=[probe(sites=site_set(POST))]),
        "grades[0].probe.probe.sites",
    ),
    "probe of zeros": (
        lambda: order(grades=[probe(vector=[0.0] * WIDTH, normalise=vector_pb2.NORMALISE_COSINE)]),
        "grades[0].probe.probe.read.vector",
    ),
    "probe of a mean": (
        lambda: order(grades=[probe(rows=gate_pb2.PROBE_ROWS_PROMPT_MEAN)]),
        "grades[0].probe.probe.rows",
    ),
    "probe of a projected cosine": (
        lambda: order(grades=[probe(normalise=vector_pb2.NORMALISE_PROJECTED_COSINE)]),
        "grades[0].probe.probe.read.normalise",
    ),
    "narrow probe": (
        lambda: order(grades=[probe(vector=[1.0])]),
        "grades[0].probe.probe.read.vector.inline.shape",
    ),
    "threshold of nothing": (
        lambda: order(grades=[probe(theta=0.5)]),
        "grades[0].probe.probe.read.theta",
    ),
    "strange pool": (lambda: order(grades=[probe(pool=77)]), "grades[0].probe.pool"),
    "probe of generated tokens": (
        lambda: order(grades=[probe(where=selector(GENERATED))]),
        "grades[0].probe.probe.where.include[0].phase",
    ),
    "probe behind the prompt": (
        lambda: order(grades=[probe(where=selector(window(90, 91)))]),
        "grades[0].probe.probe.where.include[0].positions",
    ),
    "recovered rank": (
        lambda: order(grades=[grade("RANK", recovered=True)]),
        "grades[0].recovered",
    ),
    "recovered from nothing": (
        lambda: order(pair(zeros=replace_pb2.ZeroSource()), grades=[grade(recovered=True)]),
        "pairs[0]",
    ),
    "nothing to denoise": (
        lambda: order(
            pair(zeros=replace_pb2.ZeroSource()), direction=sweep_pb2.SWEEP_DIRECTION_DENOISE
        ),
        "direction",
    ),
    "strange direction": (lambda: order(direction=77), "direction"),
    "strange alignment": (lambda: order(alignment=77), "alignment"),
    "strange priority": (lambda: order(priority=77), "priority"),
    "no window": (lambda: order(layer_window=0), "layer_window"),
    "large window": (lambda: order(layer_window=LAYERS + 1), "layer_window"),
    "unknown layer": (lambda: order(sites=site_set(POST, layers=[99])), "sites.list.layers[0]"),
    "empty where": (lambda: order(where=selector_pb2.Selector()), "where"),
    "generated where": (lambda: order(where=selector(GENERATED)), "where"),
    "where and groups": (
        lambda: order(
            pair(groups=[selector(window(0, 1))]),
            group_labels=["a"],
            where=selector(window(0, 1)),
        ),
        "where",
    ),
    "groups without labels": (
        lambda: order(pair(groups=[selector(window(0, 1))])),
        "pairs[0].groups",
    ),
    "long label": (
        lambda: order(pair(groups=[selector(window(0, 1))]), group_labels=["a" * 129]),
        "group_labels[0]",
    ),
    "repeated labels": (lambda: order(group_labels=["a", "a"]), "group_labels"),
    "other columns": (lambda: order(pair(), pair(prompt=prompt(1, 2))), "pairs[1].prompt"),
    "large alpha": (lambda: order(alpha=1.5), "alpha"),
    "odd alpha": (lambda: order(alpha=math.nan), "alpha"),
    "mask": (
        lambda: order(
            mask=replace_pb2.DimensionMask(dimensions=replace_pb2.Dimensions(dimensions=[WIDTH]))
        ),
        "mask.dimensions.dimensions",
    ),
    "weights": (
        lambda: order(mask=replace_pb2.DimensionMask(weights=tensor_pb2.Tensor())),
        "mask.weights.dtype",
    ),
    "no cells at once": (lambda: order(max_concurrent_cells=0), "max_concurrent_cells"),
    "too many baselines": (lambda: order(baseline_count=65), "baseline_count"),
    "done beyond the grid": (
        lambda: order(done=[sweep_pb2.CellRun(start=11, count=2)]),
        "done[0]",
    ),
    "nothing done": (lambda: order(done=[sweep_pb2.CellRun(start=1)]), "done[0]"),
    "zoom": (lambda: order(zoom=sweep_pb2.Zoom(column_stride=1)), "zoom.layer_stride"),
    "run": (lambda: order(pair(run_id="nobody")), "pairs[0].run_id"),
    "id": (lambda: order(request_id="a b"), "request_id"),
    "adapter": (lambda: order(lora_name="nobody"), "lora_name"),
    "divergence under an adapter of the head": (
        lambda: order(lora_name="headed", grades=[grade("LOGPROB"), grade("KL")]),
        "grades[1].metric",
    ),
}


async def test_gated_steering_is_refused_with_the_reason(starter) -> None:
    gated = add()
    gated.gate.conditions.append(above(1.0))
    running = await starter(PatchedBackend())
    refusal = await refused(running, order(steering=steering_pb2.Steering(interventions=[gated])))
    assert refusal.field == "steering.interventions[0].gate.conditions[0].probe_name"
    assert "sweeps, lenses and calls that store runs are not gated" in refusal.message
    await settled(running)


@pytest.mark.parametrize("name", REFUSED)
async def test_bad_requests_are_refused_by_field(starter, name) -> None:
    make, path = REFUSED[name]
    running = await starter(PatchedBackend())
    refusal = await refused(running, make())
    assert refusal.code in (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.NOT_FOUND)
    assert refusal.brief[2] == path
    await settled(running)


async def test_values_of_all_cells_are_limited(starter, monkeypatch) -> None:
    monkeypatch.setattr(grids, "SWEEP_VALUES", 2 * LAYERS)
    running = await starter(PatchedBackend())
    where = selector(window(0, 1))
    await swept(running, order(where=where, grades=[grade(), grade("RANK")]))
    refusal = await refused(running, order(where=where, grades=[grade()] * 3))
    assert (refusal.reason, refusal.field) == ("REASON_INVALID_VALUE", "grades")


async def test_rows_of_all_prompts_are_limited(starter, monkeypatch) -> None:
    monkeypatch.setattr(pairs, "SWEEP_ROWS", 11)
    running = await starter(PatchedBackend())
    noise = sweep_pb2.NoiseCorruption(
        noise=replace_pb2.NoiseSource(std=1.0),
        sites=site_set(types_pb2.POINT_RESID_PRE, layers=[0]),
        where=selector(window(0, 2)),
        noise_count=2,
    )
    where = selector(window(0, 1))
    noisy = [pair(noise=noise) for _ in range(3)]
    await swept(running, order(*noisy[:2], where=where))
    refusal = await refused(running, order(*noisy, where=where))
    assert (refusal.reason, refusal.field) == ("REASON_INVALID_VALUE", "pairs[2].noise")
    assert "11 rows" in refusal.message
    await settled(running)


async def test_a_stored_vector_counts_once_however_many_prompts_it_steers(
    starter, monkeypatch
) -> None:
    monkeypatch.setattr(pairs, "SWEEP_ROWS", 1)
    running = await starter(PatchedBackend())
    await put(running.client, header(name="calm"), chunk(values()))
    calm = steering_pb2.Intervention(
        sites=site_set(POST, layers=[0]),
        where=selector(window(0, 1)),
        replace=replace_pb2.Replace(vector=vector_pb2.VectorRef(name="calm")),
    )
    steering = steering_pb2.Steering(interventions=[calm])
    await swept(running, order(pair(), pair(), where=selector(window(1, 2)), steering=steering))
