"""Rows projected on directions: what the client gets, and what is held for it meanwhile."""

import asyncio
import gc

import numpy as np
import pytest

from rheostat._capture.encodings import read_tensor
from rheostat_server import errors
from rheostat_server.delivery.spill_manager import SpillQueue
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Name, make_vector
from rheostat_wire.v1 import capture_pb2, generation_service_pb2, tensor_pb2, vector_pb2

from ..fakes import LAYERS, WIDTH, ScriptedBackend, row
from ..messages import FIRST, SECOND, along, capture, request, site_set, tensor
from ..streams import until
from ..subscribers import (
    EVERY,
    POST,
    Subscriber,
    generate,
    opening,
    rows_of,
    site,
    wanted,
)

RNG = np.random.default_rng(0)
FLAT = RNG.normal(size=(1, WIDTH)).astype(np.float32)
BY_LAYER = RNG.normal(size=(2, WIDTH)).astype(np.float32)
EIGHT = tensor_pb2.ENCODING_FULL8


def put(running, rows: np.ndarray, name: str = "joy") -> bytes:
    """Stores a vector under a name; its digest."""
    vector = make_vector(FloatType.FLOAT32, len(rows), WIDTH, rows.tobytes(), "v")
    running.manager.store.put_named(vector, name, Name(vector.digest, "", None))
    return vector.digest


def joy() -> vector_pb2.VectorRef:
    return vector_pb2.VectorRef(name="joy")


def sent(events) -> dict[tuple[int, int], np.ndarray]:
    """Rows by (layer, position)."""
    found = {}
    for part in (event.captured for event in events if event.WhichOneof("event") == "captured"):
        at = [p for run in part.positions for p in range(run.start, run.start + run.count)]
        values = read_tensor(part.tensor).values
        for i, one in enumerate(part.sites):
            for j, position in enumerate(at):
                found[one.layer, position] = values[i, j]
    return found


@pytest.mark.parametrize("whole", [False, True], ids=["on the device", "on the server"])
@pytest.mark.parametrize("encoding", [None, tensor_pb2.ENCODING_LZ4_PLANES, EIGHT])
async def test_what_comes_is_the_scalar_product_with_each_direction(
    starter, encoding, whole
) -> None:
    running = await starter(ScriptedBackend(whole=whole))
    put(running, BY_LAYER)
    spec = capture(
        site_set(POST, layers=[0, 2]), projection=along(tensor(FLAT), joy()), encoding=encoding
    )
    found = sent(await generate(running, "a", captures=[spec]))
    assert len(found) == 2 * 5
    for (layer, position), values in found.items():
        directions = np.stack([FLAT[0], BY_LAYER[[0, 2].index(layer)]])
        expected = directions @ row(site(layer), position)
        bound = np.ptp(expected) / 500 if encoding == EIGHT else 1e-5 * np.abs(expected).max()
        assert np.abs(values - expected).max() <= bound + 1e-3


@pytest.mark.parametrize("whole", [False, True], ids=["on the device", "on the server"])
async def test_what_comes_of_readouts_is_what_numpy_makes_of_the_rows(starter, whole) -> None:
    running = await starter(ScriptedBackend(whole=whole))
    flat, other = tensor(FLAT), tensor(BY_LAYER[:1])
    unit, cosine = vector_pb2.NORMALISE_UNIT, vector_pb2.NORMALISE_COSINE
    relu, jump, tanh = (
        vector_pb2.Activation.Value(f"ACTIVATION_{name}") for name in ("RELU", "JUMP_RELU", "TANH")
    )
    rows = {position: row(site(1), position).astype(np.float64) for position in range(5)}
    theta = float(np.median([x @ FLAT[0] for x in rows.values()])) + 1e-3
    readouts = [
        vector_pb2.Readout(vector=flat),
        vector_pb2.Readout(vector=flat, normalise=unit, bias=0.5),
        vector_pb2.Readout(vector=other, normalise=cosine, activation=tanh),
        vector_pb2.Readout(vector=other, bias=-0.25, activation=relu),
        vector_pb2.Readout(vector=flat, activation=jump, theta=theta),
    ]
    onto = capture_pb2.Projection(readouts=capture_pb2.ReadoutList(readouts=readouts))
    spec = capture(site_set(POST, layers=[1]), projection=onto)
    found = sent(await generate(running, "a", captures=[spec]))
    a, b = FLAT[0].astype(np.float64), BY_LAYER[0].astype(np.float64)
    for (_, position), values in found.items():
        x = rows[position]
        size = np.linalg.norm(x) * np.linalg.norm(b)
        expected = [
            x @ a,
            x @ a / np.linalg.norm(a) + 0.5,
            np.tanh(x @ b / size) if size else 0.0,
            max(x @ b - 0.25, 0.0),
            x @ a if x @ a > theta else 0.0,
        ]
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-3)


