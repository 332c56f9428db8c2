"""Capacities, vectors and what was made of them on the device."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine import Capacity
from rheostat_engine.plan.composition import TokenVariants
from rheostat_engine.plan.tables import SteeringTable
from rheostat_engine.worker.steering.bank import Bank
from rheostat_engine.worker.steering.doses import Norms
from rheostat_engine.worker.steering.programs import Programs
from rheostat_engine.worker.steering.vectors import Vectors

from .strategies import DIGESTS, ROWS

CPU = torch.device("cpu")
WIDTH = 8
VECTORS: dict[bytes, npt.NDArray[np.float32]] = {
    digest: np.random.default_rng(i).uniform(1, 2, (ROWS, WIDTH)).astype(np.float32)
    for i, digest in enumerate(DIGESTS)
}
"""Positive, so that sums of them with positive scales are never zero, and independent."""


def variants_of(table: SteeringTable | None) -> tuple[TokenVariants, ...]:
    """What happens at the positions of each clause set."""
    if table is None:
        return ()
    return tuple(map(table.token_variants, range(len(table.intervals.members))))


def norms(vectors: Vectors) -> Norms:
    """What comes with vectors when they are loaded."""
    return {
        digest: np.linalg.norm(vector.astype(np.float64), axis=1).astype(np.float32)
        for digest, vector in vectors.items()
    }


def capacity(
    *,
    bank_rows: int = 64,
    directions: int = 64,
    steps: int = 256,
    slots: int = 64,
    token_rules: int = 32,
    capture_rows: int = 1000,
) -> Capacity:
    """Room for everything but what is said."""
    return Capacity(bank_rows, directions, steps, slots, token_rules, capture_rows)


def used(bank: Bank) -> tuple[int, int, int, int]:
    """Rows, directions, steps and slots in use."""
    programs = bank.programs
    return (
        programs.rows_used,
        programs.directions_used,
        programs.steps_used,
        bank.slots_used,
    )


def chain(programs: Programs, code: int) -> Iterator[tuple[list[int], list[float]]]:
    """The steps that a code runs: ints without the number of the next step, and floats."""
    step = -code
    while step > 0:
        kind, number, following, last, mask, column, write = programs.ints[step].tolist()
        yield [kind, number, last, mask, column, write], programs.floats[step].tolist()
        step = following
