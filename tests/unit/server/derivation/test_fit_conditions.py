"""FitConditions over a real channel, on an engine whose rows follow from site and token."""

from collections.abc import Callable
from dataclasses import replace

import grpc
import numpy as np
import pytest

from rheostat_engine import Point, Site
from rheostat_server.derivation import fit_conditions, prompt_runner
from rheostat_wire.v1 import gate_pb2, steering_service_pb2, types_pb2, vector_pb2

from ..conftest import Refusal, rest
from ..fakes import WIDTH
from ..messages import PROMPT, selector, site_set, tensor, window
from ..uploads import refusal_of
from .test_derive import TABLE, TokenBackend, ids

pb = steering_service_pb2
POST = types_pb2.POINT_RESID_POST
MEANS, COMPONENT = pb.FIT_DIRECTION_DIFFERENCE_OF_MEANS, pb.FIT_DIRECTION_PRINCIPAL_COMPONENT
POSITIVE = [(5, 6, 7), (8, 9), (10, 11, 12, 13), (14, 15)]
NEGATIVE = [(20, 21), (22,), (23, 24, 25), (26, 27)]


def order(**fields: object) -> pb.FitConditionsRequest:
    given = {
        "positive": [ids(*one) for one in POSITIVE],
        "negative": [ids(*one) for one in NEGATIVE],
        "sites": site_set(POST, layers=[0, 1]),
        **fields,
    }
    return pb.FitConditionsRequest(**given)


async def fitted(running, message: pb.FitConditionsRequest) -> pb.FittedConditions:
    *events, last = await rest(running.client.steering.FitConditions(message))
    counts = [event.progress.done_prompt_count for event in events]
    assert (counts[0], counts) == (0, sorted(counts))
    assert {event.progress.total_prompt_count for event in events} == {8}
    return last.fitted


def pooled(prompt: tuple[int, ...], layer: int, pool: int, normalise: int) -> np.ndarray:
    rows = TABLE[Site(Point.RESID_POST, layer).index][list(prompt)].astype(np.float64)
    if normalise == vector_pb2.NORMALISE_COSINE:
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows[-1] if pool == gate_pb2.POOL_LAST else rows.mean(axis=0)


async def test_the_table_has_every_combination_and_the_best_is_a_ready_condition(starter) -> None:
    running = await starter(TokenBackend())
    answer = await fitted(running, order(name="calm/when"))
    assert len(answer.fits) == 2 * 2 * 2 * 2
    for fit in answer.fits:
        layer, pool = fit.site.layer, fit.pool
        unit = vector_pb2.NORMALISE_UNIT
        rows = [
            np.stack([pooled(one, layer, pool, unit) for one in prompts])
            for prompts in (POSITIVE, NEGATIVE)
        ]
        direction = rows[0].mean(0) - rows[1].mean(0)
        if fit.made == COMPONENT:
            middle = (rows[0].mean(0) + rows[1].mean(0)) / 2
            _, _, right = np.linalg.svd(np.concatenate(rows) - middle)
            direction = right[0] * np.sign(direction @ right[0])
        direction /= np.linalg.norm(direction)
        scores = [
            np.array([pooled(one, layer, pool, fit.normalise) @ direction for one in prompts])
            for prompts in (POSITIVE, NEGATIVE)
        ]
        held = [one > fit.threshold for one in scores]
        f1 = 2 * held[0].sum() / (held[0].sum() + held[1].sum() + 4)
        assert (fit.below, fit.f1) == (False, pytest.approx(f1))
    best = answer.fits[answer.best]
    ranks = [(min(fit.f1, fit.held_out_f1), fit.margin) for fit in answer.fits]
    assert (min(best.f1, best.held_out_f1), best.margin) == max(ranks)
    condition, probe = answer.condition, answer.probe
    assert (condition.above, condition.after_prompt) == (best.threshold, True)
    assert (condition.pool, condition.probe_name) == (best.pool, probe.name)
    assert (list(probe.sites.points), list(probe.sites.list.layers)) == ([POST], [best.site.layer])
    assert (probe.read.normalise, probe.read.vector.digest) == (best.normalise, answer.digest)
    label = running.manager.store.label("calm/when")
    assert (label.digest, list(label.sites.list.layers)) == (answer.digest, [best.site.layer])


async def test_a_given_vector_is_read_where_and_as_it_points(starter) -> None:
    running = await starter(TokenBackend())
    rng = np.random.default_rng(1)
    own = tensor(rng.normal(size=(2, WIDTH)).astype(np.float32))
    own.row_layers.layers.extend([1, 0])
    unit = [vector_pb2.NORMALISE_UNIT]
    message = order(vectors=[own], pools=[gate_pb2.POOL_LAST], normalises=unit)
    answer = await fitted(running, message)
    assert [fit.WhichOneof("direction") for fit in answer.fits] == ["vector_index"] * 2
    assert list(answer.probe.read.vector.row_layers.layers) == [1, 0]
    assert running.manager.store.get(answer.digest, "").rows == 2
    best = answer.fits[answer.best]
    assert answer.condition.HasField("below" if best.below else "above")
    assert answer.probe.where == selector(window(-1))  # reads no token that it need not


