"""Finds the branches, the tensors that attention and the MLP add to the stream.

It runs the block with changed tensors, and compares the results.

Pair layout
    A branch is the first of the two parts. It is served if the other part is the stream to which
    the branch is added.
Single layout
    A branch is the output of a module. Two modules return the branches if all of these hold:

    * With the other module's output at zero, a tensor added to one module's output leaves the block
      multiplied by one number, the gain.
    * With both outputs at zero, the block returns its input bit for bit, whatever attention's
      noise. So nothing else is added.
    * The module at `resid_mid`, if there is one, receives the stream with attention's branch alone.

    The last such modules are taken, so that a norm or dropout behind a projection belongs to the
    branch.

Invariant: a block that doesn't fit is refused with the reason.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from rheostat_engine.sites.block_layout import Branch
from rheostat_engine.sites.block_replay import NOISE_FACTOR, Replay, bitwise_equal, stream_sum
from rheostat_engine.sites.module_calls import (
    Args,
    Call,
    Forward,
    ForwardPatch,
    Kwargs,
    Trace,
    Value,
    cloned,
    output_tensors,
    stream_tensors,
)

NO_MODULES = "no two modules return what attention and the MLP add to the stream"
NOT_BEFORE = "the block adds attention's output to something other than the stream that enters it"
NOT_AFTER = "the block adds the MLP's output to something other than the stream after attention"

_BRANCH_NOISE_FACTOR = 32
"""Noise in a branch is this many times as large as the stream, because the gain may be small, and
bfloat16 rounds small additions away."""


class Branches(NamedTuple):
    """The branches of a block."""

    attention: Branch | None
    mlp: Branch | None
    parallel: bool = False
    """Whether both read the stream that enters the block."""


def find_in_pair(replay: Replay, mid: nn.Module) -> Branches:
    """The branches of a block with pair layout: the first parts at the mid norm and at the exit."""
    base, other = replay.run(), replay.run(seed=2, scale=NOISE_FACTOR)
    inputs, other_inputs = (
        stream_tensors(call.args, call.kwargs, replay.width)
        for trace in (base, other)
        for call in trace.calls
        if call.module is mid
    )
    attention = _is_rounded(inputs[1], replay.entry) and bool(
        torch.equal(inputs[1], other_inputs[1])
    )
    mlp = _is_rounded(replay.exit_parts(base)[1], stream_sum(inputs))
    return Branches(Branch(None) if attention else None, Branch(None) if mlp else None)


def _is_rounded(part: torch.Tensor, stream: torch.Tensor) -> bool:
    """Whether `part` is `stream` (float32), rounded once or twice."""
    step = 2 * torch.finfo(part.dtype).eps
    return bool(torch.isclose(part.float(), stream, rtol=step, atol=1e-6).all())


def find_in_single(replay: Replay, mid: nn.Module | None) -> Branches:
    """The branches of a block with single layout: the outputs of two modules, or none."""
    candidates = _candidates(replay)
    for late, second in reversed(list(enumerate(candidates))):
        if not _adds_to_stream(replay, second, {}):
            continue
        patches = {second.module: _zeros_patch(replay)}
        for first in reversed(candidates[:late]):
            if _adds_to_stream(replay, first, patches):
                branches = _order(replay, first.module, second.module, mid)
                if branches is not None:
                    return branches
    return Branches(None, None)


def _candidates(replay: Replay) -> list[Call]:
    """Calls of modules that ran once and returned one tensor of the stream's shape."""
    return [
        call
        for call in _single_calls(replay.run())
        if call.module is not replay.block.module
        and [out.shape for out in output_tensors(call.out, replay.width)] == [replay.entry.shape]
    ]


def _single_calls(trace: Trace) -> list[Call]:
    """Calls of modules that ran exactly once, in the order in which they ended."""
    runs = Counter(call.module for call in trace.calls)
    return [call for call in trace.ended if runs[call.module] == 1]


def _adds_to_stream(replay: Replay, call: Call, patches: dict[nn.Module, ForwardPatch]) -> bool:
    """Whether a change of a module's output leaves the block multiplied by one number."""
    (out,) = output_tensors(call.out, replay.width)
    added = replay.noise(out, 3, times=_BRANCH_NOISE_FACTOR, apart=True)

    def add_noise(forward: Forward, args: Args, kwargs: Kwargs) -> Value:
        value = forward(*args, **kwargs)
        output_tensors(value, replay.width)[0].add_(added)
        return value

    before = replay.exit(replay.run(patches))
    after = replay.exit(replay.run({**patches, call.module: add_noise}))
    noise = added.float()
    change = after - before
    gain = float((change * noise).sum() / noise.square().sum())
    return bool(gain) and replay.close(change, gain * noise, gain * noise)


