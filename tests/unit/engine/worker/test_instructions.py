"""A step's compact instructions mean one code, one cell and one ring row per token and site."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine.worker.expander import Expander
from rheostat_engine.worker.state.buffers import Buffers
from rheostat_engine.worker.steering.programs import FLOATS, INTS
from rheostat_engine.worker.steering.token_rules import TokenRules

from ..no_gates import no_gates
from ..strategies import SETS, VOCABULARY, packed_ids
from ..tables import CPU

SITES, TOKENS, SLOTS = 3, 8, 4


class Step(NamedTuple):
    """The arguments of `Expander.instructions`."""

    columns: np.ndarray
    base: np.ndarray | None
    first_row: int


@st.composite
def instructions(draw: st.DrawFn) -> tuple[Step, list[int]]:
    """Any step, with blocks and rules or without, and its token ids."""
    count = draw(st.integers(1, TOKENS))
    blocks = draw(st.integers(0, 3))
    rules = draw(st.integers(0, 2))

    def each(top: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(0, top), min_size=count, max_size=count)), "i4")

    base = None
    if blocks:
        values = st.lists(st.integers(0, 20), min_size=blocks * SITES, max_size=blocks * SITES)
        base = np.array(draw(values), np.int32).reshape(blocks, SITES)
    columns = np.stack([each(SLOTS - 1), each(70), each(rules), each(blocks), each(5)])
    ids = [
        draw(st.integers(0, VOCABULARY - 1) if rule else st.integers(-9, 10**6))
        for rule in columns[2].tolist()
    ]
    step = Step(columns, base, draw(st.integers(1, 9)))
    return step, ids + draw(st.lists(st.integers(-9, 10**6), max_size=2))


def made(tokens: int = TOKENS) -> Buffers:
    """Buffers; only the instructions matter."""
    return Buffers(
        tokens=tokens,
        rows=torch.zeros(9, 2),
        directions=torch.zeros(1, 2),
        ints=torch.zeros(1, INTS, dtype=torch.int32),
        floats=torch.zeros(1, FLOATS),
        gates=no_gates(tokens),
        doses=torch.zeros(SITES, 1, 4),
        ring=torch.zeros(40, 2),
    )


@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_every_sites_instructions_begin_where_the_first_sites_do(tokens: int) -> None:
    buffers = made(tokens)
    assert buffers.code.shape[1] >= tokens
    for site in range(SITES):
        one = buffers.of(site)
        assert {part.data_ptr() % 16 for part in (one.code, one.cap_row)} == {0}


@pytest.mark.parametrize("again", [False, True])
@given(steps=st.lists(instructions(), min_size=1, max_size=3), seed=st.integers(0, 2**32 - 1))
def test_instructions_are_expanded_token_by_token_and_site_by_site(
    again: bool, steps: list[tuple[Step, list[int]]], seed: int
) -> None:
    buffers = made()
    generator = torch.Generator().manual_seed(seed)
    code_of = torch.randint(-9, 9, (SITES, SLOTS), generator=generator, dtype=torch.int32)
    rules = TokenRules(2, 8, VOCABULARY, CPU)
    sets = {rules.acquire(tuple(map(packed_ids, one))): one for one in (SETS[:2], SETS[2:4])}
    # As many variants as any start may reach.
    slots, dose_slots = ([draw % SLOTS for draw in range(16)], list(range(100, 116)))
    assert rules.add_variants(np.array([slots], np.int32), np.array([dose_slots], np.int32)) == [0]
    expander = Expander(buffers, code_of, rules, TOKENS)
    for step, ids in steps:
        others = [(name + 1) % VOCABULARY for name in ids]
        before = buffers.code.clone(), buffers.cap_row.clone(), buffers.dose_slot.clone()
        if again:
            others_there = torch.tensor(others, dtype=torch.int32)
            expander.write(expander.instructions(*step._replace(first_row=30), others_there))
            expander.write_again(step.first_row, torch.tensor(ids, dtype=torch.int32))
        else:
            ids_there = torch.tensor(ids, dtype=torch.int32)
            expander.write(expander.instructions(*step, ids_there))
        count = step.columns.shape[1]
        for now, then in zip(
            (buffers.code, buffers.cap_row, buffers.dose_slot), before, strict=True
        ):
            assert torch.equal(now[..., count:], then[..., count:])
        for token in range(count):
            slot, dose_slot, rule, block, order = step.columns[:, token].tolist()
            if rule:
                held = sets[rule]
                variant = slot + sum((ids[token] in one) << bit for bit, one in enumerate(held))
                slot, dose_slot = slots[variant], dose_slots[variant]
            assert buffers.dose_slot[token] == dose_slot
            for site in range(SITES):
                assert buffers.code[site, token] == code_of[site, slot]
                target = 0
                if step.base is not None and block:
                    first = step.base[block - 1, site]
                    target = first - 1 + step.first_row + order if first else 0
                assert buffers.cap_row[site, token] == target