async def test_the_work_that_is_kept_off_the_event_loop_counts_each_condition(
    starter, monkeypatch
) -> None:
    sizes: list[int] = []

    async def counted(size: int, work: Callable[..., object], *args: object) -> object:
        if work is fit_conditions._fits_at:
            sizes.append(size)
        return work(*args)

    monkeypatch.setattr(fit_conditions, "offload", counted)
    running = await starter(TokenBackend())
    await fitted(running, order(directions=[MEANS], pools=[gate_pb2.POOL_LAST]))
    cosine = [vector_pb2.NORMALISE_COSINE]
    own = [tensor(np.full((1, WIDTH), 1.0 + n, np.float32)) for n in range(3)]
    await fitted(running, order(vectors=own, directions=[MEANS], normalises=cosine))
    rows = 4 * WIDTH * (len(POSITIVE) + len(NEGATIVE))
    assert sizes == [2 * rows] * 2 + [2 * 4 * rows] * 2


async def test_one_prompt_in_a_set_has_no_held_out_scores(starter) -> None:
    running = await starter(TokenBackend())
    *_, last = await rest(
        running.client.steering.FitConditions(order(positive=[ids(5, 6)], directions=[MEANS]))
    )
    assert not any(fit.HasField("held_out_f1") for fit in last.fitted.fits)


def of_mean_row(prompt: tuple[int, ...], layer: int, v: np.ndarray, normalise: int) -> float:
    """What a probe of the prompt's mean row reads along v."""
    x = TABLE[Site(Point.RESID_POST, layer).index][list(prompt)].astype(np.float64).mean(axis=0)
    if normalise == vector_pb2.NORMALISE_UNIT:
        return float(x @ v / np.linalg.norm(v))
    if normalise == vector_pb2.NORMALISE_PROJECTED_COSINE:
        v = np.tanh((x @ v) / (v @ v) * v)
    return float(x @ v / (np.linalg.norm(x) * np.linalg.norm(v)))


async def test_the_number_of_conditional_activation_steering_is_tried(starter) -> None:
    running = await starter(TokenBackend())
    rng = np.random.default_rng(5)
    own = rng.normal(size=(1, WIDTH)).astype(np.float32)
    mean, projected = gate_pb2.PROBE_ROWS_PROMPT_MEAN, vector_pb2.NORMALISE_PROJECTED_COSINE
    unit, cosine = vector_pb2.NORMALISE_UNIT, vector_pb2.NORMALISE_COSINE
    order_of = {"rows": [mean, gate_pb2.PROBE_ROWS_EACH], "normalises": [projected, unit, cosine]}
    answer = await fitted(running, order(vectors=[tensor(own)], **order_of))
    tried = [(fit.rows, fit.pool, fit.normalise) for fit in answer.fits]
    last, averaged = gate_pb2.POOL_LAST, gate_pb2.POOL_MEAN
    of_site = [(mean, last, one) for one in order_of["normalises"]]
    of_site += [(gate_pb2.PROBE_ROWS_EACH, last, one) for one in order_of["normalises"]]
    of_site += [(gate_pb2.PROBE_ROWS_EACH, averaged, one) for one in (unit, cosine)]
    assert tried == of_site * 2
    for fit in answer.fits:
        if fit.rows == mean:
            layer, v = fit.site.layer, own[0].astype(np.float64)
            on_p, on_n = (
                [of_mean_row(one, layer, v, fit.normalise) for one in prompts]
                for prompts in (POSITIVE, NEGATIVE)
            )
            held = [
                sum(one < fit.threshold if fit.below else one > fit.threshold for one in scores)
                for scores in (on_p, on_n)
            ]
            assert fit.f1 == pytest.approx(2 * held[0] / (sum(held) + 4))


