"""Byte planes in an LZ4 frame: the exact encoding that is smaller than the elements.

Invariant: unpacking what was packed gives the same bytes, and never makes more of them than asked.
"""

import lz4.frame
import numpy as np

_RATIO = 255
"""A byte of an LZ4 frame stands for at most so many."""

_FRAME, _BLOCK, _BLOCK_BYTES = 19, 4, 1 << 16
"""Bytes around a frame's blocks, with its size and its end; before each block; in a whole one."""


def split(data: bytes, itemsize: int) -> bytes:
    """The first byte of every element, then the second, and so on."""
    words = np.frombuffer(data, f"<u{itemsize}")
    planes = np.empty((itemsize, words.size), np.uint8)
    for number in range(itemsize):
        planes[number] = words >> words.dtype.type(8 * number)
    return planes.tobytes()


def joined(planes: bytes, itemsize: int) -> bytes:
    """The elements whose planes these are."""
    parts = np.frombuffer(planes, np.uint8).reshape(itemsize, -1)
    words = parts[0].astype(f"<u{itemsize}")
    for number in range(1, itemsize):
        words |= parts[number].astype(words.dtype) << words.dtype.type(8 * number)
    return bytes(words.data)


def packed(data: bytes, itemsize: int) -> bytes:
    """The planes of elements as one LZ4 frame."""
    frame: bytes = lz4.frame.compress(split(data, itemsize), store_size=True)
    return frame


def most(size: int) -> int:
    """Bytes of the largest frame that so many can become: blocks that don't shrink stay whole."""
    return _FRAME + size + _BLOCK * -(-size // _BLOCK_BYTES)


def unpacked(frame: bytes, size: int, itemsize: int) -> bytes:
    """`size` bytes of elements, as they were.

    Raises:
        ValueError: it is no single frame of so many bytes.
    """
    planes = b""
    if size <= _RATIO * len(frame):
        decompressor = lz4.frame.LZ4FrameDecompressor()
        try:
            # One byte of room more lets the frame come to its end, or show that it is too long.
            planes = decompressor.decompress(frame, max_length=size + 1)
        except RuntimeError as error:
            raise ValueError(f"no LZ4 frame: {error}") from error
        if not decompressor.eof or decompressor.unused_data:
            raise ValueError(f"no single LZ4 frame of {size} bytes")
    if len(planes) != size:
        raise ValueError(f"an LZ4 frame of another length than {size} bytes")
    return joined(planes, itemsize)
