"""A block's sites are found by what its tensors do, and what can't be trusted is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from rheostat_engine import Point
from rheostat_engine.sites.block_layout import BlockLayout, Branch, SiteError, StreamLayout
from rheostat_engine.sites.branches import NO_MODULES, NOT_BEFORE
from rheostat_engine.sites.probe import NOWHERE, probe

from ..blocks import (
    KINDS,
    WIDTH,
    Base,
    Beside,
    Bigger,
    Decoder,
    Ignored,
    Moved,
    Neither,
    Norm,
    Pair,
    Parts,
    Sandwich,
    Scaled,
    Single,
    Squared,
    Two,
    expected,
    give_own_forward,
    stream,
)

NO_POINT = (Point.RESID_MID, Point.ATTN_OUT, Point.MLP_OUT)


def layouts(model: Decoder, dtype: torch.dtype = torch.float32) -> list[BlockLayout]:
    """What the probe says of a model."""
    return probe(model.blocks(), WIDTH, lambda: model(stream(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sites_are_found_where_the_stream_and_what_is_added_to_it_are(
    kind: type[Base], dtype: torch.dtype
) -> None:
    model = Decoder(kind).to(dtype)
    gain = float(torch.tensor(0.22)) if kind is Scaled else 1.0
    assert layouts(model, dtype) == [expected(kind, layer, gain) for layer in model.bases()]


def test_a_block_whose_numbers_are_not_finite_is_refused_by_name() -> None:
    model = Decoder(Single).to(torch.float16)
    model.bases()[1].mlp.down.weight.data *= 1e5
    message = (
        r"^layer 1 \(Single\) returns numbers that are not finite in torch.float16; "
        "its sites can't be found$"
    )
    with pytest.raises(SiteError, match=message):
        layouts(model, torch.float16)


@pytest.mark.parametrize("gain", [-1.0, 1 / 3, 1e-2, 1.001, 40.0])
def test_a_gain_is_known_as_well_as_float32_knows_it(gain: float) -> None:
    class Other(Scaled):
        pass

    Other.gain = gain
    model = Decoder(Other).to(torch.bfloat16)
    found = layouts(model, torch.bfloat16)
    exact = float(torch.tensor(gain))
    assert [(layout.attention, layout.mlp) for layout in found] == [
        (Branch(layer.attention, exact), Branch(layer.mlp, exact)) for layer in model.bases()
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Bigger, Squared, Two])
def test_branches_that_no_two_modules_return_are_refused(
    kind: type[Base], dtype: torch.dtype
) -> None:
    for layout in layouts(Decoder(kind).to(dtype), dtype):
        assert (layout.attention, layout.mlp) == (None, None)
        assert layout.refused[Point.ATTN_OUT] == NO_MODULES
        assert layout.refused[Point.MLP_OUT] == NO_MODULES


def test_a_norm_that_runs_twice_is_no_place_for_a_site() -> None:
    class Shared(Pair):
        def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> Parts:
            if residual is None:
                x, residual = self.first(x), x
            else:
                x, residual = self.first(x, residual)
            x, residual = self.first(self.attention(x), residual)
            return self.mlp(x), residual

    none = BlockLayout(StreamLayout.PAIR, None, None, None, dict.fromkeys(NO_POINT, NOWHERE))
    assert layouts(Decoder(Shared)) == [none] * 3


def test_a_branch_that_is_not_added_to_the_stream_that_came_is_refused() -> None:
    found = layouts(Decoder(Moved))
    assert [(layout.attention, layout.mlp) for layout in found] == [(None, Branch(None))] * 3
    assert [dict(layout.refused) for layout in found] == [{Point.ATTN_OUT: NOT_BEFORE}] * 3


class Ranks:
    """Two ranks that split each matrix between them."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=60)
        self._parts: dict[int, torch.Tensor] = {}

    def sum(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        """What both hold, once both are here."""
        self._parts[rank] = part
        self._barrier.wait()
        whole = self._parts[0] + self._parts[1]
        self._barrier.wait()
        return whole

    def probe(self, kind: type["OnRank"]) -> list[list[BlockLayout]]:
        """What each rank says of a model."""

        def one(rank: int) -> list[BlockLayout]:
            model = models[rank]
            return probe(model.blocks(), WIDTH, lambda: model(stream()), rank=rank)

        models = [Decoder(kind), Decoder(kind)]
        for rank, model in enumerate(models):
            for layer in model.bases():
                assert isinstance(layer, OnRank)
                layer.join(self, rank)
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2)))


