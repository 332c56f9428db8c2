"""Checkpoints: a sweep goes on with the cells that its file lacks, or refuses a file of another."""

from pathlib import Path

import grpc
import pytest

import rheostat
from rheostat import aio
from rheostat._client import engine as sync_engine
from rheostat_wire.v1 import engine_service_pb2, sweep_service_pb2

from ..conftest import Refusal
from ..sweep_messages import cell, started, summary, texts

Code = grpc.StatusCode
PAIR = rheostat.Pair([1, 2, 3], corrupt=[1, 9, 3], answer=[7], foil=[8])
GONE = Refusal(Code.UNAVAILABLE, "the server ended")
WHOLE = [[1.0, 3.0, 4.0], [5.0, 2.0, 6.0]]


@pytest.fixture
def scripted(server, monkeypatch):
    """A server whose first call ends after two cells."""
    for module in (sync_engine, aio):
        monkeypatch.setattr(module, "RESUMPTIONS", 0)
    server.on("Tokenize", texts)
    server.on("GetModel", engine_service_pb2.GetModelResponse(model_name="m"))
    server.on(
        "Sweep",
        [started(), cell(0, 1.0), cell(4, 2.0), GONE],
        [started(4), cell(1, 3.0), cell(2, 4.0), cell(3, 5.0), cell(5, 6.0), summary()],
    )
    return server


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sweep.checkpoint"


def sweep(client, path: Path, pair: rheostat.Pair = PAIR, **options: object):
    return client.run(lambda engine: engine.sweep(pair, checkpoint=path, **options))


def begun(client, path: Path, **options: object) -> None:
    with pytest.raises(rheostat.Unavailable):
        sweep(client, path, **options)


def asked(server) -> list[sweep_service_pb2.SweepRequest]:
    return [one for one in server.asked if isinstance(one, sweep_service_pb2.SweepRequest)]


def test_a_sweep_goes_on_with_the_cells_that_its_file_lacks(scripted, client, path) -> None:
    begun(client, path)
    came: list[rheostat.Cell] = []
    told: list[tuple[int, int]] = []
    got = sweep(client, path, on_cell=came.append, progress=lambda *n: told.append(n))
    assert got.array().tolist() == WHOLE
    assert [(one.start, one.count) for one in asked(scripted)[-1].done] == [(0, 1), (4, 1)]
    assert not asked(scripted)[-1].done_values
    assert [one.index for one in came] == [1, 2, 3, 5]
    assert (told[0], told[-1]) == ((2, 6), (6, 6))


def test_a_finished_sweep_runs_no_cell_again(scripted, client, path) -> None:
    begun(client, path)
    sweep(client, path)
    scripted.on("Sweep", [started(0), summary()])
    assert sweep(client, path).array().tolist() == WHOLE
    assert [(one.start, one.count) for one in asked(scripted)[-1].done] == [(0, 6)]


@pytest.mark.parametrize("kept", range(1, 60, 7))
def test_a_message_that_was_cut_off_is_discarded(scripted, client, path, kept) -> None:
    begun(client, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-kept])
    cells = [cell(index, value) for index, value in enumerate([1.0, 3.0, 4.0, 5.0, 2.0, 6.0])]
    scripted.on("Sweep", [started(), *cells, summary()])
    assert sweep(client, path).array().tolist() == WHOLE
    assert not any(one.start == 4 for one in asked(scripted)[-1].done)
    scripted.on("Sweep", [started(0), summary()])
    assert sweep(client, path).array().tolist() == WHOLE


@pytest.mark.parametrize("size", range(120))
def test_a_file_that_was_cut_off_anywhere_can_be_taken_up(scripted, client, path, size) -> None:
    begun(client, path)
    path.write_bytes(path.read_bytes()[:size])
    cells = [cell(index, value) for index, value in enumerate([1.0, 3.0, 4.0, 5.0, 2.0, 6.0])]
    scripted.on("Sweep", [started(), *cells, summary()])
    assert sweep(client, path).array().tolist() == WHOLE


