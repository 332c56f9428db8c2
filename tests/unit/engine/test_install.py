"""Installed sites run once each, read the stream, change the stream and are otherwise not there."""

import copy

import pytest
import torch

from rheostat_engine import Point, Site
from rheostat_engine.core.buffers import Buffers
from rheostat_engine.points import site_count
from rheostat_engine.sites.forms import SiteError
from rheostat_engine.sites.install import install
from rheostat_engine.sites.op import bind
from rheostat_engine.sites.probe import probe

from .blocks import (
    TOKENS,
    WIDTH,
    Base,
    Decoder,
    Pair,
    Parallel,
    PostNorm,
    Sandwich,
    Single,
    buffers,
    give_own_forward,
    stream,
)

LAYERS = 3
KINDS = [Pair, Sandwich, Single, PostNorm, Parallel]


def sited(model: Decoder, *, entry: bool = True) -> tuple[Buffers, list[Site]]:
    """Installs the sites; every site captures every token once it is active."""
    forms = probe(model.blocks(), WIDTH, lambda: model(stream()))
    made = buffers(LAYERS, ring=1 + site_count(LAYERS) * TOKENS)
    count = made.cap_row.numel()
    made.cap_row[:] = torch.arange(1, count + 1, dtype=torch.int32).view_as(made.cap_row)
    installed = install(model.blocks(), forms, made, width=WIDTH, entry=entry)
    bind(made)
    return made, installed


def branches(layer: Base, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What attention adds to the stream; for parallel blocks also what the MLP does."""
    if isinstance(layer, PostNorm):
        return layer.first(layer.attention(x)), None
    added = layer.attention(layer.first(x))
    if isinstance(layer, Sandwich):
        added = layer.after_attention(added)
    return added, layer.mlp(layer.second(x)) if isinstance(layer, Parallel) else None


def by_hand(
    model: Decoder, steered: int | None = None, vector: float = 0.0
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """The stream at every site, and the model's output, with a vector added at one site."""
    streams: dict[int, torch.Tensor] = {}

    def at(site: int, x: torch.Tensor) -> torch.Tensor:
        streams[site] = x + vector if site == steered else x
        return streams[site]

    x = at(0, stream())
    for number, layer in enumerate(model.bases()):
        attention, mlp = branches(layer, x)
        if mlp is not None:
            x = x + attention + mlp
        else:
            x = at(2 * number + 1, x + attention)
            if isinstance(layer, PostNorm):
                x = x + layer.second(layer.mlp(x))
            else:
                added = layer.mlp(layer.second(x))
                x = x + (layer.after_mlp(added) if isinstance(layer, Sandwich) else added)
        x = at(2 * number + 2, x)
    return streams, model.last(x)


def normed(out: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A model's output without the residual beside it."""
    return out[0] if isinstance(out, tuple) else out


def sites_of(kind: type[Base]) -> list[int]:
    return [s for s in range(site_count(LAYERS)) if kind is not Parallel or s % 2 == 0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_site_of_a_model_runs_exactly_once(kind: type[Base]) -> None:
    model = Decoder(kind, LAYERS)
    made, installed = sited(model)
    assert sorted(site.index for site in installed) == sites_of(kind)
    made.census = [0] * site_count(LAYERS)
    model(stream())
    assert [s for s, runs in enumerate(made.census) if runs] == sites_of(kind)
    assert max(made.census) == 1


def test_only_the_models_first_block_has_a_site_at_its_entry() -> None:
    _, installed = sited(Decoder(Pair, LAYERS), entry=False)
    assert Site(Point.RESID_PRE, 0) not in installed
    assert sorted(site.index for site in installed) == list(range(1, site_count(LAYERS)))


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_idle_sites_change_no_bit(kind: type[Base]) -> None:
    model = Decoder(kind, LAYERS)
    expected = model(stream())
    made, _ = sited(model)
    out = model(stream())
    for one, other in zip(tuple(expected), tuple(out), strict=True):
        assert torch.equal(one, other)
    assert not made.ring.any()


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_added_at_a_site_is_added_to_the_stream_there_and_captured(
    kind: type[Base],
) -> None:
    model = Decoder(kind, LAYERS)
    plain = copy.deepcopy(model)
    made, _ = sited(model)
    made.active.set(made.active.mask | True)
    for steered in [None, *sites_of(kind)]:
        made.code.zero_()
        if steered is not None:
            made.code[steered] = 3
        out = normed(model(stream()))
        streams, expected = by_hand(plain, steered, 3.0)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        captured = made.ring[1:].view(site_count(LAYERS), TOKENS, WIDTH)
        assert sorted(streams) == sites_of(kind)
        for site, expected_stream in streams.items():
            torch.testing.assert_close(captured[site], expected_stream, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("kind", [Pair, Single])
def test_modules_with_a_forward_of_their_own_are_sited_too(kind: type[Base]) -> None:
    model = Decoder(kind, LAYERS)
    expected = normed(model(stream()))
    for layer in model.bases():
        give_own_forward(layer)
        give_own_forward(layer.second)
    made, installed = sited(model)
    assert len(installed) == site_count(LAYERS)
    made.census = [0] * site_count(LAYERS)
    assert torch.equal(normed(model(stream())), expected)
    assert made.census == [1] * site_count(LAYERS)


def test_a_forward_that_is_no_method_is_refused_by_name() -> None:
    model = Decoder(Single, LAYERS)
    layer = model.bases()[1]
    own = layer.forward
    layer.forward = lambda x: own(x)
    with pytest.raises(SiteError, match=r"^Single has a forward of its own that is no method$"):
        sited(model)


def test_a_sited_module_is_still_of_its_class_and_saves_nothing_of_ours() -> None:
    model = Decoder(Pair, LAYERS)
    names = sorted(model.state_dict())
    sited(model)
    assert all(isinstance(layer, Pair) for layer in model.bases())
    assert [type(layer).__name__ for layer in model.bases()] == ["SitedPair"] * LAYERS
    assert sorted(model.state_dict()) == names


def test_every_site_knows_the_program_by_its_own_view_of_it() -> None:
    model = Decoder(Pair, LAYERS)
    made, _ = sited(model)
    found = {
        name: made.site_of(buffer)
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if "rheostat_" in name
    }
    expected = {"layers.0.rheostat_entry": 0}
    for number in range(LAYERS):
        expected[f"layers.{number}.second.rheostat_mid"] = 2 * number + 1
        expected[f"layers.{number}.rheostat_exit"] = 2 * number + 2
    assert found == expected
