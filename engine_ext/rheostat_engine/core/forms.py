"""The forms in which this worker sends captured rows, and what it takes to make them.

Invariant: the device memory of all forms together stays below a limit. Rows in a form that finds no
place, or that nobody can make here, leave as they are, which every reader can read.
"""

import logging
from collections import OrderedDict

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.core import encoders
from rheostat_engine.core.vectors import Vectors
from rheostat_engine.row_forms import Coding, Directions, RowForm

_LOG = logging.getLogger(__name__)

REFUSED = 1
"""Number of the form of rows that leave as they are though a form was asked for."""

MOST = 128
"""Forms at the same time; each costs a step that has rows in it some launches of its own."""

_Matrix = npt.NDArray[np.float32]


class Made:
    """A form, and what makes it. `encode` is called on one thread alone."""

    def __init__(
        self, form: RowForm, number: int, width: int, projection: _Matrix | None = None
    ) -> None:
        """A form of rows [n, width].

        Args:
            form: which.
            number: of the form; see `Forms`.
            width: W.
            projection: its directions, [D, W].
        """
        self.number = number
        self.key = form.key
        self.row_bytes = form.row_bytes(width)
        self.bytes = _matrix_bytes(form, width)
        """Device memory that it holds once it has been used."""
        self.scratch = _scratch(form, width)
        """Device memory that encoding one row takes."""
        self.users = 0
        self._form = form
        self._projection = projection
        self._directions: torch.Tensor | None = None
        self._signs: torch.Tensor | None = None

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, W] in this form: uint8 [n, row_bytes]."""
        form, numbers = self._form, rows
        if self._projection is not None:
            if self._directions is None:
                self._directions = torch.from_numpy(self._projection).to(rows.device)
            numbers = encoders.projected(rows, self._directions)
        if form.coding is Coding.CAST:
            return encoders.cast(numbers, getattr(torch, form.dtype))
        if form.coding is Coding.FULL8:
            return encoders.full8(numbers)
        if form.coding is Coding.TOPK8:
            return encoders.topk8(numbers, form.kept)
        if self._signs is None:
            shape = (form.kept, numbers.shape[1])
            self._signs = encoders.random_signs(*shape, form.seed, rows.device)
        return encoders.rp8(numbers, self._signs)


class Forms:
    """The forms that captures in force ask for, by number; unused ones stay while there is room."""

    def __init__(self, *, width: int, itemsize: int, vectors: Vectors, limit: int) -> None:
        """None is in use.

        Args:
            width: W.
            itemsize: bytes of an element of the stream.
            vectors: float32 [rows, W] by digest: those that the worker holds, now and later.
            limit: bytes of device memory that all forms may hold.
        """
        self._width = width
        self._raw_bytes = width * itemsize
        self._vectors = vectors
        self._limit = limit
        self._free = list(range(REFUSED + MOST, REFUSED, -1))
        self._made: OrderedDict[RowForm, Made] = OrderedDict()
        self._by_number: dict[int, Made] = {}
        self.bytes = 0
        """Device memory that they hold."""

    def __len__(self) -> int:
        """Forms in use."""
        return sum(made.users > 0 for made in self._made.values())

    def __getitem__(self, number: int) -> Made | None:
        """The form with a number that is in use; None where rows leave as they are."""
        return self._by_number[number] if number > REFUSED else None

    def acquire(self, form: RowForm | None) -> int:
        """The form's number, used once more; 0 of none, `REFUSED` of one that cannot be."""
        if form is None:
            return 0
        made = self._made.get(form)
        if made is None:
            made = self._make(form)
        if made is None:
            _LOG.info("rows in a form of %s leave as they are", form.coding.name)
            return REFUSED
        self._made.move_to_end(form)
        made.users += 1
        return made.number

    def hold(self, number: int, times: int = 1) -> None:
        """Uses a form that is in use so many times more."""
        if number > REFUSED:
            self._by_number[number].users += times

    def release(self, number: int, times: int = 1) -> None:
        """Ends so many uses."""
        if number > REFUSED:
            self._by_number[number].users -= times

    def _make(self, form: RowForm) -> Made | None:
        size = _matrix_bytes(form, self._width)
        if not self._possible(form) or not self._make_room(size):
            return None
        projection = None
        if form.directions is not None:
            projection = self._rows_of(form.directions)
            if projection is None:
                return None
        made = Made(form, self._free.pop(), self._width, projection)
        self._made[form] = self._by_number[made.number] = made
        self.bytes += size
        return made

    def _possible(self, form: RowForm) -> bool:
        """Whether it can be made of a row, and is smaller."""
        keeps = form.coding in (Coding.RP8, Coding.TOPK8)
        most = form.numbers(self._width)
        return (not keeps or 1 <= form.kept <= most) and 0 < form.row_bytes(
            self._width
        ) <= self._raw_bytes

    def _make_room(self, size: int) -> bool:
        unused = [form for form, made in self._made.items() if not made.users]
        held = sum(self._made[form].bytes for form in unused)
        if size > self._limit - self.bytes + held or not (self._free or unused):
            return False
        for form in unused:
            if self._free and size <= self._limit - self.bytes:
                break
            made = self._made.pop(form)
            del self._by_number[made.number]
            self._free.append(made.number)
            self.bytes -= made.bytes
        return True

    def _rows_of(self, directions: Directions) -> _Matrix | None:
        """The directions, [D, W]; None where the worker lacks one."""
        found = []
        for digest, row in zip(directions.vectors, directions.rows, strict=True):
            vector = self._vectors.get(digest)
            if vector is None or not 0 <= row < len(vector) or vector.shape[1] != self._width:
                _LOG.info("a direction, row %d of %s, is not in the worker", row, digest.hex())
                return None
            found.append(vector[row])
        return np.stack(found)


def _matrix_bytes(form: RowForm, width: int) -> int:
    numbers = form.numbers(width)
    rows = 0 if form.directions is None else numbers
    signs = form.kept * numbers if form.coding is Coding.RP8 else 0
    return 4 * (rows * width + signs)


def _scratch(form: RowForm, width: int) -> int:
    """About what a row takes at once: float32 and float64 copies, keys to sort by, codes."""
    numbers = form.numbers(width)
    size = 4 * width + form.row_bytes(width)
    if form.directions is not None:
        size += 4 * numbers
    if form.coding is Coding.TOPK8:
        return size + 48 * numbers + 32 * form.kept
    if form.coding is Coding.CAST:
        return size
    return size + 32 * (form.kept if form.coding is Coding.RP8 else numbers)
