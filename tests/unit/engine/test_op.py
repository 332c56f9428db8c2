"""The op at a site does what a loop over tokens does, and the compiler's bits stay as they were."""

import copy
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rheostat_engine.core.program import Program
from rheostat_engine.points import site_count
from rheostat_engine.sites import install as installation
from rheostat_engine.sites.forms import Block, BlockForm, Carrier
from rheostat_engine.sites.install import install
from rheostat_engine.sites.op import bind, reference, site
from rheostat_engine.sites.probe import probe

from .blocks import TOKENS, WIDTH, Base, Decoder, Norm, Pair, Single, program, stream


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def naive(
    h: torch.Tensor,
    carried: list[torch.Tensor],
    add_row: list[int],
    cap_row: list[int],
    bank: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    """One token after the other."""
    for token in range(len(h)):
        if add_row[token]:
            h[token] = (h[token].float() + bank[add_row[token]].float()).to(h.dtype)
        if cap_row[token]:
            total = h[token].float()
            if len(carried) == 1:
                total = total + carried[0][token].float()
            elif carried:
                total = total + (carried[0][token].float() + carried[1][token].float())
            ring[cap_row[token]] = total.to(ring.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_the_op_equals_a_loop_over_tokens(
    dtype: torch.dtype, data: st.DataObject, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = data.draw(st.integers(1, 6))
    parts = data.draw(st.integers(0, 2))

    def noise(rows: int) -> torch.Tensor:
        return torch.randn(rows, 4, generator=generator).to(dtype)

    h, bank, ring = noise(tokens), noise(3), noise(10)
    carried = [
        noise(tokens).to(data.draw(st.sampled_from([dtype, torch.float32]))) for _ in range(parts)
    ]
    add_row = data.draw(st.lists(st.integers(0, 2), min_size=tokens, max_size=tokens))
    places = data.draw(st.permutations(range(1, 10)))
    cap_row = [p if data.draw(st.booleans()) else 0 for p in places[:tokens]]
    mine, mine_ring = h.clone(), ring.clone()
    buffers = (torch.tensor([*one, 2, 9], dtype=torch.int32) for one in (add_row, cap_row))
    reference(mine, carried, *buffers, bank, mine_ring)
    naive(h, carried, add_row, cap_row, bank, ring)
    assert torch.equal(mine, h)
    assert torch.equal(mine_ring, ring)


def busy(layers: int, dtype: torch.dtype = torch.float32) -> Program:
    """A program that adds to every other token and captures every third, at every site."""
    made = program(layers, dtype=dtype)
    sites = site_count(layers)
    for number in range(sites):
        made.add_row[number, ::2] = 1 + number % 3
        made.cap_row[number, ::3] = torch.arange(3, dtype=torch.int32) + 1 + 3 * number
    made.active.set(made.active.mask | True)
    return made


def call(made: Program, number: int, h: torch.Tensor) -> None:
    """The op at a site, through the dispatcher."""
    site(h, [], *made.buffers(number))


def test_a_site_that_is_not_active_touches_nothing() -> None:
    made = busy(2)
    mask = made.active.mask.copy()
    mask[3] = False
    made.active.set(mask)
    bind(made)
    h = stream()
    call(made, 3, h)
    assert torch.equal(h, stream())
    assert not made.ring.any()
    call(made, 2, h)
    assert torch.equal(h[::2], stream()[::2] + 3)
    assert torch.equal(h[1::2], stream()[1::2])
    assert torch.equal(made.ring[7:10], h[::3])
    made.active.clear()
    before = h.clone(), made.ring.clone()
    call(made, 2, h)
    assert torch.equal(h, before[0])
    assert torch.equal(made.ring, before[1])


def test_a_census_counts_every_call_of_a_site() -> None:
    made = program(1)
    bind(made)
    made.census = [0, 0, 0]
    for number in (1, 2, 1):
        call(made, number, stream())
    assert made.census == [0, 2, 1]


def test_leading_dimensions_are_tokens() -> None:
    made = busy(1)
    bind(made)
    flat, folded = stream(), stream().view(2, -1, WIDTH)
    call(made, 1, flat)
    ring = made.ring.clone()
    made.ring.zero_()
    call(made, 1, folded)
    assert torch.equal(folded.view(-1, WIDTH), flat)
    assert torch.equal(made.ring, ring)


@pytest.mark.parametrize("kind", [Pair, Single])
def test_compiled_blocks_equal_eager_ones_bit_for_bit(kind: type[Base]) -> None:
    model = Decoder(kind, 2).eval()
    forms = probe(model.blocks(), WIDTH, lambda: model(stream()))
    made = busy(2)
    install(model.blocks(), forms, made, width=WIDTH, entry=True)
    bind(made)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    with torch.inference_mode():
        for run in (model, compiled):
            made.ring.zero_()
            out = run(stream())
            results.append((*(out if isinstance(out, tuple) else (out,)), made.ring.clone()))
    assert all(map(torch.equal, *results))
    assert (results[0][-1][1:16].abs().sum(-1) > 0).all()


class Tail(Base):
    """A pair-form block from its attention's output on."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor):
        x, residual = self.second(x, residual)
        return self.mlp(x), residual


class Segment(nn.Module):
    """What vLLM compiles between two attention layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = Tail()
        self.following = Norm()

    def forward(self, x: torch.Tensor, residual: torch.Tensor):
        return self.following(*self.tail(x, residual))


def compiled(segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
    """What the segment, compiled for bfloat16, makes of some tokens."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(TOKENS, WIDTH, generator=generator).bfloat16() for _ in range(2)]
    torch.compiler.reset()
    with torch.inference_mode():
        result: tuple[torch.Tensor, torch.Tensor] = torch.compile(segment, fullgraph=True)(*parts)
    return result


def test_an_idle_op_changes_no_bit_of_a_compiled_segment_because_it_is_given_the_unrounded_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    stock = Segment().to(torch.bfloat16).eval()
    sited, rounded = copy.deepcopy(stock), copy.deepcopy(stock)
    made = program(1, dtype=torch.bfloat16)
    bind(made)
    for one in (sited, rounded):
        form = BlockForm(Carrier.PAIR, one.tail.second, "")
        install([Block(0, one.tail, ())], [form], made, width=WIDTH, entry=False)
    expected = compiled(stock)
    assert all(map(torch.equal, expected, compiled(sited)))

    def at_exit_with_the_rounded_sum(self: nn.Module, *args: object) -> object:
        out = super(installation._PairBlock, self).forward(*args)
        installation._CARRIED.clear()
        self._rheostat_at_exit(out[0], [out[1]])
        return out

    monkeypatch.setattr(installation._PairBlock, "forward", at_exit_with_the_rounded_sum)
    assert not all(map(torch.equal, expected, compiled(rounded)))
