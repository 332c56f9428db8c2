"""Programs on the device: the steps for a token at a site, shared by content.

A program of one constant addition is a row of the bank. Any other program has a chain of steps.
Each step has the number of its row or direction, the number of its mask, and the number of the next
step.

Invariant: a program keeps its rows, directions and steps as long as it has a use. A site's
instruction is the code of a program: 0 does nothing, -s runs the chain from step s on. A code above
0 adds a row of the bank; see `addition_code`.

Why some additions are codes although they have a chain
    If a code names a row, the site loads it together with the stream. A chain loads its step first,
    then the row, which takes some microseconds longer at each site. An addition with a gate or a
    gain is usually alone at its site, except at the site that opens the gate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from rheostat_engine.plan.acts import Kind
from rheostat_engine.plan.capacity import MAX_BANK_ROWS, Capacity
from rheostat_engine.plan.composition import Direction, Program, RowKey, Step, only_adds
from rheostat_engine.plan.gate_table import Floats, Ints, gate_rows
from rheostat_engine.plan.gates import MAX_GATES, MAX_TERMS, Gate, Normalise
from rheostat_engine.worker.state.device_table import Table
from rheostat_engine.worker.state.id_allocators import BankError, Exhausted, RefCountedIds
from rheostat_engine.worker.steering.vectors import Basis, Vectors, sums_of

INTS = 7
"""Integers of a step."""

FLOATS = 8
"""Floats of a step."""
GAIN_UNIT = 256
"""More than the number of any gate, so that one integer names a gate and a gain."""

ROW_UNIT = MAX_BANK_ROWS + 1
"""More than the number of any row, so that one integer names a row, and a gate or a gain."""

_INFINITE = 2.0**128 - 2.0**103
"""The smallest number that float32 rounds to infinity."""

_TINY = 2.0**-126
"""The smallest normal float32."""


@dataclass(slots=True)
class _Entry:
    code: int
    chain: tuple[int, ...] = ()
    users: int = 0


class _Numbers(NamedTuple):
    """What a step uses."""

    first: int
    """Its row, direction, gate or sum of rows."""
    second: int = 0
    """Its mask, the settings of a readout, or whether a gate has a single term."""
    write: int = 0
    """The direction along which it moves x, if it is another than it reads. READ_MEAN: the sum."""


class _NewSteps(NamedTuple):
    """Steps that are written to the device together."""

    numbers: list[int]
    ints: list[list[int]]
    """As `Programs.ints`."""
    floats: list[list[float]]
    """As `Programs.floats`."""


class Programs:
    """The programs in use."""

    def __init__(
        self, capacity: Capacity, *, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocates rows, directions and steps.

        Args:
            capacity: the number of each, without number 0.
            width: W.
            dtype: of the rows.
            device: of all tables.
        """
        self._rows = Table(torch.zeros(capacity.bank_rows + 1, width, dtype=dtype, device=device))
        self._directions = Table(torch.zeros(capacity.directions + 1, width, device=device))
        steps = capacity.steps + 1
        self._ints = Table(torch.zeros(steps, INTS, dtype=torch.int32, device=device))
        gates = capacity.gates + 1
        self._gate_ints = Table(
            torch.zeros(gates, len(Ints), MAX_TERMS, dtype=torch.int32, device=device)
        )
        self._gate_floats = Table(torch.zeros(gates, len(Floats), MAX_TERMS, device=device))
        self._gate_numbers: RefCountedIds[Gate] = RefCountedIds(capacity.gates, "gate")
        self._floats = Table(torch.zeros(steps, FLOATS, device=device))
        self._row_numbers: RefCountedIds[RowKey] = RefCountedIds(
            capacity.bank_rows, "row of the bank"
        )
        self._zeros: dict[RowKey, int] = {}
        self._direction_numbers: RefCountedIds[Direction] = RefCountedIds(
            capacity.directions, "direction"
        )
        self._free_steps = list(range(capacity.steps, 0, -1))
        self._entries: dict[Program, _Entry] = {}
        self.rows = self._rows.tensor
        """[rows, W], the model's dtype: rows that are added."""
        self.directions = self._directions.tensor
        """[directions, W] float32: unit vectors."""
        self.ints = self._ints.tensor
        """[steps, INTS] int32.

        Kind; row, direction, or index of a sum of rows; next step; whether it is measured;
        mask row, the settings of a readout (see `settings_of`), or whether a gate has a single
        term; what `_factors` returns; the direction along which a pull moves x, if it is another. 0
        means that there is no next step, no mask, nothing that multiplies the strength, or no other
        direction.

        Readings are the last steps of a chain. A reading is never measured and moves nothing. In
        place of these two integers `Kind.READ` has the numbers of the second and the third step
        after it, so that the kernel can load four readings at once. `Kind.READ_MEAN` has the
        position at which it reads, and the index of the sum.
        """
        self.floats = self._floats.tensor
        """[steps, FLOATS] float32.

        Low; high; strength; factor of the direction along which a pull moves x; of a readout the
        bias, theta, and the factor of the coordinate along its direction; unused.
        """
        self.gate_ints = self._gate_ints.tensor
        """[gates, rows of `Ints`, MAX_TERMS] int32."""
        self.gate_floats = self._gate_floats.tensor
        """[gates, rows of `Floats`, MAX_TERMS] float32."""

    @property
    def rows_used(self) -> int:
        """Rows in use."""
        return len(self._row_numbers)

    @property
    def directions_used(self) -> int:
        """Directions in use."""
        return len(self._direction_numbers)

    @property
    def gates_used(self) -> int:
        """Gates in use."""
        return len(self._gate_numbers)

    @property
    def steps_used(self) -> int:
        """Steps in use."""
        return self._ints.tensor.shape[0] - 1 - len(self._free_steps)

    @property
    def more_than_half_used(self) -> bool:
        """Whether more than half of the rows, directions, gates or steps are used."""
        shared = self._row_numbers, self._direction_numbers, self._gate_numbers
        scarce = any(numbers.more_than_half_used for numbers in shared)
        return scarce or self.steps_used > len(self._free_steps)

    def acquire(self, programs: Sequence[Program], vectors: Vectors) -> list[int]:
        """Adds a use of programs, and makes programs that do not exist yet; their codes.

        Raises:
            BankError: a program can't be made, or a resource is exhausted. No use is added then.
        """
        rows = self._make_rows(programs, vectors)
        basis = self.basis(vectors)
        codes: list[int] = []
        new = _NewSteps([], [], [])
        try:
            for program in programs:
                codes.append(self._use(program, basis, new))
        except BankError:
            for program, _ in zip(programs, codes, strict=False):
                self.release(program)
            raise
        finally:
            for key in rows:
                self._give_row(key)
        if new.numbers:
            self._ints.put_all(new.numbers, np.array(new.ints))
            self._floats.put_all(new.numbers, np.array(new.floats))
        return codes

    def release(self, program: Program) -> None:
        """Ends one use."""
        entry = self._entries[program]
        entry.users -= 1
        if entry.users == 0:
            del self._entries[program]
            self._release_steps(program)
            self._free_steps.extend(entry.chain)

    def basis(self, vectors: Vectors) -> Basis:
        """An empty basis of vectors, for `use_direction`."""
        return Basis(vectors, self.directions.shape[1])

    def use_direction(self, direction: Direction, basis: Basis) -> int:
        """Adds a use of a direction, makes it if needed, and returns its number.

        Also called before a program needs the direction, so that its cost is spread over slices.

        Raises:
            BankError: it can't be made, or every direction is in use. No use is added then.
        """
        taken = self._direction_numbers.take(direction)
        if taken.fresh:
            try:
                content = basis.unit_of(direction)
            except BankError:
                self._direction_numbers.give(direction)
                raise
            self._directions.put(taken.number, content)
        return taken.number

    def release_direction(self, direction: Direction) -> None:
        """Ends one use of a direction."""
        self._direction_numbers.give(direction)

    def use_gates(self, gates: Sequence[Gate]) -> list[int]:
        """Adds a use of gates, and makes those that do not exist yet; their rows in the table.

        Raises:
            Exhausted: too few are free. No use is added then.
        """
        taken = self._gate_numbers.take_all(gates)
        for gate, (number, fresh) in zip(gates, taken, strict=True):
            if fresh:
                ints, floats = gate_rows(gate)
                self._gate_ints.put(number, ints)
                self._gate_floats.put(number, floats)
        return [number for number, _ in taken]

    def release_gates(self, gates: Sequence[Gate]) -> None:
        """Ends one use of gates."""
        for gate in gates:
            self._gate_numbers.give(gate)

    def flush(self) -> None:
        """Copies new rows, directions, gates and steps to the device."""
        gates = self._gate_ints, self._gate_floats
        for table in (self._rows, self._directions, *gates, self._ints, self._floats):
            table.flush()

    def _make_rows(self, programs: Sequence[Program], vectors: Vectors) -> list[RowKey]:
        """Makes all missing rows of programs at once, and adds a use of each; their keys."""
        missing = {
            key: None
            for program in programs
            if program not in self._entries
            for step in program
            for key in step.rows
            if key not in self._row_numbers and key not in self._zeros
        }
        if not missing:
            return []
        sums = sums_of(list(missing), vectors, self.rows.shape[1], self.rows.dtype)
        zeros = {key: 1 for key, zero in zip(missing, sums.zero.tolist(), strict=True) if zero}
        others = [key for key in missing if key not in zeros]
        numbers = [number for number, _ in self._row_numbers.take_all(others)]
        self._zeros |= zeros
        if numbers:
            self._rows.put_all(numbers, sums.rows[~sums.zero] if zeros else sums.rows)
        return list(missing)

    def _use(self, program: Program, basis: Basis, new: _NewSteps) -> int:
        entry = self._entries.get(program)
        if entry is None:
            entry = self._make(program, basis, new)
            self._entries[program] = entry
        entry.users += 1
        return entry.code

    def _make(self, program: Program, basis: Basis, new: _NewSteps) -> _Entry:
        if only_adds(program):
            return _Entry(self._take_row(program[0].addends))
        if not all(map(_usable, program)):
            raise BankError("a bound or strength is not finite in float32")
        if len(program) > len(self._free_steps):
            raise Exhausted("every step is in use")
        if self._zeros and any(step.mask in self._zeros for step in program):
            raise BankError("a mask is zero, or rounds to zero")
        numbers: list[_Numbers] = []
        floats: list[list[float]] = []
        try:
            for step in program:
                floats.append(_floats(step, basis))
                numbers.append(self._take(step, basis))
        except BankError:
            self._release_steps(program[: len(numbers)])
            raise
        chain = tuple([self._free_steps.pop() for _ in program])
        new.numbers.extend(chain)
        behind = [*chain, 0, 0, 0]
        for at, (step, used) in enumerate(zip(program, numbers, strict=True)):
            following, third, fourth = behind[at + 1 : at + 4]
            if step.kind is Kind.READ_MEAN:
                assert step.reading is not None, "it reads"
                third, fourth = step.reading.mean_at, used.write
            elif step.kind is not Kind.READ:
                third, fourth = step.last, used.write
            factors = _factors(step)
            new.ints.append([step.kind, used.first, following, third, used.second, factors, fourth])
        new.floats.extend(floats)
        code = addition_code(program, numbers[0].first)
        return _Entry(-chain[0] if code is None else code, chain)

    def _take(self, step: Step, basis: Basis) -> _Numbers:
        """Adds a use of a step's row, directions or gate, and of its mask; their numbers."""
        if step.kind is Kind.GATE:
            return _Numbers(0, int(step.one_term))
        if step.kind is Kind.SUM:
            assert step.row_sum is not None, "it has one"
            return _Numbers(step.row_sum)
        if not step.direction:
            mask = self._take_row(step.mask) if step.mask else 0
            return _Numbers(self._take_row(step.addends), mask)
        read, write = self.use_direction(step.direction, basis), step.row_sum or 0
        if step.write:
            try:
                write = self.use_direction(step.write, basis)
            except BankError:
                self._direction_numbers.give(step.direction)
                raise
        return _Numbers(read, settings_of(step), write)

    def _take_row(self, key: RowKey) -> int:
        """Adds a use of an existing row; its number."""
        if key in self._zeros:
            self._zeros[key] += 1
            return 0
        return self._row_numbers.take(key).number

    def _give_row(self, key: RowKey) -> None:
        if key not in self._zeros:
            self._row_numbers.give(key)
            return
        self._zeros[key] -= 1
        if not self._zeros[key]:
            del self._zeros[key]

    def _release_steps(self, taken: Sequence[Step]) -> None:
        for step in taken:
            for key in step.rows:
                self._give_row(key)
            for direction in filter(None, (step.direction, step.write)):
                self._direction_numbers.give(direction)