def _order(
    replay: Replay, first: nn.Module, second: nn.Module, mid: nn.Module | None
) -> Branches | None:
    """Decides which module is attention and which the MLP; None if the block adds anything else."""
    quiet = {first: _zeros_patch(replay), second: _zeros_patch(replay)}
    if not bitwise_equal(
        [replay.exit(replay.run(quiet, seed=2, scale=NOISE_FACTOR))], [replay.entry]
    ):
        return None
    runs = [replay.run({first: patch}) for patch in (_zeros_patch(replay), _noise_patch(replay, 3))]
    parallel = not _differs(replay, second, *runs)
    # Two scales: a stream may round a small branch away, and large noise may overflow float16.
    base, others = replay.run(), [replay.run(seed=2), replay.run(seed=2, scale=NOISE_FACTOR)]
    early, late = (
        any(_differs(replay, module, base, other) for other in others) for module in (first, second)
    )
    if (early == late) if parallel else not early:
        return None
    if parallel and late:
        first, second = second, first
    branches = [
        Branch(module, _gain(replay, module, other))
        for module, other in ((first, second), (second, first))
    ]
    if not all(branch.gain for branch in branches) or not _sums_match(replay, branches, mid):
        return None
    attention, mlp = branches
    return Branches(attention, mlp, parallel)


def _differs(replay: Replay, module: nn.Module, left: Trace, right: Trace) -> bool:
    """Whether a module returned different results in two runs."""
    lefts, rights = (
        output_tensors(next(c.out for c in trace.calls if c.module is module), replay.width)
        for trace in (left, right)
    )
    return replay.differ(lefts, rights)


def _gain(replay: Replay, module: nn.Module, other: nn.Module) -> float:
    """The factor by which the block multiplies a module's output; 0 if it can't be measured.

    The stream is zero, so that the product leaves the block unchanged. The module returns float32
    ones, because the model's dtype can't represent every gain. Later modules that run once return
    their recorded outputs, because they may not accept float32.
    """
    replaced = False

    def ones(forward: Forward, args: Args, kwargs: Kwargs) -> Value:
        nonlocal replaced
        out = forward(*args, **kwargs)
        (old,) = output_tensors(out, replay.width)
        unit = torch.ones_like(old, dtype=torch.float32)
        replaced = True
        return tuple(unit if v is old else v for v in out) if isinstance(out, tuple) else unit

    def replay_later(output: Value) -> ForwardPatch:
        return lambda forward, args, kwargs: (
            cloned(output) if replaced else forward(*args, **kwargs)
        )

    patches: dict[nn.Module, ForwardPatch] = {
        call.module: replay_later(call.out)
        for call in _single_calls(replay.run({other: _zeros_patch(replay)}))
        if module not in call.module.modules()
    }
    (other_out,) = (call.out for call in replay.run().calls if call.module is other)
    running, to_zeros = replay_later(other_out), _zeros_patch(replay)
    patches[other] = lambda forward, args, kwargs: to_zeros(
        lambda *a, **k: running(forward, a, k), args, kwargs
    )
    patches[module] = ones
    zeros = [torch.zeros_like(part) for part in replay.inputs]
    try:
        product = replay.exit_parts(replay.run(patches, inputs=zeros))[0]
    except RuntimeError:  # from torch, if the block accepts only its own dtype
        return 0.0
    values = product.unique()
    certain = values.numel() == 1 and (product.dtype is torch.float32 or float(values) == 1.0)
    return float(values) if certain else 0.0


def _sums_match(replay: Replay, branches: Sequence[Branch], mid: nn.Module | None) -> bool:
    """Whether the streams after attention and after the block are sums of the branches."""
    sums, patches = [replay.entry], dict[nn.Module, ForwardPatch]()
    for seed, branch in enumerate(branches, 3):
        assert branch.module is not None
        noise = replay.noise(replay.inputs[0], seed, times=_BRANCH_NOISE_FACTOR)
        patches[branch.module] = _noise_patch(replay, seed)
        sums.append(sums[-1] + branch.gain * noise.float())
        if len(sums) == 2 and mid is not None:
            calls = [call for call in replay.run(patches).calls if call.module is mid]
            inputs = [stream_tensors(call.args, call.kwargs, replay.width)[0] for call in calls]
            if not all(replay.close(part, sums[-1], sums[-1] - sums[-2]) for part in inputs):
                return False
    return replay.close(replay.exit(replay.run(patches)), sums[-1], sums[-1] - sums[-2])


def _zeros_patch(replay: Replay) -> ForwardPatch:
    """A patch that makes a module's output zero."""
    return _overwrite(replay, torch.zeros(()))


def _noise_patch(replay: Replay, seed: int) -> ForwardPatch:
    """A patch that replaces a module's output by noise larger than the stream."""
    return _overwrite(replay, replay.noise(replay.inputs[0], seed, times=_BRANCH_NOISE_FACTOR))


def _overwrite(replay: Replay, values: torch.Tensor) -> ForwardPatch:
    """A patch that overwrites a module's output in place, as the op at the site does."""

    def patch(forward: Forward, args: Args, kwargs: Kwargs) -> Value:
        out = forward(*args, **kwargs)
        output_tensors(out, replay.width)[0].copy_(values)
        return out

    return patch
