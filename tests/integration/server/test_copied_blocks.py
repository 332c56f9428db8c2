"""Cells that copy the part of a cached block before their first row.

Tests their values, how many tokens they compute, and plain requests that read the same blocks.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import rheostat
from rheostat_engine import Point, Site
from rheostat_wire.v1 import types_pb2

from ..engine.reference import HfReference
from .conftest import Server
from .test_sweeps import RIGHT, connected, grade, hooks, logprobs, positions, sites, sweep

pytestmark = pytest.mark.integration

BLOCK = 128
"""Tokens of a block of the KV cache, vLLM's default on a CPU."""
LAYERS = 0, 3
COLUMNS = [1, 100, 127, 128, 129, 200, 255, 256, 258]
GROUPS = {
    "with a gap": [(100, 102), (200, 201)],
    "with a common row": [(101, 104)],
    "long": [(150, 258)],
}
"""The windows of groups of positions. Cells of these groups share no plan."""


def test_cells_that_copy_a_part_of_a_block_are_what_hooks_give(
    server: Server, reference: HfReference
) -> None:
    draw = np.random.default_rng(3)
    clean, corrupt = (draw.integers(4, 1900, 2 * BLOCK + 3).tolist() for _ in range(2))
    with connected(server) as services:
        pair = services.pair(
            prompt=types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=clean)),
            corrupt=types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=corrupt)),
        )
        swept = sweep(
            services,
            pair,
            sites=sites("resid_post", layers=LAYERS),
            where=positions(*((at, at + 1) for at in COLUMNS)),
            grades=[grade("LOGPROB")],
            baseline_count=1,
            max_concurrent_cells=1,  # the unchanged prompt comes first, and its blocks are cached
        )
        (right,) = services.tokens(RIGHT, special=False)
    for cell in swept.cells.values():
        site, at = Site(Point.RESID_POST, LAYERS[cell.row]), COLUMNS[cell.column]
        after = logprobs(reference, corrupt, hooks(reference, clean, site, [(at, at)]))
        assert cell.values[0] == pytest.approx(after[right], abs=2e-3)
    assert np.ptp(swept.grid()) > 0.1
    # Both prompts, and of each cell what follows its row. The last block, of three tokens, is not
    # full, so each cell computes it, and so does the corrupt prompt when it runs again.
    cells = len(LAYERS) * sum(len(clean) - min(at, 2 * BLOCK) for at in COLUMNS)
    assert swept.summary.computed_token_count == 2 * len(clean) + cells + 3


def test_cells_with_plans_of_their_own_copy_parts_of_blocks_too(
    server: Server, reference: HfReference
) -> None:
    draw = np.random.default_rng(5)
    clean, corrupt = (draw.integers(4, 1900, 2 * BLOCK + 3).tolist() for _ in range(2))
    with connected(server) as services:
        pair = services.pair(
            prompt=types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=clean)),
            corrupt=types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=corrupt)),
            groups=[positions(*windows) for windows in GROUPS.values()],
        )
        swept = sweep(
            services,
            pair,
            group_labels=list(GROUPS),
            sites=sites("resid_post", layers=LAYERS),
            grades=[grade("LOGPROB")],
            baseline_count=1,
            max_concurrent_cells=1,
        )
        (right,) = services.tokens(RIGHT, special=False)
    groups = [[at for window in windows for at in range(*window)] for windows in GROUPS.values()]
    for cell in swept.cells.values():
        site = Site(Point.RESID_POST, LAYERS[cell.row])
        changes = hooks(reference, clean, site, [(at, at) for at in groups[cell.column]])
        after = logprobs(reference, corrupt, changes)
        assert cell.values[0] == pytest.approx(after[right], abs=2e-3)
    assert np.ptp(swept.grid()) > 0.1
    cells = len(LAYERS) * sum(len(clean) - group[0] for group in groups)
    assert swept.summary.computed_token_count == 2 * len(clean) + cells + 3


def test_patched_rows_never_reach_plain_requests_of_the_same_prompts(
    engine: rheostat.Engine,
) -> None:
    """The requests read the same cached blocks as the cells: before, beside and after them."""
    draw = np.random.default_rng(4)
    prompts = [draw.integers(4, 1900, 2 * BLOCK + 3).tolist() for _ in range(2)]
    greedy = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 5}
    cold = [engine.generate(prompt, **greedy) for prompt in prompts]
    assert [one.receipt.cached_prompt_token_count for one in cold] == [0, 0]
    pair = rheostat.Pair(prompts[0], corrupt=prompts[1], answer=list(cold[0].token_ids[:1]))
    beside: list[rheostat.Generation] = []

    def ask(done: int, count: int) -> None:
        """Sends plain requests after every few cells, while other cells run."""
        if done % 6 == 1:
            beside.extend(pool.map(lambda prompt: engine.generate(prompt, **greedy), prompts))

    with ThreadPoolExecutor(2) as pool:
        swept = engine.sweep(
            pair,
            points="resid_post",
            layers=LAYERS,
            where=rheostat.positions(*COLUMNS),
            grades="logprob",
            progress=ask,
            watch=False,
        )
    after = [engine.generate(prompt, **greedy) for prompt in prompts]
    assert np.ptp(swept.array()) > 0.1
    assert len(beside) >= 4
    for number, plain in enumerate([*beside, *after]):
        expected = cold[number % 2]
        assert plain.receipt.cached_prompt_token_count == 2 * BLOCK
        assert plain.token_ids == expected.token_ids
        for one, other in zip(plain.logprobs, expected.logprobs, strict=True):
            assert one.token.logprob == pytest.approx(other.token.logprob, abs=1e-4)
