"""Finds the branches, which attention and the MLP add to the stream, by changing them.

In pair form a branch is the first of two parts. It is served if the other part is the stream that
the branch is added to. In single form it is some module's output. Two modules return the branches
if, and only if,
* what is added to the output of either comes out of the block multiplied by one number, its gain,
  no more and no less, while the other's output is held at zero,
* with both outputs at zero the block returns what it was given, bit for bit, whatever attention's
  noise: nothing else is added, and
* the module at `resid_mid`, if there is one, is given the stream with attention's branch alone.
The last such modules are taken, so that a norm or a dropout behind a projection is part of the
branch.

Invariant: a block that doesn't fit is refused with the reason.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from rheostat_engine.sites.block_layout import Branch
from rheostat_engine.sites.module_calls import (
    Args,
    Around,
    Call,
    Forward,
    Kwargs,
    Trace,
    Value,
    copied,
    returned,
    streams,
)
from rheostat_engine.sites.replay import LOUD, Replay, equal, whole

NO_MODULES = "no two modules return what attention and the MLP add to the stream"
NOT_BEFORE = "what attention's output is added to is not the stream that enters the block"
NOT_AFTER = "what the MLP's output is added to is not the stream after attention"


_MUCH = 32
"""The factor of the noise in branches over the stream, because gains may be small, and bfloat16
rounds small additions."""


class Branches(NamedTuple):
    """The branches of a block."""

    attention: Branch | None
    mlp: Branch | None
    parallel: bool = False
    """Whether both read the stream that enters the block."""


def beside(replay: Replay, mid: nn.Module) -> Branches:
    """The branches of a pair-form block: what the mid norm and the next block are given first."""
    base, other = replay.run(), replay.run(seed=2, scale=LOUD)
    given, again = (
        streams(call.args, call.kwargs, replay.width)
        for trace in (base, other)
        for call in trace.calls
        if call.module is mid
    )
    entered = _same(given[1], replay.entry) and bool(torch.equal(given[1], again[1]))
    left = _same(replay.exit_parts(base)[1], whole(given))
    return Branches(Branch(None) if entered else None, Branch(None) if left else None)


def _same(part: torch.Tensor, stream: torch.Tensor) -> bool:
    """Whether a part is a float32 stream, rounded once or twice."""
    step = 2 * torch.finfo(part.dtype).eps
    return bool(torch.isclose(part.float(), stream, rtol=step, atol=1e-6).all())


def search(replay: Replay, mid: nn.Module | None) -> Branches:
    """The branches of a single-form block: two modules' outputs, or neither."""
    candidates = _candidates(replay)
    for late, second in reversed(list(enumerate(candidates))):
        if not _comes_out(replay, second, {}):
            continue
        silent = {second.module: _silence(replay)}
        for first in reversed(candidates[:late]):
            if _comes_out(replay, first, silent):
                branches = _settle(replay, first.module, second.module, mid)
                if branches is not None:
                    return branches
    return Branches(None, None)


def _candidates(replay: Replay) -> list[Call]:
    """Calls that return one tensor of the stream's shape, of modules that ran only once."""
    return [
        call
        for call in _once(replay.run())
        if call.module is not replay.block.module
        and [out.shape for out in returned(call.out, replay.width)] == [replay.entry.shape]
    ]


def _once(trace: Trace) -> list[Call]:
    """Calls of the modules that ran but once, in the order in which they ended."""
    runs = Counter(call.module for call in trace.calls)
    return [call for call in trace.ended if runs[call.module] == 1]


def _comes_out(replay: Replay, call: Call, around: dict[nn.Module, Around]) -> bool:
    """Whether a change of a module's output leaves the block, up to a factor."""
    (out,) = returned(call.out, replay.width)
    added = replay.loud(out, 3, times=_MUCH, apart=True)

    def louder(forward: Forward, args: Args, kwargs: Kwargs) -> Value:
        value = forward(*args, **kwargs)
        returned(value, replay.width)[0].add_(added)
        return value

    before = replay.exit(replay.run(around))
    after = replay.exit(replay.run({**around, call.module: louder}))
    noise = added.float()
    change = after - before
    gain = float((change * noise).sum() / noise.square().sum())
    return bool(gain) and replay.near(change, gain * noise, gain * noise)


