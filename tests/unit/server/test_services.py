"""The other rpcs over a real channel."""

import hashlib

import grpc
import numpy as np
import pytest
from google.protobuf import empty_pb2

from rheostat._proto.v1 import (
    capture_service_pb2,
    engine_service_pb2,
    generation_pb2,
    generation_service_pb2,
    patch_service_pb2,
    receipt_pb2,
    steering_pb2,
    steering_service_pb2,
    tensor_pb2,
    types_pb2,
)
from rheostat_server.limits import CHUNK_BYTES
from rheostat_server.model_report import build_version

from .conftest import Refusal
from .fakes import (
    LAYERS,
    PARALLEL,
    WIDTH,
    ScriptedBackend,
    add,
    capture,
    request,
    selector,
    site_set,
    tensor,
    window,
)

Code = grpc.StatusCode
steering = steering_service_pb2
POST = types_pb2.POINT_RESID_POST


async def refusal_of(call) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return Refusal.of(caught.value)


def header(rows: int = 1, **fields: object) -> steering.PutVectorsRequest:
    values = {
        "dtype": tensor_pb2.DTYPE_FLOAT32,
        "shape": [rows, WIDTH],
        "total_bytes": rows * WIDTH * 4,
        **fields,
    }
    return steering.PutVectorsRequest(header=steering.VectorHeader(**values))


def chunk(data: bytes) -> steering.PutVectorsRequest:
    return steering.PutVectorsRequest(chunk=data)


def values(value: float = 1.0, rows: int = 1) -> bytes:
    return np.full((rows, WIDTH), value, dtype="<f4").tobytes()


def digest(data: bytes, rows: int = 1) -> bytes:
    head = f"rheostat.v1 vector float32 {rows}x{WIDTH}\n".encode()
    return hashlib.sha256(head + data).digest()


async def put(client, *messages: steering.PutVectorsRequest) -> steering.PutVectorsResponse:
    return await client.steering.PutVectors(iter(messages))


async def test_an_upload_is_stored_named_and_sent_back(running) -> None:
    data = values(rows=2)
    sites = site_set(POST, layers=[0, 1])
    first = header(2, name="joy", description="glad", sites=sites, digest=digest(data, 2))
    answer = await put(running.client, first, chunk(data[:5]), chunk(data[5:]))
    assert answer == steering.PutVectorsResponse(digest=digest(data, 2))
    for ref in ({"name": "joy"}, {"digest": digest(data, 2)}):
        parts = [
            part
            async for part in running.client.steering.GetVectors(steering.GetVectorsRequest(**ref))
        ]
        info = parts[0].info
        assert (info.digest, info.dtype, list(info.shape)) == (
            digest(data, 2),
            tensor_pb2.DTYPE_FLOAT32,
            [2, WIDTH],
        )
        assert b"".join(part.chunk for part in parts[1:]) == data
        assert info.description == ("glad" if "name" in ref else "")
        assert info.HasField("sites") == ("name" in ref)


async def test_an_upload_twice_is_one_vector_and_a_name_moves(running) -> None:
    one, two = values(1.0), values(2.0)
    await put(running.client, header(name="joy"), chunk(one))
    again = await put(running.client, header(name="joy"), chunk(one))
    assert again == steering.PutVectorsResponse(digest=digest(one), existed=True)
    moved = await put(running.client, header(name="joy"), chunk(two))
    assert moved == steering.PutVectorsResponse(digest=digest(two), previous_digest=digest(one))


