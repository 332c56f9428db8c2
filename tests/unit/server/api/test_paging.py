"""Every listing of the contract comes in pages, and all of them alike."""

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rheostat_server.api.paging import fitting, from_token, page_size, to_token
from rheostat_server.errors import InvalidValue
from rheostat_wire.v1 import (
    capture_pb2,
    capture_service_pb2,
    engine_service_pb2,
    generation_service_pb2,
    lens_service_pb2,
    monitor_service_pb2,
    run_service_pb2,
    steering_service_pb2,
    sweep_service_pb2,
    types_pb2,
)

from ..messages import request, site_set
from ..uploads import chunk, header, put, refusal_of, values

BOUNDED = {
    "EngineService/GetModel": "the model's points, and its adapters",
    "EngineService/GetStats": "the variants of the compiled model",
    "GenerationService/Explain": "what one request asks for",
    "GenerationService/Tokenize": "the tokens of one text",
    "LensService/Attribute": "the model's layers",
}
"""What answers with several things at once, and what bounds them."""

UNARY = {
    f"{service.name}/{method.name}": method
    for module in (
        capture_service_pb2,
        engine_service_pb2,
        generation_service_pb2,
        lens_service_pb2,
        monitor_service_pb2,
        sweep_service_pb2,
        run_service_pb2,
        steering_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not method.client_streaming and not method.server_streaming
}

LISTINGS = [
    name
    for name, method in UNARY.items()
    if name not in BOUNDED and any(field.is_repeated for field in method.output_type.fields)
]


def test_every_answer_that_grows_with_what_is_stored_has_pages() -> None:
    assert sorted(LISTINGS) == [
        "CaptureService/GetArtifacts",
        "CaptureService/ListSinks",
        "RunService/ListRuns",
        "SteeringService/ListVectors",
    ]
    for name in LISTINGS:
        asked, answered = UNARY[name].input_type, UNARY[name].output_type
        assert {"page_size", "page_token"} <= {*asked.fields_by_name.keys()}
        assert "next_page_token" in answered.fields_by_name
    assert all("List" not in name for name in BOUNDED)


async def ask(running, name: str, **fields: object) -> tuple[list[Message], str]:
    """A page, and the next one's token."""
    kind, answer = GetMessageClass(UNARY[name].input_type), GetMessageClass(UNARY[name].output_type)
    if "request_id" in kind.DESCRIPTOR.fields_by_name:
        fields["request_id"] = "kept"
    call = running.client.channel.unary_unary(
        f"/rheostat.v1.{name}", kind.SerializeToString, answer.FromString
    )
    page = await call(kind(**fields))
    (entries,) = (value for field, value in page.ListFields() if field.is_repeated)
    return list(entries), page.next_page_token


@pytest.fixture
async def stocked(starter, tmp_path):
    """A server with three or more entries in every listing."""
    sinks = [f"{name}=memory" for name in ("a", "b", "c")]
    running = await starter(sinks=(*sinks, f"disk=filesystem:root={tmp_path}"))
    for name in ("x", "y", "z"):
        await put(running.client, header(name=name), chunk(values()))
    sites = site_set(types_pb2.POINT_RESID_POST, layers=[0, 1, 2])
    to_disk = capture_pb2.SinkTarget(sink_name="disk", layout=capture_pb2.LAYOUT_PER_FILE)
    specs = [capture_pb2.CaptureSpec(sites=sites, sink=to_disk)]
    for run in ("1", "2", "3"):
        target = capture_pb2.RunTarget(run_id=run)
        specs.append(capture_pb2.CaptureSpec(sites=sites, run=target))
    await running.client.generate(request(request_id="kept", captures=specs))
    return running


@pytest.mark.parametrize("name", LISTINGS)
async def test_small_pages_together_are_one_large_page(stocked, name) -> None:
    whole, token = await ask(stocked, name)
    assert len(whole) >= 3
    assert token == ""
    found = []
    for _ in whole:
        page, token = await ask(stocked, name, page_size=1, page_token=token)
        found += page
    assert (found, token) == (whole, "")


@pytest.mark.parametrize("name", LISTINGS)
async def test_a_size_above_the_largest_counts_as_the_largest(stocked, name) -> None:
    assert await ask(stocked, name, page_size=2**32 - 1) == await ask(stocked, name)


@pytest.mark.parametrize("token", ["%", to_token("a", "b", "c", "d"), "x" * 20_000])
@pytest.mark.parametrize("name", LISTINGS)
async def test_a_token_that_the_server_did_not_give_is_refused(stocked, name, token) -> None:
    refusal = await refusal_of(ask(stocked, name, page_token=token))
    code = grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.brief == (code, "REASON_INVALID_VALUE", "page_token")


@pytest.mark.parametrize("name", [n for n in LISTINGS if not n.endswith("ListSinks")])
async def test_a_token_of_another_shape_is_refused(stocked, name) -> None:
    parts = {"ListRuns": ("one",), "ListVectors": ("x", "no hex"), "GetArtifacts": ("a", "b", "-1")}
    token = to_token(*parts[name.partition("/")[2]])
    refusal = await refusal_of(ask(stocked, name, page_token=token))
    assert (refusal.reason, refusal.field) == ("REASON_INVALID_VALUE", "page_token")


def test_a_token_gives_its_key_back() -> None:
    assert from_token(to_token("a/ü", "", "7"), 3) == ("a/ü", "", "7")
    with pytest.raises(InvalidValue):
        from_token(to_token("a", "b"), 3)


@pytest.mark.parametrize(("asked", "given"), [(0, 100), (1, 1), (1000, 1000), (1001, 1000)])
def test_how_large_a_page_is(asked, given) -> None:
    assert page_size(asked) == given


def test_a_page_of_large_entries_ends_early_but_never_empty() -> None:
    assert fitting([1, 2, 3], lambda _: 2 << 20) == [1]
    assert fitting([1, 2, 3], lambda _: 600 << 10) == [1, 2]
    assert fitting([1, 2, 3], lambda _: 10) == [1, 2, 3]
    assert fitting([], lambda _: 10) == []
