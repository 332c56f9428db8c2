"""Routers are found through what vLLM's mixtures are given, and copied as they are."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from rheostat_engine.adapters.probing import PROBE_TOKENS
from rheostat_engine.adapters.routers import (
    SEVERAL_MIXTURES,
    TOO_WIDE,
    WRONG_SHAPE,
    Routers,
    find_routers,
)
from rheostat_engine.plan.points import site_count
from rheostat_engine.sites.block_layout import Block
from rheostat_engine.sites.op import bind
from rheostat_engine.worker.state.buffers import Buffers

from ..no_gates import no_gates

WIDTH = 6
EXPERTS = 4
LAYERS = 3


class Mixture(MoERunner):
    """One of vLLM's mixtures, without experts."""

    def __init__(self, said: torch.Tensor, experts: int = EXPERTS) -> None:
        nn.Module.__init__(self)
        self.moe_config: Any = SimpleNamespace(num_logical_experts=experts)
        self.said = said
        self.got: list[torch.Tensor] = []

    def _apply_quant_method(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        *rest: Any,  # vLLM's own
        **more: Any,  # as above
    ) -> Any:  # as above
        self.got.append(router_logits)
        return hidden_states

    def run(self) -> None:
        """As vLLM calls it."""
        self._apply_quant_method(
            hidden_states=torch.zeros(len(self.said), WIDTH),
            router_logits=self.said,
            shared_experts_input=None,
        )


def logits(experts: int = EXPERTS, tokens: int = PROBE_TOKENS) -> torch.Tensor:
    return torch.arange(float(tokens * experts)).view(tokens, experts)


def found(*layers: tuple[Mixture, ...], runs: int = 1) -> Routers:
    """What is found in blocks that hold these mixtures."""
    blocks, context = [], {}
    for layer, held in enumerate(layers):
        module = nn.ModuleList(held)
        blocks.append(Block(layer, module, ()))
        context |= {f"{layer}.{n}": one for n, one in enumerate(held)}
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context)
    )

    def run_model() -> None:
        for held in layers:
            for one in held * runs:
                one.run()

    return find_routers(blocks, config, WIDTH, run_model)


def test_vllm_hands_what_a_router_says_over_by_name() -> None:
    names = list(inspect.signature(MoERunner._apply_quant_method).parameters)
    assert names[:3] == ["self", "hidden_states", "router_logits"]
    called = inspect.getsource(MoERunner._forward_impl)
    assert "router_logits=router_logits," in called, "adapters/routers.py relies on it"


def test_a_router_is_found_where_there_is_a_mixture() -> None:
    routers = found((), (Mixture(logits()),), (Mixture(logits(5), 5),))
    assert routers.experts == {1: EXPERTS, 2: 5}
    assert routers.refused == {}
    assert routers.rows == {(EXPERTS, torch.float32), (5, torch.float32)}


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        ((Mixture(logits()), Mixture(logits())), SEVERAL_MIXTURES),
        ((Mixture(logits(EXPERTS + 1)),), WRONG_SHAPE),
        ((Mixture(logits(tokens=PROBE_TOKENS + 1)),), WRONG_SHAPE),
        ((Mixture(logits().int()),), WRONG_SHAPE),
        ((Mixture(logits(WIDTH + 1), WIDTH + 1),), TOO_WIDE),
    ],
    ids=["several", "another number", "other tokens", "no numbers", "too many"],
)
def test_a_router_that_is_not_understood_is_refused_with_the_reason(
    held: tuple[Mixture, ...], reason: str
) -> None:
    routers = found((Mixture(logits()),), held)
    assert (routers.experts, routers.refused) == ({0: EXPERTS}, {1: reason})


def test_one_that_does_not_run_once_is_refused() -> None:
    assert found((Mixture(logits()),), runs=2).refused == {0: WRONG_SHAPE}
    assert found((Mixture(logits()),), runs=0).refused == {0: WRONG_SHAPE}


def test_looking_changes_nothing() -> None:
    mixture = Mixture(logits())
    found((mixture,))
    assert "_apply_quant_method" not in mixture.__dict__
    assert type(mixture) is Mixture
    assert len(mixture.got) == 1


def test_what_it_says_is_copied_and_reaches_the_experts_unchanged() -> None:
    mixtures = [Mixture(logits()), Mixture(logits() + 100)]
    routers = found(*((one,) for one in mixtures))
    sites = site_count(LAYERS) + LAYERS
    buffers = Buffers(
        tokens=PROBE_TOKENS,
        rows=torch.zeros(2, WIDTH),
        directions=torch.zeros(2, WIDTH),
        ints=torch.zeros(2, 4, dtype=torch.int32),
        floats=torch.zeros(2, 4),
        gates=no_gates(PROBE_TOKENS),
        doses=torch.zeros(sites, 2, 4),
        ring=torch.zeros(9, WIDTH),
    )
    bind(buffers)
    site_slots = routers.install(buffers, lambda layer: site_count(LAYERS) + layer)
    assert site_slots == [site_count(LAYERS), site_count(LAYERS) + 1]
    buffers.cap_row[site_slots[1], [2, 5]] = torch.tensor([3, 7], dtype=torch.int32)
    buffers.active.mask[site_slots[1]] = True
    for one in mixtures:
        one.run()
        assert one.got[-1] is one.said
    assert torch.equal(mixtures[1].said, logits() + 100)
    expected = torch.zeros(9, WIDTH)
    expected[3, :EXPERTS], expected[7, :EXPERTS] = mixtures[1].said[2], mixtures[1].said[5]
    assert torch.equal(buffers.ring, expected)
