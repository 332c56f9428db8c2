"""DeriveVectors over a real channel, on an engine whose rows follow from site and token."""

import asyncio
import gc
from dataclasses import dataclass, field, replace

import grpc
import numpy as np
import pytest

from rheostat_engine import Point, Rows, Site
from rheostat_engine.plan.points import site_count
from rheostat_server.derivation import derive as derivation
from rheostat_server.derivation import prompt_runner
from rheostat_server.derivation.contrast import Method, contrast
from rheostat_server.engine.backend import Job
from rheostat_server.generation import responses as generation
from rheostat_server.requests import sequence as sequences
from rheostat_wire.v1 import (
    steering_service_pb2,
    tensor_pb2,
    types_pb2,
    vector_pb2,
)

from ..conftest import rest
from ..fakes import INFO, LAYERS, PARALLEL, WIDTH, ScriptedBackend, positions_of
from ..messages import GENERATED, add, request, selector, site_set, span, token_range, window
from ..streams import peak, settled, until
from ..uploads import refusal_of

Code = grpc.StatusCode
pb = steering_service_pb2
PRE, POST = types_pb2.POINT_RESID_PRE, types_pb2.POINT_RESID_POST
MEANS = pb.DERIVE_METHOD_DIFFERENCE_OF_MEANS
COMPONENT = pb.DERIVE_METHOD_PRINCIPAL_COMPONENT
TABLE = (
    np.random.default_rng(0).standard_normal((site_count(LAYERS), 128, WIDTH)).astype(np.float32)
)
"""[sites, tokens, width]"""


@dataclass
class TokenBackend(ScriptedBackend):
    """Its row of a token at a site is that of `table`."""

    table: np.ndarray = field(default_factory=lambda: TABLE)

    def _capture(self, job: Job, start: int, end: int) -> None:
        for capture in job.plan.captures:
            kept = positions_of(capture.spans, start, end)
            for site in capture.sites if kept else ():
                data = self.table[site][[job.prompt[p] for p in kept]]
                at = np.array(kept, np.int32)
                self.deliver(Rows(job.plan.request_id, (site,), at, data[None]))


def ids(*tokens: int) -> types_pb2.Prompt:
    return types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=tokens))


def text(words: str) -> types_pb2.Prompt:
    return types_pb2.Prompt(text=words)


def order(**fields: object) -> steering_service_pb2.DeriveVectorsRequest:
    """Two prompts against two, the last token at resid_post 1, unless `fields` say otherwise."""
    given = {
        "positive": [ids(5, 6, 7), ids(8, 9)],
        "negative": [ids(10, 11), ids(12)],
        "sites": site_set(POST, layers=[1]),
        **fields,
    }
    return pb.DeriveVectorsRequest(**given)


async def derive(
    running, request_message: steering_service_pb2.DeriveVectorsRequest
) -> pb.DerivedVectors:
    """What a derivation ends with, once its progress was checked."""
    *events, last = await rest(running.client.steering.DeriveVectors(request_message))
    told = [event.progress for event in events]
    total = len(request_message.positive) + len(request_message.negative)
    assert {one.total_prompt_count for one in told} == {total}
    counts = [one.done_prompt_count for one in told]
    assert (counts[0], counts[-1], sorted(set(counts))) == (0, total, counts)
    return last.derived


def row(point: Point, layer: int, *tokens: int) -> np.ndarray:
    """The mean of the tokens' rows, as float32."""
    found = TABLE[Site(point, layer).index][list(tokens)].astype(np.float64)
    return found.mean(axis=0).astype(np.float32)


async def stored(running, **ref: object) -> tuple[steering_service_pb2.VectorInfo, np.ndarray]:
    call = running.client.steering.GetVector(pb.GetVectorRequest(**ref))
    parts = [part async for part in call]
    data = b"".join(part.chunk for part in parts[1:])
    return parts[0].info, np.frombuffer(data, "<f4").reshape(tuple(parts[0].info.shape))


def figures(answer: steering_service_pb2.DerivedRow) -> tuple[object, ...]:
    separation = answer.separation if answer.HasField("separation") else None
    return answer.norm, answer.stream_norm, answer.explained, separation