def _settle(
    replay: Replay, first: nn.Module, second: nn.Module, mid: nn.Module | None
) -> Branches | None:
    """Orders two modules as attention and MLP; None if the block adds anything else."""
    quiet = {first: _silence(replay), second: _silence(replay)}
    if not equal([replay.exit(replay.run(quiet, seed=2, scale=LOUD))], [replay.entry]):
        return None
    runs = [replay.run({first: around}) for around in (_silence(replay), _loud(replay, 3))]
    parallel = not _differs(replay, second, *runs)
    # A stream may round a small branch away, and loud attention may be too much for float16.
    base, others = replay.run(), [replay.run(seed=2), replay.run(seed=2, scale=LOUD)]
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
    if not all(branch.gain for branch in branches) or not _add_up(replay, branches, mid):
        return None
    attention, mlp = branches
    return Branches(attention, mlp, parallel)


def _differs(replay: Replay, module: nn.Module, left: Trace, right: Trace) -> bool:
    """Whether a module returned different results in two runs."""
    lefts, rights = (
        returned(next(c.out for c in trace.calls if c.module is module), replay.width)
        for trace in (left, right)
    )
    return replay.differ(lefts, rights)


def _gain(replay: Replay, module: nn.Module, other: nn.Module) -> float:
    """The factor by which the block multiplies a module's output; 0 if it can't be measured.

    The stream is held at zero, so that the product comes out as it is. The output is float32, as
    the model's dtype can't hold a gain, and what ran once after it returns what it did before.
    """
    given: list[bool] = []

    def ones(forward: Forward, args: Args, kwargs: Kwargs) -> Value:
        out = forward(*args, **kwargs)
        (old,) = returned(out, replay.width)
        unit = torch.ones_like(old, dtype=torch.float32)
        given.append(True)
        return tuple(unit if v is old else v for v in out) if isinstance(out, tuple) else unit

    def later(output: Value) -> Around:
        return lambda forward, args, kwargs: copied(output) if given else forward(*args, **kwargs)

    around: dict[nn.Module, Around] = {
        call.module: later(call.out)
        for call in _once(replay.run({other: _silence(replay)}))
        if module not in call.module.modules()
    }
    (own,) = (call.out for call in replay.run().calls if call.module is other)
    running, silence = later(own), _silence(replay)
    around[other] = lambda forward, args, kwargs: silence(
        lambda *a, **k: running(forward, a, k), args, kwargs
    )
    around[module] = ones
    zeros = [torch.zeros_like(part) for part in replay.given]
    try:
        left = replay.exit_parts(replay.run(around, given=zeros))[0]
    except RuntimeError:  # torch's, of a block that takes no other dtype than its own
        return 0.0
    values = left.unique()
    certain = values.numel() == 1 and (left.dtype is torch.float32 or float(values) == 1.0)
    return float(values) if certain else 0.0


def _add_up(replay: Replay, branches: Sequence[Branch], mid: nn.Module | None) -> bool:
    """Whether the streams after attention and after the block are sums of the branches."""
    sums, around = [replay.entry], dict[nn.Module, Around]()
    for seed, branch in enumerate(branches, 3):
        assert branch.module is not None
        noise = replay.loud(replay.given[0], seed, times=_MUCH)
        around[branch.module] = _loud(replay, seed)
        sums.append(sums[-1] + branch.gain * noise.float())
        if len(sums) == 2 and mid is not None:
            calls = [call for call in replay.run(around).calls if call.module is mid]
            given = [streams(call.args, call.kwargs, replay.width)[0] for call in calls]
            if not all(replay.near(part, sums[-1], sums[-1] - sums[-2]) for part in given):
                return False
    return replay.near(replay.exit(replay.run(around)), sums[-1], sums[-1] - sums[-2])


def _silence(replay: Replay) -> Around:
    """A module whose output is zeros."""
    return _replace(replay, torch.zeros(()))


def _loud(replay: Replay, seed: int) -> Around:
    """A module whose output is noise, larger than the stream."""
    return _replace(replay, replay.loud(replay.given[0], seed, times=_MUCH))


def _replace(replay: Replay, values: torch.Tensor) -> Around:
    """A module whose output is something else, written over it as the op at the site does."""

    def around(forward: Forward, args: Args, kwargs: Kwargs) -> Value:
        out = forward(*args, **kwargs)
        returned(out, replay.width)[0].copy_(values)
        return out

    return around
