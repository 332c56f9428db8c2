"""The server's store of vectors, over both clients."""

import datetime
import hashlib

import grpc
import numpy as np
import pytest
from google.protobuf import text_format

import rheostat
from rheostat import Point
from rheostat_wire.v1 import steering_service_pb2 as pb

MIB = 1024 * 1024


def digest_of(array: np.ndarray) -> bytes:
    rows, width = array.shape
    header = f"rheostat.v1 vector {array.dtype} {rows}x{width}\n".encode()
    return hashlib.sha256(header + array.tobytes()).digest()


def info(text: str) -> pb.VectorInfo:
    return text_format.Parse(text, pb.VectorInfo())


def test_put_sends_a_header_and_chunks_of_a_mebibyte_and_tells_how_far_it_is(client, server):
    array = np.arange(3 * 200_000, dtype=np.float32).reshape(3, 200_000)
    digest = digest_of(array)
    server.on("PutVector", pb.PutVectorResponse(digest=digest))
    told = []
    vector = client.run(
        lambda engine: engine.vectors.put(
            array,
            points="resid_post",
            layers=range(2, 5),
            name="tone/joy",
            description="joyful",
            progress=lambda sent, total: told.append((sent, total)),
        )
    )
    header, *chunks = server.asked
    expected = text_format.Parse(
        """header {
             dtype: DTYPE_FLOAT32 shape: 3 shape: 200000 total_bytes: 2400000 name: "tone/joy"
             description: "joyful"
             sites { points: POINT_RESID_POST range { start: 2 stop: 5 } }
           }""",
        pb.PutVectorRequest(),
    )
    expected.header.digest = digest
    assert header == expected
    assert [len(chunk.chunk) for chunk in chunks] == [MIB, MIB, 2_400_000 - 2 * MIB]
    assert b"".join(chunk.chunk for chunk in chunks) == array.tobytes()
    assert told == [(MIB, 2_400_000), (2 * MIB, 2_400_000), (2_400_000, 2_400_000)]
    assert vector == rheostat.Vector(
        digest.hex(), "tone/joy", (3, 200_000), "float32", (Point.RESID_POST,), range(2, 5)
    )


def test_one_row_without_name_or_sites_is_enough(client, server):
    array = np.ones(4, np.float16)
    server.on("PutVector", pb.PutVectorResponse())
    vector = client.run(lambda engine: engine.vectors.put(array))
    digest = digest_of(array[None, :])
    assert server.asked == [
        pb.PutVectorRequest(
            header=pb.VectorHeader(
                dtype="DTYPE_FLOAT16", shape=[1, 4], digest=digest, total_bytes=8
            )
        ),
        pb.PutVectorRequest(chunk=array.tobytes()),
    ]
    assert vector == rheostat.Vector(digest.hex(), None, (1, 4), "float16")


def test_a_refused_upload_raises_its_reason(client, server, refusal):
    server.on(
        "PutVector",
        refusal.of(grpc.StatusCode.INVALID_ARGUMENT, "width", "REASON_VECTOR_SHAPE", expected="8"),
    )
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.vectors.put(np.ones(4)))
    assert (raised.value.reason, raised.value.metadata) == (
        "REASON_VECTOR_SHAPE",
        {"expected": "8"},
    )


@pytest.mark.parametrize("name", ["", "/joy", "a b", "x" * 129])
def test_names_that_cannot_be_are_refused_before_they_are_sent(client, server, name):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.vectors.put(np.ones(4), name=name))
    assert (raised.value.path, server.asked) == ("name", [])


def test_get_brings_the_numbers_back(client, server):
    bits = np.array([[0x3F80, 0xC000], [0x4040, 0x0000]], "<u2")
    digest = hashlib.sha256(b"rheostat.v1 vector bfloat16 2x2\n" + bits.tobytes()).digest()
    stored = pb.VectorInfo(digest=digest, name="joy", dtype="DTYPE_BFLOAT16", shape=[2, 2])
    stored.sites.points.append("POINT_RESID_MID")
    stored.sites.list.layers.extend([5, 1])
    server.on(
        "GetVector",
        [
            pb.GetVectorResponse(info=stored),
            pb.GetVectorResponse(chunk=bits.tobytes()[:3]),
            pb.GetVectorResponse(chunk=bits.tobytes()[3:]),
        ],
    )
    vector = client.run(lambda engine: engine.vectors.get("joy"))
    assert server.asked == [pb.GetVectorRequest(name="joy")]
    assert vector == rheostat.Vector(
        digest.hex(), "joy", (2, 2), "bfloat16", (Point.RESID_MID,), (1, 5)
    )
    assert vector.values.tolist() == [[1.0, -2.0], [3.0, 0.0]]


def test_get_by_digest_asks_for_the_digest(client, server):
    array = np.ones((1, 2), np.float32)
    stored = pb.VectorInfo(digest=digest_of(array), dtype="DTYPE_FLOAT32", shape=[1, 2])
    server.on(
        "GetVector",
        [pb.GetVectorResponse(info=stored), pb.GetVectorResponse(chunk=array.tobytes())],
    )
    vector = client.run(lambda engine: engine.vectors.get(digest=digest_of(array).hex()))
    assert server.asked == [pb.GetVectorRequest(digest=digest_of(array))]
    assert vector.values.tolist() == [[1.0, 1.0]]
    with pytest.raises(rheostat.InvalidRequest):
        client.run(lambda engine: engine.vectors.get(digest="abc"))


