"""The model's final norm and unembedding, as functions of rows of the residual stream.

How the norm is found
    The probe runs the model once. The final norm is the module outside the decoder blocks whose
    output is the model's output. Its class and its name play no part. Then it runs alone, on random
    rows, because attention of the probe's run leaves numbers that may not be finite.
How the unembedding is found
    Logits come from the model's own `compute_logits`, so that its scale, bias and cap are right.
    Rows of the unembedding come from the layer that `compute_logits` passes to vLLM's logits
    processor.

Invariant: what can't be reproduced on random rows is refused, with the reason. A rank without
the final norm, such as a pipeline stage before the last, has no unembedding and refuses nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from rheostat_engine.adapters.probing import forward_context
from rheostat_engine.sites.block_layout import Block

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Largest difference from the model, as a fraction of the largest magnitude."""


class FinalNorm(NamedTuple):
    """The final norm: `gain * scale * x + bias`, with a scale of each row of its own.

    With `centered`, the mean of the row is subtracted first, as by a LayerNorm.
    """

    module: nn.Module
    gain: torch.Tensor
    """[W], float32."""
    bias: torch.Tensor
    """[W], float32."""
    centered: bool

    def normed(self, rows: torch.Tensor) -> torch.Tensor:
        """The final rows of rows [n, W] of the stream."""
        return _first(self.module(rows))

    def scales(self, rows: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        """The scale of each row [n], float32, from rows of the stream and their final rows."""
        directions = self.gain * self.center(rows.float())
        changed = ((final.float() - self.bias) * directions).sum(1)
        return changed / directions.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)

    def center(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows without their mean, if the norm subtracts it."""
        return rows - rows.mean(-1, keepdim=True) if self.centered else rows


class LensRows(NamedTuple):
    """What the unembedding makes of rows, on the device."""

    top_ids: torch.Tensor
    """[n, k]: the likeliest tokens, best first."""
    top_logprobs: torch.Tensor
    """[n, k], float32."""
    logprobs: torch.Tensor
    """[n, m], float32: of the tokens that were asked for."""
    ranks: torch.Tensor
    """[n, m]: 1 + the number of likelier tokens."""
    log_normalizers: torch.Tensor
    """[n], float32: logit = log-probability + log-normalizer."""
    divergences: torch.Tensor
    """[n], float32: KL(reference || row), or empty without a reference."""


class Directions(NamedTuple):
    """The logit of a token as a function of a row x: `scale * (x . direction) + offset`."""

    rows: torch.Tensor
    """[m, W], float32."""
    offsets: torch.Tensor
    """[m], float32."""


@dataclass(frozen=True)
class Unembedding:
    """The unembedding of a model on one rank."""

    model: Any  # vLLM's models declare `compute_logits` in a Protocol; None without a head
    config: VllmConfig
    dtype: torch.dtype
    device: torch.device
    without_lora: Callable[[], None]
    """Is called before logits are computed, so that no adapter acts on them."""
    norm: FinalNorm | None = None
    """None on a rank without a head, and where it is refused."""
    refused: str = ""
    """Why rows can't be read with it; empty if they can, or if the rank has no head."""
    head: nn.Module | None = None
    scale: float = 1.0
    """Factor of the logits."""
    not_linear: str = ""
    """Why tokens have no directions; empty if they have."""

    def read(
        self,
        rows: torch.Tensor,
        top_k: int,
        token_ids: Sequence[int],
        reference: torch.Tensor | None = None,
    ) -> tuple[LensRows, torch.Tensor] | None:
        """Reads rows [n, W] of the stream; returns the result and the final norm's scales [n].

        Each rank of the last pipeline stage must call it. Returns None on other stages, and on
        ranks that don't get the gathered logits.

        Args:
            rows: of any float type. They are rounded to the model's.
            top_k: number of likeliest tokens.
            token_ids: tokens whose log-probabilities and ranks are wanted.
            reference: [1, W] or [n, W], the row to whose distribution each row is compared.
        """
        if self.norm is None:
            return None
        count = len(rows)
        if reference is not None:
            rows = torch.cat([rows, reference.to(rows)])
        with torch.inference_mode(), forward_context(self.config, len(rows)):
            rows = rows.to(self.device, self.dtype)
            final = self.norm.normed(rows)
            logits = self.logits(final)
            scales = self.norm.scales(rows[:count], final[:count])
            if logits is None:
                return None
            return _lens_rows(logits.float(), count, top_k, token_ids), scales

    def directions(self, token_ids: Sequence[int]) -> Directions | None:
        """The directions of tokens. Each rank of the last pipeline stage must call it."""
        if self.norm is None or self.head is None:
            return None
        with torch.inference_mode(), forward_context(self.config, 1):
            ids = torch.tensor(token_ids, device=self.device)
            # Not the head's own `forward`, which the heads of some models refuse.
            head = cast(VocabParallelEmbedding, self.head)
            weights = self.scale * VocabParallelEmbedding.forward(head, ids).float()
            zeros = torch.zeros(1, len(self.norm.gain), dtype=self.dtype, device=self.device)
            logits = self.logits(zeros)
            if logits is None:
                return None
            offsets = logits[0, ids].float() + weights @ self.norm.bias
            return Directions(self.norm.center(weights * self.norm.gain), offsets)

    def logits(self, final: torch.Tensor) -> torch.Tensor | None:
        """The model's logits [n, vocabulary] of final rows; None on ranks that don't get them."""
        self.without_lora()
        logits: torch.Tensor | None = self.model.compute_logits(final)
        return logits


def find_unembedding(
    model: nn.Module,
    config: VllmConfig,
    blocks: Sequence[Block],
    run_model: Callable[[], object],
    *,
    device: torch.device,
    without_lora: Callable[[], None],
) -> Unembedding:
    """Finds the final norm and the unembedding, and checks both on the probe's rows.

    Args:
        model: loaded, not compiled.
        config: the engine's configuration.
        blocks: the decoder blocks of this rank.
        run_model: runs the model on a few tokens, and returns its output.
        device: the device of the model.
        without_lora: see `Unembedding.without_lora`.
    """
    dtype = cast(torch.dtype, config.model_config.dtype)
    nothing = Unembedding(model, config, dtype, device, without_lora)
    try:
        with torch.inference_mode():
            return _found(nothing, blocks, run_model)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return _refused(nothing, f"the model's final norm or its unembedding raised: {error}")


def _found(
    nothing: Unembedding, blocks: Sequence[Block], run_model: Callable[[], object]
) -> Unembedding:
    calls, output = _outer_calls(nothing.model, blocks, run_model)
    if not isinstance(output, torch.Tensor):
        return nothing  # this stage of the pipeline passes its stream on
    # A model of the Transformers backend returns the norm's output without its first dimension.
    call = next((call for call in reversed(calls) if _same(call.output, output)), None)
    if call is None or not hasattr(nothing.model, "compute_logits"):
        return _refused(nothing, "the model's output is not that of a norm after its blocks")
    tolerance = _TOLERANCE[nothing.dtype]
    width = output.shape[-1]
    with forward_context(nothing.config, len(output)):
        norm = _final_norm(call.module, width, nothing.dtype, nothing.device)
        streams, final = call.repeated(nothing.dtype, nothing.device)
        # Some norms ignore a second tensor that they are given.
        if norm is None or not any(_follows(norm, stream, final, tolerance) for stream in streams):
            return _refused(nothing, "the final norm is neither an RMSNorm nor a LayerNorm")
        return _with_head(replace(nothing, norm=norm), final, tolerance)


def _follows(norm: FinalNorm, stream: torch.Tensor, output: torch.Tensor, tolerance: float) -> bool:
    """Whether the norm makes this output of rows [n, W], and by the formula of `FinalNorm`."""
    scales = norm.scales(stream, output)[:, None]
    formula = norm.gain * scales * norm.center(stream.float()) + norm.bias
    return _close(norm.normed(stream), output, tolerance) and _close(formula, output, tolerance)


def _with_head(found: Unembedding, final: torch.Tensor, tolerance: float) -> Unembedding:
    """Finds the head, and checks that the logits of final rows [n, W] are linear in them."""
    received: dict[str, Any] = {}

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        received["processor"] = _base(module)
        received["head"] = _base(args[0] if args else kwargs.get("lm_head"))

    with ExitStack() as hooks:
        for module in found.model.modules():
            if isinstance(_base(module), LogitsProcessor):
                hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        logits = found.logits(final)
    if "processor" not in received:
        return replace(found, not_linear="the logits don't come from vLLM's logits processor")
    processor, head = received["processor"], received["head"]
    if processor.soft_cap is not None:
        reason = f"the model caps its logits at {processor.soft_cap:g}, so they are not linear"
        return replace(found, not_linear=reason)
    method = getattr(head, "quant_method", None)
    if not isinstance(head, VocabParallelEmbedding) or not isinstance(
        method, UnquantizedEmbeddingMethod
    ):
        return replace(found, not_linear="the model's unembedding is quantized")
    linear = replace(found, head=head, scale=float(processor.scale))
    most = processor.org_vocab_size - 1
    ids = sorted({0, 1, most // 2, most})
    directions = linear.directions(ids)
    if logits is None or directions is None or found.norm is None:
        return linear  # another rank has the logits, and checks them
    rows = _rows_of(found.norm, final)
    if _close(rows @ directions.rows.T + directions.offsets, logits[:, ids], tolerance):
        return linear
    return replace(found, not_linear="the model's logits are not linear in its final rows")


def _rows_of(norm: FinalNorm, final: torch.Tensor) -> torch.Tensor:
    """Rows whose final rows these are, with scale 1."""
    gain = torch.where(norm.gain == 0, torch.ones_like(norm.gain), norm.gain)
    return (final.float() - norm.bias) / gain


class _OuterCall(NamedTuple):
    """A call of a module outside the blocks."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: torch.Tensor

    def repeated(
        self, dtype: torch.dtype, device: torch.device
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Calls it again with random rows; returns the stream, and the output [n, W].

        The stream is the sum of its tensors, or else the first of them.
        """
        generator = torch.Generator().manual_seed(0)
        tensors: list[torch.Tensor] = []

        def random(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.shape != self.output.shape:
                return value
            noise = torch.randn(value.shape, generator=generator).to(device, dtype)
            tensors.append(noise.clone())  # because some kernels write into their inputs
            return noise

        output = _first(
            self.module(
                *map(random, self.args),
                **{name: random(value) for name, value in self.kwargs.items()},
            )
        )
        streams = torch.stack(tensors).sum(0), tensors[0]
        return [stream.flatten(0, -2) for stream in streams], output.flatten(0, -2)


def _outer_calls(
    model: nn.Module, blocks: Sequence[Block], run_model: Callable[[], object]
) -> tuple[list[_OuterCall], object]:
    """Runs the model; returns the calls of modules that neither are in blocks nor have blocks."""
    inner = {module for block in blocks for module in block.module.modules()}
    calls: list[_OuterCall] = []

    def leave(
        module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object
    ) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor):
            calls.append(_OuterCall(module, args, kwargs, first))

    with ExitStack() as hooks:
        for module in model.modules():
            if module not in inner and inner.isdisjoint(module.modules()):
                hooks.enter_context(module.register_forward_hook(leave, with_kwargs=True))
        return calls, run_model()


def _final_norm(
    module: nn.Module, width: int, dtype: torch.dtype, device: torch.device
) -> FinalNorm | None:
    """Measures a norm's gain and bias with rows whose mean square is 1."""
    if width % 2:
        return None
    ones = torch.ones(width, device=device)
    signs = ones.clone()
    signs[1::2] = -1
    rows = torch.stack([torch.zeros_like(ones), ones, signs]).to(dtype)
    bias, at_ones, at_signs = _first(module(rows)).float()
    gain = signs * (at_signs - bias)
    centered = not _close(at_ones - bias, gain, 0.1)
    return FinalNorm(module, gain, bias, centered)


def _lens_rows(
    logits: torch.Tensor,  # [n, vocabulary], float32; then those of 1 or n references
    count: int,
    top_k: int,
    token_ids: Sequence[int],
) -> LensRows:
    normalizers = logits.logsumexp(-1)
    logprobs = logits - normalizers[:, None]
    divergences = logits.new_empty(0)
    if len(logits) > count:
        reference = logprobs[count:]
        # Tokens of probability 0 add nothing.
        logprobs, normalizers = logprobs[:count], normalizers[:count]
        terms = torch.where(reference.isneginf(), 0.0, reference.exp() * (reference - logprobs))
        divergences = terms.sum(-1)
    top = logprobs.topk(min(top_k, logprobs.shape[1]), -1)
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    wanted = logprobs[:, ids]
    ranks = torch.empty(wanted.shape, dtype=torch.int64, device=logits.device)
    for column in range(len(token_ids)):  # all at once would need a matrix for each token
        ranks[:, column] = (logprobs > wanted[:, column : column + 1]).sum(-1) + 1
    return LensRows(top.indices, top.values, wanted, ranks, normalizers, divergences)


def _refused(nothing: Unembedding, reason: str) -> Unembedding:
    return replace(nothing, norm=None, refused=reason, not_linear=reason)


def _same(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors [..., W] have the same elements in memory."""
    return first.data_ptr() == other.data_ptr() and first.numel() == other.numel()


def _close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    difference = (got.float() - expected.float()).abs().max()
    return bool(difference <= tolerance * expected.float().abs().max().clamp_min(1e-6))


def _first(output: Any) -> torch.Tensor:  # Any: a norm's output, with or without a residual
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _base(module: Any) -> Any:  # Any: a layer of vLLM's, in an adapter's layer or not
    return getattr(module, "base_layer", module)
