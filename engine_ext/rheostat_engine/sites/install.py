"""Installs the op at the sites: blocks and norms get a subclass whose forward calls the op.

Invariant: each site has exactly one op.

Where the op runs
    At each block's exit, before the module at `resid_mid`, and at the first block's entry. A
    branch's op runs after the module that returns the branch. With pair layout, it runs right
    before the op of the stream to which the branch is added.
Why the residual at a pair's exit is recomputed
    The op at the exit gets the float32 sum that the mid norm forms anyway, not the residual that
    the norm returns in the model's dtype. Reading that tensor would make the compiler store it, and
    later values would be rounded differently.
"""

from collections.abc import Sequence
from types import MethodType

import torch
from torch import nn

from rheostat_engine.plan.points import Point, Site
from rheostat_engine.sites.block_layout import Block, BlockLayout, Branch, SiteError, StreamLayout
from rheostat_engine.sites.module_calls import output_tensors, stream_tensors
from rheostat_engine.sites.op import site
from rheostat_engine.worker.state.buffers import Buffers

_RESIDUALS: list[torch.Tensor] = []
"""While torch.compile traces a block with pair layout: the sum from its mid norm to its exit."""


def install(
    blocks: Sequence[Block],
    layouts: Sequence[BlockLayout],
    buffers: Buffers,
    *,
    width: int,
    entry: bool,
) -> list[Site]:
    """Replaces the classes of blocks, mid modules and branch modules in place.

    Args:
        blocks: consecutive decoder blocks.
        layouts: their layouts.
        buffers: the buffers of the ops.
        width: W.
        entry: whether the first block is the model's first, so that its `resid_pre` is no other
            block's `resid_post`.

    Returns:
        The installed sites.

    Raises:
        SiteError: a module's forward can't be wrapped.
    """
    installed: list[Site] = []
    subclasses: dict[tuple[object, ...], type[nn.Module]] = {}

    def swap(module: nn.Module, mixin: type[nn.Module]) -> None:
        base, own = type(module), module.__dict__.pop("forward", None)
        if own is not None and not isinstance(own, MethodType):
            raise SiteError(f"{base.__name__} has a forward on the instance that is not a method")
        key = (mixin, base, own and own.__func__)
        if key not in subclasses:
            # A forward set on the instance would hide ours, so it moves into the class.
            inner = base if own is None else type(base.__name__, (base,), {"forward": own.__func__})
            subclasses[key] = type(f"Sited{base.__name__}", (mixin, inner), {})
        module.__class__ = subclasses[key]

    def attach(module: nn.Module, where: str, at: Site) -> None:
        installed.append(at)
        module._rheostat_width = width  # type: ignore[assignment]  # nn.Module takes any attribute
        module.register_buffer(f"rheostat_{where}", buffers.site_handle(at.index), persistent=False)

    def attach_branch(branch: Branch | None, inside: nn.Module, at: Site) -> None:
        if branch is None:
            return
        buffers.gains[at.index] = branch.gain
        attach(branch.module or inside, "branch", at)
        if branch.module is None:
            inside._rheostat_has_branch = True  # type: ignore[assignment]  # as above
        else:
            swap(branch.module, _Branch)

    for number, (block, layout) in enumerate(zip(blocks, layouts, strict=True)):
        pair = layout.stream_layout is StreamLayout.PAIR
        attach_branch(
            layout.attention, layout.mid or block.module, Site(Point.ATTN_OUT, block.layer)
        )
        if layout.mid is not None:
            attach(layout.mid, "mid", Site(Point.RESID_MID, block.layer))
            swap(layout.mid, _PairMid if pair else _SingleMid)
        attach_branch(layout.mlp, block.module, Site(Point.MLP_OUT, block.layer))
        attach(block.module, "exit", Site(Point.RESID_POST, block.layer))
        block.module._rheostat_has_mid = layout.mid is not None  # type: ignore[assignment]  # as above
        first = entry and number == 0
        if first:
            attach(block.module, "entry", Site(Point.RESID_PRE, block.layer))
        if pair:
            swap(block.module, _FirstPairBlock if first else _PairBlock)
        else:
            swap(block.module, _FirstSingleBlock if first else _SingleBlock)
    return installed


class _Sited(nn.Module):
    """Attributes of the mixins below. A mixin comes before the module's class in the MRO."""

    _rheostat_width: int
    _rheostat_has_mid: bool
    _rheostat_has_branch: bool = False
    rheostat_entry: torch.Tensor
    rheostat_branch: torch.Tensor
    rheostat_mid: torch.Tensor
    rheostat_exit: torch.Tensor


class _Branch(_Sited):
    def forward(self, *args: object, **kwargs: object) -> object:
        out = super().forward(*args, **kwargs)
        site(output_tensors(out, self._rheostat_width)[0], None, self.rheostat_branch)
        return out


class _PairMid(_Sited):
    def forward(self, *args: object, **kwargs: object) -> object:
        h, residual = stream_tensors(args, kwargs, self._rheostat_width)
        if self._rheostat_has_branch:
            site(h, None, self.rheostat_branch)
        site(h, residual, self.rheostat_mid)
        if torch.compiler.is_compiling():
            _RESIDUALS.append(h.float() + residual.float())
        return super().forward(*args, **kwargs)


class _SingleMid(_Sited):
    def forward(self, *args: object, **kwargs: object) -> object:
        site(stream_tensors(args, kwargs, self._rheostat_width)[0], None, self.rheostat_mid)
        return super().forward(*args, **kwargs)


class _PairBlock(_Sited):
    def forward(self, *args: object, **kwargs: object) -> object:
        out = super().forward(*args, **kwargs)
        h, residual = output_tensors(out, self._rheostat_width)
        if self._rheostat_has_branch:
            site(h, None, self.rheostat_branch)
        if not (torch.compiler.is_compiling() and self._rheostat_has_mid):
            site(h, residual, self.rheostat_exit)
            return out
        total = _RESIDUALS.pop()
        site(h, total, self.rheostat_exit)
        return tuple(total.to(part.dtype) if part is residual else part for part in out)


class _FirstPairBlock(_PairBlock):
    def forward(self, *args: object, **kwargs: object) -> object:
        site(stream_tensors(args, kwargs, self._rheostat_width)[0], None, self.rheostat_entry)
        return super().forward(*args, **kwargs)


class _SingleBlock(_Sited):
    def forward(self, *args: object, **kwargs: object) -> object:
        out = super().forward(*args, **kwargs)
        site(output_tensors(out, self._rheostat_width)[0], None, self.rheostat_exit)
        return out


class _FirstSingleBlock(_SingleBlock):
    def forward(self, *args: object, **kwargs: object) -> object:
        site(stream_tensors(args, kwargs, self._rheostat_width)[0], None, self.rheostat_entry)
        return super().forward(*args, **kwargs)