def _factors(step: Step) -> int:
    """What a step is multiplied by, or where a reading goes.

    A reading: 1 plus its column. Any other step: 1 plus the number of its gate, and `GAIN_UNIT`
    times 1 plus the index of its gain; 0 for either that it does not have.
    """
    if step.reading is not None:
        return 1 + step.reading.column
    gate = 0 if step.gate is None else 1 + step.gate
    return gate + (0 if step.gain is None else GAIN_UNIT * (1 + step.gain))


def addition_code(program: Program, row: int) -> int | None:
    """The code of a program that adds one row with at most one factor; None for other programs.

    The code is `row` + `ROW_UNIT` * n. n names the factor: 0 is none, 1 + the number of a gate, or
    1 + `MAX_GATES` + the index of a gain.

    Args:
        program: the program.
        row: the row's number.
    """
    step = program[0]
    if len(program) > 1 or step.kind is not Kind.ADD:
        return None
    if step.gate is None:
        return row + (0 if step.gain is None else ROW_UNIT * (MAX_GATES + 1 + step.gain))
    return row + ROW_UNIT * (1 + step.gate) if step.gain is None else None


def settings_of(step: Step) -> int:
    """Normalisation, activation and `only_on` of what a step reads, four bits each."""
    read = step.readout if step.reading is None else step.reading
    return read.normalise | read.activation << 4 | step.only_on << 8


def _floats(step: Step, basis: Basis) -> list[float]:
    """The floats of a step.

    Raises:
        BankError: the norm of a vector is not finite in float32, or no vector.
    """
    read = step.readout if step.reading is None else step.reading
    factor = written = 1.0
    if step.direction and read.normalise is Normalise.NONE:
        factor = basis.norm_of(step.direction)
        written = 1 / max(factor, _TINY)
    if step.write:
        written = basis.norm_of(step.write)
    if not max(factor, written) < _INFINITE:
        raise BankError("the norm of a vector is not finite in float32")
    return [step.low, step.high, step.strength, written, read.bias, read.theta, factor, 0.0]


def _usable(step: Step) -> bool:
    """Whether a step's bounds and strength stay valid when they are rounded to float32."""
    return step.low < _INFINITE and step.high > -_INFINITE and abs(step.strength) < _INFINITE
