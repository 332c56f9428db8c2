"""Puts the op at the sites: blocks and norms get a subclass whose forward calls it.

Invariant: each site's op stands exactly once, at a block's exit, before the module at `resid_mid`,
and at the first block's entry; a branch's stands behind the module that returns it, or, in pair
form, right before the op of the stream that it is added to. What the op is given exists anyway: in
pair form the exit's carried part is the float32 sum that the mid norm forms, not the norm's rounded
output, because asking for that output would make the compiler store it and round what follows
differently.
"""

from collections.abc import Sequence
from types import MethodType

import torch
from torch import nn

from rheostat_engine.plan.points import Point, Site
from rheostat_engine.sites.block_layout import Block, BlockLayout, Branch, SiteError, StreamLayout
from rheostat_engine.sites.module_calls import returned, streams
from rheostat_engine.sites.op import site
from rheostat_engine.worker.state.buffers import Buffers

_CARRIED: list[torch.Tensor] = []
"""Between a pair-form block's mid norm and its exit, while it is traced: the sum of the two."""


def install(
    blocks: Sequence[Block],
    layouts: Sequence[BlockLayout],
    buffers: Buffers,
    *,
    width: int,
    entry: bool,
) -> list[Site]:
    """Changes the classes of blocks and mid modules in place.

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
            raise SiteError(f"{base.__name__} has a forward of its own that is no method")
        key = (mixin, base, own and own.__func__)
        if key not in subclasses:
            # A forward that was set on the instance alone moves into the class: it would hide ours.
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
    """The attributes of all mixins, which come before the module's own class."""

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
        site(returned(out, self._rheostat_width)[0], None, self.rheostat_branch)
        return out


class _PairMid(_Sited):
    def forward(self, *args: object, **kwargs: object) -> object:
        h, residual = streams(args, kwargs, self._rheostat_width)
        if self._rheostat_has_branch:
            site(h, None, self.rheostat_branch)
        site(h, residual, self.rheostat_mid)
        if torch.compiler.is_compiling():
            _CARRIED.append(h.float() + residual.float())
        return super().forward(*args, **kwargs)


class _SingleMid(_Sited):
    def forward(self, *args: object, **kwargs: object) -> object:
        site(streams(args, kwargs, self._rheostat_width)[0], None, self.rheostat_mid)
        return super().forward(*args, **kwargs)


class _PairBlock(_Sited):
    def forward(self, *args: object, **kwargs: object) -> object:
        out = super().forward(*args, **kwargs)
        h, residual = returned(out, self._rheostat_width)
        if torch.compiler.is_compiling() and self._rheostat_has_mid:
            residual = _CARRIED.pop()
        if self._rheostat_has_branch:
            site(h, None, self.rheostat_branch)
        site(h, residual, self.rheostat_exit)
        return out


class _FirstPairBlock(_PairBlock):
    def forward(self, *args: object, **kwargs: object) -> object:
        site(streams(args, kwargs, self._rheostat_width)[0], None, self.rheostat_entry)
        return super().forward(*args, **kwargs)


class _SingleBlock(_Sited):
    def forward(self, *args: object, **kwargs: object) -> object:
        out = super().forward(*args, **kwargs)
        site(returned(out, self._rheostat_width)[0], None, self.rheostat_exit)
        return out


class _FirstSingleBlock(_SingleBlock):
    def forward(self, *args: object, **kwargs: object) -> object:
        site(streams(args, kwargs, self._rheostat_width)[0], None, self.rheostat_entry)
        return super().forward(*args, **kwargs)
