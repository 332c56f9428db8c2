"""Hostile calls that generate nothing: storms, uploads, names, messages. See `scenarios`."""

import random

from rheostat_bench.abuse import (
    GENERATE,
    MIB,
    TOKENIZE,
    Target,
    add,
    count,
    prompt,
    sampling,
    sites,
)
from rheostat_bench.calls import METHODS, Call
from rheostat_wire.v1 import (
    capture_service_pb2,
    engine_service_pb2,
    generation_pb2,
    generation_service_pb2,
    run_service_pb2,
    steering_pb2,
    steering_service_pb2,
    tensor_pb2,
    types_pb2,
)

PUT = "SteeringService/PutVector"
_LARGEST_UPLOAD = 64 * MIB
_NO_FIELD = b"\x07"
"""What no message begins with: a wire type that there is not."""
_UNKNOWN = 20_000
"""A field number that no message has."""


def stats(target: Target, rng: random.Random, size: float) -> Call:
    """Counters, which the workers are asked for."""
    message = engine_service_pb2.GetStatsRequest()
    return Call("EngineService/GetStats", (message.SerializeToString(),))


def model(target: Target, rng: random.Random, size: float) -> Call:
    """A GetModel call, whose answer does not change while the server runs."""
    message = engine_service_pb2.GetModelRequest()
    return Call("EngineService/GetModel", (message.SerializeToString(),))


def lists(target: Target, rng: random.Random, size: float) -> Call:
    """Artifacts that there are or are not, vectors, runs, sinks."""
    artifacts = capture_service_pb2.GetArtifactsRequest(request_id=f"again-{rng.randrange(9)}")
    calls = [
        Call("CaptureService/GetArtifacts", (artifacts.SerializeToString(),)),
        Call("CaptureService/ListSinks", (b"",)),
        Call(
            "SteeringService/ListVectors",
            (steering_service_pb2.ListVectorsRequest(page_size=1000).SerializeToString(),),
        ),
        Call(
            "RunService/ListRuns",
            (run_service_pb2.ListRunsRequest(page_size=1000).SerializeToString(),),
        ),
    ]
    return rng.choice([calls[0], *calls])


def contrast(target: Target, rng: random.Random, size: float) -> Call:
    """Vectors from as many prompts as there can be, cancelled on the way."""
    request = steering_service_pb2.DeriveVectorsRequest(
        sites=sites(types_pb2.POINT_RESID_POST, types_pb2.POINT_RESID_MID)
    )
    for side in (request.positive, request.negative):
        for _ in range(count(size, 512)):
            side.add().token_ids.CopyFrom(prompt(rng, target, 8))
    message = request.SerializeToString()
    return Call("SteeringService/DeriveVectors", (message,), reads=0, holds=4.0 * size)


def set_global(target: Target, rng: random.Random, size: float) -> Call:
    """Server-wide steering that changes nothing, set anew with vectors that nobody has seen."""
    steering = steering_pb2.Steering()
    for _ in range(count(size, 4)):
        act = add(rng, target, None, rows=target.layers)
        act.add.scale = 0.0
        steering.interventions.append(act)
    message = steering_service_pb2.SetGlobalRequest(
        policy=steering_service_pb2.Policy(steering=steering)
    )
    return Call("SteeringService/SetGlobal", (message.SerializeToString(),))


def _header(target: Target, rows: int, name: str = "") -> steering_service_pb2.VectorHeader:
    return steering_service_pb2.VectorHeader(
        dtype=tensor_pb2.DTYPE_FLOAT32,
        shape=[rows, target.width],
        total_bytes=rows * target.width * 4,
        name=name,
    )


