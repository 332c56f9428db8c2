"""Rows leave the real engine in the form that their readers want, and fewer bytes leave it."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest

import rheostat
from rheostat import captures
from rheostat._capture.encodings import Decoded, read_tensor
from rheostat_engine import Point, Site
from rheostat_server.capture.encodings import Form
from rheostat_server.tensors import FloatType, converted, widened
from rheostat_wire.v1 import tensor_pb2

from ..engine.reference import HfReference
from .conftest import Server, watched

pytestmark = pytest.mark.integration

WIDTH, LAYERS = 128, 6
PROMPT = np.random.default_rng(7).integers(3, 1900, 60).tolist()
TOKENS = 8
ROWS = len(PROMPT) + TOKENS - 1
"""Positions that have a row."""
OPTIONS = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
CODED = {
    "full8": (tensor_pb2.ENCODING_FULL8, {}, 8 + WIDTH),
    "rp8": (tensor_pb2.ENCODING_RP8, {"kept": 24, "seed": 2**64 - 5}, 8 + 24),
    "topk8": (tensor_pb2.ENCODING_TOPK8, {"kept": 16}, 8 + 5 * 16),
}
"""Encoding, options, bytes of a row."""
TOLERANCE = 2e-5


class Raw(NamedTuple):
    """What the engine computes of the prompt and what follows."""

    rows: dict[tuple[str, int], np.ndarray]
    """[ROWS, W] by point and layer."""
    token_ids: list[int]
    """All of them."""


@pytest.fixture
def raw(engine: rheostat.Engine) -> Raw:
    """The rows as they are."""
    points = ["resid_post", "attn_out"]
    out = engine.generate(PROMPT, capture=rheostat.Capture(points, "all"), **OPTIONS)
    return Raw(dict(out.activations), [*PROMPT, *out.token_ids])


class DeviceBytes:
    """Counts the bytes that leave the device."""

    def __init__(self, engine: rheostat.Engine) -> None:
        self._engine = engine
        self._before = engine.stats()

    def left(self) -> int:
        return self._engine.stats().left_bytes - self._before.left_bytes


def server_s(rows: np.ndarray, name: str) -> Decoded:
    """Rows in the server's encoding, as a client reads it."""
    encoding, options, _ = CODED[name]
    encode = Form(encoding, **options).encode
    return read_tensor(encode(rows, row_type=FloatType.FLOAT32, wanted=FloatType.FLOAT32))


@pytest.mark.parametrize("name", CODED)
def test_coded_rows_are_the_server_s_and_only_their_codes_leave(
    engine: rheostat.Engine, raw: Raw, name: str
) -> None:
    _, options, row_bytes = CODED[name]
    meter = DeviceBytes(engine)
    capture = rheostat.Capture("resid_post", "all", encoding=name, **options)
    out = engine.generate(PROMPT, capture=capture, **OPTIONS)
    assert meter.left() == ROWS * LAYERS * row_bytes
    for layer in range(LAYERS):
        rows = raw.rows["resid_post", layer]
        found, error = (
            out.activations["resid_post", layer],
            out.activations.max_error("resid_post", layer),
        )
        expected = server_s(rows, name)
        if name == "rp8":
            matrix = rheostat.projection_matrix(24, WIDTH, 2**64 - 5).astype(np.float64)
            slack = 1e-5 * np.linalg.norm(rows, axis=1, keepdims=True)
            assert (np.abs(found - rows @ matrix.T) <= error[:, None] + slack).all()
            continue
        assert found.tobytes() == expected.values.tobytes()
        assert error.tobytes() == expected.max_error.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("encoding", ["raw", "lz4_planes"])
def test_a_narrower_type_is_made_on_the_device(
    engine: rheostat.Engine, raw: Raw, dtype: str, encoding: str
) -> None:
    meter = DeviceBytes(engine)
    capture = rheostat.Capture("attn_out", [1, 4], dtype=dtype, encoding=encoding)
    out = engine.generate(PROMPT, capture=capture, **OPTIONS)
    assert meter.left() == ROWS * 2 * WIDTH * 2
    kind = FloatType(dtype)
    for layer in (1, 4):
        rows = raw.rows["attn_out", layer]
        expected = widened(converted(rows, row_type=FloatType.FLOAT32, wanted=kind), kind)
        assert out.activations["attn_out", layer].tobytes() == expected.tobytes()


def test_projections_are_scalar_products_with_hugging_face_s_rows(
    engine: rheostat.Engine, raw: Raw, reference: HfReference
) -> None:
    rng = np.random.default_rng(3)
    flat, by_layer = rng.normal(size=(5, WIDTH)), rng.normal(size=(LAYERS, WIDTH))
    stored = engine.vectors.put(by_layer.astype(np.float32), name="by-layer")
    streams = reference.run(raw.token_ids[:-1]).streams
    meter = DeviceBytes(engine)
    capture = rheostat.Capture("resid_post", "all", projection=[stored, rheostat.inline(flat[0])])
    out = engine.generate(PROMPT, capture=capture, **OPTIONS)
    assert meter.left() == ROWS * LAYERS * 2 * 4
    for layer in range(LAYERS):
        rows = streams[Site(Point.RESID_POST, layer).index].astype(np.float64)
        found = out.activations["resid_post", layer]
        assert found.shape == (ROWS, 2)
        size = np.linalg.norm(rows, axis=1, keepdims=True) * np.linalg.norm(by_layer, axis=1).max()
        expected = rows @ np.stack([by_layer[layer], flat[0]]).T
        assert (np.abs(found - expected) <= TOLERANCE * size).all()
    meter = DeviceBytes(engine)
    coded = rheostat.Capture("resid_post", 2, projection=flat, encoding="full8")
    out = engine.generate(PROMPT, capture=coded, **OPTIONS)
    assert meter.left() == ROWS * (8 + 5)
    rows = streams[Site(Point.RESID_POST, 2).index].astype(np.float64)
    size = np.linalg.norm(rows, axis=1, keepdims=True) * np.linalg.norm(flat, axis=1).max()
    error = out.activations.max_error("resid_post", 2)[:, None] + TOLERANCE * size
    assert (np.abs(out.activations["resid_post", 2] - rows @ flat.T) <= error).all()
    engine.vectors.delete("by-layer")


