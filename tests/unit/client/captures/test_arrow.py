"""Stored rows as Arrow tables and Hugging Face datasets."""

import builtins
from pathlib import Path

import numpy as np
import pytest

import rheostat
from rheostat.captures import StoredCaptures, open_captures
from rheostat_server.sinks import (
    Layout,
    RowBlock,
)
from rheostat_server.sinks.formats import Format

from .stored_kit import (
    WIDTH,
    expected,
    three_requests,
)


@pytest.fixture
def written(tmp_path: Path) -> tuple[StoredCaptures, dict[str, list[RowBlock]]]:
    return three_requests(tmp_path, Layout.SHARDED, Format.SAFETENSORS)


def test_rows_become_an_arrow_table(written) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    store, rows = written
    table = store.to_arrow("resid_post", 0, batch=5)
    assert table.column_names == [
        "tag",
        "request_id",
        "sample",
        "baseline",
        "position",
        "token_id",
        "values",
    ]
    assert table.schema.field("values").type == pyarrow.list_(pyarrow.float32(), WIDTH)
    one = table.filter(pyarrow.compute.equal(table["request_id"], "c:1")).combine_chunks()
    values, positions, token_ids = expected(rows["c:1"], 0, None, False)
    found = np.concatenate([chunk.flatten().to_numpy() for chunk in one["values"].chunks])
    np.testing.assert_array_equal(found.view(np.uint32), values.reshape(-1).view(np.uint32))
    assert one["position"].to_pylist() == positions.tolist()
    assert one["token_id"].to_pylist() == token_ids.tolist()
    assert len(store.to_arrow("resid_post", 0, sample=1, baseline=False)) == 3 * 7


def test_arrow_comes_in_batches_for_what_memory_does_not_hold(written) -> None:
    pytest.importorskip("pyarrow")
    store, _ = written
    sizes = [len(batch) for batch in store.to_reader("resid_post", 0, batch=10)]
    assert sizes == [10, 10, 10, 10, 2]


def test_rows_become_a_dataset(written) -> None:
    pytest.importorskip("datasets")
    store, rows = written
    found = store.to_datasets("mlp_out", 3).with_format("numpy")
    assert len(found) == 42
    one = found.filter(lambda row: row["request_id"] == "a")
    values, positions, _ = expected(rows["a"], 2, None, False)
    np.testing.assert_array_equal(one["position"][:], positions)
    assert np.asarray(one["values"][:]).shape == values.shape


@pytest.mark.parametrize(
    ("library", "call"), [("pyarrow", "to_arrow"), ("datasets", "to_datasets")]
)
def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str, call: str
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object):
        if name.partition(".")[0] == library:
            raise ModuleNotFoundError(f"No module named '{name}'", name=library)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(rheostat.Refused, match=f"pip install {library}"):
        getattr(open_captures(tmp_path), call)("resid_post", 0)


def test_no_rows_make_no_table(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(rheostat.NotFound):
        open_captures(tmp_path).to_arrow("resid_post", 0)
    with pytest.raises(rheostat.InvalidRequest):
        open_captures(tmp_path).rows("resid_post", 0, batch=0)
