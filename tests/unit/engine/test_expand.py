"""A step's compact instructions mean one bank row and one ring row per token and site."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine.core.expand import Compact, Expander
from rheostat_engine.core.program import Program

SITES, TOKENS, SLOTS = 3, 8, 4


@st.composite
def instructions(draw: st.DrawFn) -> Compact:
    """Any step, with blocks or without."""
    count = draw(st.integers(1, TOKENS))
    blocks = draw(st.integers(0, 3))

    def each(top: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(0, top), min_size=count, max_size=count)), "i4")

    base = None
    if blocks:
        values = st.lists(st.integers(0, 20), min_size=blocks * SITES, max_size=blocks * SITES)
        base = np.array(draw(values), np.int32).reshape(blocks, SITES)
    return Compact(each(SLOTS - 1), each(blocks), each(5), base)


@given(st.lists(instructions(), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_instructions_are_expanded_token_by_token_and_site_by_site(
    steps: list[Compact], seed: int
) -> None:
    program = Program(sites=SITES, tokens=TOKENS, bank=torch.zeros(9, 2), ring=torch.zeros(40, 2))
    row_of = torch.randint(
        0, 9, (SITES, SLOTS), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )
    expander = Expander(program, row_of, TOKENS)
    for step in steps:
        before = program.add_row.clone(), program.cap_row.clone()
        expander.write(step)
        count = len(step.slot)
        assert torch.equal(program.add_row[:, count:], before[0][:, count:])
        assert torch.equal(program.cap_row[:, count:], before[1][:, count:])
        for site in range(SITES):
            for token in range(count):
                assert program.add_row[site, token] == row_of[site, step.slot[token]]
                target = 0
                if step.base is not None and step.block[token]:
                    first = step.base[step.block[token] - 1, site]
                    target = first + step.order[token] if first else 0
                assert program.cap_row[site, token] == target
