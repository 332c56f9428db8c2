"""Finds each block's sites by running the block and seeing what its tensors do.

A tensor that a module is given is `resid_mid` if, and only if,
* the module is called after attention,
* the tensor changes when attention's output changes, and
* what is added to it, with the module's own output held fixed, comes out of the block added to the
  stream, no more and no less.
Names of classes and attributes play no part.

Invariant: a block whose behaviour doesn't fit is refused with the reason, never guessed at.
"""

from collections.abc import Callable

import torch
from torch import nn

from rheostat_engine.sites.calls import (
    Args,
    Around,
    Call,
    Forward,
    Kwargs,
    Trace,
    Value,
    copied,
    patched,
    streams,
)
from rheostat_engine.sites.forms import Block, BlockForm, Carrier, SiteError

_TOLERANCE = 0.05
"""Relative; bfloat16 rounds sums to 0.4 %, a wrong site is off by 100 %."""
_LOUD = 1000.0
"""How much larger attention's other noise is: a stream rounds small branches away."""


def probe(blocks: list[Block], width: int, run_model: Callable[[], object]) -> list[BlockForm]:
    """The form of every block.

    Args:
        blocks: consecutive decoder blocks.
        width: W.
        run_model: runs the whole model once, uncompiled, on a few tokens, without KV.

    Raises:
        SiteError: a block is never called, changes the stream's carrier, or the stream is changed
            between two blocks.
    """
    noise = _Noise([attention for block in blocks for attention in block.attention])
    trace = Trace()
    with patched({**noise.around(1), **{b.module: trace.watch(b.module) for b in blocks}}):
        run_model()
    calls = {call.module: call for call in trace.calls}
    for block in blocks:
        if block.module not in calls:
            raise SiteError(f"layer {block.layer} did not run as a module; its sites are unknown")
    ordered = [calls[block.module] for block in blocks]
    for block, call, following in zip(blocks, ordered, ordered[1:], strict=False):
        if not _equal(
            _parts(call.out, block, width), streams(following.args, following.kwargs, width)
        ):
            raise SiteError(
                f"the stream is changed between layers {block.layer} and {block.layer + 1}; "
                "resid_post and resid_pre would not be one tensor"
            )
    return [_form(block, calls[block.module], noise, width) for block in blocks]


