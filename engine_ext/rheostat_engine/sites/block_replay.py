"""Runs one block again on its recorded inputs, with attention's output replaced by noise.

Invariants: equal replays give equal results on every rank, apart from `Replay.noise`. A replay
changes neither the block nor its recorded inputs.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rheostat_engine.sites.block_layout import Block, SiteError, StreamLayout
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
    patched_forwards,
    stream_tensors,
)

NOISE_FACTOR = 1000.0
"""Scale of attention's larger noise, because a stream rounds small branches away."""
_ROUNDINGS = 8
"""Tolerance of a comparison, in epsilons of the stream's dtype. Noise is as large as the stream, so
each addition up to the block's exit rounds by about half an epsilon. At most five additions lie
between the noise and the exit, in each of the two compared runs."""
_LEAST_TOLERANCE = 1e-4
"""Tolerance of a comparison in float32. At a wrong site the relative difference is about 1."""
_LEAST_SIZE = 1e-2
"""Least standard deviation of noise, because dummy weights give a stream close to zero."""
_HEADROOM = 64
"""The factor by which noise stays below the largest number of its dtype (65,504 in float16)."""

ForwardPatches = Mapping[nn.Module, ForwardPatch]


def attention_noise(
    modules: Sequence[nn.Module], seed: int, scale: float = 1.0
) -> dict[nn.Module, ForwardPatch]:
    """Patches that replace the output of attention by reproducible noise.

    Args:
        modules: the layers with a KV cache or other state.
        seed: the seed of the noise.
        scale: its scale.
    """

    def patch(forward: Forward, args: Args, kwargs: Kwargs) -> Value:
        out = forward(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            return scale * noise_like(out, seed)
        return out

    return dict.fromkeys(modules, patch)


class Replay:
    """A decoder block with one recorded call of it."""

    def __init__(self, block: Block, call: Call, width: int, rank: int) -> None:
        """`width` is W; `rank` the tensor-parallel rank of this worker."""
        self.block = block
        self.width = width
        self.stream_layout = StreamLayout.SINGLE
        """How the block passes the stream on; set by the probe."""
        self.inputs = stream_tensors(call.args, call.kwargs, width)
        """The inputs that may be parts of the stream."""
        self._call = call
        self._rank = rank
        self.parts = self.parts_of(call.out)
        """The recorded results: the stream, or its two parts."""
        if not all(bool(part.isfinite().all()) for part in self.parts):
            raise SiteError(
                f"layer {block.layer} ({type(block.module).__name__}) returns numbers that are not "
                f"finite in {self.parts[0].dtype}; its sites can't be found"
            )
        entering = [part for part in self.inputs if part.shape == self.parts[0].shape]
        epsilon = max(torch.finfo(part.dtype).eps for part in (*entering, *self.parts))
        self._tolerance = max(_ROUNDINGS * epsilon, _LEAST_TOLERANCE)
        ends = [parts for parts in (entering, self.parts) if parts]
        self._size = max(_LEAST_SIZE, *(float(stream_sum(p).square().mean().sqrt()) for p in ends))

    def run(
        self,
        patches: ForwardPatches | None = None,
        *,
        seed: int = 1,
        scale: float = 1.0,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> Trace:
        """Runs the block.

        Args:
            patches: replacements of modules' forwards; these modules are not recorded.
            seed: the seed of attention's noise.
            scale: the scale of attention's noise.
            inputs: replace the recorded inputs.
        """
        patches = patches or {}
        trace = Trace()
        attention = attention_noise(self.block.attention, seed, scale)
        watched = {
            module: trace.watch(module)
            for module in self.block.module.modules()
            if module not in attention and module not in patches
        }
        with torch.inference_mode(), patched_forwards({**watched, **attention, **patches}):
            args, kwargs = cloned(self._call.args), cloned(self._call.kwargs)
            if inputs is not None:
                for part, value in zip(
                    stream_tensors(args, kwargs, self.width), inputs, strict=True
                ):
                    part.copy_(value)
            self.block.module.forward(*args, **kwargs)
        return trace

    def exit(self, trace: Trace) -> torch.Tensor:
        """The stream that left the block, float32."""
        parts = self.exit_parts(trace)
        return parts[0].float() if self.stream_layout is StreamLayout.SINGLE else stream_sum(parts)

    def exit_parts(self, trace: Trace) -> list[torch.Tensor]:
        """The parts of the stream that left the block."""
        return self.parts_of(next(c for c in trace.calls if c.module is self.block.module).out)

    @property
    def entry(self) -> torch.Tensor:
        """The stream that entered the block, float32."""
        return stream_sum(
            self.inputs if self.stream_layout is StreamLayout.PAIR else self.inputs[:1]
        )

    def parts_of(self, out: Value) -> list[torch.Tensor]:
        """The parts of the stream in the results of a block.

        Raises:
            SiteError: there are no parts, or too many.
        """
        parts = output_tensors(out, self.width)
        if not parts or len(parts) > 2 or any(p.shape != parts[0].shape for p in parts):
            raise self.no_stream()
        return parts

    def no_stream(self) -> SiteError:
        """Makes the error for a block that returns no stream."""
        return SiteError(
            f"layer {self.block.layer} ({type(self.block.module).__name__}) returns neither the "
            "stream nor a pair that sums to it"
        )

    def noise(
        self, like: torch.Tensor, seed: int, *, times: float = 1.0, apart: bool = False
    ) -> torch.Tensor:
        """Noise as large as the stream before or after the block, whichever is larger.

        The first block of a trained model adds branches far larger than the embedding, which would
        round noise of the embedding's size away.

        Args:
            like: a tensor of the same shape and dtype.
            seed: of the generator.
            times: a factor on the size, reduced if the dtype's range requires it.
            apart: whether tensor-parallel ranks get different noise. This distinguishes a tensor
                that is summed over ranks later from a tensor that is equal on all ranks.
        """
        scale = min(times * self._size, torch.finfo(like.dtype).max / _HEADROOM)
        noise = noise_like(like, seed + 1000 * self._rank * apart)
        return (noise.float() * scale).to(like.dtype)

    def close(self, left: torch.Tensor, right: torch.Tensor, size: torch.Tensor) -> bool:
        """Whether two tensors differ by no more than rounding of a tensor as large as `size`."""
        difference = left.float() - right.float()
        return bool(difference.norm() <= self._tolerance * size.float().norm())

    def differ(self, lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> bool:
        """Whether any two tensors differ by more than rounding.

        An element that is finite in only one of them is a difference, because float16 overflows
        easily.
        """
        return len(lefts) != len(rights) or any(map(self._differ, lefts, rights))

    def _differ(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        if left.shape != right.shape or bool((left.isfinite() != right.isfinite()).any()):
            return True
        left, right = (t.float().nan_to_num(0.0, 0.0, 0.0) for t in (left, right))
        return not self.close(left, right, left)


def stream_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the parts of a stream, float32."""
    return torch.stack([part.float() for part in parts]).sum(0)


def bitwise_equal(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are equal in every bit."""
    return len(lefts) == len(rights) and all(map(torch.equal, lefts, rights))


def noise_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Normal noise with a tensor's shape, dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(tensor.shape, generator=generator)
    return noise.to(device=tensor.device, dtype=tensor.dtype)
