"""Buffers of steps whose tokens have no gates."""

import torch

from rheostat_engine.plan.gate_table import Floats, Ints
from rheostat_engine.plan.gates import MAX_TERMS
from rheostat_engine.worker.state.buffers import GateBuffers


def no_gates(
    tokens: int, *, states: int = 0, gates: int = 0, row_sums: int = 0, width: int = 0
) -> GateBuffers:
    """For so many tokens, with room for some states, gates and sums of rows of a width."""
    ints = torch.zeros(gates + 1, len(Ints), MAX_TERMS, dtype=torch.int32)
    return GateBuffers.allocate(
        tokens,
        states,
        ints,
        torch.zeros(gates + 1, len(Floats), MAX_TERMS),
        row_sums=row_sums,
        width=width,
    )
