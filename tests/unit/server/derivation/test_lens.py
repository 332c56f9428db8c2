"""Lens, Attribute and directions of tokens over a real channel, on a scripted engine."""

import asyncio
import math
from dataclasses import replace

import grpc
import numpy as np
import pytest

from rheostat_engine import Point, Site
from rheostat_server.derivation import lens as lenses
from rheostat_server.vectors import token_directions
from rheostat_wire.v1 import (
    lens_service_pb2,
    replace_pb2,
    run_service_pb2,
    steering_service_pb2,
    types_pb2,
    vector_pb2,
)

from ..conftest import rest
from ..fakes import (
    LAYERS,
    OFFSETS,
    SCALE,
    SITES,
    UNEMBEDDING,
    VOCABULARY,
    WIDTH,
    ScriptedBackend,
    row,
)
from ..messages import add, along, capture, request, selector, site_set, window
from ..stored_runs import NUMBERS, header, nothing_left, put, rows, span
from ..streams import captured, settled, until
from ..uploads import refusal_of

Code = grpc.StatusCode
pb = lens_service_pb2
POST = types_pb2.POINT_RESID_POST
PROMPT = types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=[5, 6, 7]))


def order(**fields: object) -> pb.LensRequest:
    """The last token of a prompt at resid_post 1, unless `fields` say otherwise."""
    return pb.LensRequest(**{"prompt": PROMPT, "sites": site_set(POST, layers=[1]), **fields})


def direction(token: int, minus: int | None = None) -> vector_pb2.VectorRef:
    return vector_pb2.VectorRef(
        token_direction=vector_pb2.TokenDirection(token_id=token, minus_token_id=minus)
    )


def logits(*rows: tuple[int, int]) -> np.ndarray:
    """The scripted engine's logits of rows (site, position)."""
    return logits_of(np.stack([row(*one) for one in rows]))


def logits_of(rows: np.ndarray) -> np.ndarray:
    """The scripted engine's logits of rows [N, WIDTH]."""
    return SCALE * rows.astype(np.float64) @ UNEMBEDDING.T + OFFSETS


def array(message) -> np.ndarray:
    kinds = {1: "<f4", 4: "<f8", 6: "<i4"}
    return np.frombuffer(message.inline, kinds[message.dtype]).reshape(tuple(message.shape))


async def test_rows_are_read_by_site_and_position(running) -> None:
    started, *parts = await rest(
        running.client.lens.Lens(
            order(
                sites=site_set(POST, layers=[0, 2]),
                where=selector(window(start=1)),
                top_k=2,
                token_ids=[3, 9],
            )
        )
    )
    assert [site.layer for site in started.started.sites] == [0, 2]
    assert [(one.start, one.count) for one in started.started.positions] == [(1, 2)]
    assert list(started.started.prompt_token_ids.ids) == [5, 6, 7]
    (part,) = (part.rows for part in parts)
    assert (part.first_row, part.row_count) == (0, 4)
    expected = logits(
        *((Site(Point.RESID_POST, layer).index, p) for layer in (0, 2) for p in (1, 2))
    )
    normalizers = np.log(np.exp(expected).sum(1))
    logprobs = expected - normalizers[:, None]
    best = np.argsort(-logprobs, 1)[:, :2]
    assert array(part.top_token_ids).tolist() == best.tolist()
    np.testing.assert_allclose(
        array(part.top_logprobs), np.take_along_axis(logprobs, best, 1), rtol=1e-5
    )
    np.testing.assert_allclose(array(part.logprobs), logprobs[:, [3, 9]], rtol=1e-5)
    np.testing.assert_allclose(array(part.log_normalizers), normalizers, rtol=1e-5)
    ranks = 1 + (logprobs[:, None] > logprobs[:, [3, 9], None]).sum(-1)
    assert array(part.ranks).tolist() == ranks.tolist()


async def test_few_rows_are_read_at_a_time(running, monkeypatch) -> None:
    """A step waits for each call of the workers."""
    cost = 1 + 1 / 16 + 5 / 64
    monkeypatch.setitem(lenses.LENS_LOGITS, "cpu", math.ceil(2 * VOCABULARY * cost))
    _, *parts = await rest(
        running.client.lens.Lens(order(where=selector(window(start=0)), token_ids=[1]))
    )
    assert running.backend.lens_calls == [2, 1]
    assert [(part.rows.first_row, part.rows.row_count) for part in parts] == [(0, 2), (2, 1)]
    assert array(parts[0].rows.top_token_ids).shape == (2, 5)