async def test_numbers_are_float32_unless_another_type_is_asked_for(running) -> None:
    for dtype, kind in ((None, "DTYPE_FLOAT32"), (tensor_pb2.DTYPE_FLOAT16, "DTYPE_FLOAT16")):
        spec = capture(site_set(POST, layers=[1]), projection=along(tensor(FIRST)), dtype=dtype)
        events = await generate(running, "a", captures=[spec])
        parts = [e.captured.tensor for e in events if e.WhichOneof("event") == "captured"]
        assert {tensor_pb2.Dtype.Name(one.dtype) for one in parts} == {kind}
        assert {one.shape[2] for one in parts} == {1}


async def test_the_engine_gets_the_vectors_before_the_plan_that_names_them(running) -> None:
    digest = put(running, BY_LAYER)
    spec = capture(site_set(POST, layers=[0, 1]), projection=along(joy()))
    await generate(running, "a", captures=[spec])
    assert running.backend.loaded == [digest.hex()]
    captures = running.backend.jobs[-1].plan.captures
    assert [(one.sites, one.encoding.directions.rows) for one in captures] == [
        ((site(0),), (0,)),
        ((site(1),), (1,)),
    ]


async def test_one_site_under_two_names_is_projected_as_each_layer_says(running) -> None:
    put(running, BY_LAYER)
    sites = site_set(1, POST, layers=[0, 1])  # resid_pre 1 and resid_post 0 are one site
    events = await generate(running, "a", captures=[capture(sites, projection=along(joy()))])
    found = {}
    for part in (event.captured for event in events if event.WhichOneof("event") == "captured"):
        for i, one in enumerate(part.sites):
            values = read_tensor(part.tensor).values
            found.setdefault((one.point, one.layer), values[i, 0])  # of the first position
    stream = row(site(0), 0)
    assert np.allclose(found[POST, 0], BY_LAYER[0] @ stream)
    assert np.allclose(found[1, 1], BY_LAYER[1] @ stream)


async def test_a_subscription_keeps_what_its_names_meant(running) -> None:
    before = put(running, FLAT)
    one = await Subscriber.open(running, opening(EVERY, [wanted(1, projection=along(joy()))]))
    await until(lambda: running.backend.loaded == [before.hex()])
    put(running, 2 * FLAT)
    running.manager.store.delete_name("joy", "name")
    await generate(running, "a")
    await one.until("end_of_request")
    found = {key[3]: values for key, values in rows_of(one.events).items()}
    assert len(found) == 5
    for position, values in found.items():
        assert np.allclose(values, FLAT @ row(site(1), position), rtol=1e-5)
    assert running.backend.loaded == [before.hex()]


async def test_a_request_does_not_wait_for_an_observer_s_vectors(starter) -> None:
    loading = asyncio.Event()
    running = await starter(ScriptedBackend(loading=loading))
    put(running, FLAT)
    one = await Subscriber.open(running, opening(EVERY, [wanted(1, projection=along(joy()))]))
    await generate(running, "a")
    await one.until("end_of_request")
    assert running.backend.loaded == []
    assert len(rows_of(one.events)) == 5
    for key, values in rows_of(one.events).items():
        assert np.allclose(values, FLAT @ row(site(1), key[3]), rtol=1e-5)
    loading.set()
    await until(lambda: len(running.backend.loaded) == 1)