def test_bytes_that_do_not_have_their_digest_are_data_loss(client, server):
    stored = pb.VectorInfo(digest=b"\1" * 32, name="joy", dtype="DTYPE_FLOAT32", shape=[1, 1])
    chunk = pb.GetVectorResponse(chunk=b"\0\0\0\0")
    server.on("GetVector", [pb.GetVectorResponse(info=stored), chunk])
    with pytest.raises(rheostat.DataLoss) as raised:
        client.run(lambda engine: engine.vectors.get("joy"))
    assert raised.value.message == "the received bytes do not have the digest of joy"


@pytest.mark.parametrize(
    "sites",
    [
        "points: POINT_RESID_POST range { start: 2 }",
        "points: POINT_RESID_POST range { step: 2 }",
        "points: 99 all {}",
    ],
)
def test_advice_that_this_client_has_no_words_for_is_no_advice(client, server, sites):
    stored = f'vectors {{ name: "joy" dtype: DTYPE_FLOAT32 shape: [1, 4] sites {{ {sites} }} }}'
    server.on("ListVectors", text_format.Parse(stored, pb.ListVectorsResponse()))
    (found,) = client.run(lambda engine: engine.vectors.list())
    assert (found.vector.points, found.vector.layers) == (None, None)


def test_list_reads_every_page(client, server):
    first = pb.ListVectorsResponse(next_page_token="2")
    first.vectors.append(
        info(
            r"""digest: "\001" name: "a" dtype: DTYPE_FLOAT32 shape: 1 shape: 8
                description: "first" request_count: 2 store_time { seconds: 86400 }
                sites { points: POINT_RESID_PRE all {} }"""
        )
    )
    second = pb.ListVectorsResponse()
    second.vectors.append(info(r'digest: "\002" dtype: DTYPE_FLOAT16 shape: 2 shape: 8'))
    server.on("ListVectors", first, second)
    found = client.run(lambda engine: engine.vectors.list())
    assert server.asked == [
        pb.ListVectorsRequest(page_size=1000),
        pb.ListVectorsRequest(page_size=1000, page_token="2"),
    ]
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    assert found == [
        rheostat.VectorInfo(
            rheostat.Vector("01", "a", (1, 8), "float32", (Point.RESID_PRE,), "all"),
            "first",
            epoch + datetime.timedelta(days=1),
            2,
        ),
        rheostat.VectorInfo(rheostat.Vector("02", None, (2, 8), "float16"), "", epoch, 0),
    ]


def test_delete_takes_a_name_off_and_gives_the_digest(client, server):
    server.on("DeleteName", pb.DeleteNameResponse(digest=b"\xab" * 32))
    assert client.run(lambda engine: engine.vectors.delete("joy")) == "ab" * 32
    assert server.asked == [pb.DeleteNameRequest(name="joy")]


HERE, THERE = "ab" * 32, "cd" * 32


@pytest.mark.parametrize(
    ("vector", "options", "sent"),
    [
        (HERE, {}, {}),
        (rheostat.Vector(HERE), {"expected": THERE}, {"expected_digest": bytes.fromhex(THERE)}),
        (HERE, {"expected": rheostat.Vector(THERE)}, {"expected_digest": bytes.fromhex(THERE)}),
        (HERE, {"expected": ""}, {"expected_digest": b""}),
        (
            rheostat.Vector(HERE, points=(Point.RESID_PRE,), layers=(2,), description="glad"),
            {},
            {
                "description": "glad",
                "sites": {"points": ["POINT_RESID_PRE"], "list": {"layers": [2]}},
            },
        ),
        (HERE, {"description": "", "points": "resid_pre"}, {"description": ""}),
    ],
)
def test_a_name_is_put_on_a_stored_vector(client, server, vector, options, sent):
    server.on("SetName", pb.SetNameResponse(previous_digest=bytes.fromhex(THERE)))
    found = client.run(lambda engine: engine.vectors.set_name("joy", vector, **options))
    assert found == THERE
    assert server.asked == [pb.SetNameRequest(name="joy", digest=bytes.fromhex(HERE), **sent)]


def test_a_name_that_was_on_nothing_was_on_nothing(client, server):
    server.on("SetName", pb.SetNameResponse())
    assert client.run(lambda engine: engine.vectors.set_name("joy", HERE)) == ""


@pytest.mark.parametrize(
    ("vector", "expected", "path"),
    [
        ("ab", None, "digest"),
        (rheostat.named("mirth"), None, "digest"),
        (HERE, "ab", "expected"),
        (HERE, rheostat.named("mirth"), "expected"),
    ],
)
def test_a_vector_whose_digest_is_not_known_gets_no_name(client, server, vector, expected, path):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: engine.vectors.set_name("joy", vector, expected=expected))
    assert raised.value.path == path
    assert server.asked == []
