"""Finds each block's sites by running the block with changed tensors.

The input of a module is `resid_mid` if all of these hold:

* The module is called once, after attention.
* The input changes when attention's output changes.
* With the module's own output held fixed, a tensor added to the input leaves the block added to the
  stream.

If a block returns two tensors and the next block gives the same result with the two swapped, they
are a pair. `branches.py` defines branches. Names of classes and attributes are not used.

Invariant: a block whose behaviour doesn't fit is refused with the reason.
"""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from rheostat_engine.plan.points import Point
from rheostat_engine.sites.block_layout import Block, BlockLayout, SiteError, StreamLayout
from rheostat_engine.sites.block_replay import (
    NOISE_FACTOR,
    Replay,
    attention_noise,
    bitwise_equal,
    stream_sum,
)
from rheostat_engine.sites.branches import (
    NO_MODULES,
    NOT_AFTER,
    NOT_BEFORE,
    Branches,
    find_in_pair,
    find_in_single,
)
from rheostat_engine.sites.module_calls import (
    Args,
    Call,
    Forward,
    Kwargs,
    Trace,
    Value,
    cloned,
    patched_forwards,
    stream_tensors,
)

PARALLEL = "attention and MLP run in parallel on the same stream"
NOWHERE = "no module receives the stream after attention"


def probe(
    blocks: list[Block], width: int, run_model: Callable[[], object], *, rank: int = 0
) -> list[BlockLayout]:
    """The layout of every block.

    Args:
        blocks: consecutive decoder blocks.
        width: W.
        run_model: runs the whole model once, uncompiled, on a few tokens, without KV.
        rank: the tensor-parallel rank of this worker.

    Raises:
        SiteError: a block is never called, changes the stream's layout, or the stream is changed
            between two blocks.
    """
    noise = attention_noise([attention for block in blocks for attention in block.attention], 1)
    trace = Trace()
    with patched_forwards(noise | {b.module: trace.watch(b.module) for b in blocks}):
        run_model()
    calls = {call.module: call for call in trace.calls}
    for block in blocks:
        if block.module not in calls:
            raise SiteError(f"layer {block.layer} did not run as a module; its sites are unknown")
    replays = [Replay(block, calls[block.module], width, rank) for block in blocks]
    for replay, following in pairwise(replays):
        # A block may return more than the stream, and the next block receives only the stream.
        if not bitwise_equal(replay.parts[: max(1, len(following.inputs))], following.inputs):
            raise SiteError(
                f"the stream is changed between layers {replay.block.layer} and "
                f"{following.block.layer}; resid_post and resid_pre would not be one tensor"
            )
    for replay, following in zip(replays, [*replays[1:], replays[-1]], strict=True):
        replay.stream_layout = _stream_layout(replay, following, alone=len(replays) == 1)
    return [_layout(replay) for replay in replays]


def _stream_layout(replay: Replay, following: Replay, *, alone: bool) -> StreamLayout:
    """Tests the outputs of a block on the next block; the last block is tested on itself."""
    if len(replay.parts) == 1:
        return StreamLayout.SINGLE
    if len(following.inputs) > 1:
        h, residual, noise = (following.noise(following.inputs[0], seed) for seed in (4, 5, 6))
        left, swapped, changed = (
            following.exit_parts(following.run(inputs=parts))
            for parts in ([h, residual], [residual, h], [h, noise])
        )
        if following.close(stream_sum(left), stream_sum(swapped), stream_sum(left)):
            return StreamLayout.PAIR
        if following.close(left[0], changed[0], left[0]):
            return StreamLayout.SINGLE
    elif not alone:
        return StreamLayout.SINGLE
    else:
        replay.stream_layout = StreamLayout.PAIR
        if _find_mid(replay)[0] is not None:
            return StreamLayout.PAIR
    raise replay.no_stream()