async def test_the_more_is_read_of_a_row_the_fewer_rows_are_read_at_a_time(
    running, monkeypatch
) -> None:
    monkeypatch.setitem(lenses.LENS_LOGITS, "cpu", 6 * VOCABULARY)
    much = {"top_k": 100, "token_ids": range(64)}
    await rest(running.client.lens.Lens(order(where=selector(window(start=0)), **much)))
    few = running.backend.lens_calls.copy()
    await rest(running.client.lens.Lens(order(where=selector(window(start=0)))))
    assert sum(few) == 3
    assert running.backend.lens_calls[len(few) :] == [3]
    assert max(few) < 3


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"prompt": types_pb2.Prompt()}, "MISSING_FIELD", "prompt"),
        ({"sites": None}, "MISSING_FIELD", "sites"),
        ({"sites": site_set(POST, layers=[9])}, "UNKNOWN_LAYER", "sites.list.layers[0]"),
        ({"top_k": 101}, "INVALID_VALUE", "top_k"),
        ({"token_ids": [VOCABULARY]}, "UNKNOWN_TOKEN", "token_ids[0]"),
        ({"token_ids": [1, 1]}, "INVALID_VALUE", "token_ids"),
        ({"token_ids": range(65)}, "INVALID_VALUE", "token_ids"),
        ({"lora_name": "none"}, "LORA_NOT_FOUND", "lora_name"),
        (
            {"where": selector(window(start=4))},
            "INVALID_POSITION",
            "where.include[0].positions",
        ),
    ],
)
async def test_an_error_names_the_field(running, fields, reason, field) -> None:
    refusal = await refusal_of(rest(running.client.lens.Lens(order(**fields))))
    assert (refusal.reason, refusal.field) == (f"REASON_{reason}", field)


def of_run(*positions: int, **fields: object) -> pb.LensRequest:
    """The lens of the uploaded run at some positions; at all of them if there is none."""
    chosen = replace_pb2.PositionList(positions=positions) if positions else None
    return pb.LensRequest(**{"run_id": "up", "positions": chosen, **fields})


async def test_a_run_is_read_as_it_is_stored(running) -> None:
    """At its own sites and positions, by default all; nothing is run."""
    generated = header(positions=[span(1, 1), span(4, 1)], token_ids=[11, 7])
    await put(running, generated, rows(NUMBERS, positions=[span(1, 1), span(4, 1)]))
    jobs = len(running.backend.jobs)
    started, part = await rest(running.client.lens.Lens(of_run(token_ids=[3])))
    assert [one.layer for one in started.started.sites] == [0, 2]
    assert [(one.start, one.count) for one in started.started.positions] == [(1, 1), (4, 1)]
    assert list(started.started.prompt_token_ids.ids) == [10, 11, 12]
    expected = logits_of(NUMBERS.reshape(4, WIDTH))
    logprobs = expected - np.log(np.exp(expected).sum(1))[:, None]
    np.testing.assert_allclose(array(part.rows.logprobs)[:, 0], logprobs[:, 3], rtol=1e-5)
    started, part = await rest(
        running.client.lens.Lens(of_run(4, -2, sites=site_set(POST, layers=[2]), token_ids=[3]))
    )
    assert [one.layer for one in started.started.sites] == [2]
    assert [(one.start, one.count) for one in started.started.positions] == [(1, 1), (4, 1)]
    np.testing.assert_allclose(array(part.rows.logprobs)[:, 0], logprobs[2:, 3], rtol=1e-5)
    assert len(running.backend.jobs) == jobs
    await running.client.runs.DeleteRun(run_service_pb2.DeleteRunRequest(run_id="up"))
    await nothing_left(running)


@pytest.mark.parametrize(
    ("message", "reason", "field"),
    [
        (of_run(run_id="nobody"), "RUN_NOT_FOUND", "run_id"),
        (of_run(run_id="a b"), "INVALID_VALUE", "run_id"),
        (of_run(prompt=PROMPT), "INVALID_VALUE", "prompt"),
        (of_run(where=selector(window(0))), "INVALID_VALUE", "where"),
        (of_run(steering={"interventions": [add()]}), "INVALID_VALUE", "steering"),
        (of_run(lora_name="a"), "INVALID_VALUE", "lora_name"),
        (of_run(sites=site_set(POST, layers=[1])), "RUN_INCOMPLETE", "sites"),
        (of_run(sites=site_set(POST, layers=[9])), "UNKNOWN_LAYER", "sites.list.layers[0]"),
        (of_run(2), "RUN_INCOMPLETE", "positions.positions"),
        (of_run(0, -3), "INVALID_VALUE", "positions.positions"),
        (order(positions={"positions": [0]}), "INVALID_VALUE", "positions"),
    ],
)
async def test_a_lens_of_a_run_is_refused_by_field(running, message, reason, field) -> None:
    await put(running, header(), rows(NUMBERS))
    refusal = await refusal_of(rest(running.client.lens.Lens(message)))
    assert (refusal.reason, refusal.field) == (f"REASON_{reason}", field)
    await running.client.runs.DeleteRun(run_service_pb2.DeleteRunRequest(run_id="up"))
    await nothing_left(running)


