"""Runs that are captured, read and uploaded on the real engine, and what they replace."""

import concurrent.futures

import grpc
import numpy as np
import pytest

import rheostat
from rheostat_wire.v1 import run_service_pb2, run_service_pb2_grpc

from .conftest import Server

pytestmark = pytest.mark.integration

WIDTH, LAYERS = 128, 6
CLEAN = "The Eiffel Tower is in the city of"
CORRUPT = "The Willis Tower is in the city of"
POINTS = ["resid_post", "attn_out"]
OPTIONS = {"max_tokens": 4, "temperature": 0, "logprobs": 20, "ignore_eos": True}


@pytest.fixture(autouse=True)
def nothing_left(engine: rheostat.Engine):
    """Deletes the runs of a test; then the server holds none of its bytes."""
    before = {run.id for run in engine.runs()}
    size = engine.stats().run_bytes
    yield
    for run in engine.runs():
        if run.id not in before:
            engine.delete_run(run.id)
    stats = engine.stats()
    assert (stats.run_bytes, stats.leaked_count) == (size, 0)


def logprobs(out: rheostat.Generation) -> list[list[tuple[int, float]]]:
    return [
        [(one.token_id, one.logprob) for one in (step.token, *step.alternatives)]
        for step in out.logprobs
    ]


def replaced(engine: rheostat.Engine, run: str, layer: int = 2) -> rheostat.Generation:
    replace = rheostat.replace(rheostat.from_run(run)).at(
        points="resid_post", layers=layer, where="prompt"
    )
    capture = rheostat.Capture("resid_post", "all", where="prompt")
    return engine.generate(CORRUPT, steering=replace, capture=capture, **OPTIONS)


def test_read_rows_are_those_of_an_inline_capture(engine: rheostat.Engine) -> None:
    run = engine.capture_run(CLEAN, POINTS, run_id="clean", labels={"of": "runs"}, lease=60)
    inline = engine.generate(CLEAN, capture=rheostat.Capture(POINTS, where="prompt"), **OPTIONS)
    assert (run.id, run.width, dict(run.labels)) == ("clean", WIDTH, {"of": "runs"})
    assert run.positions == (range(len(inline.prompt_token_ids)),)
    assert run.prompt_token_ids == tuple(inline.prompt_token_ids)
    assert run.receipt.captures[0].run_id == "clean"
    again = engine.run("clean")
    assert (again.sites, again.size_bytes, again.dtype) == (run.sites, run.size_bytes, run.dtype)
    for encoding in ("raw", "lz4_planes"):
        rows = engine.read_run(run, encoding=encoding)
        assert set(rows) == set(inline.activations)
        for site in rows:
            assert np.array_equal(rows[site], inline.activations[site])
            assert rows.token_ids(*site).tolist() == list(inline.prompt_token_ids)
    some = engine.read_run("clean", "resid_pre", [1, 3], positions=[-1, 0])
    assert set(some) == {("resid_pre", 1), ("resid_pre", 3)}
    for layer in (1, 3):
        wanted = inline.activations["resid_post", layer - 1][[0, -1]]
        assert np.array_equal(some["resid_pre", layer], wanted)


def test_an_uploaded_run_replaces_as_the_captured_run_does(engine: rheostat.Engine) -> None:
    run = engine.capture_run(CLEAN, "resid_post", run_id="clean")
    rows = engine.read_run(run)
    engine.put_run(rows, prompt_token_ids=run.prompt_token_ids, run_id="copy")
    one, other = replaced(engine, "clean"), replaced(engine, "copy")
    assert one.token_ids == other.token_ids
    assert logprobs(one) == logprobs(other)
    for site in one.activations:
        assert np.array_equal(one.activations[site], other.activations[site])
    assert np.array_equal(one.activations["resid_post", 2], rows["resid_post", 2])
    sources = [out.receipt.interventions[0].source for out in (one, other)]
    assert sources[0].sha256 == sources[1].sha256 != ""


