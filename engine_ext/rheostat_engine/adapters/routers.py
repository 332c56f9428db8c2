"""The routers of a model's mixtures of experts, and the op behind each.

All of vLLM's mixtures run through a `MoERunner`, which the static forward context knows. Whether a
block calls its router itself or passes it on, the logits reach `_apply_quant_method`, which chooses
the experts.

Invariant: if the op can't be put into a mixture, or the mixture does not get one number for each
expert, the layer has no `router_logits`, and the reason is reported.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from rheostat_engine.adapters.probing import PROBE_TOKENS
from rheostat_engine.sites.block_layout import Block
from rheostat_engine.sites.op import site
from rheostat_engine.worker.state.buffers import Buffers

_GIVEN = "_apply_quant_method"

_Seen = dict[nn.Module, list[torch.Tensor]]
"""The logits of routers, by their mixture."""

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
        """Stores the routers.

        Args:
            runners: mixtures whose routers are served, by layer.
            refused: why others are not, by layer.
            rows: widths and types of the logits.
        """
        self._runners = runners
        self.rows = frozenset(rows)
        """Widths and types of the logits."""
        self.refused = dict(refused)
        """Why a layer's router is not served; layers without a mixture are missing."""
        self.experts = {layer: _experts(runner) for layer, runner in runners.items()}
        """From how many experts each router chooses, by layer."""

    def install(self, buffers: Buffers, slot_of: Callable[[int], int]) -> list[int]:
        """Puts the op behind every router.

        Args:
            buffers: the buffers of the ops.
            slot_of: returns the slot of a layer's router.

        Returns:
            The slots of the routers.
        """
        classes: dict[type[MoERunner], type[MoERunner]] = {}
        for layer, runner in self._runners.items():
            base = type(runner)
            if base not in classes:
                classes[base] = type(f"Sited{base.__name__}", (_SitedRunner, base), {})
            site_handle = buffers.site_handle(slot_of(layer))
            runner.register_buffer("rheostat_router", site_handle, persistent=False)
            runner.__class__ = classes[base]
        return [slot_of(layer) for layer in self._runners]


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
    """Finds the routers of some blocks, and checks their logits.

    Args:
        blocks: decoder blocks.
        config: the engine's, whose static forward context knows every mixture.
        width: W.
        run_model: runs the whole model once, uncompiled, on `PROBE_TOKENS` tokens, without KV.
    """
    context = config.compilation_config.static_forward_context
    runners_of_model = {layer for layer in context.values() if isinstance(layer, MoERunner)}
    by_layer = {
        block.layer: mixtures
        for block in blocks
        if (mixtures := [module for module in block.module.modules() if module in runners_of_model])
    }
    seen: _Seen = {}
    runners = [runner for mixtures in by_layer.values() for runner in mixtures]
    for runner in runners:
        runner.__dict__[_GIVEN] = _noting(getattr(runner, _GIVEN), seen.setdefault(runner, []))
    try:
        if runners:
            run_model()
    finally:
        for runner in runners:
            del runner.__dict__[_GIVEN]
    reasons = {layer: _why_not(mixtures, seen, width) for layer, mixtures in by_layer.items()}
    served = {layer: mixtures[0] for layer, mixtures in by_layer.items() if not reasons[layer]}
    return Routers(
        served,
        {layer: reason for layer, reason in reasons.items() if reason},
        {(_experts(runner), logits.dtype) for runner in served.values() for logits in seen[runner]},
    )


def _noting(stock: Callable[..., object], seen: list[torch.Tensor]) -> Callable[..., object]:
    """Stores the logits of a router, and changes nothing."""

    def given(*, router_logits: torch.Tensor, **rest: Any) -> object:  # vLLM's own
        seen.append(router_logits)
        return stock(router_logits=router_logits, **rest)

    return given


def _why_not(mixtures: Sequence[MoERunner], seen: _Seen, width: int) -> str:
    if len(mixtures) > 1:
        return SEVERAL
    (runner,) = mixtures
    shapes = [tuple(logits.shape) for logits in seen[runner] if logits.is_floating_point()]
    if shapes != [(PROBE_TOKENS, _experts(runner))]:
        return OTHERWISE
    return WIDE if _experts(runner) > width else ""


def _experts(runner: MoERunner) -> int:
    return int(runner.moe_config.num_logical_experts)
