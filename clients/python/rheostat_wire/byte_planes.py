"""ENCODING_LZ4_PLANES: the byte planes of elements, compressed in one LZ4 frame.

Plane k holds byte k of every element. LZ4 finds repeats only after this split, because the high
bytes of neighbouring elements are then side by side.

Decompression never allocates more bytes than the caller expects, whatever size a frame declares.
"""

import lz4.frame
import numpy as np

from rheostat_wire.quantization import Payload

_MOST_EXPANSION = 255
"""Largest number of bytes that one byte of an LZ4 frame decompresses to."""

_FRAME, _BLOCK, _BLOCK_BYTES = 19, 4, 1 << 16
"""Bytes of a frame's header and end mark, of a block's header, and of a block's data."""


def split_planes(data: bytes, itemsize: int) -> bytes:
    """Splits elements into planes, one after the other."""
    words = np.frombuffer(data, f"<u{itemsize}")
    planes = np.empty((itemsize, words.size), np.uint8)
    for number in range(itemsize):
        planes[number] = words >> words.dtype.type(8 * number)
    return planes.tobytes()


def join_planes(planes: bytes, itemsize: int) -> bytes:
    """Joins planes to elements; the inverse of `split_planes`."""
    parts = np.frombuffer(planes, np.uint8).reshape(itemsize, -1)
    words = parts[0].astype(f"<u{itemsize}")
    for number in range(1, itemsize):
        words |= parts[number].astype(words.dtype) << words.dtype.type(8 * number)
    return bytes(words.data)


def compress(data: bytes, itemsize: int) -> bytes:
    """Compresses the planes of elements into one LZ4 frame."""
    frame: bytes = lz4.frame.compress(split_planes(data, itemsize), store_size=True)
    return frame


def largest_frame(size: int) -> int:
    """The largest frame for `size` bytes, in bytes. LZ4 stores blocks that don't shrink as is."""
    return _FRAME + size + _BLOCK * -(-size // _BLOCK_BYTES)


def decompress(frame: Payload, size: int, itemsize: int) -> bytes:
    """Decompresses a frame to elements of `size` bytes.

    Raises:
        ValueError: `frame` is not a single LZ4 frame of `size` bytes.
    """
    planes = b""
    if size <= _MOST_EXPANSION * len(frame):
        decompressor = lz4.frame.LZ4FrameDecompressor()
        try:
            # One byte more than expected lets the decompressor reach the frame's end, or shows that
            # the frame is too long.
            planes = decompressor.decompress(frame, max_length=size + 1)
        except (RuntimeError, EOFError) as error:
            raise ValueError(f"no LZ4 frame: {error}") from error
        if not decompressor.eof or decompressor.unused_data:
            raise ValueError(f"no single LZ4 frame of {size} bytes")
    if len(planes) != size:
        raise ValueError(f"an LZ4 frame of another length than {size} bytes")
    return join_planes(planes, itemsize)
