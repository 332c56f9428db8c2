"""The encoders of captured rows.

Invariant: all encoders together stay below a limit of device memory. If an encoding does not fit or
is not possible here, its rows are sent raw, which every reader accepts.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.plan.row_encodings import Codec, Directions, RowEncoding
from rheostat_engine.worker.transport import encoders

_LOG = logging.getLogger(__name__)

REFUSED = 1
"""The encoding number of rows that are sent raw although an encoding was requested."""

MAX_ENCODINGS = 128
"""The most encodings at once, because a step launches some kernels for each of its encodings."""

_Matrix = npt.NDArray[np.float32]


class RowEncoder:
    """An encoding and its matrices. Only one thread calls `encode`."""

    def __init__(
        self, encoding: RowEncoding, number: int, width: int, projection: _Matrix | None = None
    ) -> None:
        """`number` is the number in `RowEncodings`; `projection`, [D, W], the directions."""
        self.number = number
        self.key = encoding.key
        self.row_bytes = encoding.row_bytes(width)
        self.bytes = _matrix_bytes(encoding, width)
        """Device memory of the matrices, which are allocated on first use."""
        self.scratch = _scratch(encoding, width)
        """Device memory to encode one row."""
        self.users = 0
        self._encoding = encoding
        self._projection = projection
        self._directions: torch.Tensor | None = None
        self._readouts: encoders.Readouts | None = None
        self._signs: torch.Tensor | None = None

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encodes rows [n, W] as uint8 [n, row_bytes]."""
        encoding, numbers = self._encoding, rows
        if self._projection is not None:
            if self._directions is None:
                self._directions = torch.from_numpy(self._projection).to(rows.device)
                if encoding.directions is not None and encoding.directions.readouts:
                    readouts = encoding.directions.readouts
                    self._readouts = encoders.readouts_of(readouts, self._directions)
            numbers = encoders.project(rows, self._directions)
            if self._readouts is not None:
                numbers = encoders.read(rows, numbers, self._readouts)
        if encoding.codec is Codec.CAST:
            return encoders.cast(numbers, getattr(torch, encoding.dtype))
        if encoding.codec is Codec.FULL8:
            return encoders.full8(numbers)
        if encoding.codec is Codec.TOPK8:
            return encoders.topk8(numbers, encoding.kept)
        if self._signs is None:
            shape = (encoding.kept, numbers.shape[1])
            self._signs = encoders.random_signs(*shape, encoding.seed, rows.device)
        return encoders.rp8(numbers, self._signs)


class RowEncodings:
    """Encoders by number. Unused encoders stay until their memory is needed."""

    def __init__(
        self, *, width: int, itemsize: int, vectors: Mapping[bytes, _Matrix], limit: int
    ) -> None:
        """Allocates nothing.

        Args:
            width: W.
            itemsize: bytes of an element of the stream.
            vectors: float32 [rows, W] by digest; the worker's mapping, which changes.
            limit: bytes of device memory for all encoders.
        """
        self._width = width
        self._raw_bytes = width * itemsize
        self._vectors = vectors
        self._limit = limit
        self._free = list(range(REFUSED + MAX_ENCODINGS, REFUSED, -1))
        self._encoders: OrderedDict[RowEncoding, RowEncoder] = OrderedDict()
        self._by_number: dict[int, RowEncoder] = {}
        self.bytes = 0
        """Device memory of all encoders."""

    def __len__(self) -> int:
        return sum(encoder.users > 0 for encoder in self._encoders.values())

    def __getitem__(self, number: int) -> RowEncoder | None:
        """The encoder of a number in use; None if its rows are raw."""
        return self._by_number[number] if number > REFUSED else None

    def acquire(self, encoding: RowEncoding | None) -> int:
        """Adds a use; returns the number: 0 for None, `REFUSED` if the encoding is not possible."""
        if encoding is None:
            return 0
        encoder = self._encoders.get(encoding) or self._make(encoding)
        if encoder is None:
            _LOG.info("rows with encoding %s are sent raw", encoding.codec.name)
            return REFUSED
        self._encoders.move_to_end(encoding)
        encoder.users += 1
        return encoder.number

    def add_uses(self, number: int, times: int = 1) -> None:
        """Adds `times` uses of an encoding in use."""
        if number > REFUSED:
            self._by_number[number].users += times

    def release(self, number: int, times: int = 1) -> None:
        """Ends `times` uses."""
        if number > REFUSED:
            self._by_number[number].users -= times

    def _make(self, encoding: RowEncoding) -> RowEncoder | None:
        size = _matrix_bytes(encoding, self._width)
        if not self._is_possible(encoding) or not self._make_space(size):
            return None
        projection = None
        if encoding.directions is not None:
            projection = self._rows_of(encoding.directions)
            if projection is None:
                return None
        encoder = RowEncoder(encoding, self._free.pop(), self._width, projection)
        self._encoders[encoding] = self._by_number[encoder.number] = encoder
        self.bytes += size
        return encoder

    def _is_possible(self, encoding: RowEncoding) -> bool:
        """Whether the encoding is valid for the stream, and not larger than raw rows."""
        chooses = encoding.codec in (Codec.RP8, Codec.TOPK8)
        most = encoding.numbers(self._width)
        return (not chooses or 1 <= encoding.kept <= most) and 0 < encoding.row_bytes(
            self._width
        ) <= self._raw_bytes

    def _make_space(self, size: int) -> bool:
        unused = [encoding for encoding, encoder in self._encoders.items() if not encoder.users]
        releasable = sum(self._encoders[encoding].bytes for encoding in unused)
        if size > self._limit - self.bytes + releasable or not (self._free or unused):
            return False
        for encoding in unused:
            if self._free and size <= self._limit - self.bytes:
                break
            encoder = self._encoders.pop(encoding)
            del self._by_number[encoder.number]
            self._free.append(encoder.number)
            self.bytes -= encoder.bytes
        return True

    def _rows_of(self, directions: Directions) -> _Matrix | None:
        """The directions, [D, W]; None if the worker lacks one."""
        rows = []
        for digest, row in zip(directions.vectors, directions.rows, strict=True):
            vector = self._vectors.get(digest)
            if vector is None or not 0 <= row < len(vector) or vector.shape[1] != self._width:
                _LOG.info("a direction, row %d of %s, is not in the worker", row, digest.hex())
                return None
            rows.append(vector[row])
        return np.stack(rows)


def _matrix_bytes(encoding: RowEncoding, width: int) -> int:
    numbers = encoding.numbers(width)
    rows = 0 if encoding.directions is None else numbers
    signs = encoding.kept * numbers if encoding.codec is Codec.RP8 else 0
    return 4 * (rows * width + signs)


def _scratch(encoding: RowEncoding, width: int) -> int:
    """Approximate device memory to encode a row: float32 and float64 copies, sort keys, codes."""
    numbers = encoding.numbers(width)
    size = 4 * width + encoding.row_bytes(width)
    if encoding.directions is not None:
        size += 4 * numbers
    if encoding.codec is Codec.TOPK8:
        return size + 48 * numbers + 32 * encoding.kept
    if encoding.codec is Codec.CAST:
        return size
    return size + 32 * (encoding.kept if encoding.codec is Codec.RP8 else numbers)
