"""Uploads and reads of runs."""

import numpy as np

from rheostat_wire import byte_planes
from rheostat_wire.dtypes import narrow
from rheostat_wire.v1 import (
    run_pb2,
    tensor_pb2,
    types_pb2,
)
from rheostat_wire.v1 import run_service_pb2 as pb

from .conftest import rest
from .fakes import WIDTH
from .streams import settled

POST, PRE = types_pb2.POINT_RESID_POST, types_pb2.POINT_RESID_PRE
PROMPT_TOKENS = types_pb2.TokenIds(ids=[10, 11, 12])
ANSWERS = types_pb2.Prompt(token_ids=PROMPT_TOKENS)

RAW, LZ4 = tensor_pb2.ENCODING_RAW, tensor_pb2.ENCODING_LZ4_PLANES
F32, F16, BF16 = tensor_pb2.DTYPE_FLOAT32, tensor_pb2.DTYPE_FLOAT16, tensor_pb2.DTYPE_BFLOAT16
STORED = {F32: "float32", F16: "float16", BF16: "bfloat16"}


def site(layer: int, point: int = POST) -> types_pb2.Site:
    return types_pb2.Site(point=point, layer=layer)


def span(start: int, count: int = 1) -> types_pb2.PositionRun:
    return types_pb2.PositionRun(start=start, count=count)


def header(**fields: object) -> pb.PutRunRequest:
    values = {
        "run_id": "up",
        "sites": [site(0), site(2)],
        "positions": [span(0, 2)],
        "prompt_token_ids": PROMPT_TOKENS,
        "dtype": F32,
        **fields,
    }
    return pb.PutRunRequest(header=pb.RunHeader(**values))


def tensor(values: np.ndarray, dtype: int = F32, encoding: int = RAW) -> tensor_pb2.Tensor:
    """Rows [sites, positions, W] of float32 numbers."""
    stored = narrow(values.astype(np.float32), STORED[dtype])
    data = stored.tobytes()
    payload = data if encoding == RAW else byte_planes.compress(data, stored.itemsize)
    return tensor_pb2.Tensor(dtype=dtype, shape=values.shape, encoding=encoding, inline=payload)


def rows(values: np.ndarray, sites=None, positions=None, **fields: object) -> pb.PutRunRequest:
    message = pb.RunRows(
        sites=[site(0), site(2)] if sites is None else sites,
        positions=[span(0, 2)] if positions is None else positions,
        tensor=tensor(values),
    )
    message.tensor.MergeFrom(tensor_pb2.Tensor(**fields))
    return pb.PutRunRequest(rows=message)


NUMBERS = np.arange(4 * WIDTH, dtype=np.float32).reshape(2, 2, WIDTH)


async def put(running, *messages: pb.PutRunRequest) -> run_pb2.Run:
    return (await running.client.runs.PutRun(iter(messages), timeout=10)).run


async def read(running, run_id: str = "up", **fields: object) -> list[pb.ReadRunResponse]:
    message = pb.ReadRunRequest(run_id=run_id, **fields)
    return await rest(running.client.runs.ReadRun(message, timeout=10))


def by_site(answers: list[pb.ReadRunResponse]) -> dict[tuple[int, int, int], list[float]]:
    """Rows of float32 by point, layer and position; each may come once."""
    found: dict[tuple[int, int, int], list[float]] = {}
    for answer in answers:
        one = answer.captured
        data = one.tensor.inline
        if one.tensor.encoding == LZ4:
            data = byte_planes.decompress(data, 4 * int(np.prod(one.tensor.shape)), 4)
        values = np.frombuffer(data, "<f4").reshape(one.tensor.shape)
        places = [p for run in one.positions for p in range(run.start, run.start + run.count)]
        for i, place in enumerate(one.sites):
            for j, position in enumerate(places):
                key = place.point, place.layer, position
                assert key not in found
                found[key] = values[i, j].tolist()
    return found


async def nothing_left(running) -> None:
    stats = await settled(running)
    assert (stats.run_count, stats.run_bytes, stats.leaked_count) == (0, 0, 0)