def test_readers_who_want_one_row_in_different_forms_are_all_right(
    engine: rheostat.Engine, raw: Raw
) -> None:
    direction = np.random.default_rng(4).normal(size=(1, WIDTH)).astype(np.float32)
    eight = rheostat.Capture("resid_post", [0, 1, 2], encoding="full8")
    probe = rheostat.Capture("resid_post", [1, 2], projection=direction)
    meter = DeviceBytes(engine)
    with engine.subscribe(capture=probe, every=True) as subscription:
        out = engine.generate(PROMPT, capture=eight, **OPTIONS)
        got: dict[tuple[int, int], np.ndarray] = {}
        for event in subscription:
            if isinstance(event, rheostat.EndOfRequest):
                break
            for rows in event.rows:
                for position, row in zip(rows.positions.tolist(), rows.values, strict=True):
                    got[rows.layer, position] = row
    # What only one of them reads leaves in its form, the rest as it is, once.
    assert meter.left() == ROWS * (8 + WIDTH) + ROWS * 2 * 4 * WIDTH
    for layer in (0, 1, 2):
        expected = server_s(raw.rows["resid_post", layer], "full8").values
        assert out.activations["resid_post", layer].tobytes() == expected.tobytes()
    assert sorted(got) == [(layer, p) for layer in (1, 2) for p in range(ROWS)]
    for (layer, position), row in got.items():
        expected = raw.rows["resid_post", layer][position] @ direction.T
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-3)


def test_many_requests_in_many_forms_share_steps(engine: rheostat.Engine, raw: Raw) -> None:
    def run(number: int) -> None:
        name = ["full8", "topk8", "raw"][number % 3]
        options = CODED[name][1] if name in CODED else {}
        capture = rheostat.Capture("resid_post", [number % LAYERS], encoding=name, **options)
        prompt = PROMPT[: 20 + 5 * number]
        out = engine.generate(prompt, capture=capture, **OPTIONS)
        own = rheostat.Capture("resid_post", [number % LAYERS])
        again = engine.generate(prompt, capture=own, **OPTIONS)
        rows = again.activations["resid_post", number % LAYERS]
        found = out.activations["resid_post", number % LAYERS]
        if name == "raw":
            np.testing.assert_allclose(found, rows, rtol=1e-4, atol=1e-4)
            return
        error = out.activations.max_error("resid_post", number % LAYERS)[:, None]
        kept = found != 0 if name == "topk8" else np.ones_like(found, bool)
        assert (np.abs(found - rows) <= error + 1e-4)[kept].all()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))


def test_a_sink_keeps_projections(
    tight_server: Server, sinking: rheostat.Engine, reference: HfReference
) -> None:
    directions = np.random.default_rng(5).normal(size=(3, WIDTH)).astype(np.float32)
    to = rheostat.Sink("disk", tag="probe")
    capture = rheostat.Capture("resid_post", 3, "prompt", to, projection=directions)
    sinking.generate(PROMPT, capture=capture, max_tokens=1)
    root = tight_server.log.parent / "rows"
    (batch,) = captures.open_captures(root, tag="probe").rows("resid_post", 3)
    (manifest,) = (json.loads(one.read_text()) for one in root.rglob("manifest.json"))
    digests = [rheostat.inline(one).digest for one in directions]
    assert manifest["projections"] == {"0": {"digests": digests, "rows": {"3": [0, 0, 0]}}}
    rows = reference.run(PROMPT).streams[Site(Point.RESID_POST, 3).index]
    size = np.linalg.norm(rows, axis=1, keepdims=True) * np.linalg.norm(directions, axis=1).max()
    assert batch.values.shape == (len(PROMPT), 3)
    assert (np.abs(batch.values - rows @ directions.T) <= TOLERANCE * size).all()


@pytest.fixture
def sinking(tight_server: Server) -> Iterator[rheostat.Engine]:
    yield from watched(tight_server)


def test_rows_whose_form_finds_no_room_leave_whole_and_are_projected_by_the_server(
    sinking: rheostat.Engine, reference: HfReference
) -> None:
    directions = np.random.default_rng(6).normal(size=(3, WIDTH)).astype(np.float32)
    before = sinking.stats()
    capture = rheostat.Capture("resid_post", 3, "prompt", projection=directions)
    out = sinking.generate(PROMPT, capture=capture, max_tokens=1)
    after = sinking.stats()
    assert after.left_bytes - before.left_bytes == len(PROMPT) * 4 * WIDTH
    assert after.plain_row_count - before.plain_row_count == len(PROMPT)
    rows = reference.run(PROMPT).streams[Site(Point.RESID_POST, 3).index]
    size = np.linalg.norm(rows, axis=1, keepdims=True) * np.linalg.norm(directions, axis=1).max()
    found = out.activations["resid_post", 3]
    assert (np.abs(found - rows @ directions.T) <= TOLERANCE * size).all()