@pytest.mark.parametrize(
    ("wire", "method"),
    [(None, Method.DIFFERENCE_OF_MEANS), (COMPONENT, Method.PRINCIPAL_COMPONENT)],
)
async def test_each_point_gets_a_vector_with_a_row_per_layer(starter, wire, method) -> None:
    running = await starter(TokenBackend())
    answer = await derive(
        running,
        order(
            sites=site_set(POST, PRE, layers=[2, 0]), method=wire, name="joy", description="glad"
        ),
    )
    assert [(v.point, v.name, [r.layer for r in v.rows]) for v in answer.vectors] == [
        (POST, "joy/resid_post", [0, 2]),
        (PRE, "joy/resid_pre", [0, 2]),
    ]
    for vector, point in zip(answer.vectors, (Point.RESID_POST, Point.RESID_PRE), strict=True):
        info, rows = await stored(running, name=vector.name)
        assert (info.digest, info.dtype) == (vector.digest, tensor_pb2.DTYPE_FLOAT32)
        assert (info.description, info.sites) == (
            "glad",
            types_pb2.SiteSet(points=[vector.point], list=types_pb2.LayerList(layers=[0, 2])),
        )
        for made, told, layer in zip(rows, vector.rows, (0, 2), strict=True):
            sets = [
                np.stack([row(point, layer, token) for token in tokens])
                for tokens in ((7, 9), (11, 12))
            ]
            expected = contrast(*sets, method)
            assert np.array_equal(made, expected.row)
            norms = np.linalg.norm(np.concatenate(sets).astype(np.float64), axis=1)
            figures_expected = (*expected[1:2], norms.mean(), *expected[2:])
            assert figures(told) == pytest.approx(figures_expected, rel=1e-6)
    stats = await settled(running)
    assert (stats.requests.completed_count, stats.leaked_count) == (4, 0)


async def test_rows_of_a_prompt_are_averaged_and_norms_are_of_single_rows(starter) -> None:
    running = await starter(TokenBackend())
    answer = await derive(
        running,
        order(positive=[ids(5, 6, 7)], negative=[ids(3, 4)], where=selector(window(start=1))),
    )
    (vector,) = answer.vectors
    expected = row(Point.RESID_POST, 1, 6, 7) - row(Point.RESID_POST, 1, 4)
    _, rows = await stored(running, digest=vector.digest)
    assert rows[0] == pytest.approx(expected, rel=1e-6)
    norms = np.linalg.norm(TABLE[Site(Point.RESID_POST, 1).index][[6, 7, 4]], axis=1)
    stream_norm = ((norms[0] + norms[1]) / 2 + norms[2]) / 2
    *numbers, separation = figures(vector.rows[0])
    assert numbers == pytest.approx([np.linalg.norm(expected), stream_norm, 1], rel=1e-6)
    assert separation is None
    assert vector.name == ""


@pytest.mark.parametrize(
    ("where", "picked"),
    [
        (selector(token_range(97)), ([97, 97], [97])),
        (selector(span("ab")), ([97, 98], [97, 98])),
        (selector(exclude=[token_range(97), window(end=1)]), ([98], [98, 99])),
        (selector(window(1, 3), exclude=[GENERATED]), ([97, 97], [97, 98])),
        (selector(exclude=[token_range(97), *[window(end=1)] * 1023]), ([98], [98, 99])),
    ],
)
async def test_a_selector_is_resolved_against_each_prompt(starter, where, picked) -> None:
    running = await starter(TokenBackend())
    answer = await derive(
        running, order(positive=[text("aab")], negative=[text("abc")], where=where, name="v")
    )
    _, rows = await stored(running, name="v")
    expected = np.subtract(*(row(Point.RESID_POST, 1, *tokens) for tokens in picked))
    assert rows[0] == pytest.approx(expected, rel=1e-6)
    assert len(answer.vectors) == 1


async def test_chats_are_rendered_like_any_prompt(starter) -> None:
    running = await starter(TokenBackend())
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(role="user", content="hi")])
    await derive(running, order(positive=[types_pb2.Prompt(chat=chat)], negative=[ids(4)]))
    prompts = {bytes(job.prompt) for job in running.backend.jobs}
    assert prompts == {b"user: hi\n>", b"\x04"}
    assert all(job.sampling.max_tokens == 1 for job in running.backend.jobs)


async def test_many_prompts_of_unequal_number_weigh_the_same(starter) -> None:
    running = await starter(TokenBackend())
    many = [ids(1 + i % 100, 2 + i % 90) for i in range(100)]
    answer = await derive(running, order(positive=many, negative=many[:50]))
    sets = [
        np.stack([row(Point.RESID_POST, 1, prompt.token_ids.ids[-1]) for prompt in chosen])
        for chosen in (many, many[:50])
    ]
    expected = contrast(*sets, Method.DIFFERENCE_OF_MEANS)
    _, rows = await stored(running, digest=answer.vectors[0].digest)
    assert np.array_equal(rows[0], expected.row)
    assert len(running.backend.jobs) == 150


