"""The routers of a model's mixtures of experts, and the op behind each.

All of vLLM's mixtures run through a `MoERunner`, which the static forward context knows. Whether a
block calls its router itself or hands it over, what the router says reaches `_apply_quant_method`,
from which experts are chosen.

Invariant: a mixture that the op can't stand in, or that is given something else than a number for
each expert, has no `router_logits`, and the reason is said.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from rheostat_engine.adapters.probing import PROBE_TOKENS
from rheostat_engine.core.buffers import Buffers
from rheostat_engine.sites.forms import Block
from rheostat_engine.sites.op import site

_GIVEN = "_apply_quant_method"

_Seen = dict[nn.Module, list[torch.Tensor]]
"""What routers said, by their mixture."""

SEVERAL = "the layer has several mixtures of experts"
OTHERWISE = "the layer's experts are not given one number for each of them and every token"
WIDE = "the layer has more experts than the stream is wide"


class Routers:
    """The routers of this rank's blocks."""

    def __init__(
        self,
        runners: Mapping[int, MoERunner],
        refused: Mapping[int, str],
        rows: Collection[tuple[int, torch.dtype]] = (),
    ) -> None:
        """Takes what was found.

        Args:
            runners: mixtures whose routers are served, by layer.
            refused: why others are not, by layer.
            rows: widths and types of what the routers say.
        """
        self._runners = runners
        self.rows = frozenset(rows)
        """Widths and types of what the routers say."""
        self.refused = dict(refused)
        """Why a layer's router is not served; layers without a mixture are missing."""
        self.experts = {layer: _experts(runner) for layer, runner in runners.items()}
        """From how many experts each router chooses, by layer."""

    def install(self, buffers: Buffers, place: Callable[[int], int]) -> list[int]:
        """Puts the op behind every router.

        Args:
            buffers: what the ops are given.
            place: where the tables keep a layer's router.

        Returns:
            The places.
        """
        classes: dict[type[MoERunner], type[MoERunner]] = {}
        for layer, runner in self._runners.items():
            base = type(runner)
            if base not in classes:
                classes[base] = type(f"Sited{base.__name__}", (_SitedRunner, base), {})
            mark = buffers.mark(place(layer))
            runner.register_buffer("rheostat_router", mark, persistent=False)
            runner.__class__ = classes[base]
        return [place(layer) for layer in self._runners]


class _SitedRunner(nn.Module):
    rheostat_router: torch.Tensor

    def _apply_quant_method(
        self,
        *,
        router_logits: torch.Tensor,
        **rest: Any,  # vLLM's own, passed through
    ) -> Any:  # as above
        site(router_logits, None, self.rheostat_router)
        return super()._apply_quant_method(  # type: ignore[misc]  # stands before a MoERunner
            router_logits=router_logits, **rest
        )


def find_routers(
    blocks: Sequence[Block], config: VllmConfig, width: int, run_model: Callable[[], object]
) -> Routers:
    """Finds the routers of some blocks, and sees what they say.

    Args:
        blocks: decoder blocks.
        config: the engine's, whose static forward context knows every mixture.
        width: W.
        run_model: runs the whole model once, uncompiled, on `PROBE_TOKENS` tokens, without KV.
    """
    context = config.compilation_config.static_forward_context
    known = {layer for layer in context.values() if isinstance(layer, MoERunner)}
    found = {
        block.layer: held
        for block in blocks
        if (held := [module for module in block.module.modules() if module in known])
    }
    seen: _Seen = {}
    runners = [runner for held in found.values() for runner in held]
    for runner in runners:
        runner.__dict__[_GIVEN] = _noting(getattr(runner, _GIVEN), seen.setdefault(runner, []))
    try:
        if runners:
            run_model()
    finally:
        for runner in runners:
            del runner.__dict__[_GIVEN]
    reasons = {layer: _why_not(held, seen, width) for layer, held in found.items()}
    served = {layer: held[0] for layer, held in found.items() if not reasons[layer]}
    return Routers(
        served,
        {layer: reason for layer, reason in reasons.items() if reason},
        {(_experts(runner), one.dtype) for runner in served.values() for one in seen[runner]},
    )


def _noting(stock: Callable[..., object], said: list[torch.Tensor]) -> Callable[..., object]:
    """Notes what comes from a router, and changes nothing."""

    def given(*, router_logits: torch.Tensor, **rest: Any) -> object:  # vLLM's own
        said.append(router_logits)
        return stock(router_logits=router_logits, **rest)

    return given


def _why_not(held: Sequence[MoERunner], seen: _Seen, width: int) -> str:
    if len(held) > 1:
        return SEVERAL
    (runner,) = held
    shapes = [tuple(one.shape) for one in seen[runner] if one.is_floating_point()]
    if shapes != [(PROBE_TOKENS, _experts(runner))]:
        return OTHERWISE
    return WIDE if _experts(runner) > width else ""


def _experts(runner: MoERunner) -> int:
    return int(runner.moe_config.num_logical_experts)
