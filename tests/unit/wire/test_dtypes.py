"""Element types: exact widening, and rounding to nearest even."""

import numpy as np
import pytest
import torch

from rheostat_wire import dtypes
from rheostat_wire.dtypes import narrow, widen

ALL = np.arange(2**16, dtype=np.uint16)


@pytest.mark.parametrize("chunk", [1 << 18, 1 << 16, 1000, 1])
def test_every_bfloat16_widens_to_the_float32_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(dtypes, "_CHUNK", chunk)
    wide = widen(ALL.reshape(2, -1), "bfloat16")
    assert wide.shape == (2, 2**15)
    assert np.array_equal(wide.reshape(-1).view(np.uint32), ALL.astype(np.uint32) << 16)


def test_every_float16_widens_as_torch_does() -> None:
    wide = widen(ALL.view(np.float16), "float16")
    assert np.array_equal(wide, torch.from_numpy(ALL.view(np.float16)).float(), equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "theirs"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_numbers_are_rounded_as_torch_does(dtype: dtypes.DtypeName, theirs: torch.dtype) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = (np.arange(2**16, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, [0x7F7FFFFF, 0xFF7FFFFF]]).astype(np.uint32)
    values = values.view(np.float32)
    found = widen(narrow(values, dtype), dtype)
    assert np.array_equal(found, torch.from_numpy(values).to(theirs).float(), equal_nan=True)