@pytest.mark.parametrize(
    ("messages", "code", "reason", "field"),
    [
        ([], "INVALID_ARGUMENT", "TRUNCATED_UPLOAD", "header"),
        ([chunk(b"x")], "INVALID_ARGUMENT", "MISSING_FIELD", "header"),
        ([steering.PutVectorsRequest()], "INVALID_ARGUMENT", "MISSING_FIELD", ""),
        ([header(), header()], "INVALID_ARGUMENT", "INVALID_VALUE", "header"),
        ([header()], "INVALID_ARGUMENT", "TRUNCATED_UPLOAD", "header.total_bytes"),
        (
            [header(), chunk(values()[:-1])],
            "INVALID_ARGUMENT",
            "TRUNCATED_UPLOAD",
            "header.total_bytes",
        ),
        ([header(), chunk(values() + b"x")], "INVALID_ARGUMENT", "INVALID_VALUE", "chunk"),
        ([header(), chunk(b"")], "INVALID_ARGUMENT", "INVALID_VALUE", "chunk"),
        (
            [header(), chunk(bytes(CHUNK_BYTES + 1))],
            "INVALID_ARGUMENT",
            "INVALID_VALUE",
            "chunk",
        ),
        (
            [header(digest=bytes(32)), chunk(values())],
            "INVALID_ARGUMENT",
            "DIGEST_MISMATCH",
            "header.digest",
        ),
        ([header(digest=b"x")], "INVALID_ARGUMENT", "INVALID_VALUE", "header.digest"),
        ([header(), chunk(values(np.nan))], "INVALID_ARGUMENT", "NON_FINITE", "chunk"),
        ([header(shape=[WIDTH])], "INVALID_ARGUMENT", "VECTOR_SHAPE", "header.shape"),
        ([header(shape=[1, WIDTH + 1])], "INVALID_ARGUMENT", "VECTOR_SHAPE", "header.shape"),
        ([header(shape=[0, WIDTH])], "INVALID_ARGUMENT", "VECTOR_SHAPE", "header.shape"),
        ([header(shape=[1025, WIDTH])], "INVALID_ARGUMENT", "VECTOR_SHAPE", "header.shape"),
        ([header(total_bytes=1)], "INVALID_ARGUMENT", "VECTOR_SHAPE", "header.total_bytes"),
        ([header(dtype=0)], "INVALID_ARGUMENT", "UNKNOWN_ENUM", "header.dtype"),
        (
            [header(dtype=tensor_pb2.DTYPE_INT64)],
            "INVALID_ARGUMENT",
            "INVALID_VALUE",
            "header.dtype",
        ),
        ([header(name=" ")], "INVALID_ARGUMENT", "INVALID_VALUE", "header.name"),
        (
            [header(description="x" * 1025)],
            "INVALID_ARGUMENT",
            "INVALID_VALUE",
            "header.description",
        ),
        ([header(100)], "RESOURCE_EXHAUSTED", "STORE_FULL", "header.total_bytes"),
    ],
)
async def test_a_wrong_upload_is_refused_and_stores_nothing(
    starter, messages, code, reason, field
) -> None:
    running = await starter(vector_store_bytes=1000)
    refusal = await refusal_of(put(running.client, *messages))
    assert refusal.brief == (Code[code], f"REASON_{reason}", field)
    assert len(running.host.store) == 0


async def test_listings_go_by_name_and_page_by_page(running) -> None:
    for name in ("b", "a/2", "a/1"):
        await put(running.client, header(name=name), chunk(values()))
    await put(running.client, header(), chunk(values(2.0)))
    list_vectors = running.client.steering.ListVectors
    names, token = [], ""
    while True:
        page = await list_vectors(steering.ListVectorsRequest(page_size=3, page_token=token))
        names.append([vector.name for vector in page.vectors])
        token = page.next_page_token
        if not token:
            break
    assert names == [["", "a/1", "a/2"], ["b"]]
    assert (page.used_bytes, page.capacity_bytes) == (2 * WIDTH * 4, running.host.store.capacity)
    some = await list_vectors(steering.ListVectorsRequest(name_prefix="a/"))
    assert [vector.name for vector in some.vectors] == ["a/1", "a/2"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"page_size": 0}, "page_size"),
        ({"page_size": 1001}, "page_size"),
        ({"page_token": "%"}, "page_token"),
        ({"page_token": "YWI="}, "page_token"),
    ],
)
async def test_a_wrong_page_is_refused(running, fields, field) -> None:
    refusal = await refusal_of(
        running.client.steering.ListVectors(steering.ListVectorsRequest(**fields))
    )
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_INVALID_VALUE", field)