def _layout(replay: Replay) -> BlockLayout:
    mid, parallel = _find_mid(replay)
    if replay.stream_layout is StreamLayout.SINGLE:
        branches = find_in_single(replay, mid)
        why = NO_MODULES, NO_MODULES
    elif mid is not None:
        branches, why = find_in_pair(replay, mid), (NOT_BEFORE, NOT_AFTER)
    else:
        branches, why = Branches(None, None), (NOWHERE, NOWHERE)
    points = {Point.RESID_MID: mid, Point.ATTN_OUT: branches.attention, Point.MLP_OUT: branches.mlp}
    reasons = (PARALLEL if parallel or branches.parallel else NOWHERE, *why)
    return BlockLayout(
        stream_layout=replay.stream_layout,
        mid=mid,
        attention=branches.attention,
        mlp=branches.mlp,
        refused={
            point: reason
            for (point, module), reason in zip(points.items(), reasons, strict=True)
            if module is None
        },
    )


def _find_mid(replay: Replay) -> tuple[nn.Module | None, bool]:
    """The module at `resid_mid`, or None. And, if None, whether the block runs in parallel.

    A block is parallel if a module after attention receives the stream without attention's output.
    """
    base, other = replay.run(), replay.run(seed=2, scale=NOISE_FACTOR)
    empty = [torch.zeros_like(part) for part in replay.inputs]
    alone, changed = replay.run(inputs=empty), replay.run(inputs=empty, seed=2)
    parallel = False
    runs = Counter(call.module for call in base.calls)
    for candidate in _after_attention(replay.block, base):
        if runs[candidate.module] > 1 or not _is_candidate(candidate, replay):
            continue
        if not _reaches_exit(replay, candidate, base):
            continue
        inputs, other_inputs, alone_inputs, changed_inputs = (
            _inputs_of(replay, trace, candidate.module) for trace in (base, other, alone, changed)
        )
        # Two tests, because a large stream may round a small branch away; and with a stream of
        # zeros, a branch that is multiplied by a function of the stream may be zero.
        if bitwise_equal(inputs, other_inputs) and not replay.differ(alone_inputs, changed_inputs):
            parallel = True
            continue
        return candidate.module, False
    return None, parallel


def _inputs_of(replay: Replay, trace: Trace, module: nn.Module) -> list[torch.Tensor]:
    """The stream inputs of a module's only call."""
    call = next(call for call in trace.calls if call.module is module)
    return stream_tensors(call.args, call.kwargs, replay.width)


def _after_attention(block: Block, trace: Trace) -> list[Call]:
    holders = {
        module
        for module in block.module.modules()
        if any(inner in block.attention for inner in module.modules())
    }
    last = max((i for i, c in enumerate(trace.calls) if c.module in holders), default=-1)
    inside = {inner for holder in holders - {block.module} for inner in holder.modules()}
    return [c for c in trace.calls[last + 1 :] if c.module not in inside]


def _is_candidate(call: Call, replay: Replay) -> bool:
    inputs = stream_tensors(call.args, call.kwargs, replay.width)
    return len(inputs) == (2 if replay.stream_layout is StreamLayout.PAIR else 1)


def _reaches_exit(replay: Replay, call: Call, base: Trace) -> bool:
    """Whether a change of the candidate's input leaves the block."""
    added = replay.noise(stream_tensors(call.args, call.kwargs, replay.width)[0], 3)

    def patch(forward: Forward, args: Args, kwargs: Kwargs) -> Value:
        stream_tensors(args, kwargs, replay.width)[0].add_(added)
        out = forward(*args, **kwargs)
        if replay.stream_layout is StreamLayout.PAIR:
            if not (isinstance(out, tuple) and len(out) == 2 and isinstance(call.out, tuple)):
                return out
            return (cloned(call.out[0]), out[1])
        return cloned(call.out)

    changed = replay.run({call.module: patch})
    before, after = replay.exit(base), replay.exit(changed)
    if before.shape != after.shape or before.shape != added.shape:
        return False
    return replay.close(after - before, added, added)