def idle_upload(target: Target, rng: random.Random, size: float) -> Call:
    """An upload that is announced, and does not come."""
    header = _header(target, min(1024, _LARGEST_UPLOAD // (4 * target.width)))
    first = steering_service_pb2.PutVectorRequest(header=header)
    return Call(PUT, (first.SerializeToString(),), reads=0, holds=4.0 * size, half_closes=False)


def new_name(target: Target, rng: random.Random, size: float) -> Call:
    """A name with as much written beside it as there can be."""
    header = _header(target, 1, f"hostile/{rng.getrandbits(64)}")
    header.description = "d" * count(size, 1024)
    header.sites.points.append(types_pb2.POINT_RESID_POST)
    header.sites.list.layers.extend(range(count(size, 1024)))
    row = rng.randbytes(2) + bytes(4 * target.width - 2)
    kind = steering_service_pb2.PutVectorRequest
    return Call(PUT, (kind(header=header).SerializeToString(), kind(chunk=row).SerializeToString()))


def _field(number: int, data: bytes) -> bytes:
    """A field of bytes, as it is on the wire."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def unknown_fields(target: Target, rng: random.Random, size: float) -> Call:
    """A request with fields that its message does not have: few large ones, or very many."""
    request = generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, 4), sampling=sampling(1)
    ).SerializeToString()
    if rng.random() < 0.5:
        extra = _field(_UNKNOWN, bytes(count(size, 2 * MIB)))
    else:
        extra = _field(_UNKNOWN, b"x") * count(size, 300_000)
    return Call(GENERATE, (request + extra,))


def malformed(target: Target, rng: random.Random, size: float) -> Call:
    """A request of any rpc whose bytes are cut off, changed or noise."""
    method = rng.choice(METHODS)
    request = bytearray(
        generation_service_pb2.GenerateRequest(
            token_ids=prompt(rng, target, 8), sampling=sampling(1), labels={"team": "red"}
        ).SerializeToString()
    )
    which = rng.randrange(3)
    if which == 0:
        del request[rng.randrange(1, len(request)) :]
    elif which == 1:
        for _ in range(rng.randrange(1, 4)):
            request[rng.randrange(len(request))] = rng.randrange(256)
    else:
        request = bytearray(_NO_FIELD + rng.randbytes(count(size, MIB)))
    # The cut bytes may still be a valid request. Its response is not read to the end.
    return Call(method, (bytes(request),), reads=1)


def large_message(target: Target, rng: random.Random, size: float) -> Call:
    """A message of nearly 16 MiB, or one that is nested as deep as it can be."""
    which = rng.randrange(3)
    if which == 0:
        return Call(GENERATE, (_NO_FIELD + rng.randbytes(count(size, 15 * MIB)),))
    if which == 1:
        stop_tokens = b"\x05" * count(size, 7 * MIB)
        fields = generation_pb2.Sampling.DESCRIPTOR.fields_by_name
        sampled = _field(fields["stop_token_ids"].number, stop_tokens)
        fields = generation_service_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
        text = _field(fields["text"].number, b"a")
        return Call(GENERATE, (text + _field(fields["sampling"].number, sampled),))
    fields = generation_service_pb2.TokenizeRequest.DESCRIPTOR.fields_by_name
    text, nested = _field(fields["text"].number, b"a"), b""
    for _ in range(count(size, 20_000)):
        nested = _field(_UNKNOWN, nested)
        if len(nested) > 15 * MIB:
            break
    return Call(TOKENIZE, (text + nested,))


def tiny_fields(target: Target, rng: random.Random, size: float) -> Call:
    """A message of nearly 16 MiB that consists of up to 8 million fields of a few bytes."""
    request = generation_service_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
    sampled = generation_pb2.Sampling.DESCRIPTOR.fields_by_name
    steered = steering_pb2.Steering.DESCRIPTOR.fields_by_name
    which = rng.randrange(6)
    room = count(size, 15 * MIB)
    if which == 0:
        message = _field(request["captures"].number, b"") * (room // 2)
    elif which == 1:
        message = _field(request["labels"].number, b"") * (room // 2)
    elif which == 2:
        stop = _field(sampled["stop"].number, b"") * (room // 2)
        message = _field(request["sampling"].number, stop)
    elif which == 3:
        one = _field(steered["interventions"].number, _field(1, b""))
        message = _field(request["steering"].number, one * (room // len(one)))
    elif which == 4:
        tokens = (_varint(1 << 3) + b"\x05") * (room // 2)
        message = _field(request["token_ids"].number, tokens)
    else:
        group = _varint(_UNKNOWN << 3 | 3) + _varint(_UNKNOWN << 3 | 4)
        message = group * (room // len(group))
    return Call(GENERATE, (message,))