class _Noise:
    """Attention that answers with reproducible noise instead of what it would compute."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules

    def around(self, seed: int, scale: float = 1.0) -> dict[nn.Module, Around]:
        return {module: self._one(seed, scale) for module in self._modules}

    def _one(self, seed: int, scale: float) -> Around:
        def around(forward: Forward, args: Args, kwargs: Kwargs) -> Value:
            out = forward(*args, **kwargs)
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                return scale * _noise_like(out, seed)
            return out

        return around


def _form(block: Block, call: Call, noise: _Noise, width: int) -> BlockForm:
    parts = _parts(call.out, block, width)
    carrier = Carrier.PAIR if len(parts) == 2 else Carrier.SINGLE
    mid, parallel = _find_mid(block, call, noise, width, carrier)
    if mid is not None:
        return BlockForm(carrier, mid, "")
    if parallel:
        return BlockForm(carrier, None, "attention and MLP run in parallel on the same stream")
    return BlockForm(carrier, None, "no module is given the stream after attention")


def _find_mid(
    block: Block, call: Call, noise: _Noise, width: int, carrier: Carrier
) -> tuple[nn.Module | None, bool]:
    """The module at `resid_mid`, and whether one was given the stream before attention instead."""
    base = _replay(block, call, noise, {}, seed=1)
    other = _replay(block, call, noise, {}, seed=2, scale=_LOUD)
    attended = _after_attention(block, base)
    parallel = False
    seen: set[nn.Module] = set()
    for candidate in attended:
        if candidate.module in seen or not _is_candidate(candidate, width, carrier):
            continue
        seen.add(candidate.module)
        if not _carries(block, call, noise, width, candidate, base, carrier):
            continue
        twin = next((c for c in other.calls if c.module is candidate.module), None)
        if twin is None or _equal(
            streams(candidate.args, candidate.kwargs, width), streams(twin.args, twin.kwargs, width)
        ):
            parallel = True
            continue
        return candidate.module, False
    return None, parallel


def _after_attention(block: Block, trace: Trace) -> list[Call]:
    holders = {
        module
        for module in block.module.modules()
        if any(inner in block.attention for inner in module.modules())
    }
    last = max((i for i, c in enumerate(trace.calls) if c.module in holders), default=-1)
    inside = {inner for holder in holders - {block.module} for inner in holder.modules()}
    return [c for c in trace.calls[last + 1 :] if c.module not in inside]


def _is_candidate(call: Call, width: int, carrier: Carrier) -> bool:
    given = streams(call.args, call.kwargs, width)
    return len(given) == (2 if carrier is Carrier.PAIR else 1)


def _carries(
    block: Block, call: Call, noise: _Noise, width: int, seen: Call, base: Trace, carrier: Carrier
) -> bool:
    """Whether what is added to the candidate's input comes out of the block."""
    given = streams(seen.args, seen.kwargs, width)
    target = given[0]
    # As large as the stream, which may be far larger than the branch: the sum is rounded to it.
    whole = torch.stack([part.float() for part in given]).sum(0)
    scale = whole.pow(2).mean().sqrt().clamp(min=1e-2)
    added = (_noise_like(target, 3).float() * scale).to(target.dtype)

    def around(forward: Forward, args: Args, kwargs: Kwargs) -> Value:
        streams(args, kwargs, width)[0].add_(added)
        out = forward(*args, **kwargs)
        if carrier is Carrier.PAIR:
            if not (isinstance(out, tuple) and len(out) == 2 and isinstance(seen.out, tuple)):
                return out
            return (copied(seen.out[0]), out[1])
        return copied(seen.out)

    changed = _replay(block, call, noise, {seen.module: around}, seed=1)
    before, after = _stream(base, block, width), _stream(changed, block, width)
    if before.shape != after.shape or before.shape != added.shape:
        return False
    difference = after - before - added.float()
    return bool(difference.norm() <= _TOLERANCE * added.float().norm())


def _replay(
    block: Block,
    call: Call,
    noise: _Noise,
    around: dict[nn.Module, Around],
    *,
    seed: int,
    scale: float = 1.0,
) -> Trace:
    trace = Trace()
    attention = {m: a for m, a in noise.around(seed, scale).items() if m in block.attention}
    watched = {
        module: trace.watch(module)
        for module in block.module.modules()
        if module not in attention and module not in around
    }
    with torch.inference_mode(), patched({**watched, **attention, **around}):
        args, kwargs = copied(call.args), copied(call.kwargs)
        block.module.forward(*args, **kwargs)
    return trace


def _stream(trace: Trace, block: Block, width: int) -> torch.Tensor:
    whole = next(c for c in trace.calls if c.module is block.module)
    parts = _parts(whole.out, block, width)
    return torch.stack([part.float() for part in parts]).sum(0)


def _parts(out: Value, block: Block, width: int) -> list[torch.Tensor]:
    values = out if isinstance(out, tuple) else (out,)
    parts = streams(values, {}, width)
    if not parts or len(parts) > 2 or any(p.shape != parts[0].shape for p in parts):
        raise SiteError(
            f"layer {block.layer} ({type(block.module).__name__}) returns neither the stream nor "
            "a pair that sums to it"
        )
    return parts


def _equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ones) == len(others) and all(
        one.shape == other.shape and bool(torch.equal(one, other))
        for one, other in zip(ones, others, strict=True)
    )


def _noise_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(tensor.shape, generator=generator)
    return noise.to(device=tensor.device, dtype=tensor.dtype)
