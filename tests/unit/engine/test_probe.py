"""A block's sites are found by what its tensors do, and what can't be trusted is refused."""

import pytest
import torch
from torch import nn

from rheostat_engine.sites.forms import Block, BlockForm, Carrier, SiteError
from rheostat_engine.sites.probe import probe

from .blocks import (
    WIDTH,
    Base,
    Decoder,
    Neither,
    Pair,
    Parallel,
    PostNorm,
    Sandwich,
    SharedNorm,
    Single,
    give_own_forward,
    stream,
)

PARALLEL = "attention and MLP run in parallel on the same stream"
NOWHERE = "no module is given the stream after attention"


def forms(model: Decoder, dtype: torch.dtype = torch.float32) -> list[BlockForm]:
    """What the probe says of a model."""
    return probe(model.blocks(), WIDTH, lambda: model(stream(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "carrier", "mid"),
    [
        (Pair, Carrier.PAIR, "second"),
        (Sandwich, Carrier.PAIR, "second"),
        (Single, Carrier.SINGLE, "second"),
        (PostNorm, Carrier.SINGLE, "mlp"),
    ],
)
def test_mid_is_the_module_whose_input_is_the_stream_after_attention(
    kind: type[Base], carrier: Carrier, mid: str, dtype: torch.dtype
) -> None:
    model = Decoder(kind).to(dtype)
    assert forms(model, dtype) == [
        BlockForm(carrier, getattr(layer, mid), "") for layer in model.bases()
    ]


@pytest.mark.parametrize("kind", [Pair, Sandwich, Single])
def test_mid_is_found_where_branches_are_far_smaller_than_the_stream(kind: type[Base]) -> None:
    model = Decoder(kind, layers=6).to(torch.bfloat16)
    for layer in model.bases():
        layer.attention.out.weight.data *= 1e-3
    big = 30 * stream(torch.bfloat16)
    found = probe(model.blocks(), WIDTH, lambda: model(big))
    assert [form.mid for form in found] == [layer.second for layer in model.bases()]


@pytest.mark.parametrize(("kind", "reason"), [(Parallel, PARALLEL), (SharedNorm, NOWHERE)])
def test_a_block_without_such_a_module_has_no_mid_and_says_why(
    kind: type[Base], reason: str
) -> None:
    assert forms(Decoder(kind)) == [BlockForm(Carrier.SINGLE, None, reason)] * 3


def test_probing_changes_nothing() -> None:
    model = Decoder(Pair)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    out = model(stream())
    forms(model)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(map(torch.equal, model(stream()), out))


def test_a_forward_of_its_own_survives_probing() -> None:
    model = Decoder(Pair)
    for layer in model.bases():
        give_own_forward(layer.second)
    own = [layer.second.__dict__["forward"] for layer in model.bases()]
    assert [form.mid for form in forms(model)] == [layer.second for layer in model.bases()]
    assert [layer.second.__dict__["forward"] for layer in model.bases()] == own


def test_a_stream_that_changes_between_blocks_is_refused() -> None:
    model = Decoder(Single, between=lambda x: 2 * x)
    message = (
        "^the stream is changed between layers 0 and 1; resid_post and resid_pre would not be one "
        "tensor$"
    )
    with pytest.raises(SiteError, match=message):
        forms(model)


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
        forms(model)


def test_a_failure_within_the_model_leaves_no_patch_behind() -> None:
    model = Decoder(Single)

    def fail() -> None:
        model(stream())
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        probe(model.blocks(), WIDTH, fail)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_block_may_hold_more_than_one_layer_with_state() -> None:
    class Two(Single):
        def __init__(self) -> None:
            super().__init__()
            self.more = type(self.attention)()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normed = self.first(x)
            x = x + self.attention(normed) + self.more(normed)
            out: torch.Tensor = x + self.mlp(self.second(x))
            return out

    model = Decoder(Two)
    blocks = [
        Block(i, layer, (layer.attention.core, layer.more.core))
        for i, layer in enumerate(model.bases())
        if isinstance(layer, Two)
    ]
    found = probe(blocks, WIDTH, lambda: model(stream()))
    assert [form.mid for form in found] == [layer.second for layer in model.bases()]
