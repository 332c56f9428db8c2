"""What a reader gets does not depend on who brought rows into their form, nor when that changed."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rheostat._capture.encodings import read_tensor
from rheostat_engine import OPEN_END, Point, Rows, Site
from rheostat_server.capture.engine_captures import engine_captures
from rheostat_server.capture.specs import (
    ResolvedCapture,
    Target,
    resolve_capture,
)
from rheostat_server.delivery.byte_budget import ByteCounter
from rheostat_server.delivery.capture_rows import CaptureRows
from rheostat_server.delivery.items import Chunk, SequenceKey
from rheostat_server.delivery.row_messages import captured_of, captured_rows
from rheostat_server.selectors.selection import Selection, typical_context
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Vector, VectorStore
from rheostat_wire.v1 import capture_pb2, generation_service_pb2, tensor_pb2

from ..fakes import INFO, SITES, WIDTH, ScriptedBackend, row
from ..messages import FIRST, along, site_set, tensor

POST = 3
LAYERS = (0, 2)
END = 9
"""Positions."""
DIRECTIONS = np.random.default_rng(1).normal(size=(2, 1, WIDTH)).astype(np.float32)
ALONG = along(*map(tensor, DIRECTIONS))
HALF = tensor_pb2.DTYPE_FLOAT16
WANTED = {
    "float16": {"dtype": HALF},
    "bfloat16 planes": {
        "dtype": tensor_pb2.DTYPE_BFLOAT16,
        "encoding": tensor_pb2.ENCODING_LZ4_PLANES,
    },
    "full8": {"encoding": tensor_pb2.ENCODING_FULL8},
    "topk8": {"encoding": tensor_pb2.ENCODING_TOPK8, "kept": 1},
    "rp8": {"encoding": tensor_pb2.ENCODING_RP8, "kept": 2, "seed": 3},
    "projection": {"projection": ALONG},
    "projection in float16": {"projection": ALONG, "dtype": HALF},
    "projection in full8": {"projection": ALONG, "encoding": tensor_pb2.ENCODING_FULL8},
    "projection in topk8": {
        "projection": ALONG,
        "encoding": tensor_pb2.ENCODING_TOPK8,
        "kept": 1,
    },
}
EXACT = ("float16", "bfloat16 planes", "full8", "topk8")
STORE = VectorStore(1 << 20, lambda digest: None)


def resolved(*layers: int, **fields: object) -> ResolvedCapture:
    """A capture of resid_post, everywhere."""
    spec = capture_pb2.CaptureSpec(sites=site_set(POST, layers=layers or LAYERS), **fields)
    found = resolve_capture(
        spec, SITES, typical_context(INFO), STORE.view(), "captures[0]", Target.INLINE
    )
    return replace(found, selection=Selection(((0, OPEN_END),), ()))


def device(capture: ResolvedCapture) -> ScriptedBackend:
    """A device that has the capture's vectors."""
    vectors: dict[bytes, Vector] = {}
    if capture.projection is not None:
        vectors = {one.digest: one for one in capture.projection.vectors}
    return ScriptedBackend(vectors=vectors)


def rows(capture: ResolvedCapture, site: Site, start: int, end: int, *, made: bool) -> Rows:
    data = np.stack([row(site.index, p) for p in range(start, end)])
    positions = np.arange(start, end, dtype=np.int32)
    if not made:
        return Rows("r", (site.index,), positions, data[None])
    (form,) = capture.forms[site.index]
    assert form is not None
    assert form.row_bytes(WIDTH) < data[0].nbytes
    made = device(capture)._formed(form, data)
    return Rows("r", (site.index,), positions, made[None], form.key)


def chunks(capture: ResolvedCapture, plan: list[list[tuple[int, bool]]]) -> list[Chunk]:
    """All that a reader gets; `plan` says of each site how its rows come."""
    waiting = CaptureRows(0, capture, FloatType.FLOAT32, END, ByteCounter())
    for site, runs in zip(capture.sites, plan, strict=True):
        at = 0
        for count, made in runs:
            end = min(END, at + count)
            if end > at:
                waiting.add(rows(capture, site, at, end, made=made))
            at = end
    return [
        Chunk(None, SequenceKey(0, False), block, [0] * len(block.positions))
        for block in waiting.ready([], END)
    ]