async def test_a_name_is_taken_off_once(running) -> None:
    await put(running.client, header(name="joy"), chunk(values()))
    delete = running.client.steering.DeleteName
    answer = await delete(steering.DeleteNameRequest(name="joy"))
    assert answer == steering.DeleteNameResponse(digest=digest(values()))
    refusal = await refusal_of(delete(steering.DeleteNameRequest(name="joy")))
    assert refusal == Refusal(
        Code.NOT_FOUND,
        "REASON_NAME_NOT_FOUND",
        "name",
        'no vector has the name "joy"',
        resource="joy",
    )


@pytest.mark.parametrize(
    ("ref", "code", "reason", "field"),
    [
        ({}, "INVALID_ARGUMENT", "MISSING_FIELD", ""),
        ({"digest": b"x"}, "INVALID_ARGUMENT", "INVALID_VALUE", "digest"),
        ({"digest": bytes(32)}, "NOT_FOUND", "VECTOR_NOT_FOUND", "digest"),
        ({"name": "x"}, "NOT_FOUND", "NAME_NOT_FOUND", "name"),
    ],
)
async def test_a_vector_that_is_not_there_is_refused(running, ref, code, reason, field) -> None:
    refusal = await refusal_of(
        running.client.steering.GetVectors(steering.GetVectorsRequest(**ref)).read()
    )
    assert refusal.brief == (Code[code], f"REASON_{reason}", field)


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
        prompt_tokens=3,
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
                bytes=4 * WIDTH * 4,
            )
        ],
        cache_keys=[key],
        new_bank_rows=1,
    )
    assert (running.backend.jobs, len(running.host.store), running.host.ledger.requests) == (
        [],
        0,
        0,
    )


async def test_a_plain_request_has_the_engines_own_cache_keys(running) -> None:
    answer = await explained(running, request(captures=[capture()]))
    assert (list(answer.cache_keys), answer.new_bank_rows) == ([], 0)