def test_a_cell_that_failed_is_tried_again(scripted, client, path) -> None:
    failed = cell(3)
    failed.cell.error.code = 8
    failed.cell.error.message = "no room"
    scripted.on("Sweep", [started(), cell(0, 1.0), failed, GONE])
    begun(client, path)
    cells = [cell(index, value) for index, value in enumerate([1.0, 3.0, 4.0, 5.0, 2.0, 6.0])]
    scripted.on("Sweep", [started(5), *cells[1:], summary()])
    got = sweep(client, path)
    assert got.array().tolist() == WHOLE
    assert not got.skipped
    assert [(one.start, one.count) for one in asked(scripted)[-1].done] == [(0, 1)]


def test_a_cell_within_the_noise_of_its_own_call_stays_marked(scripted, client, path) -> None:
    far = cell(0, 1.0, below_noise=True)  # the last call's noise is around -2
    scripted.on("Sweep", [started(), far, GONE])
    begun(client, path)
    cells = [cell(index, value) for index, value in enumerate([0.0, -2.1, 4.0, 5.0, 2.0, 6.0])]
    scripted.on("Sweep", [started(5), *cells[1:], summary()])
    assert sweep(client, path).below_noise.tolist() == [[True, True, False], [False] * 3]


def test_zoom_is_told_what_was_found(scripted, client, path) -> None:
    begun(client, path)
    sweep(client, path, zoom={"layer_stride": 1, "column_stride": 2})
    request = asked(scripted)[-1]
    assert [(one.start, one.count) for one in request.done] == [(0, 1), (4, 1)]
    assert list(request.done_values) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"layers": [0]}, "points or layers"),
        ({"grades": "rank"}, "grades"),
        ({"window": 3}, "window"),
        ({"pair": rheostat.Pair([1, 2, 4], corrupt=[1, 9, 3], answer=[7], foil=[8])}, "pairs"),
        ({"pair_values": True}, "pair_values"),
        ({"lora": "a", "alpha": 0.5}, "alpha, lora"),
    ],
)
def test_the_file_of_another_sweep_is_refused(scripted, client, path, options, named) -> None:
    begun(client, path)
    before = path.read_bytes()
    with pytest.raises(rheostat.InvalidRequest, match=f"a sweep with other {named}:") as caught:
        sweep(client, path, **options)
    assert caught.value.path == "checkpoint"
    assert path.read_bytes() == before
    assert len(asked(scripted)) == 1


def test_what_changes_no_cell_may_differ(scripted, client, path) -> None:
    begun(client, path)
    labelled = rheostat.Pair([1, 2, 3], corrupt=[1, 9, 3], answer=[7], foil=[8], label="fact")
    options = {"concurrency": 2, "baselines": 4, "priority": "normal", "keep_runs": 60}
    assert sweep(client, path, labelled, **options).array().tolist() == WHOLE


def test_the_file_of_another_model_is_refused(scripted, client, path) -> None:
    begun(client, path)
    scripted.on("GetModel", engine_service_pb2.GetModelResponse(model_name="other"))
    with pytest.raises(rheostat.InvalidRequest, match="has cells of m; the server runs other"):
        sweep(client, path)


@pytest.mark.parametrize("what", ["rows", "columns", "pairs"])
def test_a_model_with_other_layers_or_tokens_is_refused(scripted, client, path, what) -> None:
    begun(client, path)
    other = started(5)
    del getattr(other.started, what)[-1]
    scripted.on("Sweep", [other, cell(1, 3.0), summary()])
    with pytest.raises(rheostat.InvalidRequest, match="other layers or tokens"):
        sweep(client, path)


def test_another_file_is_left_alone(scripted, client, path) -> None:
    path.write_text("a letter")
    with pytest.raises(rheostat.InvalidRequest, match="is no checkpoint of a sweep"):
        sweep(client, path)
    assert path.read_text() == "a letter"
    with pytest.raises(FileNotFoundError):
        sweep(client, path.parent / "missing" / "sweep.checkpoint")


def test_more_runs_than_a_server_takes_come_again(scripted, client, path, monkeypatch) -> None:
    monkeypatch.setattr("rheostat._sweeps.accumulator._DONE_RUNS", 1)
    scripted.on("Sweep", [started(), cell(0, 1.0), cell(2, 4.0), cell(3, 5.0), GONE])
    begun(client, path)
    rest = [cell(0, 1.0), cell(1, 3.0), cell(4, 2.0), cell(5, 6.0)]
    scripted.on("Sweep", [started(4), *rest, summary()])
    assert sweep(client, path).array().tolist() == WHOLE
    assert [(one.start, one.count) for one in asked(scripted)[-1].done] == [(2, 2)]
