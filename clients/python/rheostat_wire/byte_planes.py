"""Byte planes in an LZ4 frame: ENCODING_LZ4_PLANES, exact and smaller than the elements.

Plane k holds byte k of every element. Decompression gives the compressed bytes back, and never
makes more of them than asked.
"""

import lz4.frame
import numpy as np

from rheostat_wire.quantization import Payload

_MOST_EXPANSION = 255
"""A byte of an LZ4 frame stands for at most so many."""

_FRAME, _BLOCK, _BLOCK_BYTES = 19, 4, 1 << 16
"""Bytes around a frame's blocks, with its size and its end; before each block; in a whole one."""


def split_planes(data: bytes, itemsize: int) -> bytes:
    """The planes of elements, one after the other."""
    words = np.frombuffer(data, f"<u{itemsize}")
    planes = np.empty((itemsize, words.size), np.uint8)
    for number in range(itemsize):
        planes[number] = words >> words.dtype.type(8 * number)
    return planes.tobytes()


def join_planes(planes: bytes, itemsize: int) -> bytes:
    """The elements of planes."""
    parts = np.frombuffer(planes, np.uint8).reshape(itemsize, -1)
    words = parts[0].astype(f"<u{itemsize}")
    for number in range(1, itemsize):
        words |= parts[number].astype(words.dtype) << words.dtype.type(8 * number)
    return bytes(words.data)


def compress(data: bytes, itemsize: int) -> bytes:
    """The planes of elements as one LZ4 frame."""
    frame: bytes = lz4.frame.compress(split_planes(data, itemsize), store_size=True)
    return frame


def largest_frame(size: int) -> int:
    """Bytes of the largest frame of so many bytes: blocks that don't shrink stay whole."""
    return _FRAME + size + _BLOCK * -(-size // _BLOCK_BYTES)


def decompress(frame: Payload, size: int, itemsize: int) -> bytes:
    """The `size` bytes of elements in a frame.

    Raises:
        ValueError: it is no single frame of so many bytes.
    """
    planes = b""
    if size <= _MOST_EXPANSION * len(frame):
        decompressor = lz4.frame.LZ4FrameDecompressor()
        try:
            # One byte of room more lets the frame come to its end, or show that it is too long.
            planes = decompressor.decompress(frame, max_length=size + 1)
        except (RuntimeError, EOFError) as error:
            raise ValueError(f"no LZ4 frame: {error}") from error
        if not decompressor.eof or decompressor.unused_data:
            raise ValueError(f"no single LZ4 frame of {size} bytes")
    if len(planes) != size:
        raise ValueError(f"an LZ4 frame of another length than {size} bytes")
    return join_planes(planes, itemsize)
