"""Sweeps of prompts that differ in length: aligned cells equal hooks, the others have a reason."""

import pytest

from rheostat_engine import Point, Site
from rheostat_wire.v1 import replace_pb2, types_pb2

from ..engine.reference import HfReference
from .test_sweeps import (
    CORRUPT,
    LONGER,
    RIGHT,
    WRONG,
    Services,
    hooks,
    logprobs,
    services,
    sites,
    sweep,
)

__all__ = ["services"]  # a fixture

pytestmark = pytest.mark.integration


def test_prompts_of_unequal_length_are_aligned_and_the_rest_has_a_reason(
    services: Services, reference: HfReference
) -> None:
    clean, corrupt = services.tokens(LONGER), services.tokens(CORRUPT)
    pair = services.pair(prompt=types_pb2.Prompt(text=LONGER))
    swept = sweep(services, pair, sites=sites("resid_post", layers=[2]))
    alignment = swept.started.pairs[0].alignment
    suffix = alignment.suffix_token_count
    assert suffix >= 6
    (right,), (wrong,) = (services.tokens(text, special=False) for text in (RIGHT, WRONG))
    missing = []
    for position in range(len(clean)):
        cell = swept.cells[position]
        if alignment.prefix_token_count <= position < len(clean) - suffix:
            missing.append(position)
            assert "no partner" in cell.error.message
            continue
        other = position
        if position >= alignment.prefix_token_count:
            other += len(corrupt) - len(clean)
        changes = hooks(reference, clean, Site(Point.RESID_POST, 2), [(other, position)])
        after = logprobs(reference, corrupt, changes)
        assert cell.values[0] == pytest.approx(after[right] - after[wrong], abs=2e-3)
    unaligned = [p for one in alignment.unaligned for p in range(one.start, one.start + one.count)]
    void = [p for one in swept.summary.missing for p in range(one.start, one.start + one.count)]
    assert missing == unaligned == void


def test_prompts_of_unequal_length_can_be_aligned_position_by_position(
    services: Services, reference: HfReference
) -> None:
    clean, corrupt = services.tokens(LONGER), services.tokens(CORRUPT)
    pair = services.pair(prompt=types_pb2.Prompt(text=LONGER))
    identity = replace_pb2.ALIGNMENT_IDENTITY
    swept = sweep(services, pair, sites=sites("resid_post", layers=[2]), alignment=identity)
    (right,), (wrong,) = (services.tokens(text, special=False) for text in (RIGHT, WRONG))
    assert len(corrupt) < len(swept.cells) == len(clean)
    for position, cell in swept.cells.items():
        if position >= len(corrupt):
            assert "is shorter" in cell.error.message
            continue
        changes = hooks(reference, clean, Site(Point.RESID_POST, 2), [(position, position)])
        after = logprobs(reference, corrupt, changes)
        assert cell.values[0] == pytest.approx(after[right] - after[wrong], abs=2e-3)
