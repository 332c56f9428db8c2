"""Byte planes in LZ4 frames are exact and bounded. Damaged frames are refused."""

import lz4.frame
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_wire import byte_planes


@pytest.mark.parametrize("size", [64, 8192, 1 << 16, (1 << 16) + 8, 1 << 20])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_planes_that_do_not_shrink_take_the_most_that_is_said(size: int, itemsize: int) -> None:
    noise = np.random.default_rng(0).bytes(size)
    assert len(byte_planes.compress(noise, itemsize)) == byte_planes.largest_frame(size)
    assert len(byte_planes.compress(bytes(size), itemsize)) < byte_planes.largest_frame(size)


def test_planes_put_the_lowest_byte_of_every_element_first() -> None:
    elements = np.array([0x0102, 0x0304], np.uint16)
    assert lz4.frame.decompress(byte_planes.compress(elements.tobytes(), 2)) == bytes([2, 4, 1, 3])


@given(st.binary(max_size=4000), st.sampled_from([2, 4]))
def test_what_was_compressed_comes_back(data: bytes, itemsize: int) -> None:
    data = data[: len(data) // itemsize * itemsize]
    frame = byte_planes.compress(data, itemsize)
    assert byte_planes.decompress(frame, len(data), itemsize) == data


@given(st.binary(max_size=200), st.integers(0, 60), st.data())
def test_a_damaged_frame_gives_its_size_or_is_refused(noise: bytes, size: int, data) -> None:
    frame = bytearray(byte_planes.compress(bytes(64), 4))
    at = data.draw(st.integers(0, len(frame)))
    frame[at : at + len(noise)] = noise
    try:
        found = byte_planes.decompress(bytes(frame), 4 * size, 4)
    except ValueError:
        return
    assert len(found) == 4 * size
