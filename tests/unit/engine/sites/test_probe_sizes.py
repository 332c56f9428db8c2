"""The same sites are found whatever the dtype, and whatever the sizes of stream and branches."""

from collections.abc import Callable

import pytest
import torch

from rheostat_engine.sites.block_layout import BlockLayout
from rheostat_engine.sites.probe import probe

from .. import blocks
from ..blocks import (
    KINDS,
    Base,
    Bigger,
    Decoder,
    Moved,
    Norm,
    Pair,
    PostNorm,
    Sandwich,
    Scaled,
    Single,
    Squared,
    Two,
    expected,
    stream,
)

Scale = Callable[[Decoder, torch.Tensor], object]
"""Changes a model and the stream [tokens, W] that enters it, in place."""


def scale_entry(by: float) -> Scale:
    """Changes the size of the stream that enters the first block."""
    return lambda model, entering: entering.mul_(by)


def scale_projections(by: float) -> Scale:
    """Changes the size of what attention and the MLP return."""

    def scale(model: Decoder, entering: torch.Tensor) -> None:
        for layer in model.bases():
            layer.attention.out.weight.data *= by
            layer.mlp.down.weight.data *= by

    return scale


def scale_norms(by: float) -> Scale:
    """Changes the size of what norms return, and with it that of a branch that is normed."""

    def scale(model: Decoder, entering: torch.Tensor) -> None:
        for module in model.layers.modules():
            if isinstance(module, Norm):
                module.weight.data *= by

    return scale


def add_outliers(model: Decoder, entering: torch.Tensor) -> None:
    """Makes two dimensions of the stream far larger than the others, as in trained models."""
    entering[:, :2] *= 300


def shrink_all(model: Decoder, entering: torch.Tensor) -> None:
    """Makes every weight and the stream as small as vLLM's dummy weights."""
    for parameter in model.parameters():
        parameter.data.uniform_(-1e-3, 1e-3)
    entering.mul_(1e-3)


SCALES: dict[str, Scale] = {
    "as initialised": scale_entry(1.0),
    "small stream": scale_entry(1e-3),
    "large stream": scale_entry(200.0),
    "small branches": scale_projections(1e-3),
    "large branches": scale_projections(50.0),
    "small norms": scale_norms(1e-2),
    "large norms": scale_norms(50.0),
    "outliers": add_outliers,
    "dummy weights": shrink_all,
}


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALED = [(dtype, scale) for dtype in DTYPES for scale in SCALES]
EXTREMES = [one for one in SCALED if one[1] in ("small stream", "large branches", "outliers")]
SCALED.remove((torch.float16, "dummy weights"))  # nothing is left of such an MLP in float16


def probe_scaled(
    kind: type[Base], dtype: torch.dtype, scale: str
) -> tuple[Decoder, list[BlockLayout]]:
    """A model of some scale, and what the probe finds in it."""
    model = Decoder(kind, layers=2)
    entering = stream()
    SCALES[scale](model, entering)
    model, entering = model.to(dtype), entering.to(dtype)
    return model, probe(model.blocks(), blocks.WIDTH, lambda: model(entering))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_sites_are_found_whatever_the_dtype_and_the_sizes_of_stream_and_branches(
    kind: type[Base],
) -> None:
    gain = float(torch.tensor(0.22)) if kind is Scaled else 1.0
    for dtype, scale in SCALED:
        model, found = probe_scaled(kind, dtype, scale)
        wanted = [expected(kind, layer, gain) for layer in model.bases()]
        assert found == wanted, (dtype, scale)


@pytest.mark.parametrize("scale", ["small stream", "large branches", "large norms"])
@pytest.mark.parametrize("kind", [Pair, Sandwich, Single, PostNorm])
def test_the_same_sites_are_found_in_a_wide_bfloat16_model(
    kind: type[Base], scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "WIDTH", 768)
    model, found = probe_scaled(kind, torch.bfloat16, scale)
    assert found == [expected(kind, layer, 1.0) for layer in model.bases()]


@pytest.mark.parametrize("kind", [Bigger, Squared, Two])
def test_wrong_branches_are_refused_whatever_the_dtype_and_the_sizes(kind: type[Base]) -> None:
    for dtype, scale in EXTREMES:
        for layout in probe_scaled(kind, dtype, scale)[1]:
            assert (layout.attention, layout.mlp) == (None, None), (dtype, scale)


def test_a_changed_residual_is_refused_whatever_the_dtype_and_the_sizes() -> None:
    for dtype, scale in EXTREMES:
        for layout in probe_scaled(Moved, dtype, scale)[1]:
            assert layout.attention is None, (dtype, scale)