def test_a_run_is_captured_under_steering(engine: rheostat.Engine) -> None:
    push = rheostat.inline(np.full(WIDTH, 0.5, np.float32)).at(points="resid_post", layers=1)
    engine.capture_run(CLEAN, "resid_post", steering=push, where=rheostat.positions(-1), run_id="s")
    capture = rheostat.Capture("resid_post", "all", where=rheostat.positions(-1))
    inline = engine.generate(CLEAN, steering=push, capture=capture, **OPTIONS)
    plain = engine.generate(CLEAN, capture=capture, **OPTIONS)
    rows = engine.read_run("s")
    for layer in range(LAYERS):
        ours = rows["resid_post", layer]
        assert np.array_equal(ours, inline.activations["resid_post", layer])
        assert np.array_equal(ours, plain.activations["resid_post", layer]) == (layer < 1)


def test_several_runs_are_captured_read_and_uploaded_at_once(engine: rheostat.Engine) -> None:
    def copy(number: int) -> bool:
        run = engine.capture_run(f"{CLEAN} {number}", POINTS)
        rows = engine.read_run(run)
        mine = engine.put_run(rows, prompt_token_ids=run.prompt_token_ids)
        back = engine.read_run(mine, encoding="lz4_planes")
        return all(np.array_equal(rows[site], back[site]) for site in rows) and len(rows) == 12

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(copy, range(24)))


def test_a_cut_upload_leaves_nothing(server: Server, engine: rheostat.Engine) -> None:
    size = engine.stats().run_bytes
    header = run_service_pb2.RunHeader(
        run_id="cut",
        sites=[{"point": "POINT_RESID_POST", "layer": 1}],
        positions=[{"start": 0, "count": 2}],
        prompt_token_ids={"ids": [1, 2]},
        dtype="DTYPE_FLOAT32",
    )
    with grpc.insecure_channel(server.target) as channel:
        stub = run_service_pb2_grpc.RunServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.PutRun(iter([run_service_pb2.PutRunRequest(header=header)]))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert engine.stats().run_bytes == size
    with pytest.raises(rheostat.NotFound):
        engine.run("cut")
    engine.put_run({("resid_post", 1): np.zeros((2, WIDTH))}, prompt_token_ids=[1, 2], run_id="cut")


def test_wrong_runs_are_refused_by_field(engine: rheostat.Engine) -> None:
    rows = {("resid_post", 1): np.ones((2, WIDTH), np.float32)}
    for wrong, reason, path in (
        ({("resid_post", 1): np.ones((2, 5))}, "REASON_VECTOR_SHAPE", "rows.tensor.shape"),
        ({("resid_post", 77): rows["resid_post", 1]}, "REASON_UNKNOWN_LAYER", "header.sites"),
        ({**rows, ("resid_pre", 2): rows["resid_post", 1]}, "REASON_INVALID_VALUE", "header.sites"),
    ):
        with pytest.raises(rheostat.InvalidRequest) as raised:
            engine.put_run(wrong, prompt_token_ids=[1, 2])
        assert raised.value.reason == reason
        assert raised.value.path.startswith(path)
    with pytest.raises(rheostat.InvalidRequest) as raised:
        engine.put_run(rows, prompt_token_ids=[1])
    assert (raised.value.reason, raised.value.path) == ("REASON_MISSING_FIELD", "header.token_ids")
    with pytest.raises(rheostat.NotFound):
        engine.read_run("nobody")
    run = engine.capture_run(CLEAN, "resid_post", 1)
    with pytest.raises(rheostat.Refused) as refused:
        engine.read_run(run, "resid_post", 2)
    assert refused.value.reason == "REASON_RUN_INCOMPLETE"
    with pytest.raises(rheostat.AlreadyExists):
        engine.capture_run(CLEAN, "resid_post", 1, run_id=run.id)
    with pytest.raises(rheostat.InvalidRequest) as raised:
        engine.capture_run(CLEAN, "resid_post", 1, where="generated")
    assert raised.value.reason == "REASON_INVALID_POSITION"