async def test_too_many_rows_of_a_run_are_refused(running, monkeypatch) -> None:
    await put(running, header(), rows(NUMBERS))
    monkeypatch.setattr(lenses, "LENS_BYTES", 4 * WIDTH * 2)
    assert len(await rest(running.client.lens.Lens(of_run(0)))) == 2
    refusal = await refusal_of(rest(running.client.lens.Lens(of_run())))
    assert (refusal.reason, refusal.field) == ("REASON_INVALID_VALUE", "sites")


async def test_steering_acts_and_its_errors_name_it(running) -> None:
    message = order()
    message.steering.interventions.append(add())
    await rest(running.client.lens.Lens(message))
    assert len(running.backend.jobs[-1].plan.acts) == 1
    message.steering.interventions[0].add.vector.CopyFrom(vector_pb2.VectorRef(name="nobody"))
    refusal = await refusal_of(rest(running.client.lens.Lens(message)))
    assert (refusal.reason, refusal.field) == (
        "REASON_NAME_NOT_FOUND",
        "steering.interventions[0].add.vector.name",
    )


async def test_too_many_rows_are_refused(running, monkeypatch) -> None:
    monkeypatch.setattr(lenses, "LENS_BYTES", 4 * WIDTH * 2)
    await rest(running.client.lens.Lens(order(where=selector(window(start=1)))))
    refusal = await refusal_of(
        rest(running.client.lens.Lens(order(where=selector(window(start=0)))))
    )
    assert (refusal.reason, refusal.field) == ("REASON_INVALID_VALUE", "sites")
    await settled(running)
    monkeypatch.setattr(lenses, "ALL_LENS_BYTES", 1)
    refusal = await refusal_of(rest(running.client.lens.Lens(order())))
    assert refusal.reason == "REASON_QUEUE_FULL"


async def test_a_cancelled_call_leaves_nothing(starter) -> None:
    running = await starter(ScriptedBackend(unscheduled=asyncio.Event()))
    call = running.client.lens.Lens(order())
    await until(lambda: bool(running.backend.jobs))
    call.cancel()
    await settled(running)
    assert (running.backend.lens_calls, running.manager.ledger.requests) == ([], 0)
    running.backend.unscheduled.set()
    assert len(await rest(running.client.lens.Lens(order()))) == 2


async def test_a_model_without_a_lens_says_why(starter) -> None:
    running = await starter(ScriptedBackend(sites=replace(SITES, no_lens="odd", no_directions="d")))
    for call in (
        rest(running.client.lens.Lens(order())),
        running.client.lens.Attribute(pb.AttributeRequest(prompt=PROMPT)),
    ):
        refusal = await refusal_of(call)
        assert refusal.brief == (Code.FAILED_PRECONDITION, "REASON_NOT_SUPPORTED", "")
        assert "this model has no lens: odd" in refusal.message


@pytest.mark.parametrize("minus", [None, 9])
async def test_a_logit_is_the_sum_of_its_parts(running, minus) -> None:
    wanted = vector_pb2.TokenDirection(token_id=3, minus_token_id=minus)
    answer = await running.client.lens.Attribute(
        pb.AttributeRequest(prompt=PROMPT, direction=wanted)
    )
    tokens = [3] if minus is None else [3, minus]
    signs = np.array([1.0, -1.0])[: len(tokens)]
    sites = [Site(Point.RESID_PRE, 0)] + [
        Site(point, layer) for layer in range(LAYERS) for point in (Point.ATTN_OUT, Point.MLP_OUT)
    ]
    assert [(one.point, one.layer) for one in answer.sites[:3]] == [
        (types_pb2.POINT_RESID_PRE, 0),
        (types_pb2.POINT_ATTN_OUT, 0),
        (types_pb2.POINT_MLP_OUT, 0),
    ]
    d = signs @ UNEMBEDDING[tokens].astype(np.float64)
    parts = [SCALE * row(site.index, 2).astype(np.float64) @ d for site in sites]
    np.testing.assert_allclose(array(answer.contributions), parts, rtol=1e-5)
    last = logits((Site(Point.RESID_POST, LAYERS - 1).index, 2))[0]
    assert answer.logit == pytest.approx(float(signs @ last[tokens]), rel=1e-5)
    assert answer.bias == pytest.approx(float(signs @ OFFSETS[tokens]), rel=1e-5)
    assert answer.scale == pytest.approx(SCALE)
    total = float(array(answer.contributions).sum()) + answer.bias
    assert answer.remainder == pytest.approx(answer.logit - total)
    assert list(answer.prompt_token_ids.ids) == [5, 6, 7]


