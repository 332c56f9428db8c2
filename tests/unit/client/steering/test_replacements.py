"""Replacements: the message of each source, and all that is refused before it is sent."""

import copy
import dataclasses
import datetime
import inspect

import numpy as np
import pytest

import rheostat
from rheostat_wire.v1 import replace_pb2, selector_pb2, steering_pb2, tensor_pb2, types_pb2

WIDTH = 4
ROW = rheostat.inline(np.arange(1, WIDTH + 1, dtype=np.float32))
INFO = rheostat.RunInfo(
    "clean",
    (),
    (),
    (),
    0,
    datetime.datetime.now(datetime.UTC),
    datetime.datetime.now(datetime.UTC),
    {},
)


def message(replacement: rheostat.Replace) -> steering_pb2.Intervention:
    """At resid_post 1, at two positions."""
    placed = replacement.at(points="resid_post", layers=1, where=rheostat.positions(2, 3))
    return placed.to_wire("steering.interventions[0]")


def source(replacement: rheostat.Replace) -> replace_pb2.Replace:
    return message(replacement).replace


def test_a_replacement_has_sites_positions_and_a_source() -> None:
    wire = message(rheostat.replace(ROW, alpha=0.5))
    assert wire.sites == types_pb2.SiteSet(
        points=[types_pb2.POINT_RESID_POST], list=types_pb2.LayerList(layers=[1])
    )
    assert wire.where.include[0].positions == selector_pb2.Window(start=2, end=4)
    assert wire.replace == replace_pb2.Replace(vector=ROW.to_wire(), alpha=0.5)


def test_a_vectors_own_points_and_layers_are_the_default() -> None:
    row = rheostat.inline(ROW.values, points="attn_out", layers=3)
    wire = rheostat.replace(row).at(where="prompt").to_wire("i")
    assert list(wire.sites.points) == [types_pb2.POINT_ATTN_OUT]
    assert list(wire.sites.list.layers) == [3]


def test_rows_of_a_run_come_by_position_or_by_alignment() -> None:
    assert source(rheostat.replace(rheostat.from_run("clean"))).run == replace_pb2.RunSource(
        run_id="clean", alignment=replace_pb2.ALIGNMENT_IDENTITY
    )
    by_affixes = rheostat.from_run(INFO, align="affixes", site=("attn_out", 2))
    assert source(rheostat.replace(by_affixes)).run == replace_pb2.RunSource(
        run_id="clean",
        alignment=replace_pb2.ALIGNMENT_AFFIXES,
        site=types_pb2.Site(point=types_pb2.POINT_ATTN_OUT, layer=2),
    )
    by_position = rheostat.replace(rheostat.from_run("clean", range(-2, 0)))
    assert source(by_position).run == replace_pb2.RunSource(
        run_id="clean", positions=replace_pb2.PositionList(positions=[-2, -1])
    )


def test_the_mean_of_a_run_and_zeros_are_sources() -> None:
    assert source(rheostat.replace(rheostat.run_mean("clean", 3))).mean == replace_pb2.MeanSource(
        run_id="clean", positions=replace_pb2.PositionList(positions=[3])
    )
    assert not source(rheostat.replace(rheostat.run_mean(INFO))).mean.HasField("positions")
    assert source(rheostat.replace(rheostat.Zeros())).WhichOneof("source") == "zeros"


