"""The other rpcs over a real channel."""

import asyncio
import threading
import time
from dataclasses import replace

import grpc
import numpy as np
import pytest
from google.protobuf import empty_pb2

from rheostat_server.api import generation as generation_services
from rheostat_server.api.model_report import build_version
from rheostat_server.engine.backend import WorkerStats
from rheostat_server.limits import STATS_SECONDS
from rheostat_wire.v1 import (
    engine_service_pb2,
    generation_pb2,
    generation_service_pb2,
    receipt_pb2,
    steering_service_pb2,
    types_pb2,
    vector_pb2,
)

from ..fakes import INFO, LAYERS, PARALLEL, SITES, WIDTH, ScriptedBackend
from ..messages import add, capture, request, selector, site_set, tensor, window
from ..streams import settled
from ..uploads import chunk, header, put, refusal_of, values

Code = grpc.StatusCode
steering = steering_service_pb2
POST = types_pb2.POINT_RESID_POST


async def explained(running, message) -> generation_service_pb2.ExplainResponse:
    return await running.client.generation.Explain(
        generation_service_pb2.ExplainRequest(request=message)
    )


async def test_explain_says_what_generate_would_do_and_does_nothing(running) -> None:
    vector = tensor(np.array([[0.0] * WIDTH, [3.0] * WIDTH]))
    message = request(
        steer=[add(vector, sites=site_set(POST, layers=[1, 2]), scale=-2.0)],
        captures=[capture(where=selector(window(-1, 9)))],
        sampling=generation_pb2.Sampling(max_tokens=4),
    )
    answer = await explained(running, message)
    site = types_pb2.Site
    run = types_pb2.PositionRun
    (key,) = answer.cache_keys
    assert len(key.digest) == 32
    one = answer.interventions[0].digests[0]
    pb = generation_service_pb2
    assert answer == pb.ExplainResponse(
        prompt_token_count=3,
        prompt_token_ids=types_pb2.TokenIds(ids=[10, 11, 12]),
        interventions=[
            pb.ResolvedIntervention(
                intervention=receipt_pb2.InterventionRef(
                    origin=receipt_pb2.ORIGIN_REQUEST, op=receipt_pb2.OP_ADD
                ),
                sites=[site(point=POST, layer=1), site(point=POST, layer=2)],
                selection=pb.ResolvedSelection(positions=[run(start=0, count=6)]),
                digests=[one],
                doses=[
                    pb.SiteDose(site=site(point=POST, layer=1), norm=0),
                    pb.SiteDose(site=site(point=POST, layer=2), norm=12),
                ],
            )
        ],
        captures=[
            pb.ResolvedCapture(
                sites=[site(point=POST, layer=0)],
                selection=pb.ResolvedSelection(positions=[run(start=2, count=4)]),
                payload_bytes=4 * WIDTH * 4,
            )
        ],
        cache_keys=[key],
        new_bank_row_count=1,
    )
    assert (running.backend.jobs, len(running.manager.store), running.manager.ledger.requests) == (
        [],
        0,
        0,
    )


async def test_a_plain_request_has_the_engines_own_cache_keys(running) -> None:
    answer = await explained(running, request(captures=[capture()]))
    assert (list(answer.cache_keys), answer.new_bank_row_count) == ([], 0)


async def test_explain_refuses_what_generate_would_with_its_own_path(running) -> None:
    refusal = await refusal_of(
        explained(running, request(steer=[add(vector_pb2.VectorRef(name="x"))]))
    )
    assert refusal.brief == (
        Code.NOT_FOUND,
        "REASON_NAME_NOT_FOUND",
        "request.steering.interventions[0].add.vector.name",
    )
    missing = running.client.generation.Explain(generation_service_pb2.ExplainRequest())
    assert (await refusal_of(missing)).field == "request"