async def test_the_best_condition_of_mean_rows_is_a_ready_probe(starter) -> None:
    running = await starter(TokenBackend())
    mean, projected = gate_pb2.PROBE_ROWS_PROMPT_MEAN, vector_pb2.NORMALISE_PROJECTED_COSINE
    answer = await fitted(running, order(rows=[mean], normalises=[projected]))
    assert len(answer.fits) == 2 * 2  # sites and directions: a mean row has no pools
    best, probe, condition = answer.fits[answer.best], answer.probe, answer.condition
    assert {fit.rows for fit in answer.fits} == {mean}
    assert (probe.rows, probe.read.normalise) == (mean, projected)
    assert probe.where == selector(PROMPT)
    assert (condition.pool, condition.after_prompt) == (gate_pb2.POOL_LAST, True)
    bound = condition.below if best.below else condition.above
    assert bound == best.threshold
    v = np.frombuffer(running.manager.store.get(answer.digest, "").data, "<f4").astype(np.float64)
    on_p, on_n = (
        np.array([of_mean_row(one, best.site.layer, v, projected) for one in prompts])
        for prompts in (POSITIVE, NEGATIVE)
    )
    tp, fp = ((one < bound if best.below else one > bound).sum() for one in (on_p, on_n))
    assert best.f1 == pytest.approx(2 * tp / (tp + fp + 4))


ZERO = tensor(np.zeros((1, WIDTH), np.float32))


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"positive": []}, "MISSING_FIELD", "positive"),
        ({"negative": [types_pb2.Prompt()]}, "MISSING_FIELD", "negative[0]"),
        ({"sites": None}, "MISSING_FIELD", "sites"),
        ({"sites": site_set(types_pb2.POINT_ROUTER_LOGITS, layers=[0])}, "", "sites"),
        ({"pools": [0]}, "UNKNOWN_ENUM", "pools[0]"),
        ({"pools": [gate_pb2.POOL_MAX]}, "NOT_SUPPORTED", "pools[0]"),
        ({"pools": [gate_pb2.POOL_LAST] * 2}, "INVALID_VALUE", "pools"),
        ({"directions": [9]}, "UNKNOWN_ENUM", "directions[0]"),
        ({"normalises": [vector_pb2.NORMALISE_NONE]}, "INVALID_VALUE", "normalises[0]"),
        ({"normalises": [7]}, "UNKNOWN_ENUM", "normalises[0]"),
        (
            {
                "normalises": [vector_pb2.NORMALISE_PROJECTED_COSINE],
                "pools": [gate_pb2.POOL_MEAN],
            },
            "NOT_SUPPORTED",
            "pools",
        ),
        ({"rows": [0]}, "UNKNOWN_ENUM", "rows[0]"),
        ({"rows": [7]}, "UNKNOWN_ENUM", "rows[0]"),
        ({"rows": [gate_pb2.PROBE_ROWS_EACH] * 2}, "INVALID_VALUE", "rows"),
        ({"vectors": [ZERO]}, "ZERO_VECTOR", "vectors[0]"),
        ({"vectors": [vector_pb2.VectorRef(name="gone")]}, "NAME_NOT_FOUND", "vectors[0].name"),
        ({"vectors": [ZERO] * 9}, "INVALID_VALUE", "vectors"),
        ({"name": "/"}, "INVALID_VALUE", "name"),
        ({"positive": [ids(3)] * 1025}, "INVALID_VALUE", "positive"),
        (
            {"positive": [ids(3)] * 1000, "negative": [ids(4)] * 25},
            "INVALID_VALUE",
            "directions",
        ),
        ({"where": selector(window(5, 7))}, "INVALID_POSITION", "where.include[0].positions"),
        ({"positive": [ids(5)], "negative": [ids(5)]}, "NO_CONTRAST", "sites"),
        ({"lora_name": "gone"}, "LORA_NOT_FOUND", "lora_name"),
    ],
)
async def test_what_cannot_be_fitted_is_refused_by_its_field(
    starter, fields, reason, field
) -> None:
    running = await starter(TokenBackend())
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rest(running.client.steering.FitConditions(order(**fields)))
    found = Refusal.of(raised.value)
    assert found.field == field
    assert reason in found.reason


async def test_rows_of_all_calls_are_counted_together(starter, monkeypatch) -> None:
    running = await starter(TokenBackend())
    monkeypatch.setattr(prompt_runner, "DERIVED_BYTES", 8 * 2 * 3 * WIDTH * 4 - 1)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rest(running.client.steering.FitConditions(order()))
    assert Refusal.of(raised.value).field == "sites"
    await fitted(running, order(pools=[gate_pb2.POOL_LAST]))
    means = order(rows=[gate_pb2.PROBE_ROWS_PROMPT_MEAN])
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rest(running.client.steering.FitConditions(means))
    assert Refusal.of(raised.value).field == "sites"


async def test_a_pipeline_fits_no_conditions(starter) -> None:
    backend = TokenBackend()
    backend.info = replace(backend.info, pipeline_parallel=2)
    running = await starter(backend)
    refusal = await refusal_of(running.client.steering.FitConditions(order()).read())
    assert refusal.brief == (grpc.StatusCode.FAILED_PRECONDITION, "REASON_NOT_SUPPORTED", "")
    assert "pipeline parallelism" in refusal.message
