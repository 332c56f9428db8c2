"""Programs on the device: what happens to a token at a site, shared by content.

A program of one addition is a row of the bank. Any other one is a chain of steps, each with the
number of its row or direction and of the step after it.

Invariant: a program holds its rows, directions and steps for as long as somebody uses it. Its code
is what a site's instruction says: 0 nothing, r > 0 add row r, -s run the chain from step s on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rheostat_engine.capacity import Capacity
from rheostat_engine.composition import Direction, Program, RowKey, Step, only_adds
from rheostat_engine.core.shared import Full, Shared
from rheostat_engine.core.tables import Table
from rheostat_engine.core.vectors import BankError, Vectors, sum_of, unit_of
from rheostat_engine.plan import Kind


@dataclass
class _Entry:
    code: int
    users: int
    held: tuple[Step, ...]
    chain: tuple[int, ...]


class Programs:
    """The programs in use."""

    def __init__(
        self, capacity: Capacity, *, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocates rows, directions and steps.

        Args:
            capacity: how many of each, number 0 not counted.
            width: W.
            dtype: of the rows.
            device: where they lie.
        """
        self._rows = Table(torch.zeros(capacity.bank_rows + 1, width, dtype=dtype, device=device))
        self._directions = Table(torch.zeros(capacity.directions + 1, width, device=device))
        steps = capacity.steps + 1
        self._ints = Table(torch.zeros(steps, 4, dtype=torch.int32, device=device))
        self._floats = Table(torch.zeros(steps, 4, device=device))
        self._row_numbers: Shared[RowKey] = Shared(capacity.bank_rows)
        self._zeros: dict[RowKey, int] = {}
        self._direction_numbers: Shared[Direction] = Shared(capacity.directions)
        self._free_steps = list(range(capacity.steps, 0, -1))
        self._entries: dict[Program, _Entry] = {}

    @property
    def rows(self) -> torch.Tensor:
        """[rows, W], the model's dtype: what is added."""
        return self._rows.tensor

    @property
    def directions(self) -> torch.Tensor:
        """[directions, W] float32: unit vectors."""
        return self._directions.tensor

    @property
    def ints(self) -> torch.Tensor:
        """[steps, 4] int32: kind, row or direction, next step (0: none), whether it is measured."""
        return self._ints.tensor

    @property
    def floats(self) -> torch.Tensor:
        """[steps, 4] float32: low, high, strength, unused."""
        return self._floats.tensor

    @property
    def rows_used(self) -> int:
        """Rows in use."""
        return len(self._row_numbers)

    @property
    def directions_used(self) -> int:
        """Directions in use."""
        return len(self._direction_numbers)

    @property
    def steps_used(self) -> int:
        """Steps in use."""
        return self._ints.tensor.shape[0] - 1 - len(self._free_steps)

    def acquire(self, program: Program, vectors: Vectors) -> int:
        """Uses a program, made if it isn't there yet; its code.

        Raises:
            BankError: it can't be made, or there is no room. Nothing is held then.
        """
        entry = self._entries.get(program)
        if entry is None:
            entry = self._make(program, vectors)
            self._entries[program] = entry
        entry.users += 1
        return entry.code

    def release(self, program: Program) -> None:
        """Ends one use."""
        entry = self._entries[program]
        entry.users -= 1
        if entry.users == 0:
            del self._entries[program]
            self._let_go(entry.held)
            self._free_steps.extend(entry.chain)

    def flush(self) -> None:
        """Brings what was made to the device."""
        for table in (self._rows, self._directions, self._ints, self._floats):
            table.flush()

    def _make(self, program: Program, vectors: Vectors) -> _Entry:
        simple = only_adds(program)
        floats = [torch.tensor([s.low, s.high, s.strength, 0.0]) for s in program]
        if not all(_usable(*one.tolist()) for one in floats):
            raise BankError("a bound or strength is not finite in float32")
        if not simple and len(program) > len(self._free_steps):
            raise BankError("every step is in use")
        held: list[Step] = []
        numbers = []
        try:
            for step in program:
                numbers.append(self._take(step, vectors))
                held.append(step)
        except BankError:
            self._let_go(held)
            raise
        if simple:
            return _Entry(numbers[0], 0, tuple(held), ())
        chain = tuple(self._free_steps.pop() for _ in program)
        after = (*chain[1:], 0)
        for at, step, number, following, values in zip(
            chain, program, numbers, after, floats, strict=True
        ):
            self._ints.put(at, torch.tensor([step.kind, number, following, step.last]))
            self._floats.put(at, values)
        return _Entry(-chain[0], 0, tuple(held), chain)

    def _take(self, step: Step, vectors: Vectors) -> int:
        if step.kind is Kind.ADD:
            return self._take_row(step.addends, vectors)
        key = step.direction
        try:
            taken = self._direction_numbers.take(key)
        except Full as error:
            raise BankError("every direction is in use") from error
        if taken.fresh:
            try:
                content = unit_of(key, vectors, self.directions.shape[1])
            except BankError:
                self._direction_numbers.give(key)
                raise
            self._directions.put(taken.number, content)
        return taken.number

    def _take_row(self, key: RowKey, vectors: Vectors) -> int:
        if key in self._zeros:
            self._zeros[key] += 1
            return 0
        try:
            taken = self._row_numbers.take(key)
        except Full as error:
            raise BankError("every row of the bank is in use") from error
        if not taken.fresh:
            return taken.number
        try:
            content = sum_of(key, vectors, self.rows.shape[1], self.rows.dtype)
        except BankError:
            self._row_numbers.give(key)
            raise
        if not bool(content.any()):
            self._row_numbers.give(key)
            self._zeros[key] = 1
            return 0
        self._rows.put(taken.number, content)
        return taken.number

    def _let_go(self, held: Sequence[Step]) -> None:
        for step in held:
            if step.kind is not Kind.ADD:
                self._direction_numbers.give(step.direction)
            elif step.addends not in self._zeros:
                self._row_numbers.give(step.addends)
            else:
                self._zeros[step.addends] -= 1
                if not self._zeros[step.addends]:
                    del self._zeros[step.addends]


def _usable(low: float, high: float, strength: float, _: float) -> bool:
    return low < math.inf and high > -math.inf and math.isfinite(strength)