def read(capture: ResolvedCapture, plan: list[list[tuple[int, bool]]]) -> list[tuple]:
    """All that a reader gets, row by row."""
    found = []
    for chunk in chunks(capture, plan):
        message, block = captured_of(chunk), chunk.block
        tensor = read_tensor(message.tensor)
        for i, site in enumerate(block.sites):
            for j, position in enumerate(block.positions.tolist()):
                error = None if tensor.max_error is None else tensor.max_error[i, j]
                found.append((site, position, tensor.values[i, j], error, tensor.encoding))
    return sorted(found, key=lambda one: (one[0], one[1]))


RUNS = st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=4).map(
    lambda runs: [*runs, (END, False)]
)


@pytest.mark.parametrize("name", WANTED)
@settings(deadline=None)
@given(plan=st.tuples(RUNS, RUNS))
def test_rows_that_come_in_their_form_now_and_then_are_as_if_none_did(name, plan) -> None:
    capture = resolved(**WANTED[name])
    expected = read(capture, [[(END, False)]] * 2)
    found = read(capture, [*plan])
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert [(s.layer, p) for s, p, *_ in found] == [(n, p) for n in LAYERS for p in range(END)]
    for one, other in zip(found, expected, strict=True):
        assert one[4] == other[4]
        if name in EXACT:
            assert one[2].tobytes() == other[2].tobytes()
            assert one[3] == other[3]
        else:
            step = 0 if one[3] is None else 2 * one[3]
            np.testing.assert_allclose(one[2], other[2], rtol=2e-3, atol=step + 1e-2)


def test_rows_in_a_form_that_others_want_are_not_read() -> None:
    capture, other = resolved(**WANTED["full8"]), resolved(**WANTED["topk8"])
    waiting = CaptureRows(0, capture, FloatType.FLOAT32, END, ByteCounter())
    for site in capture.sites:
        assert waiting.add(rows(other, site, 0, 2, made=True)) == []
        assert len(waiting.add(rows(capture, site, 2, END, made=True))) == 1
    (block,) = waiting.ready([], END)
    assert block.positions.tolist() == list(range(2, END))


@pytest.mark.parametrize(
    ("captures", "expected"),
    [
        ([resolved(0, 2, **WANTED["full8"])], {(0, 2): "full8"}),
        ([resolved(0, **WANTED["full8"]), resolved(2)], {(0,): "full8", (2,): None}),
        ([resolved(0, **WANTED["full8"]), resolved(0, 2, **WANTED["full8"])], {(0, 2): "full8"}),
        (
            [resolved(0, 2, **WANTED["full8"]), resolved(2, **WANTED["topk8"])],
            {(0,): "full8", (2,): None},
        ),
        ([resolved(1, dtype=tensor_pb2.DTYPE_FLOAT32)], {(1,): None}),
        ([resolved(1, encoding=tensor_pb2.ENCODING_LZ4_PLANES)], {(1,): None}),
        (
            [
                resolved(1, **WANTED["bfloat16 planes"]),
                resolved(1, dtype=tensor_pb2.DTYPE_BFLOAT16),
            ],
            {(1,): "bfloat16 planes"},
        ),
        ([resolved(1, encoding=tensor_pb2.ENCODING_TOPK8, kept=2)], {(1,): None}),
        ([resolved(1, projection=along(*[tensor(FIRST)] * 5))], {(1,): None}),
    ],
)
def test_rows_leave_in_the_form_that_all_want_if_it_is_smaller(captures, expected) -> None:
    found = {}
    for one in engine_captures(captures):
        layers = tuple(
            layer for layer in range(3) if Site(Point.RESID_POST, layer).index in one.sites
        )
        found[layers] = one.encoding
    assert found == {
        layers: None
        if name is None
        else next(iter(resolved(0, **WANTED[name]).row_encodings.values()))
        for layers, name in expected.items()
    }


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("number", [1, 4, 300])
@settings(deadline=None)
@given(plan=st.tuples(RUNS, RUNS))
def test_rows_in_parts_are_the_same_message(name, number, plan) -> None:
    message_class = generation_service_pb2.GenerateResponse
    for chunk in chunks(resolved(**WANTED[name]), [*plan]):
        rows = asyncio.run(captured_rows(chunk))
        parts = rows.as_field(number)
        assert sum(map(len, parts)) == len(parts.joined())
        assert rows.to_message() == captured_of(chunk)
        if number == message_class.CAPTURED_FIELD_NUMBER:
            received = message_class.FromString(parts.joined())
            assert received == message_class(captured=captured_of(chunk))
