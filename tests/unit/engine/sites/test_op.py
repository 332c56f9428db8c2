"""The op acts where it is active and nowhere else, and the compiler's bits stay as they were."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rheostat_engine.plan.points import site_count
from rheostat_engine.sites import install as installation
from rheostat_engine.sites.block_layout import Block, BlockLayout, Branch, StreamLayout
from rheostat_engine.sites.install import install
from rheostat_engine.sites.op import bind, call_directly, note_captured, recording, site
from rheostat_engine.sites.probe import probe
from rheostat_engine.worker.state.buffers import Buffers

from ..blocks import TOKENS, WIDTH, Base, Decoder, Norm, Pair, Parts, Single, buffers, stream


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def busy(layers: int, dtype: torch.dtype = torch.float32) -> Buffers:
    """Buffers that say: add to every other token and capture every third, at every site."""
    made = buffers(layers, dtype=dtype)
    sites = site_count(layers)
    for number in range(sites):
        made.code[number, ::2] = 1 + number % 3
        made.cap_row[number, ::3] = torch.arange(3, dtype=torch.int32) + 1 + 3 * number
    made.active.set(made.active.mask | True)
    return made


def call(made: Buffers, number: int, h: torch.Tensor, residual: torch.Tensor | None = None) -> None:
    """The op at a site, through the dispatcher."""
    site(h, residual, made.site_handle(number))


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
    made = buffers(1)
    bind(made)
    made.call_counts = [0] * 5
    for number in (1, 2, 1):
        call(made, number, stream())
    assert made.call_counts == [0, 2, 1, 0, 0]


def test_a_site_knows_itself_by_its_mark() -> None:
    made = buffers(2)
    assert [made.site_of(made.site_handle(number)) for number in range(made.sites)] == list(
        range(9)
    )
    assert [made.of(n).code.data_ptr() for n in range(made.sites)] == [
        made.site_handle(n).data_ptr() for n in range(made.sites)
    ]


def test_the_residual_is_read_and_not_changed() -> None:
    made = busy(1)
    bind(made)
    h, residual = stream(), torch.full_like(stream(), 10.0)
    call(made, 1, h, residual)
    assert torch.equal(h[::2], stream()[::2] + 2)
    assert torch.equal(residual, torch.full_like(stream(), 10.0))
    assert torch.equal(made.ring[4:7], h[::3] + 10)


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
    layouts = probe(model.blocks(), WIDTH, lambda: model(stream()))
    made = busy(2)
    install(model.blocks(), layouts, made, width=WIDTH, entry=True)
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


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The stream of each call that goes through torch's dispatcher, after `call_directly`."""
    calls: list[torch.Tensor] = []
    packet = torch.ops.rheostat.site
    for op in (packet, packet.default):
        stock = op._op

        def counted(h: torch.Tensor, *rest: torch.Tensor, _stock: Any = stock) -> None:
            calls.append(h)
            _stock(h, *rest)

        monkeypatch.setattr(op, "_op", counted)
    before = hash(packet.default)
    call_directly()
    call_directly()
    assert hash(packet.default) == before, "tables of torch are indexed by it"
    return calls


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_a_step_calls_sites_without_the_dispatcher(
    dispatched: list[torch.Tensor], backend: str | None
) -> None:
    model = Decoder(Pair, 2).eval()
    layouts = probe(model.blocks(), WIDTH, lambda: model(stream()))
    made = busy(2)
    mask = made.active.mask
    install(model.blocks(), layouts, made, width=WIDTH, entry=True)
    bind(made)
    run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)

    def results() -> tuple[torch.Tensor, ...]:
        made.ring.zero_()
        out = run(stream())
        return (*(out if isinstance(out, tuple) else (out,)), made.ring.clone())

    with torch.inference_mode():
        made.active.clear()
        results()  # compiles
        dispatched.clear()
        idle = results()
        assert len(dispatched) == made.sites
        dispatched.clear()
        made.active.set_none()
        assert all(map(torch.equal, results(), idle))
        made.active.set(mask)
        direct = results()
        assert not dispatched
        assert (direct[-1][1:16].abs().sum(-1) > 0).all()
        assert not torch.equal(direct[0], idle[0])


def test_code_can_still_be_compiled_in_a_step(dispatched: list[torch.Tensor]) -> None:
    made = busy(1)
    bind(made)

    def called(h: torch.Tensor) -> torch.Tensor:
        site(h, None, made.site_handle(1))
        return h + 1

    changed = torch.compile(called, fullgraph=True)(stream())
    assert dispatched, "by the compiler"
    assert torch.equal(changed, called(stream()))


class Tail(Base):
    """A pair-form block from its attention's output on."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Parts:
        x, residual = self.second(x, residual)
        return self.mlp(x), residual


class Segment(nn.Module):
    """What vLLM compiles between two attention layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = Tail()
        self.following = Norm()

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Parts:
        out: Parts = self.following(*self.tail(x, residual))
        return out


def compiled(segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
    """What the segment, compiled for bfloat16, makes of some tokens."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(TOKENS, WIDTH, generator=generator).bfloat16() for _ in range(2)]
    torch.compiler.reset()
    with torch.inference_mode():
        result: tuple[torch.Tensor, torch.Tensor] = torch.compile(segment, fullgraph=True)(*parts)
    return result


def test_an_idle_op_changes_no_bit_of_a_compiled_segment_because_it_receives_the_unrounded_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    stock = Segment().to(torch.bfloat16).eval()
    sited, rounded = copy.deepcopy(stock), copy.deepcopy(stock)
    made = buffers(1, dtype=torch.bfloat16)
    bind(made)
    for one in (sited, rounded):
        layout = BlockLayout(StreamLayout.PAIR, one.tail.second, Branch(None), Branch(None))
        install([Block(0, one.tail, ())], [layout], made, width=WIDTH, entry=False)
    expected = compiled(stock)
    assert all(map(torch.equal, expected, compiled(sited)))

    def at_exit_with_the_rounded_sum(self: installation._PairBlock, *args: object) -> Parts:
        out: Parts = super(installation._PairBlock, self).forward(*args)
        installation._RESIDUALS.clear()
        site(out[0], out[1], self.rheostat_exit)
        return out

    monkeypatch.setattr(installation._PairBlock, "forward", at_exit_with_the_rounded_sum)
    assert not all(map(torch.equal, expected, compiled(rounded)))


def test_captured_kernels_are_noted_by_the_recording_that_is_on() -> None:
    one: list[int] = []
    other: list[int] = []
    note_captured(1)
    with recording(one.append):
        note_captured(2)
        note_captured(3)
    note_captured(4)
    with recording(other.append):
        note_captured(5)
    assert (one, other) == ([2, 3], [5])


def test_recordings_do_not_nest_and_end_whatever_happens() -> None:
    sites: list[int] = []
    message = "^a CUDA graph is already being recorded$"
    with recording(sites.append), pytest.raises(RuntimeError, match=message), recording(print):
        pass
    with recording(sites.append):
        note_captured(1)
    assert sites == [1]
