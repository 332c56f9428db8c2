"""Installed sites run once each, read the stream, change the stream and are otherwise not there."""

import copy

import pytest
import torch

from rheostat_engine import Point, Site
from rheostat_engine.plan.points import site_count
from rheostat_engine.sites.block_layout import SiteError
from rheostat_engine.sites.install import install
from rheostat_engine.sites.op import bind
from rheostat_engine.sites.probe import probe
from rheostat_engine.worker.state.buffers import Buffers

from ..blocks import (
    TOKENS,
    WIDTH,
    Base,
    Beside,
    Decoder,
    Dropped,
    Ignored,
    MlpFirst,
    Pair,
    Parallel,
    PostNorm,
    Sandwich,
    Scaled,
    Single,
    buffers,
    give_own_forward,
    stream,
)

LAYERS = 3
PARALLEL = (Parallel, MlpFirst, Ignored)
KINDS = [Pair, Sandwich, Single, PostNorm, Scaled, Dropped, Beside, *PARALLEL]


def sited(model: Decoder, *, entry: bool = True) -> tuple[Buffers, list[Site]]:
    """Installs the sites; every site captures every token once it is active."""
    layouts = probe(model.blocks(), WIDTH, lambda: model(stream()))
    made = buffers(LAYERS, ring=1 + site_count(LAYERS) * TOKENS)
    count = made.cap_row.numel()
    made.cap_row[:] = torch.arange(1, count + 1, dtype=torch.int32).view_as(made.cap_row)
    installed = install(model.blocks(), layouts, made, width=WIDTH, entry=entry)
    bind(made)
    return made, installed


def attention_of(layer: Base, x: torch.Tensor) -> torch.Tensor:
    """What attention adds to the stream."""
    if isinstance(layer, PostNorm):
        return layer.first(layer.attention(x))
    added = layer.attention(layer.first(x))
    if isinstance(layer, Sandwich):
        return layer.after_attention(added)
    return added * layer.gain if isinstance(layer, Scaled) else added


def mlp_of(layer: Base, x: torch.Tensor) -> torch.Tensor:
    """What the MLP adds to the stream, which it is given."""
    if isinstance(layer, PostNorm):
        return layer.second(layer.mlp(x))
    added = layer.mlp((layer.first if isinstance(layer, (MlpFirst, Ignored)) else layer.second)(x))
    if isinstance(layer, Sandwich):
        return layer.after_mlp(added)
    return added * layer.gain if isinstance(layer, Scaled) else added


