"""The Triton kernels, interpreted on CPU, beside their plain twins; run by test_kernels.py."""

import sys

import numpy as np
import torch

from rheostat_engine.core.expand import expand_reference
from rheostat_engine.core.program import Program
from rheostat_engine.sites.kernels import launch_expand, launch_site, warm_up
from rheostat_engine.sites.op import reference

WIDTH = 1500
TOKENS = 9
SITES = 5


def check_site(dtype: torch.dtype, carried_dtypes: list[torch.dtype]) -> None:
    """One op with random instructions."""
    generator = torch.Generator().manual_seed(len(carried_dtypes))
    h = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    carried = [torch.randn(TOKENS, WIDTH, generator=generator).to(d) for d in carried_dtypes]
    bank = torch.randn(7, WIDTH, generator=generator).to(dtype)
    add_row = torch.tensor([0, 3, 0, 6, 1, 0, 2, 2, 0, 5], dtype=torch.int32)
    cap_row = torch.tensor([0, 0, 4, 7, 0, 1, 2, 0, 9, 9], dtype=torch.int32)
    ones = [h.clone(), torch.zeros(12, WIDTH, dtype=dtype)]
    others = [h.clone(), torch.zeros(12, WIDTH, dtype=dtype)]
    launch_site(ones[0], carried, add_row, cap_row, bank, ones[1])
    reference(others[0], carried, add_row, cap_row, bank, others[1])
    assert torch.equal(ones[0], others[0])
    assert torch.equal(ones[1], others[1])
    assert not torch.equal(ones[0], h)


def check_expand(captures: bool) -> None:
    """One step's instructions, more than a block of tokens long."""
    rng = np.random.default_rng(0)
    count = 200
    slot = torch.from_numpy(rng.integers(0, 6, count).astype(np.int32))
    block = torch.from_numpy(rng.integers(0, 4, count).astype(np.int32))
    order = torch.from_numpy(rng.integers(0, 50, count).astype(np.int32))
    row_of = torch.from_numpy(rng.integers(0, 100, (SITES, 6)).astype(np.int32))
    starts = rng.integers(1, 900, (3, SITES)) * rng.integers(0, 2, (3, SITES))
    base = torch.from_numpy(starts.astype(np.int32)) if captures else None
    ones = [torch.full((SITES, 256), -1, dtype=torch.int32) for _ in range(2)]
    others = [one.clone() for one in ones]
    launch_expand(slot, block, order, row_of, base, *ones)
    expand_reference(slot, block, order, row_of, base, *others)
    assert torch.equal(ones[0], others[0])
    assert torch.equal(ones[1], others[1])


def check_warm_up() -> None:
    """Warming up changes nothing that a step could see."""
    bank, ring = torch.randn(4, WIDTH), torch.randn(6, WIDTH)
    program = Program(sites=SITES, tokens=16, bank=bank.clone(), ring=ring.clone())
    warm_up(program, torch.zeros(SITES, 8, dtype=torch.int32))
    assert torch.equal(program.bank, bank)
    assert torch.equal(program.ring, ring)
    assert not program.add_row.any()
    assert not program.cap_row.any()


def main() -> None:
    """Every variant."""
    for dtype in (torch.float32, torch.float16):  # the interpreter truncates to bfloat16
        for carried in ([], [dtype], [torch.float32], [dtype, dtype]):
            check_site(dtype, carried)
    check_expand(captures=False)
    check_expand(captures=True)
    check_warm_up()
    sys.stdout.write("kernels equal their twins\n")


if __name__ == "__main__":
    main()
