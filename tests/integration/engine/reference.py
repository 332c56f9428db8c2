"""The reference: Hugging Face's own model, read and changed by forward hooks."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers as hf
from torch import nn

from rheostat_engine import Point, Site

from .models import MIXTURES, NO_MID

Output = torch.Tensor | tuple[torch.Tensor, ...]
Act = Callable[[int, torch.Tensor], None]
Float = npt.NDArray[np.float32]

_MID = {"gemma3": "pre_feedforward_layernorm", "olmo2": "mlp"}
"""The module whose input is the stream after attention, read off each model's own forward."""
_NORMED = ("post_attention_layernorm", "post_feedforward_layernorm")
_BRANCHES = {"gemma3": _NORMED, "olmo2": _NORMED, "gpt_neox": ("attention", "mlp")}
"""The modules that return what attention and the MLP add to the stream, read off likewise."""


class Add(NamedTuple):
    """A vector added at one site."""

    site: int
    """As the engine numbers it."""
    vector: Float
    """[W]."""
    positions: Sequence[int] | slice
    """Which tokens."""


class Change(NamedTuple):
    """Any change of some rows at one site."""

    site: int
    """As in `Add`."""
    change: Callable[[torch.Tensor], torch.Tensor]
    """From rows [n, W] to rows [n, W]."""
    positions: Sequence[int]
    """Which tokens."""


class Run(NamedTuple):
    """One forward pass."""

    streams: dict[int, Float]
    """[n, W] by site; a router's [n, experts]."""
    logprobs: Float
    """[n, vocabulary]."""


class HfReference:
    """A Hugging Face model under hooks."""

    def __init__(self, name: str, path: Path, dtype: torch.dtype = torch.float32) -> None:
        """Loads the model, which computes in `dtype`."""
        self._model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self._name = name
        base = self._model.base_model
        self.layers: list[nn.Module] = list(base.layers)

    def run(self, tokens: Sequence[int], adds: Sequence[Add | Change] = ()) -> Run:
        """Runs the tokens at once, changing what is asked for in order, and reads every site."""
        streams: dict[int, Float] = {}
        by_site: dict[int, list[Add | Change]] = {}
        for add in adds:
            by_site.setdefault(add.site, []).append(add)

        def act(site: int, stream: torch.Tensor) -> None:
            for add in by_site.get(site, []):
                if isinstance(add, Change):
                    stream[0, add.positions] = add.change(stream[0, add.positions])
                else:
                    stream[0, add.positions] += torch.from_numpy(np.asarray(add.vector))
            streams[site] = stream[0].detach().numpy().copy()

        with ExitStack() as stack:
            for number, layer in enumerate(self.layers):
                self._hook(stack, layer, number, act)
            with torch.no_grad():
                logits = self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return Run(streams, torch.log_softmax(logits.float(), -1).numpy())

    def generate(self, prompt: Sequence[int], count: int, adds: Sequence[Add] = ()) -> list[int]:
        """Greedy continuation, every token computed from scratch."""
        tokens = list(prompt)
        for _ in range(count):
            kept = [self._clip(add, len(tokens)) for add in adds]
            tokens.append(int(self.run(tokens, kept).logprobs[-1].argmax()))
        return tokens[len(prompt) :]

    @staticmethod
    def _clip(add: Add, length: int) -> Add:
        if isinstance(add.positions, slice):
            return add
        return add._replace(positions=[p for p in add.positions if p < length])

    def _hook(self, stack: ExitStack, layer: nn.Module, number: int, act: Act) -> None:
        gain = getattr(self._model.config, "residual_multiplier", 1.0)

        def at_entry(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            act(Site(Point.RESID_PRE, number).index, args[0])

        def at_mid(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            act(Site(Point.RESID_MID, number).index, args[0])

        def at_exit(_: nn.Module, __: object, out: Output) -> None:
            act(Site(Point.RESID_POST, number).index, _first(out))

        def at_branch(point: Point) -> Callable[[nn.Module, object, Output], None]:
            def hook(_: nn.Module, __: object, out: Output) -> None:
                branch = _first(out)
                added = branch * gain
                before = added.clone()
                act(Site(point, number).index, added)
                if not torch.equal(added, before):
                    branch += (added - before) / gain

            return hook

        if number == 0:
            stack.callback(layer.register_forward_pre_hook(at_entry).remove)
        if self._name not in NO_MID:
            mid = getattr(layer, _MID.get(self._name, "post_attention_layernorm"))
            stack.callback(mid.register_forward_pre_hook(at_mid).remove)
        branches = _BRANCHES.get(self._name, ("self_attn", "mlp"))
        for point, name in zip((Point.ATTN_OUT, Point.MLP_OUT), branches, strict=True):
            module = getattr(layer, name)
            stack.callback(module.register_forward_hook(at_branch(point)).remove)
        stack.callback(layer.register_forward_hook(at_exit).remove)
        if self._name in MIXTURES:

            def at_router(_: nn.Module, __: object, out: Output) -> None:
                act(Site(Point.ROUTER_LOGITS, number).index, _first(out)[None])

            stack.callback(layer.mlp.gate.register_forward_hook(at_router).remove)


def _first(out: Output) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out[0]
