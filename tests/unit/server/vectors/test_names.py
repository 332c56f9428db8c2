"""SetName over the wire: a name goes on a stored vector, moves, and keeps what it is not given."""

import grpc
import pytest

from rheostat_server.vectors import store as vectors
from rheostat_wire.v1 import steering_service_pb2, types_pb2, vector_pb2

from ..messages import add, request, site_set
from ..uploads import chunk, digest, header, put, refusal_of, values

Code = grpc.StatusCode
pb = steering_service_pb2
POST = types_pb2.POINT_RESID_POST
ONE, TWO = values(1.0), values(2.0)


@pytest.fixture
async def stored(running):
    """A server with two vectors, of which the first is called joy."""
    sites = site_set(POST, layers=[1])
    await put(running.client, header(name="joy", description="glad", sites=sites), chunk(ONE))
    await put(running.client, header(), chunk(TWO))
    return running


async def set_name(running, name: str, data: bytes, **fields: object) -> bytes:
    request_message = pb.SetNameRequest(name=name, digest=digest(data), **fields)
    return (await running.client.steering.SetName(request_message)).previous_digest


async def listed(running) -> list[tuple[str, bytes, str, bool]]:
    answer = await running.client.steering.ListVectors(pb.ListVectorsRequest())
    return [(v.name, v.digest, v.description, v.HasField("sites")) for v in answer.vectors]


async def test_a_name_moves_without_its_bytes_and_keeps_what_is_said_of_it(stored) -> None:
    assert await set_name(stored, "joy", TWO) == digest(ONE)
    assert await listed(stored) == [
        ("", digest(ONE), "", False),
        ("joy", digest(TWO), "glad", True),
    ]
    assert await set_name(stored, "joy", ONE, description="", sites=site_set(POST)) == digest(TWO)
    assert ("joy", digest(ONE), "", True) in await listed(stored)


async def test_a_vector_gets_a_further_name_or_its_first(stored) -> None:
    assert await set_name(stored, "mirth", ONE, description="too") == b""
    assert await set_name(stored, "fear", TWO) == b""
    assert sorted(await listed(stored)) == [
        ("fear", digest(TWO), "", False),
        ("joy", digest(ONE), "glad", True),
        ("mirth", digest(ONE), "too", False),
    ]


async def test_a_name_that_moves_steers_requests_from_then_on(stored) -> None:
    joy = {"steer": [add(vector_pb2.VectorRef(name="joy"), sites=site_set(POST, layers=[1]))]}
    await stored.client.generate(request(**joy))
    await set_name(stored, "joy", TWO)
    await stored.client.generate(request(**joy))
    assert stored.backend.loaded == [digest(ONE).hex(), digest(TWO).hex()]


@pytest.mark.parametrize(
    ("name", "expected", "held"),
    [("joy", TWO, ONE), ("joy", None, ONE), ("fear", ONE, None)],
)
async def test_a_name_that_is_elsewhere_than_expected_stays(stored, name, expected, held) -> None:
    before = await listed(stored)
    given = b"" if expected is None else digest(expected)
    refusal = await refusal_of(set_name(stored, name, TWO, expected_digest=given))
    assert refusal.brief == (
        Code.FAILED_PRECONDITION,
        "REASON_NAME_CONFLICT",
        "expected_digest",
    )
    assert refusal.metadata == (("digest", "" if held is None else digest(held).hex()),)
    assert await listed(stored) == before


@pytest.mark.parametrize(("name", "expected"), [("joy", ONE), ("fear", None)])
async def test_a_name_that_is_where_it_was_expected_moves(stored, name, expected) -> None:
    given = b"" if expected is None else digest(expected)
    assert await set_name(stored, name, TWO, expected_digest=given) == given


BAD = {
    "no name": ({"name": ""}, Code.INVALID_ARGUMENT, "INVALID_VALUE", "name"),
    "no digest": ({"digest": b""}, Code.INVALID_ARGUMENT, "INVALID_VALUE", "digest"),
    "short": ({"digest": b"x"}, Code.INVALID_ARGUMENT, "INVALID_VALUE", "digest"),
    "unknown": ({"digest": bytes(32)}, Code.NOT_FOUND, "VECTOR_NOT_FOUND", "digest"),
    "expected": (
        {"expected_digest": b"x"},
        Code.INVALID_ARGUMENT,
        "INVALID_VALUE",
        "expected_digest",
    ),
    "description": (
        {"description": "x" * 1025},
        Code.INVALID_ARGUMENT,
        "INVALID_VALUE",
        "description",
    ),
    "sites": (
        {"sites": site_set(POST, layers=range(1025))},
        Code.INVALID_ARGUMENT,
        "INVALID_VALUE",
        "sites.list.layers",
    ),
    "layers that the model lacks": (
        {"sites": site_set(POST, layers=[0, 99])},
        Code.INVALID_ARGUMENT,
        "UNKNOWN_LAYER",
        "sites.list.layers[1]",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
async def test_what_cannot_be_named_is_refused_by_its_field(stored, case) -> None:
    fields, code, reason, path = BAD[case]
    request_message = pb.SetNameRequest(**{"name": "joy", "digest": digest(TWO), **fields})
    refusal = await refusal_of(stored.client.steering.SetName(request_message))
    assert refusal.brief == (code, f"REASON_{reason}", path)
    assert ("joy", digest(ONE), "glad", True) in await listed(stored)


async def test_one_name_too_many_is_refused(stored, monkeypatch) -> None:
    monkeypatch.setattr(vectors, "NAMES", 1)
    refusal = await refusal_of(set_name(stored, "fear", TWO))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_STORE_FULL", "name")
    assert await set_name(stored, "joy", TWO) == digest(ONE)