async def test_explain_refuses_what_generate_would_with_its_own_path(running) -> None:
    refusal = await refusal_of(
        explained(running, request(steer=[add(steering_pb2.VectorRef(name="x"))]))
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
    span = pb.TextSpan
    assert text == pb.TokenizeResponse(
        token_ids=types_pb2.TokenIds(ids=[1, 97, 98]),
        text="ab",
        offsets=[span(), span(start=0, end=1), span(start=1, end=2)],
    )
    decoded = await tokenize(pb.TokenizeRequest(token_ids=types_pb2.TokenIds(ids=[97, 98])))
    assert decoded == pb.TokenizeResponse(
        token_ids=types_pb2.TokenIds(ids=[97, 98]),
        text="ab",
        offsets=[span(start=0, end=1), span(start=1, end=2)],
    )


async def test_tokenize_needs_a_tokenizer(starter) -> None:
    running = await starter(ScriptedBackend(text=None))
    request = generation_service_pb2.TokenizeRequest(token_ids=types_pb2.TokenIds(ids=[9]))
    refusal = await refusal_of(running.client.generation.Tokenize(request))
    assert refusal.brief == (Code.FAILED_PRECONDITION, "REASON_NO_TOKENIZER", "token_ids")
    assert refusal.precondition


async def test_the_model_says_what_can_be_done_at_every_layer_of_every_point(starter) -> None:
    running = await starter(ScriptedBackend(sites=PARALLEL))
    model = await running.client.engine.GetModel(engine_service_pb2.GetModelRequest())
    assert (model.model, model.architecture, model.layers, model.width) == (
        "toy",
        "ToyForCausalLM",
        LAYERS,
        WIDTH,
    )
    assert (model.api_version, model.build_version) == ("rheostat.v1", build_version())
    assert model.engine.runner == engine_service_pb2.RUNNER_V1
    served = {
        (group.point, layer): (
            group.capture.served,
            [o.op for o in group.ops if o.ability.served],
            group.capture.why_not,
        )
        for group in model.sites
        for layer in group.layers
    }
    all_points = [p for p in types_pb2.Point.values() if p]
    assert sorted(served) == [(p, layer) for p in all_points for layer in range(LAYERS)]
    assert served[types_pb2.POINT_RESID_PRE, 0] == (True, [receipt_pb2.OP_ADD], "")
    assert served[types_pb2.POINT_RESID_MID, 1] == (
        False,
        [],
        "attention and MLP run in parallel",
    )
    assert served[types_pb2.POINT_MLP_OUT, 2][:2] == (False, [])
    assert all(len(group.ops) == 6 for group in model.sites)


async def test_stats_join_what_server_scheduler_and_workers_count(running) -> None:
    await put(running.client, header(), chunk(values()))
    stats = await running.client.engine.GetStats(engine_service_pb2.GetStatsRequest())
    assert stats.uptime.ToNanoseconds() > 0
    stats.ClearField("uptime")
    assert stats == engine_service_pb2.GetStatsResponse(
        running=1,
        waiting=2,
        requests=engine_service_pb2.RequestCounts(),
        steps=[
            receipt_pb2.VariantSteps(variant="active", steps=2),
            receipt_pb2.VariantSteps(variant="plain", steps=3),
        ],
        bank_rows=8,
        captured_rows=5,
        captured_bytes=5 * WIDTH * 4,
        prefix_queried_tokens=30,
        prefix_hit_tokens=10,
        vectors=1,
    )


async def test_control_messages_have_a_smaller_limit(running) -> None:
    padded = engine_service_pb2.GetStatsRequest()
    padded.MergeFromString(b"\xfa\x3f" + b"\x80\x80\xc0\x02" + bytes(5 << 20))
    refusal = await refusal_of(running.client.engine.GetStats(padded))
    assert (refusal.code, refusal.reason) == (
        Code.RESOURCE_EXHAUSTED,
        "REASON_MESSAGE_TOO_LARGE",
    )


def unserved(client) -> list[object]:
    capture_pb, patch_pb = capture_service_pb2, patch_service_pb2
    return [
        client.generation.Session(iter(())).read(),
        client.steering.DeriveVectors(steering.DeriveVectorsRequest()),
        client.steering.SetGlobal(steering.SetGlobalRequest()),
        client.steering.GetGlobal(steering.GetGlobalRequest()),
        client.capture.Subscribe(iter(())).read(),
        client.capture.ListSinks(capture_pb.ListSinksRequest()),
        client.capture.GetArtifacts(capture_pb.GetArtifactsRequest()),
        client.patch.CaptureRun(patch_pb.CaptureRunRequest()),
        client.patch.ListRuns(patch_pb.ListRunsRequest()),
        client.patch.DeleteRun(patch_pb.DeleteRunRequest()),
        client.patch.RenewLease(patch_pb.RenewLeaseRequest()),
        client.patch.Sweep(patch_pb.SweepRequest()).read(),
        client.monitor.Watch(iter(())).read(),
    ]


async def test_rpcs_that_are_not_served_yet_say_so(running) -> None:
    for call in unserved(running.client):
        refusal = await refusal_of(call)
        assert refusal.brief == (Code.UNIMPLEMENTED, "REASON_UNIMPLEMENTED", "")
        assert refusal.message.endswith("is part of the contract, but not served yet")


async def test_an_unknown_method_is_grpcs_own_matter(running) -> None:
    call = running.client.channel.unary_unary(
        "/rheostat.v1.EngineService/Nothing",
        request_serializer=empty_pb2.Empty.SerializeToString,
        response_deserializer=empty_pb2.Empty.FromString,
    )
    refusal = await refusal_of(call(empty_pb2.Empty()))
    assert (refusal.code, refusal.reason) == (Code.UNIMPLEMENTED, "")
