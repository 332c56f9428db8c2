"""Hostile requests on a real server: typed errors only, the engine lives, nothing is left."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

import rheostat
from rheostat._proto.v1 import generation_service_pb2, generation_service_pb2_grpc

from .conftest import Server

pytestmark = pytest.mark.integration

REQUESTS = 1500
EXPECTED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""What a request may end with besides OK: never INTERNAL, UNKNOWN or UNAVAILABLE."""

_NUMBERS = [0, 1, 2, 3, 5, 6, 7, 100, 2**31 - 1, 2**32 - 1]
_SIGNED = [*_NUMBERS[:-1], -1, -2, -100, -(2**31)]
_FLOATS = [0.0, 1.0, -1.0, 0.5, 1e30, -1e38, float("nan"), float("inf"), 1e-45]
_TEXTS = ["", "My day was", "joy", "\x00", "ä" * 50, "{}", "../../etc", "a" * 3000]


def value(rng: random.Random, field: FieldDescriptor) -> object:
    """A scalar for a field, plausible or not."""
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(_TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice([b"", b"x" * 32, bytes(512), rng.randbytes(512)])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.choice([one.number for one in field.enum_type.values] + [99])
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice(_FLOATS)
    signed = field.type in (
        FieldDescriptor.TYPE_INT32,
        FieldDescriptor.TYPE_SINT32,
        FieldDescriptor.TYPE_INT64,
        FieldDescriptor.TYPE_SINT64,
    )
    return rng.choice(_SIGNED if signed else _NUMBERS)


def fill(rng: random.Random, message: Message, depth: int = 0) -> None:
    """Sets fields at random, nested ones too."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() > (0.35 if depth else 0.3):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)["key"] = rng.choice(_TEXTS)
        elif field.is_repeated:
            for _ in range(rng.randint(1, 3)):
                if field.message_type is not None:
                    fill(rng, getattr(message, field.name).add(), depth + 1)
                else:
                    getattr(message, field.name).append(value(rng, field))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            fill(rng, getattr(message, field.name), depth + 1)
        else:
            setattr(message, field.name, value(rng, field))


def hostile(seed: int) -> generation_service_pb2.GenerateRequest:
    """A request that is partly sound, so that it gets far."""
    rng = random.Random(seed)
    request = generation_service_pb2.GenerateRequest()
    fill(rng, request)
    request.request_id = f"fuzz-{seed}" if rng.random() < 0.9 else request.request_id
    if rng.random() < 0.7:
        request.text = "My day was"
    if rng.random() < 0.8:
        request.sampling.Clear()
        request.sampling.max_tokens = rng.randint(1, 4)
    if rng.random() < 0.6:
        for unserved in ("patches", "rules", "lora", "labels", "when_full"):
            request.ClearField(unserved)  # type: ignore[arg-type]  # names of fields
    for intervention in request.steering.interventions:
        if rng.random() < 0.6:
            intervention.ClearField("gate")
            intervention.sites.points[:] = [rng.randint(1, 3)]
            intervention.sites.list.layers[:] = [rng.randint(0, 6)]
            intervention.add.vector.inline.dtype = 1
            intervention.add.vector.inline.encoding = 1
            intervention.add.vector.inline.shape[:] = [1, 128]
            intervention.add.vector.inline.inline = rng.choice([bytes(512), b"\x3f" * 512])
    return request


def test_hostile_requests_end_with_typed_errors_and_leave_nothing(
    server: Server, engine: rheostat.Engine
) -> None:
    with grpc.insecure_channel(server.target) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)

        def one(seed: int) -> tuple[grpc.StatusCode, str, bool]:
            try:
                events = list(stub.Generate(hostile(seed), timeout=60))
            except grpc.RpcError as error:
                return error.code(), error.details(), False
            return grpc.StatusCode.OK, "", events[-1].HasField("receipt")

        with ThreadPoolExecutor(16) as pool:
            ends = list(pool.map(one, range(REQUESTS)))
    for seed, (code, details, receipt) in enumerate(ends):
        assert receipt if code is grpc.StatusCode.OK else code in EXPECTED, (seed, code, details)
        assert "Traceback" not in details, (seed, details)
    codes = Counter(code for code, _, _ in ends)
    assert codes[grpc.StatusCode.OK] > 20, codes
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 100, codes