async def test_tokenize_gives_ids_text_and_places(running) -> None:
    pb = generation_service_pb2
    tokenize = running.client.generation.Tokenize
    text = await tokenize(pb.TokenizeRequest(text="ab"))
    assert text == pb.TokenizeResponse(
        token_ids=types_pb2.TokenIds(ids=[1, 97, 98]),
        text="ab",
        starts=[0, 0, 1],
        ends=[0, 1, 2],
    )
    decoded = await tokenize(pb.TokenizeRequest(token_ids=types_pb2.TokenIds(ids=[97, 98])))
    assert decoded == pb.TokenizeResponse(
        token_ids=types_pb2.TokenIds(ids=[97, 98]),
        text="ab",
        starts=[0, 1],
        ends=[1, 2],
    )


FORMS = SITES.block_layouts
"""How the toy's blocks hold the stream."""


async def test_tokenize_needs_a_tokenizer(starter) -> None:
    running = await starter(ScriptedBackend(text=None))
    request = generation_service_pb2.TokenizeRequest(token_ids=types_pb2.TokenIds(ids=[9]))
    refusal = await refusal_of(running.client.generation.Tokenize(request))
    assert refusal.brief == (Code.FAILED_PRECONDITION, "REASON_NO_TOKENIZER", "token_ids")
    assert refusal.precondition


async def test_the_model_says_what_can_be_done_at_every_layer_of_every_point(starter) -> None:
    running = await starter(ScriptedBackend(sites=PARALLEL))
    model = await running.client.engine.GetModel(engine_service_pb2.GetModelRequest())
    assert (model.model_name, model.architecture, model.layer_count, model.width) == (
        "toy",
        "ToyForCausalLM",
        LAYERS,
        WIDTH,
    )
    assert (model.api_version, model.build_version) == ("rheostat.v1", build_version())
    assert model.engine.runner == engine_service_pb2.RUNNER_V1
    assert (model.limits.bank_rows, model.limits.capture_rows_per_step) == (8, 1000)
    assert model.limits.step_tokens == INFO.step_tokens
    served = {
        (group.point, layer): (
            group.capture.served,
            [o.op for o in group.ops if o.ability.served],
            group.capture.why_not,
        )
        for group in model.sites
        for layer in group.layers
    }
    all_points = [
        p for p in types_pb2.Point.values() if p not in (0, types_pb2.POINT_ROUTER_LOGITS)
    ]
    assert sorted(served) == [(p, layer) for p in all_points for layer in range(LAYERS)]
    assert served[types_pb2.POINT_RESID_PRE, 0] == (
        True,
        [
            receipt_pb2.OP_ADD,
            receipt_pb2.OP_NORM_ADD,
            receipt_pb2.OP_ABLATE,
            receipt_pb2.OP_CLAMP,
            receipt_pb2.OP_SCALE,
            receipt_pb2.OP_REPLACE,
        ],
        "",
    )
    assert served[types_pb2.POINT_RESID_MID, 1] == (
        False,
        [],
        "attention and MLP run in parallel",
    )
    assert served[types_pb2.POINT_MLP_OUT, 2] == served[types_pb2.POINT_RESID_PRE, 0]
    assert all(len(group.ops) == 6 for group in model.sites)
    held = {(group.point, layer): group.form for group in model.sites for layer in group.layers}
    assert held == {(point, layer): FORMS[layer] for point, layer in served}


async def test_the_model_names_the_variants_that_steps_are_counted_by(running) -> None:
    model = await running.client.engine.GetModel(engine_service_pb2.GetModelRequest())
    stats = await running.client.engine.GetStats(engine_service_pb2.GetStatsRequest())
    assert stats.steps
    assert {one.variant for one in stats.steps} <= set(model.engine.variants)


async def test_stats_join_what_server_scheduler_and_workers_count(running) -> None:
    await put(running.client, header(), chunk(values()))
    stats = await running.client.engine.GetStats(engine_service_pb2.GetStatsRequest())
    assert stats.uptime.ToNanoseconds() > 0
    stats.ClearField("uptime")
    assert stats == engine_service_pb2.GetStatsResponse(
        running_request_count=1,
        waiting_request_count=2,
        requests=engine_service_pb2.RequestCounts(),
        steps=[
            engine_service_pb2.VariantSteps(variant="active", step_count=2),
            engine_service_pb2.VariantSteps(variant="plain", step_count=3),
        ],
        bank_row_count=8,
        captured_row_count=5,
        captured_bytes=5 * WIDTH * 4,
        prefix_queried_token_count=30,
        prefix_hit_token_count=10,
        vector_count=1,
    )


