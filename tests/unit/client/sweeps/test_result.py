"""Results of sweeps as tables of pandas and datasets of xarray."""

import dataclasses
import sys

import numpy as np
import pytest

import rheostat
from rheostat._points import Point, Site
from rheostat._sweeps.result import Noise, SweepResult

NAN = np.nan


def made(**fields: object) -> SweepResult:
    """Two grades of three sites, with a branch at one layer, and two positions."""
    values = np.array(
        [[[0.0, 0.5], [1.0, NAN], [0.25, 0.75]], [[1.0, 2.0], [3.0, NAN], [4.0, 5.0]]]
    )
    result = SweepResult(
        grades=("recovered logprob", "rank"),
        sites=(Site(Point.RESID_POST, 2), Site(Point.RESID_POST, 5), Site(Point.ATTN_OUT, 5)),
        columns=("0", "7"),
        tokens=("The", " of"),
        values=values,
        standard_errors=values / 8,
        pair_values=np.zeros((0, 2, 3, 2)),
        top_token_ids=np.array([[11, 12], [13, -1], [15, 16]]),
        below_noise=np.array([[True, False], [False, False], [False, False]]),
        skipped={3: "no partner"},
        pairs=(),
        clean=(1.0, 9.0),
        corrupt=(0.0, 1.0),
        noise=(Noise(0.0, 0.1, 0.2, 8), Noise(1.0, 0.3, 0.4, 8)),
        computed_token_count=99,
        seconds=1.5,
    )
    return dataclasses.replace(result, **fields)


def test_a_table_has_a_line_for_each_cell_with_values() -> None:
    pytest.importorskip("pandas")
    table = made().to_dataframe()
    assert list(table.columns) == [
        "point", "layer", "column", "recovered logprob", "rank",
        "recovered logprob standard error", "rank standard error", "top_token_id", "below_noise",
    ]  # fmt: skip
    assert table.to_dict("records") == made().records()
    assert len(table) == 5
    attention = table[table["point"] == "attn_out"].set_index("column")
    assert attention["recovered logprob"].to_dict() == {"0 'The'": 0.25, "7 ' of'": 0.75}
    assert table["layer"].dtype == table["top_token_id"].dtype == np.int64
    assert table["below_noise"].dtype == np.bool_


def test_a_table_without_cells_has_its_columns() -> None:
    pytest.importorskip("pandas")
    table = made(values=np.full((2, 3, 2), NAN)).to_dataframe()
    assert (len(table), list(table.columns)) == (0, list(made().to_dataframe().columns))


def test_a_dataset_selects_by_grade_point_layer_and_column() -> None:
    pytest.importorskip("xarray")
    data = made().to_xarray()
    value = data.value
    assert value.dims == ("grade", "point", "layer", "column")
    assert value.shape == (2, 2, 2, 2)
    assert float(value.sel(grade="rank", point="attn_out", layer=5, column="7")) == 5.0
    post = value.sel(grade="recovered logprob", point="resid_post")
    np.testing.assert_equal(post.values, [[0.0, 0.5], [1.0, NAN]])
    assert np.isnan(value.sel(point="attn_out", layer=2)).all()  # the sweep has no such cell
    np.testing.assert_equal(data.standard_error.values, value.values / 8)
    assert data.top_token_id.sel(point="resid_post").values.tolist() == [[11, 12], [13, -1]]
    assert data.top_token_id.sel(point="attn_out").values.tolist() == [[-1, -1], [15, 16]]
    assert bool(data.below_noise.sel(point="resid_post", layer=2, column="0"))
    assert int(data.below_noise.sum()) == 1
    assert str(data.skipped.sel(point="resid_post", layer=5, column="7").values) == "no partner"
    assert int((data.skipped != "").sum()) == 1
    assert data.token.values.tolist() == ["The", " of"]
    assert data.clean.sel(grade="rank") == 9.0
    assert data.corrupt.values.tolist() == [0.0, 1.0]
    noise = [data[f"noise_{name}"].values.tolist() for name in ("mean", "std", "largest")]
    assert noise == [[0.0, 1.0], [0.1, 0.3], [0.2, 0.4]]
    assert data.attrs == {"computed_token_count": 99, "seconds": 1.5}
    assert "pair_value" not in data


def test_a_dataset_has_the_values_of_pairs_and_no_tokens_of_groups() -> None:
    pytest.importorskip("xarray")
    pairs = np.arange(24.0).reshape(2, 2, 3, 2)
    data = made(pair_values=pairs, tokens=(), columns=("subject", "last")).to_xarray()
    assert data.pair_value.dims == ("pair", "grade", "point", "layer", "column")
    assert data.pair_value.sel(point="attn_out", layer=5).values.tolist() == pairs[:, :, 2].tolist()
    assert float(data.value.sel(grade="rank", point="resid_post", layer=2, column="last")) == 2.0
    assert "token" not in data.coords


@pytest.mark.parametrize(("library", "call"), [("pandas", "to_dataframe"), ("xarray", "to_xarray")])
def test_without_the_library_the_error_says_what_to_install(monkeypatch, library, call) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(rheostat.Refused) as raised:
        getattr(made(), call)()
    assert f"needs {library}: pip install {library}, or, in a checkout, " in str(raised.value)
    assert str(raised.value).endswith("pip install '.[tables]'")


def test_skipped_cells_are_counted_by_reason() -> None:
    skipped = {0: "a", 1: "b", 2: "b", 3: "c", 4: "d", 5: "e"}
    result = made(skipped=skipped)
    assert result.skip_reasons == {"b": 2, "a": 1, "c": 1, "d": 1, "e": 1}
    assert str(result).splitlines()[1:5] == [
        "2 cells skipped: b",
        "1 cell skipped: a",
        "1 cell skipped: c",
        "2 cells skipped for other reasons, see result.skipped",
    ]
    assert "skipped:" not in str(made(skipped={}))


def test_the_text_names_the_grade_that_is_listed_and_marks_cells_within_the_noise() -> None:
    lines = str(made()).splitlines()
    at = lines.index("cells that differ most from the unchanged prompts, by recovered logprob:")
    listed = lines[at + 1 :]
    assert listed[0].split(" (")[0] == "    1.000  resid_post[5] at 0 'The'"
    marked = [line for line in listed if line.endswith(", within the noise")]
    assert [line.split(" (")[0] for line in marked] == ["    0.000  resid_post[2] at 0 'The'"]
    empty = str(made(values=np.full((2, 3, 2), NAN)))
    assert "cells that differ" not in empty


def test_a_picture_hatches_skipped_cells_and_says_why(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    axes = made(skipped={3: "no partner " * 20}).heatmap(tmp_path / "a.png").axes[0]
    caption = axes.get_xlabel().splitlines()
    assert caption[:1] == ["replaced position"]
    assert caption[1].startswith("hatched: 1 cell skipped: no partner")
    assert max(map(len, caption)) < 80
    plain = made(skipped={}).heatmap(tmp_path / "b.png").axes[0]
    assert (plain.get_xlabel(), list(plain.collections)) == ("replaced position", [])