def test_noise_has_a_seed_and_one_of_two_scales() -> None:
    wire = source(rheostat.replace(rheostat.Noise(std=0.5), alpha=0.25))
    assert wire.noise == replace_pb2.NoiseSource(seed=0, std=0.5)
    assert wire.alpha == 0.25
    noise = rheostat.Noise(embedding_std=3, seed=2**64 - 1)
    assert source(rheostat.replace(noise)).noise == replace_pb2.NoiseSource(
        seed=2**64 - 1, embedding_std=3.0
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_an_array_has_a_row_for_each_site_and_position(dtype: type) -> None:
    rows = np.arange(2 * 3 * WIDTH, dtype=dtype).reshape(2, 3, WIDTH)
    tensor = source(rheostat.replace(rows)).rows
    half = dtype is np.float16
    assert tensor.dtype == (tensor_pb2.DTYPE_FLOAT16 if half else tensor_pb2.DTYPE_FLOAT32)
    assert list(tensor.shape) == [2, 3, WIDTH]
    assert tensor.inline == rows.astype("<f2" if half else "<f4").tobytes()


def test_dimensions_or_weights_make_a_mask() -> None:
    chosen = source(rheostat.replace(ROW, dimensions=[0, 2])).mask
    assert list(chosen.dimensions.dimensions) == [0, 2]
    weights = source(rheostat.replace(ROW, mask=[0, 0.5, 1, 1])).mask.weights
    assert (weights.inline, list(weights.shape)) == (
        np.array([0, 0.5, 1, 1], "<f4").tobytes(),
        [4],
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: message(rheostat.replace(ROW, alpha=2)), "alpha is 0 to 1"),
        (lambda: rheostat.replace(np.ones(WIDTH)), "3 dimensions"),
        (lambda: rheostat.replace(np.full((1, 1, WIDTH), np.nan)), "finite"),
        (lambda: rheostat.replace(ROW, mask=[2.0]), "0 to 1"),
        (lambda: rheostat.replace(ROW, mask=[1.0], dimensions=[0]), "not both"),
        (lambda: rheostat.replace(ROW, dimensions=[-1]), "a dimension is 0"),
        (lambda: rheostat.from_run("no id!"), "no run's id"),
        (lambda: rheostat.from_run("a", align="tokens"), "affixes"),
        (lambda: rheostat.from_run("a", [1], align="affixes"), "not both"),
        (lambda: rheostat.replace(rheostat.Zeros()).to_wire("i"), "points and layers"),
        (lambda: rheostat.replace("clean"), "use rheostat.from_run"),
        (lambda: rheostat.replace(INFO), "use rheostat.from_run"),
        (lambda: rheostat.replace(rheostat.Zeros), r"use Zeros\(\)"),
        (lambda: rheostat.replace(np.ones((1, 0, WIDTH))), "none of them empty"),
        (lambda: rheostat.replace(np.full((1, 1, WIDTH), 1e300)), "not finite in float32"),
        (lambda: rheostat.replace(ROW, mask=["a"]), "real numbers"),
        (lambda: rheostat.replace(ROW, mask=[[1.0]]), "1 dimension"),
        (lambda: rheostat.from_run("a", [1.5]), "a position is a whole number"),
        (lambda: rheostat.from_run("a", [2**40]), "a position is -"),
        (lambda: rheostat.from_run("a", site=("resid", 1)), "resid"),
        (lambda: rheostat.from_run("a", site=("resid_post", -1)), "a layer is 0"),
        (lambda: rheostat.from_run("a", site=5), "a site is"),
        (rheostat.Noise, "give std or embedding_std"),
        (lambda: rheostat.Noise(std=1, embedding_std=1), "give std or embedding_std"),
        (lambda: rheostat.Noise(std=0), "std is above 0, not 0"),
        (lambda: rheostat.Noise(embedding_std=-1.0), "embedding_std is above 0, not -1"),
        (lambda: rheostat.Noise(std=1e-60), "the std 1e-60 is 0 in float32"),
        (lambda: rheostat.Noise(std="1e"), "the std is a number, not '1e'"),
        (lambda: rheostat.Noise(std=np.inf), "not finite"),
        (lambda: rheostat.Noise(std=1, seed=-1), "a seed is 0"),
        (lambda: rheostat.Noise(std=1, seed=0.5), "a seed is a whole number"),
        (lambda: rheostat.replace(rheostat.Noise), r"use Noise\(\)"),
    ],
)
def test_what_cannot_be_sent_is_refused(make, words: str) -> None:
    with pytest.raises(rheostat.InvalidRequest, match=words):
        make()


def test_the_std_of_a_noise_is_given_by_name() -> None:
    with pytest.raises(
        TypeError, match=r"^Noise\(\) takes its options by name only: write std=3 or "
    ):
        rheostat.Noise(3)
    assert copy.copy(rheostat.Noise(std=3)) == rheostat.Noise(std=3)
    shown = list(inspect.signature(rheostat.Noise).parameters)
    assert shown == ["by_position", "std", "embedding_std", "seed", "unknown"]
    with pytest.raises(TypeError, match=r"^Noise\(\) has no argument 'sigma'; it has std, emb"):
        rheostat.Noise(sigma=3)


@pytest.mark.parametrize(
    ("replacement", "text"),
    [
        (rheostat.replace(rheostat.from_run("clean")), "replace by run clean"),
        (
            rheostat.replace(rheostat.run_mean("clean"), alpha=0.5),
            "the mean of run clean (alpha 0.5)",
        ),
        (rheostat.replace(rheostat.Zeros(), dimensions=[1]), "replace by zeros, masked"),
        (rheostat.replace(np.ones((1, 2, WIDTH))), "replace by rows [1, 2, 4]"),
        (rheostat.replace(ROW), f"replace by {ROW.label}"),
        (
            rheostat.replace(rheostat.Noise(embedding_std=3), alpha=0.5),
            "replace by x + noise of 3 embedding_std, seed 0 (alpha 0.5)",
        ),
        (rheostat.replace(rheostat.Noise(std=0.1, seed=4)), "by x + noise of std 0.1, seed 4"),
    ],
)
def test_a_replacement_says_what_it_does(replacement: rheostat.Replace, text: str) -> None:
    assert text in str(replacement)
    assert dataclasses.replace(replacement, alpha=0.5).alpha == 0.5


def test_numpy_numbers_and_bits_of_bfloat16_are_read() -> None:
    assert rheostat.from_run("a", np.int64(-3)).positions == (-3,)
    assert rheostat.from_run("a", True).positions == (1,)
    bits = np.full((1, 1, WIDTH), 0x3F80, np.uint16)
    tensor = source(rheostat.replace(bits, dtype="bfloat16")).rows
    assert (tensor.dtype, tensor.inline) == (tensor_pb2.DTYPE_BFLOAT16, bits.tobytes())