async def test_a_text_that_no_context_holds_is_not_tokenised(running) -> None:
    message = generation_service_pb2.TokenizeRequest(text="x" * 64)
    refusal = await refusal_of(running.client.generation.Tokenize(message))
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_PROMPT_TOO_LONG", "text")
    message.text = "x" * 63
    assert len((await running.client.generation.Tokenize(message)).token_ids.ids) == 64


async def test_a_long_answer_of_tokenize_is_made_off_the_event_loop(starter, monkeypatch) -> None:
    threads: list[threading.Thread] = []
    make = generation_services._tokens

    def making(prompt) -> generation_service_pb2.TokenizeResponse:
        threads.append(threading.current_thread())
        return make(prompt)

    monkeypatch.setattr(generation_services, "_tokens", making)
    running = await starter(ScriptedBackend(info=replace(INFO, model_tokens=4096)))
    for text in ("x", "x" * 4000):
        await running.client.generation.Tokenize(generation_service_pb2.TokenizeRequest(text=text))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_many_callers_of_stats_ask_the_workers_once(starter) -> None:
    class Counting(ScriptedBackend):
        asked = 0

        async def worker_stats(self) -> WorkerStats:
            self.asked += 1
            await asyncio.sleep(0.05)
            return await super().worker_stats()

    running = await starter(Counting(hold=asyncio.Event()))
    call = running.client.generation.Generate(request())
    await call.read()
    message = engine_service_pb2.GetStatsRequest()
    began = time.monotonic()
    for _ in range(5):
        answers = await asyncio.gather(
            *(running.client.engine.GetStats(message) for _ in range(16))
        )
        assert {answer.captured_row_count for answer in answers} == {5}
    periods = 1 + (time.monotonic() - began) // STATS_SECONDS
    assert running.backend.asked <= periods + 1
    call.cancel()
    await settled(running)


@pytest.mark.parametrize(("unused", "leaked"), [(True, 0), (False, 5)])
async def test_slots_of_unused_tables_are_not_leaked(starter, unused: bool, leaked: int) -> None:
    """Workers keep some tables of sweeps for a while."""

    class Keeping(ScriptedBackend):
        async def worker_stats(self) -> WorkerStats:
            return WorkerStats(slots_used=5, unused_tables=unused)

    running = await starter(Keeping())
    stats = await running.client.engine.GetStats(engine_service_pb2.GetStatsRequest())
    assert stats.leaked_count == leaked


async def test_control_messages_have_a_smaller_limit(running) -> None:
    padded = engine_service_pb2.GetStatsRequest()
    padded.MergeFromString(b"\xfa\x3f" + b"\x80\x80\xc0\x02" + bytes(5 << 20))
    refusal = await refusal_of(running.client.engine.GetStats(padded))
    assert (refusal.code, refusal.reason) == (
        Code.RESOURCE_EXHAUSTED,
        "REASON_MESSAGE_TOO_LARGE",
    )


async def test_an_unknown_method_is_grpcs_own_matter(running) -> None:
    call = running.client.channel.unary_unary(
        "/rheostat.v1.EngineService/Nothing",
        request_serializer=empty_pb2.Empty.SerializeToString,
        response_deserializer=empty_pb2.Empty.FromString,
    )
    refusal = await refusal_of(call(empty_pb2.Empty()))
    assert (refusal.code, refusal.reason) == (Code.UNIMPLEMENTED, "")


async def test_tokenize_refuses_what_no_context_holds(running) -> None:
    request = generation_service_pb2.TokenizeRequest(text="x" * 4097)
    refusal = await refusal_of(running.client.generation.Tokenize(request))
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_PROMPT_TOO_LONG", "text")