async def test_logits_that_are_no_sum_are_refused_by_name(starter) -> None:
    capped = "the model caps its logits at 30, so they are not linear"
    running = await starter(ScriptedBackend(sites=replace(SITES, no_directions=capped)))
    refusal = await refusal_of(
        running.client.lens.Attribute(
            pb.AttributeRequest(prompt=PROMPT, direction=vector_pb2.TokenDirection(token_id=1))
        )
    )
    assert (refusal.reason, capped in refusal.message) == ("REASON_NOT_SUPPORTED", True)
    call = running.client.generate(request(captures=[capture(projection=along(direction(1)))]))
    refusal = await refusal_of(call)
    assert (refusal.reason, capped in refusal.message) == ("REASON_NOT_SUPPORTED", True)
    assert len(await rest(running.client.lens.Lens(order()))) == 2


async def test_rows_are_projected_on_directions_of_tokens(running) -> None:
    spec = capture(projection=along(direction(3), direction(3, 9)), where=selector(window(-1)))
    events = await rest(running.client.generation.Generate(request(captures=[spec])))
    ((key, numbers),) = list(captured(events).items())[:1]
    d = UNEMBEDDING[[3, 9]].astype(np.float64)
    x = row(Site(Point.RESID_POST, key[-2]).index, key[-1]).astype(np.float64)
    np.testing.assert_allclose(numbers, [x @ d[0], x @ (d[0] - d[1])], rtol=1e-5)
    assert running.backend.direction_calls == [[3, 9]]
    await rest(running.client.generation.Generate(request(captures=[spec])))
    assert running.backend.direction_calls == [[3, 9]]


async def test_directions_of_tokens_steer(running) -> None:
    message = request(steer=[add(direction(4))])
    await rest(running.client.generation.Generate(message))
    (digest,) = running.backend.jobs[-1].plan.acts[0].vectors
    assert running.backend.vectors[digest].float32_bytes() == UNEMBEDDING[4].tobytes()
    steering = steering_service_pb2.Policy(steering=message.steering)
    await running.client.steering.SetGlobal(steering_service_pb2.SetGlobalRequest(policy=steering))
    current = await running.client.steering.GetGlobal(steering_service_pb2.GetGlobalRequest())
    assert current.policy.steering.interventions[0].add.vector.digest == digest


@pytest.mark.parametrize(
    ("ref", "reason", "field"),
    [
        (direction(VOCABULARY), "UNKNOWN_TOKEN", "token_id"),
        (direction(1, VOCABULARY), "UNKNOWN_TOKEN", "minus_token_id"),
        (direction(1, 1), "INVALID_VALUE", "minus_token_id"),
        (
            vector_pb2.VectorRef(token_direction=vector_pb2.TokenDirection()),
            "MISSING_FIELD",
            "token_id",
        ),
    ],
)
async def test_a_direction_of_no_token_is_refused(running, ref, reason, field) -> None:
    refusal = await refusal_of(running.client.generate(request(steer=[add(ref)])))
    path = "steering.interventions[0].add.vector.token_direction"
    assert (refusal.reason, refusal.field) == (f"REASON_{reason}", f"{path}.{field}")


async def test_many_directions_come_in_small_calls_and_too_many_are_refused(
    running, monkeypatch
) -> None:
    monkeypatch.setattr(token_directions, "DIRECTIONS_PER_CALL", 2)
    monkeypatch.setattr(token_directions, "TOKEN_DIRECTIONS", 3)
    three = along(*(direction(token) for token in (1, 2, 3)))
    await rest(running.client.generation.Generate(request(captures=[capture(projection=three)])))
    assert running.backend.direction_calls == [[1, 2], [3]]
    four = along(*(direction(token) for token in (1, 2, 3, 4)))
    refusal = await refusal_of(
        running.client.generate(request(captures=[capture(projection=four)]))
    )
    assert refusal.reason == "REASON_INVALID_VALUE"