class OnRank(Base):
    """A block of which each rank has a part."""

    def join(self, ranks: Ranks, rank: int) -> None:
        """Becomes one of two."""
        self.ranks, self.rank = ranks, rank

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""
        return self.ranks.sum(self.rank, part)


class Late(OnRank):
    """Command-R: what both branches add is summed over the ranks at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.first(x)
        return x + self.whole(self.attention(normed) + self.mlp(normed))


class Early(OnRank):
    """Each branch is summed over the ranks before the norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Norm(), Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.one(self.whole(self.attention(self.first(x))))
        return x + self.other(self.whole(self.mlp(self.second(x))))


def test_what_each_rank_holds_a_part_of_is_no_branch() -> None:
    for found in Ranks().probe(Late):
        assert [(layout.attention, layout.mlp) for layout in found] == [(None, None)] * 3
        assert {layout.refused[Point.MLP_OUT] for layout in found} == {NO_MODULES}
    for found in Ranks().probe(Early):
        assert all(layout.attention and layout.mlp and not layout.refused for layout in found)


def test_probing_changes_nothing() -> None:
    model = Decoder(Pair)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    out = model(stream())
    layouts(model)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(map(torch.equal, model(stream()), out))


def test_a_forward_of_its_own_survives_probing() -> None:
    model = Decoder(Pair)
    for layer in model.bases():
        give_own_forward(layer.second)
    own = [layer.second.__dict__["forward"] for layer in model.bases()]
    assert [layout.mid for layout in layouts(model)] == [layer.second for layer in model.bases()]
    assert [layer.second.__dict__["forward"] for layer in model.bases()] == own


def test_a_stream_that_changes_between_blocks_is_refused() -> None:
    model = Decoder(Single, between=lambda x: 2 * x)
    message = (
        "^the stream is changed between layers 0 and 1; resid_post and resid_pre would not be one "
        "tensor$"
    )
    with pytest.raises(SiteError, match=message):
        layouts(model)


def test_blocks_that_are_never_called_are_refused() -> None:
    model, other = Decoder(Single), Decoder(Single)
    message = "^layer 0 did not run as a module; its sites are unknown$"
    with pytest.raises(SiteError, match=message):
        probe(model.blocks(), WIDTH, lambda: other(stream()))


def test_a_block_that_returns_no_stream_is_refused() -> None:
    model = Decoder(Neither, layers=1)
    model.last = nn.Identity()
    message = r"^layer 0 \(Neither\) returns neither the stream nor a pair that sums to it$"
    with pytest.raises(SiteError, match=message):
        layouts(model)


def test_a_failure_within_the_model_leaves_no_patch_behind() -> None:
    model = Decoder(Single)

    def fail() -> None:
        model(stream())
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        probe(model.blocks(), WIDTH, fail)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_block_may_hold_more_than_one_layer_with_state() -> None:
    model = Decoder(Two)
    assert [len(block.attention) for block in model.blocks()] == [2] * 3
    assert [layout.mid for layout in layouts(model)] == [layer.second for layer in model.bases()]


def test_two_tensors_that_are_neither_a_pair_nor_the_stream_and_more_are_refused() -> None:
    class Product(Ignored):
        def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> Parts:
            out, beside = super().forward(x, residual)
            return out if residual is None else out * residual, beside

    message = r"^layer 0 \(Product\) returns neither the stream nor a pair that sums to it$"
    with pytest.raises(SiteError, match=message):
        layouts(Decoder(Product))


@pytest.mark.parametrize("kind", [Pair, Sandwich])
def test_a_model_of_one_block_shows_its_pair_by_its_mid(kind: type[Base]) -> None:
    model = Decoder(kind, layers=1)
    assert layouts(model) == [expected(kind, model.bases()[0], 1.0)]
    message = "returns neither the stream nor a pair that sums to it$"
    with pytest.raises(SiteError, match=message):
        layouts(Decoder(Beside, layers=1))
