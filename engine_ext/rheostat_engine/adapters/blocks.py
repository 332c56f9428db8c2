"""Finds the decoder blocks of a loaded vLLM model.

A block is a child of an `nn.ModuleList`, and contains attention (or another layer with state) from
vLLM's static forward context.

Invariant: the model has exactly one such list, or is refused.
"""

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from rheostat_engine.sites.block_layout import Block, SiteError


def find_blocks(model: nn.Module, config: VllmConfig) -> list[Block]:
    """The decoder blocks of this rank, ascending by layer.

    Raises:
        SiteError: there is no decoder, or more than one.
    """
    context = config.compilation_config.static_forward_context
    stateful = {
        layer
        for layer in context.values()
        if isinstance(layer, AttentionLayerBase) and isinstance(layer, nn.Module)
    }
    lists: dict[str, list[Block]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            blocks = [
                Block(layer, child, attention)
                for layer, child in enumerate(module)
                if (attention := tuple(m for m in child.modules() if m in stateful))
            ]
            if blocks:
                lists[name] = blocks
    outermost = {
        name: blocks
        for name, blocks in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists if other != name)
    }
    if len(outermost) != 1:
        names = ", ".join(sorted(outermost)) or "none"
        raise SiteError(f"expected one list of decoder blocks, found: {names}")
    (blocks,) = outermost.values()
    return blocks