def by_hand(
    model: Decoder, steered: int | None = None, vector: float = 0.0
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """What is at every site, and the model's output, with a vector added at one site."""
    found: dict[int, torch.Tensor] = {}

    def at(point: Point, layer: int, x: torch.Tensor) -> torch.Tensor:
        site = Site(point, layer).index
        found[site] = x + vector if site == steered else x
        return found[site]

    x = at(Point.RESID_PRE, 0, stream())
    for number, layer in enumerate(model.bases()):
        attention = at(Point.ATTN_OUT, number, attention_of(layer, x))
        if isinstance(layer, PARALLEL):
            mlp = at(Point.MLP_OUT, number, mlp_of(layer, x))
            x = at(Point.RESID_POST, number, x + attention + mlp)
        else:
            x = at(Point.RESID_MID, number, x + attention)
            mlp = at(Point.MLP_OUT, number, mlp_of(layer, x))
            x = at(Point.RESID_POST, number, x + mlp)
    return found, model.last(x)


def normed(out: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A model's output without the residual beside it."""
    return out[0] if isinstance(out, tuple) else out


def sites_of(kind: type[Base]) -> list[int]:
    """The sites that a model of such blocks has."""
    lacking = {
        Site(Point.RESID_MID, layer).index for layer in range(LAYERS) if issubclass(kind, PARALLEL)
    }
    return [site for site in range(site_count(LAYERS)) if site not in lacking]


@pytest.mark.parametrize("kind", KINDS)
def test_every_site_of_a_model_runs_exactly_once(kind: type[Base]) -> None:
    model = Decoder(kind, LAYERS)
    made, installed = sited(model)
    assert sorted(site.index for site in installed) == sites_of(kind)
    made.call_counts = [0] * site_count(LAYERS)
    model(stream())
    assert [s for s, runs in enumerate(made.call_counts) if runs] == sites_of(kind)
    assert max(made.call_counts) == 1


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
        found, expected = by_hand(plain, steered, 3.0)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        captured = made.ring[1:].view(site_count(LAYERS), TOKENS, WIDTH)
        assert sorted(found) == sites_of(kind)
        for site, there in found.items():
            torch.testing.assert_close(captured[site], there, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("kind", [Pair, Single])
def test_modules_with_a_forward_of_their_own_are_sited_too(kind: type[Base]) -> None:
    model = Decoder(kind, LAYERS)
    expected = normed(model(stream()))
    for layer in model.bases():
        give_own_forward(layer)
        give_own_forward(layer.second)
        give_own_forward(layer.mlp)
    made, installed = sited(model)
    assert len(installed) == site_count(LAYERS)
    made.call_counts = [0] * site_count(LAYERS)
    assert torch.equal(normed(model(stream())), expected)
    assert made.call_counts == [1] * site_count(LAYERS)


def test_a_forward_that_is_no_method_is_refused_by_name() -> None:
    model = Decoder(Single, LAYERS)
    layer = model.bases()[1]
    own = layer.forward
    layer.forward = lambda x: own(x)
    with pytest.raises(
        SiteError, match=r"^Single has a forward on the instance that is not a method$"
    ):
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
    assert found == {
        f"layers.{where}": Site(point, layer).index
        for layer in range(LAYERS)
        for where, point in {
            "0.rheostat_entry": Point.RESID_PRE,
            f"{layer}.second.rheostat_branch": Point.ATTN_OUT,
            f"{layer}.second.rheostat_mid": Point.RESID_MID,
            f"{layer}.rheostat_branch": Point.MLP_OUT,
            f"{layer}.rheostat_exit": Point.RESID_POST,
        }.items()
        if point is not Point.RESID_PRE or layer == 0
    }


def test_a_branch_is_as_it_is_added_whatever_it_is_multiplied_by() -> None:
    model = Decoder(Scaled, LAYERS)
    made, _ = sited(model)
    gain = float(torch.tensor(Scaled.gain))
    assert made.gains == [gain if site % 2 else 1.0 for site in range(site_count(LAYERS))]


@torch.inference_mode()
def test_a_module_may_be_given_one_site_and_return_another() -> None:
    class Bare(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attention(x)
            return x + self.mlp(x)

    model = Decoder(Bare, LAYERS)
    expected = normed(model(stream()))
    made, installed = sited(model)
    made.call_counts = [0] * site_count(LAYERS)
    assert torch.equal(normed(model(stream())), expected)
    assert made.call_counts == [1] * site_count(LAYERS) == [1] * len(installed)
    assert {type(layer.mlp).__name__ for layer in model.bases()} == {"SitedSitedMlp"}


@torch.inference_mode()
@pytest.mark.parametrize("kind", [Pair, Sandwich, Single, PostNorm])
def test_captured_branches_are_what_the_stream_grows_by(kind: type[Base]) -> None:
    model = Decoder(kind, LAYERS)
    made, _ = sited(model)
    made.active.set(made.active.mask | True)
    model(stream())
    captured = made.ring[1:].view(site_count(LAYERS), TOKENS, WIDTH)
    for site in range(0, site_count(LAYERS) - 1, 2):
        grown = captured[site] + captured[site + 1]
        torch.testing.assert_close(captured[site + 2], grown, rtol=1e-5, atol=1e-6)