BAD = {
    "no positive": ({"positive": []}, "MISSING_FIELD", "positive"),
    "no negative": ({"negative": []}, "MISSING_FIELD", "negative"),
    "too many": ({"negative": [ids(1)] * 1025}, "INVALID_VALUE", "negative"),
    "empty prompt": ({"negative": [ids(1), types_pb2.Prompt()]}, "MISSING_FIELD", "negative[1]"),
    "empty text": ({"positive": [ids(1), text("")]}, "MISSING_FIELD", "positive[1].text"),
    "unknown token": (
        {"negative": [ids(1), ids(2, 500)]},
        "UNKNOWN_TOKEN",
        "negative[1].token_ids.ids[1]",
    ),
    "empty chat": (
        {"positive": [types_pb2.Prompt(chat=types_pb2.Chat())]},
        "MISSING_FIELD",
        "positive[0].chat.messages",
    ),
    "no room to run": (
        {"negative": [ids(*[3] * INFO.model_tokens)]},
        "PROMPT_TOO_LONG",
        "negative[0].token_ids",
    ),
    "no sites": ({"sites": None}, "MISSING_FIELD", "sites"),
    "no points": ({"sites": site_set(layers=[1])}, "MISSING_FIELD", "sites.points"),
    "layer": ({"sites": site_set(POST, layers=[9])}, "UNKNOWN_LAYER", "sites.list.layers[0]"),
    "method": ({"method": 0}, "UNKNOWN_ENUM", "method"),
    "unpaired": ({"method": COMPONENT, "negative": [ids(1)]}, "INVALID_VALUE", "negative"),
    "name": ({"name": "no name"}, "INVALID_VALUE", "name"),
    "long name": (
        {"name": "n" * 120, "sites": site_set(PRE, POST, layers=[1])},
        "INVALID_VALUE",
        "name",
    ),
    "description": ({"description": "d" * 1025}, "INVALID_VALUE", "description"),
    "empty where": ({"where": selector()}, "EMPTY_SELECTOR", "where"),
    "generated": ({"where": selector(GENERATED)}, "INVALID_POSITION", "where.include[0].phase"),
    "past the prompt": (
        {"where": selector(window(-1), window(0, 3))},
        "INVALID_POSITION",
        "where.include[1].positions.end",
    ),
    "before the prompt": (
        {"where": selector(window(-2))},
        "INVALID_POSITION",
        "where.include[0].positions.start",
    ),
    "nothing": ({"where": selector(token_range(99))}, "INVALID_POSITION", "where"),
    "no span": (
        {"positive": [text("ab")], "where": selector(span("b"))},
        "SPAN_NOT_FOUND",
        "where.include[0].text",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
async def test_what_cannot_be_derived_is_refused_by_its_field(starter, case) -> None:
    fields, reason, path = BAD[case]
    running = await starter(TokenBackend())
    refusal = await refusal_of(derive(running, order(**fields)))
    assert refusal.brief == (Code.INVALID_ARGUMENT, f"REASON_{reason}", path)
    await settled(running)
    assert len(running.manager.store) == 0


async def test_what_of_where_fits_no_prompt_says_which_prompt(running) -> None:
    refusal = await refusal_of(derive(running, order(where=selector(window(-2)))))
    assert refusal.message == "negative[1]: -2 is before a prompt of 1 token"


async def test_a_site_that_the_model_lacks_and_an_adapter_are_refused_by_name(starter) -> None:
    running = await starter(TokenBackend(sites=PARALLEL))
    mid = site_set(types_pb2.POINT_RESID_MID, layers=[1])
    refusal = await refusal_of(derive(running, order(sites=mid)))
    assert refusal.brief == (Code.FAILED_PRECONDITION, "REASON_SITE_NOT_SERVED", "sites")
    refusal = await refusal_of(derive(running, order(lora_name="nobody")))
    assert refusal.brief == (Code.NOT_FOUND, "REASON_LORA_NOT_FOUND", "lora_name")


async def test_rows_that_are_not_finite_are_refused_with_their_prompt(starter) -> None:
    table = TABLE.copy()
    table[Site(Point.RESID_POST, 1).index, 12, 2] = np.inf
    running = await starter(TokenBackend(table=table))
    refusal = await refusal_of(derive(running, order()))
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_NON_FINITE", "negative[1]")
    assert refusal.message == "the stream at resid_post 1 is not finite"


async def test_rows_beyond_the_budget_are_refused_at_once_or_until_others_end(
    starter, monkeypatch
) -> None:
    size = 4 * 1 * WIDTH * 4
    monkeypatch.setattr(prompt_runner, "DERIVED_BYTES", size - 1)
    running = await starter(TokenBackend(hold=asyncio.Event()))
    refusal = await refusal_of(derive(running, order()))
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_INVALID_VALUE", "sites")
    monkeypatch.setattr(prompt_runner, "DERIVED_BYTES", 2 * size - 1)
    first = asyncio.ensure_future(derive(running, order()))
    await until(lambda: len(running.backend.jobs) == 4)
    refusal = await refusal_of(derive(running, order()))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_QUEUE_FULL", "sites")
    assert refusal.retry
    running.backend.hold.set()
    made = await first
    assert await derive(running, order()) == made


async def test_vectors_that_no_store_holds_are_refused_before_anything_runs(starter) -> None:
    running = await starter(TokenBackend(), vector_store_bytes=4 * WIDTH - 1)
    refusal = await refusal_of(derive(running, order()))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_STORE_FULL", "sites")
    assert running.backend.jobs == []


async def test_a_caller_that_leaves_aborts_every_request(starter) -> None:
    running = await starter(TokenBackend(hold=asyncio.Event()))
    call = running.client.steering.DeriveVectors(order(positive=[ids(1, 2)] * 30))
    await until(lambda: len(running.backend.jobs) == 8)
    call.cancel()
    stats = await settled(running)
    assert (len(running.backend.aborted), stats.requests.aborted_count) == (8, 8)
    assert (len(running.backend.jobs), len(running.manager.store)) == (8, 0)
    assert running.manager.ledger.requests == 0


async def test_all_calls_together_run_few_prompts_at_the_same_time(starter) -> None:
    """Each prompt that ends occupies the event loop, and those of a step end together."""
    running = await starter(TokenBackend())
    running.backend.hold = asyncio.Event()
    request_messages = [order(positive=[ids(1 + i, 2)] * 20) for i in range(3)]
    async with peak(lambda: running.manager.open_requests) as most:
        calls = [
            asyncio.ensure_future(derive(running, request_message))
            for request_message in request_messages
        ]
        await until(lambda: len(running.backend.jobs) == 8)
        running.backend.hold.set()
        assert [len((await call).vectors) for call in calls] == [1, 1, 1]
    assert most.value == 8
    assert len(running.backend.jobs) == 66


async def test_a_prompt_that_fails_ends_the_others(starter) -> None:
    running = await starter(TokenBackend(hold=asyncio.Event()))
    bad = order(positive=[ids(1, 2), ids(3), ids(4), ids(999)])
    refusal = await refusal_of(derive(running, bad))
    assert refusal.brief[1:] == ("REASON_UNKNOWN_TOKEN", "positive[3].token_ids.ids[0]")
    await settled(running)
    assert len(running.manager.store) == 0


@pytest.mark.parametrize("iterations", range(12))
async def test_a_caller_that_leaves_while_a_prompt_fails_leaves_no_traceback(
    running, iterations
) -> None:
    """asyncio logs the exception of a task that nothing has awaited."""
    logged: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    bad = order(positive=[ids(999)])
    events = derivation.derive_vectors(bad, running.manager, prompt_runner.PromptRunner())
    await anext(events)
    for _ in range(iterations):
        await asyncio.sleep(0)
    await events.aclose()
    gc.collect()
    assert logged == []


async def test_a_drain_ends_a_derivation_without_a_vector(starter, monkeypatch) -> None:
    monkeypatch.setattr(sequences, "UNSCHEDULED_GRACE", 0.01)
    monkeypatch.setattr(generation, "UNSCHEDULED_GRACE", 0.01)
    running = await starter(TokenBackend(silent=True))
    call = asyncio.ensure_future(derive(running, order()))
    await until(lambda: len(running.backend.jobs) == 4)
    await running.manager.drain(0)
    refusal = await refusal_of(call)
    assert refusal.brief == (Code.UNAVAILABLE, "REASON_DRAINING", "")
    assert len(running.manager.store) == 0


async def test_a_derived_vector_steers(starter) -> None:
    running = await starter(TokenBackend())
    answer = await derive(running, order(name="joy"))
    steer = add(vector_pb2.VectorRef(name="joy"), sites=order().sites)
    await running.client.generate(request(steer=[steer]))
    assert running.backend.loaded == [answer.vectors[0].digest.hex()]


async def test_the_same_prompts_give_the_same_vector_whatever_ran_first(starter) -> None:
    one = await starter(TokenBackend())
    other = await starter(TokenBackend(info=replace(INFO, running_samples=1)))
    made = [await derive(at, order()) for at in (one, other)]
    assert made[0] == made[1]


async def test_progress_counts_prompts_as_they_end(starter) -> None:
    hold = asyncio.Event()
    running = await starter(TokenBackend(hold=hold))
    call = running.client.steering.DeriveVectors(order())
    first = await call.read()
    assert (first.progress.done_prompt_count, first.progress.total_prompt_count) == (0, 4)
    hold.set()
    events = await rest(call)
    assert [event.WhichOneof("event") for event in events[-2:]] == ["progress", "derived"]
    assert events[-2].progress.done_prompt_count == 4
