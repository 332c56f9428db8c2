"""Uploads of vectors."""

import hashlib

import grpc
import numpy as np
import pytest

from rheostat_wire.v1 import (
    steering_service_pb2,
    tensor_pb2,
)

from .conftest import Refusal
from .fakes import WIDTH

steering = steering_service_pb2


async def refusal_of(call) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return Refusal.of(caught.value)


def header(rows: int = 1, **fields: object) -> steering.PutVectorRequest:
    values = {
        "dtype": tensor_pb2.DTYPE_FLOAT32,
        "shape": [rows, WIDTH],
        "total_bytes": rows * WIDTH * 4,
        **fields,
    }
    return steering.PutVectorRequest(header=steering.VectorHeader(**values))


def chunk(data: bytes) -> steering.PutVectorRequest:
    return steering.PutVectorRequest(chunk=data)


def values(value: float = 1.0, rows: int = 1) -> bytes:
    return np.full((rows, WIDTH), value, dtype="<f4").tobytes()


def digest(data: bytes, rows: int = 1) -> bytes:
    head = f"rheostat.v1 vector float32 {rows}x{WIDTH}\n".encode()
    return hashlib.sha256(head + data).digest()


async def put(client, *messages: steering.PutVectorRequest) -> steering.PutVectorResponse:
    return await client.steering.PutVector(iter(messages))
