"""Runs one block again on its recorded inputs, with attention's output replaced by noise.

Invariants: equal replays give equal results on every rank, apart from the noise of `loud`. A replay
changes neither the block nor its recorded inputs.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rheostat_engine.sites.block_layout import Block, SiteError, StreamLayout
from rheostat_engine.sites.module_calls import (
    Args,
    Around,
    Call,
    Forward,
    Kwargs,
    Trace,
    Value,
    copied,
    patched,
    returned,
    streams,
)

LOUD = 1000.0
"""The factor of attention's other noise, because a stream rounds small branches away."""
_ROUNDINGS = 8
"""Tolerance of a comparison, in epsilons of the stream's dtype. Noise is as large as the stream, so
that every addition up to the block's exit rounds by half an epsilon of it or little more. At most
five additions lie between the noise and the exit, in the run with it and in the run without it."""
_LEAST_TOLERANCE = 1e-4
"""Tolerance of a comparison in float32. A wrong site is off by 1."""
_LEAST_SIZE = 1e-2
"""Least standard deviation of noise, because dummy weights give next to no stream."""
_HEADROOM = 64
"""The factor by which noise stays below the largest number of its dtype (65,504 in float16)."""

Arounds = Mapping[nn.Module, Around]


class AttentionNoise:
    """Replaces the output of attention by reproducible noise."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """`modules` are the layers that hold KV or state."""
        self._modules = modules

    def around(self, seed: int, scale: float = 1.0) -> dict[nn.Module, Around]:
        """The replacement of each module's forward."""
        return {module: self._replacement(seed, scale) for module in self._modules}

    def _replacement(self, seed: int, scale: float) -> Around:
        def around(forward: Forward, args: Args, kwargs: Kwargs) -> Value:
            out = forward(*args, **kwargs)
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                return scale * noise_like(out, seed)
            return out

        return around


class Replay:
    """A block and one call of it."""

    def __init__(self, block: Block, call: Call, width: int, rank: int) -> None:
        """Prepares to repeat a recorded call.

        Args:
            block: the block.
            call: the recorded call of the block.
            width: W.
            rank: the tensor-parallel rank of this worker.
        """
        self.block = block
        self.width = width
        self.stream_layout = StreamLayout.SINGLE
        """How the block passes the stream on; set by the probe."""
        self.given = streams(call.args, call.kwargs, width)
        """The inputs that may be parts of the stream."""
        self._call = call
        self._rank = rank
        self._attention = AttentionNoise(block.attention)
        self.parts = self.parts_of(call.out)
        """Its results: the stream, or two parts."""
        if not all(bool(part.isfinite().all()) for part in self.parts):
            raise SiteError(
                f"layer {block.layer} ({type(block.module).__name__}) returns numbers that are not "
                f"finite in {self.parts[0].dtype}; its sites can't be found"
            )
        entering = [part for part in self.given if part.shape == self.parts[0].shape]
        epsilon = max(torch.finfo(part.dtype).eps for part in (*entering, *self.parts))
        self._tolerance = max(_ROUNDINGS * epsilon, _LEAST_TOLERANCE)
        ends = [parts for parts in (entering, self.parts) if parts]
        self._size = max(_LEAST_SIZE, *(float(whole(p).square().mean().sqrt()) for p in ends))

    def run(
        self,
        around: Arounds | None = None,
        *,
        seed: int = 1,
        scale: float = 1.0,
        given: Sequence[torch.Tensor] | None = None,
    ) -> Trace:
        """Runs the block.

        Args:
            around: replacements of modules' forwards; these modules are not recorded.
            seed: the seed of attention's noise.
            scale: the scale of attention's noise.
            given: other inputs.
        """
        around = around or {}
        trace = Trace()
        attention = self._attention.around(seed, scale)
        watched = {
            module: trace.watch(module)
            for module in self.block.module.modules()
            if module not in attention and module not in around
        }
        with torch.inference_mode(), patched({**watched, **attention, **around}):
            args, kwargs = copied(self._call.args), copied(self._call.kwargs)
            if given is not None:
                for part, value in zip(streams(args, kwargs, self.width), given, strict=True):
                    part.copy_(value)
            self.block.module.forward(*args, **kwargs)
        return trace

    def exit(self, trace: Trace) -> torch.Tensor:
        """The stream that left the block, float32."""
        parts = self.exit_parts(trace)
        return parts[0].float() if self.stream_layout is StreamLayout.SINGLE else whole(parts)

    def exit_parts(self, trace: Trace) -> list[torch.Tensor]:
        """The parts of the stream that left the block."""
        return self.parts_of(next(c for c in trace.calls if c.module is self.block.module).out)

    @property
    def entry(self) -> torch.Tensor:
        """The stream that entered the block, float32."""
        return whole(self.given if self.stream_layout is StreamLayout.PAIR else self.given[:1])

    def parts_of(self, out: Value) -> list[torch.Tensor]:
        """The parts of the stream in the results of a block.

        Raises:
            SiteError: there are no parts, or too many.
        """
        parts = returned(out, self.width)
        if not parts or len(parts) > 2 or any(p.shape != parts[0].shape for p in parts):
            raise self.no_stream()
        return parts

    def no_stream(self) -> SiteError:
        """The error that the block returns no stream."""
        return SiteError(
            f"layer {self.block.layer} ({type(self.block.module).__name__}) returns neither the "
            "stream nor a pair that sums to it"
        )

    def loud(
        self, like: torch.Tensor, seed: int, *, times: float = 1.0, apart: bool = False
    ) -> torch.Tensor:
        """Noise as large as the stream before the block, or after the block.

        The larger of the two counts: the first block of a trained model adds branches that are far
        larger than the embedding, and noise of the embedding's size would be rounded away.

        Args:
            like: a tensor of the same shape and dtype.
            seed: the seed of the noise.
            times: a factor on the size; the dtype's range may reduce it.
            apart: whether tensor-parallel ranks get different noise, to distinguish a tensor
                that is summed over ranks from a tensor that every rank has.
        """
        scale = min(times * self._size, torch.finfo(like.dtype).max / _HEADROOM)
        noise = noise_like(like, seed + 1000 * self._rank * apart)
        return (noise.float() * scale).to(like.dtype)

    def near(self, left: torch.Tensor, right: torch.Tensor, size: torch.Tensor) -> bool:
        """Whether two tensors differ by no more than the dtype rounds a tensor like `size`."""
        difference = left.float() - right.float()
        return bool(difference.norm() <= self._tolerance * size.float().norm())

    def differ(self, lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> bool:
        """Whether any two tensors differ by more than the dtype rounds.

        A number that is finite in one of the two is a difference: float16 overflows easily.
        """
        return len(lefts) != len(rights) or any(map(self._differ, lefts, rights))

    def _differ(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        if left.shape != right.shape or bool((left.isfinite() != right.isfinite()).any()):
            return True
        left, right = (t.float().nan_to_num(0.0, 0.0, 0.0) for t in (left, right))
        return not self.near(left, right, left)


def whole(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of some parts, float32."""
    return torch.stack([part.float() for part in parts]).sum(0)


def equal(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are equal in every bit."""
    return len(lefts) == len(rights) and all(
        left.shape == right.shape and bool(torch.equal(left, right))
        for left, right in zip(lefts, rights, strict=True)
    )


def noise_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Normal noise of a tensor's shape, dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(tensor.shape, generator=generator)
    return noise.to(device=tensor.device, dtype=tensor.dtype)
