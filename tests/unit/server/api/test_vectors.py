"""The rpcs of the vector store over a real channel."""

import asyncio
import threading

import grpc
import numpy as np
import pytest

from rheostat_server.limits import CHUNK_BYTES
from rheostat_server.tasks import uploads
from rheostat_server.vectors import upload
from rheostat_wire.v1 import (
    steering_service_pb2,
    tensor_pb2,
    types_pb2,
)

from ..conftest import Refusal
from ..fakes import LAYERS, WIDTH
from ..messages import site_set
from ..streams import until
from ..uploads import chunk, digest, header, put, refusal_of, values

Code = grpc.StatusCode
steering = steering_service_pb2
POST = types_pb2.POINT_RESID_POST


async def test_an_upload_is_stored_named_and_sent_back(running) -> None:
    data = values(rows=2)
    sites = site_set(POST, layers=[0, 1])
    first = header(2, name="joy", description="glad", sites=sites, digest=digest(data, 2))
    answer = await put(running.client, first, chunk(data[:5]), chunk(data[5:]))
    assert answer == steering.PutVectorResponse(digest=digest(data, 2))
    for ref in ({"name": "joy"}, {"digest": digest(data, 2)}):
        parts = [
            part
            async for part in running.client.steering.GetVector(steering.GetVectorRequest(**ref))
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
    assert again == steering.PutVectorResponse(digest=digest(one), existed=True)
    moved = await put(running.client, header(name="joy"), chunk(two))
    assert moved == steering.PutVectorResponse(digest=digest(two), previous_digest=digest(one))


@pytest.mark.parametrize(
    ("messages", "code", "reason", "field"),
    [
        ([], "INVALID_ARGUMENT", "TRUNCATED_UPLOAD", "header"),
        ([chunk(b"x")], "INVALID_ARGUMENT", "MISSING_FIELD", "header"),
        ([steering.PutVectorRequest()], "INVALID_ARGUMENT", "MISSING_FIELD", ""),
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
        (
            [header(sites=site_set(*[POST] * 7))],
            "INVALID_ARGUMENT",
            "INVALID_VALUE",
            "header.sites.points",
        ),
        (
            [header(sites=site_set(POST, layers=range(1025)))],
            "INVALID_ARGUMENT",
            "INVALID_VALUE",
            "header.sites.list.layers",
        ),
        (
            [header(sites=site_set(POST, layers=[LAYERS]))],
            "INVALID_ARGUMENT",
            "UNKNOWN_LAYER",
            "header.sites.list.layers[0]",
        ),
        (
            [
                header(
                    sites=types_pb2.SiteSet(
                        points=[POST], range=types_pb2.LayerRange(start=1, stop=99)
                    )
                )
            ],
            "INVALID_ARGUMENT",
            "UNKNOWN_LAYER",
            "header.sites.range.stop",
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
    assert len(running.manager.store) == 0


async def test_a_refusal_reaches_a_client_that_is_still_writing(running, monkeypatch) -> None:
    monkeypatch.setattr(uploads, "_DRAIN_SECONDS", 60.0)  # 320 MiB pass through this one process
    many = [header(shape=[1, WIDTH + 1]), *[chunk(bytes(1024 * 1024))] * 8]

    async def refused() -> str:
        return (await refusal_of(put(running.client, *many))).reason

    reasons = await asyncio.gather(*(refused() for _ in range(40)))
    assert reasons == ["REASON_VECTOR_SHAPE"] * 40


async def test_an_upload_for_which_others_leave_no_room_may_come_again(
    running, monkeypatch
) -> None:
    monkeypatch.setattr(upload, "UPLOADED_BYTES", 2 * WIDTH * 4 - 1)
    refusal = await refusal_of(put(running.client, header(2), chunk(values(rows=2))))
    assert refusal == Refusal(
        Code.RESOURCE_EXHAUSTED,
        "REASON_QUEUE_FULL",
        "header.total_bytes",
        "the upload has 32 bytes; other uploads leave 31 of 31. Try again later",
        retry=True,
    )
    for _ in range(2):
        await put(running.client, header(), chunk(values()))


async def test_an_upload_has_its_bytes_until_it_is_on_the_disk(
    starter, monkeypatch, tmp_path
) -> None:
    running = await starter(vector_dir=str(tmp_path))
    monkeypatch.setattr(upload, "UPLOADED_BYTES", len(values()))
    write, go_on = running.manager.persistent_vectors._files.write, threading.Event()

    def slow(*args: object) -> None:
        go_on.wait(10)
        write(*args)

    monkeypatch.setattr(running.manager.persistent_vectors._files, "write", slow)
    first = asyncio.ensure_future(put(running.client, header(), chunk(values())))
    await until(lambda: len(running.manager.store) == 1)
    refusal = await refusal_of(put(running.client, header(), chunk(values())))
    assert refusal.reason == "REASON_QUEUE_FULL"
    go_on.set()
    assert not (await first).existed


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
    assert (page.used_bytes, page.capacity_bytes) == (2 * WIDTH * 4, running.manager.store.capacity)
    some = await list_vectors(steering.ListVectorsRequest(name_prefix="a/"))
    assert [vector.name for vector in some.vectors] == ["a/1", "a/2"]


async def test_a_page_reads_no_more_of_the_store_than_its_lines(running, monkeypatch) -> None:
    for number in range(20):
        await put(running.client, header(name=f"v{number:02}"), chunk(values()))
    read: list[str] = []
    entry = running.manager.store._entry
    monkeypatch.setattr(
        running.manager.store, "_entry", lambda name, of: (read.append(name), entry(name, of))[1]
    )
    first = await running.client.steering.ListVectors(steering.ListVectorsRequest(page_size=3))
    token = first.next_page_token
    read.clear()
    page = await running.client.steering.ListVectors(
        steering.ListVectorsRequest(page_size=3, page_token=token)
    )
    assert [vector.name for vector in page.vectors] == ["v03", "v04", "v05"]
    assert read == ["v03", "v04", "v05", "v06"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
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


@pytest.mark.parametrize("name", ["", "x" * 129, "\N{GRINNING FACE}" * 3000, "a b", "-a"])
async def test_what_cannot_be_a_name_is_refused_as_such(running, name: str) -> None:
    client = running.client.steering
    for call in (
        client.DeleteName(steering.DeleteNameRequest(name=name)),
        client.GetVector(steering.GetVectorRequest(name=name)).read(),
    ):
        refusal = await refusal_of(call)
        assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_INVALID_VALUE", "name")


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
        running.client.steering.GetVector(steering.GetVectorRequest(**ref)).read()
    )
    assert refusal.brief == (Code[code], f"REASON_{reason}", field)