async def test_a_subscription_holds_its_vectors_until_it_ends(starter) -> None:
    running = await starter(vector_store_bytes=2 * FLAT.nbytes)
    digest = put(running, FLAT)
    one = await Subscriber.open(running, opening(EVERY, [wanted(1, projection=along(joy()))]))
    running.manager.store.delete_name("joy", "name")
    for value in range(3):
        put(running, np.full((1, WIDTH), value, np.float32), "other")
        running.manager.store.delete_name("other", "name")
    assert digest in running.manager.store
    await one.rest()
    await until(lambda: not len(running.manager.subscriptions))
    for value in range(3, 6):
        put(running, np.full((1, WIDTH), value, np.float32), "other")
        running.manager.store.delete_name("other", "name")
    assert digest not in running.manager.store


async def test_a_refused_subscription_keeps_no_place_to_spill_to(starter, tmp_path) -> None:
    running = await starter(vector_store_bytes=FLAT.nbytes, spool=str(tmp_path))
    put(running, FLAT)
    gc.collect()
    before = sum(type(one) is SpillQueue for one in gc.get_objects())
    own = tensor(2 * FLAT)
    for _ in range(3):
        with pytest.raises(errors.StoreFull):
            await running.manager.subscriptions.open(
                opening(
                    EVERY,
                    [wanted(1, projection=along(own))],
                    overload=capture_pb2.OVERLOAD_SPILL,
                )
            )
    gc.collect()
    assert sum(type(one) is SpillQueue for one in gc.get_objects()) == before


async def test_a_subscription_on_what_is_not_stored_is_refused(running) -> None:
    one = Subscriber(running)
    with pytest.raises(errors.NameNotFound) as caught:
        await running.manager.subscriptions.open(
            opening(EVERY, [wanted(1, projection=along(joy()))])
        )
    assert caught.value.field == "open.captures[0].projection.readouts.readouts[0].vector.name"
    assert len(running.manager.subscriptions) == 0
    one.call.cancel()


async def test_readers_of_other_forms_get_what_they_asked_for(running) -> None:
    put(running, FLAT)
    specs = [wanted(0, 1, projection=along(joy())), wanted(1, encoding=EIGHT)]
    one = await Subscriber.open(running, opening(EVERY, specs))
    raw = capture(site_set(POST, layers=[2]))
    events = await generate(running, "a", captures=[raw])
    await one.until("end_of_request")
    forms = {c.sites: c.encoding for c in running.backend.jobs[-1].plan.captures}
    assert {sites: form is None for sites, form in forms.items()} == {
        (site(0),): False,
        (site(1), site(2)): True,
    }
    assert len(sent(events)) == 5
    by_spec: dict[int, int] = {}
    for event in one.events:
        if event.WhichOneof("event") == "captured":
            part = event.captured
            read = read_tensor(part.tensor)
            for i, where in enumerate(part.sites):
                for j, run in enumerate(range(len(part.token_ids))):
                    stream = row(site(where.layer), part.positions[0].start + run)
                    expected = FLAT @ stream if part.capture_index == 0 else stream
                    assert np.allclose(read.values[i, j], expected, atol=1.0, rtol=1e-4)
            by_spec[part.capture_index] = by_spec.get(part.capture_index, 0) + len(
                part.sites
            ) * len(part.token_ids)
    assert by_spec == {0: 10, 1: 5}


async def test_explain_counts_the_bytes_of_the_numbers(running) -> None:
    spec = capture(site_set(POST), projection=along(tensor(FIRST), tensor(SECOND)), encoding=EIGHT)
    answer = await running.client.generation.Explain(
        generation_service_pb2.ExplainRequest(request=request(captures=[spec]))
    )
    positions = answer.captures[0].selection.positions
    rows = sum(one.count for one in positions) * LAYERS
    assert answer.captures[0].payload_bytes == rows * (8 + 2)
