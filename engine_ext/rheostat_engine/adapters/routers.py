"""The routers of a model's mixtures of experts, and the op after each.

All of vLLM's mixtures run through a `MoERunner` in the static forward context. Whether a block
calls its router or passes it on, the logits reach `_apply_quant_method`, which chooses the experts.

Invariant: if the op can't be installed, or a mixture does not receive one logit per expert and
token, the layer has no `router_logits`, and the reason is reported.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from rheostat_engine.adapters.probing import PROBE_TOKENS
from rheostat_engine.sites.block_layout import Block
from rheostat_engine.sites.op import site
from rheostat_engine.worker.state.buffers import Buffers

_METHOD = "_apply_quant_method"

_RecordedLogits = dict[nn.Module, list[torch.Tensor]]
"""The recorded logits of each mixture."""

SEVERAL_MIXTURES = "the layer has several mixtures of experts"
WRONG_SHAPE = "the layer's experts do not receive one logit for each expert and token"
TOO_WIDE = "the layer has more experts than the stream has elements"


@dataclass(frozen=True)
class Routers:
    """The routers of this rank's blocks."""

    runners: dict[int, MoERunner]
    """By layer: the mixture whose router is served."""
    refused: dict[int, str]
    """By layer: why the router of a mixture is not served."""
    rows: Collection[tuple[int, torch.dtype]] = ()
    """Widths and dtypes of the logits."""

    @property
    def experts(self) -> dict[int, int]:
        """By layer: the number of experts."""
        return {layer: _experts(runner) for layer, runner in self.runners.items()}

    def install(self, buffers: Buffers, slot_of: Callable[[int], int]) -> list[int]:
        """Installs the op after every router; returns their slots (`slot_of` a layer)."""
        classes: dict[type[MoERunner], type[MoERunner]] = {}
        for layer, runner in self.runners.items():
            base = type(runner)
            if base not in classes:
                classes[base] = type(f"Sited{base.__name__}", (_SitedRunner, base), {})
            site_handle = buffers.site_handle(slot_of(layer))
            runner.register_buffer("rheostat_router", site_handle, persistent=False)
            runner.__class__ = classes[base]
        return [slot_of(layer) for layer in self.runners]


class _SitedRunner(nn.Module):
    rheostat_router: torch.Tensor

    def _apply_quant_method(
        self,
        *,
        router_logits: torch.Tensor,
        **rest: Any,  # vLLM's own, passed through
    ) -> Any:  # as above
        site(router_logits, None, self.rheostat_router)
        return super()._apply_quant_method(  # type: ignore[misc]  # precedes a MoERunner
            router_logits=router_logits, **rest
        )


def find_routers(
    blocks: Sequence[Block], config: VllmConfig, width: int, run_model: Callable[[], object]
) -> Routers:
    """Finds the routers of decoder blocks, and checks their logits.

    Args:
        blocks: decoder blocks.
        config: the engine's, with the static forward context.
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
    recorded: _RecordedLogits = {}
    runners = [runner for mixtures in by_layer.values() for runner in mixtures]
    for runner in runners:
        runner.__dict__[_METHOD] = _recording(
            getattr(runner, _METHOD), recorded.setdefault(runner, [])
        )
    try:
        if runners:
            run_model()
    finally:
        for runner in runners:
            del runner.__dict__[_METHOD]
    reasons = {layer: _refusal(mixtures, recorded, width) for layer, mixtures in by_layer.items()}
    served = {layer: mixtures[0] for layer, mixtures in by_layer.items() if not reasons[layer]}
    return Routers(
        served,
        {layer: reason for layer, reason in reasons.items() if reason},
        {
            (_experts(runner), logits.dtype)
            for runner in served.values()
            for logits in recorded[runner]
        },
    )


def _recording(stock: Callable[..., object], recorded: list[torch.Tensor]) -> Callable[..., object]:
    """Records the logits, and changes nothing."""

    def record(*, router_logits: torch.Tensor, **rest: Any) -> object:  # vLLM's own
        recorded.append(router_logits)
        return stock(router_logits=router_logits, **rest)

    return record


def _refusal(mixtures: Sequence[MoERunner], recorded: _RecordedLogits, width: int) -> str:
    if len(mixtures) > 1:
        return SEVERAL_MIXTURES
    (runner,) = mixtures
    shapes = [tuple(logits.shape) for logits in recorded[runner] if logits.is_floating_point()]
    if shapes != [(PROBE_TOKENS, _experts(runner))]:
        return WRONG_SHAPE
    return TOO_WIDE if _experts(runner) > width else ""


def _experts(runner: MoERunner) -> int:
    return int(runner.moe_config.num_logical_experts)
