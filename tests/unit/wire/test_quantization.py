"""Rows of 8-bit codes: which numbers are kept, and rows that were coded one by one."""

import numpy as np
import pytest

from rheostat_wire.quantization import (
    decode_full8,
    decode_topk8,
    encode_full8,
    encode_topk8,
    join_rows,
    largest_indices,
    split_rows,
)

ROWS = np.random.default_rng(0).standard_normal((5, 12)).astype(np.float32)


def test_of_equal_magnitudes_the_lower_index_is_kept() -> None:
    rows = np.array([[1, -2, 2, 2, -1], [0, 0, 0, 0, 0]], np.float32)
    assert largest_indices(rows, 2).tolist() == [[1, 2], [0, 1]]
    assert largest_indices(rows, 4).tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("kept", [0, 3, 12])
def test_rows_that_were_coded_one_by_one_are_the_payload_of_all(kept: int) -> None:
    def encode(rows):
        return encode_topk8(rows, kept) if kept else encode_full8(rows)

    whole = encode(ROWS)
    single = [split_rows(encode(ROWS[i : i + 1]), 1, kept) for i in range(len(ROWS))]
    assert join_rows(np.concatenate(single), kept) == whole
    assert np.array_equal(split_rows(whole, len(ROWS), kept), np.concatenate(single))


def test_every_number_is_within_the_error_that_is_said() -> None:
    values, error = decode_full8(encode_full8(ROWS), ROWS.shape)
    assert (np.abs(values - ROWS) <= error[:, None]).all()
    values, error = decode_topk8(encode_topk8(ROWS, 4), ROWS.shape, 4)
    assert (np.count_nonzero(values, axis=1) <= 4).all()
    assert (np.abs(values - ROWS) <= error[:, None]).all()


def test_indices_that_do_not_ascend_below_the_width_are_refused() -> None:
    payload = bytearray(encode_topk8(ROWS[:1], 4))
    payload[8:12], payload[12:16] = payload[12:16], payload[8:12]
    with pytest.raises(ValueError, match="do not ascend below 12"):
        decode_topk8(bytes(payload), (1, 12), 4)
