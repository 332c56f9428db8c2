"""What the benchmark of encodings measures, and that the documentation shows its figures."""

import json
from pathlib import Path

import numpy as np
import pytest

from rheostat_bench.encodings import ARMS, blocks, compare, compressors, measure, tables
from rheostat_server.tensors import FloatType

DOCS = Path(__file__).resolve().parents[3] / "docs"


def rows(kind: FloatType) -> np.ndarray:
    """Noise, [layers, positions, W]."""
    found = np.random.default_rng(0).normal(size=(3, 50, 32)).astype(np.float32)
    return (found.view(np.uint32) >> 16).astype("<u2") if kind is FloatType.BFLOAT16 else found


def test_messages_hold_every_row_once_and_at_most_a_mebibyte() -> None:
    whole = np.arange(6 * 3000 * 128, dtype=np.float32).reshape(6, 3000, 128)
    parts = blocks(whole)
    assert np.array_equal(np.concatenate(parts, axis=1), whole)
    assert max(part.nbytes for part in parts) <= 1 << 20


@pytest.mark.parametrize("kind", [FloatType.BFLOAT16, FloatType.FLOAT32])
def test_exact_arms_lose_nothing_and_the_others_no_more_than_they_state(kind: FloatType) -> None:
    table = measure(rows(kind), kind, 1)
    assert list(table) == [arm.name for arm in ARMS]
    for name in ("raw", "lz4_planes"):
        assert (table[name]["rms_error"], table[name]["largest_error"]) == (0, 0)
    for name in ("full8", "rp8, K = W/4", "topk8, K = W/8"):
        assert 0 < table[name]["largest_to_stated"] <= 1.001
        assert 0 < table[name]["largest_error"] <= table[name]["stated_error"] * 1.001
    size = 32 * (2 if kind is FloatType.BFLOAT16 else 4)
    assert table["full8"]["ratio"] == size / (8 + 32)
    assert table["rp8, K = W/4"]["ratio"] == size / (8 + 8)
    assert table["topk8, K = W/8"]["ratio"] == size / (8 + 5 * 4)


def test_every_compressor_is_measured_with_planes_and_without() -> None:
    names = [one.name for one in compressors()]
    table = compare(rows(FloatType.BFLOAT16), 1)
    assert list(table) == [name for one in names for name in (one, f"{one}, planes")]


def test_the_documented_tables_are_those_of_the_file() -> None:
    result = json.loads((DOCS / "benchmarks" / "cpu" / "encodings.json").read_text())
    page = (DOCS / "encodings.md").read_text()
    for table in tables(result).split("\n\n"):
        assert table in page
