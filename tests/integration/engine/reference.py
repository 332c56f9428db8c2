"""The reference: Hugging Face's own model, read and changed by forward hooks, in float32."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers as hf
from torch import nn

Float = npt.NDArray[np.float32]

_MID = {"gemma3": "pre_feedforward_layernorm", "olmo2": "mlp"}
"""The module whose input is the stream after attention, read off each model's own forward."""


class Add(NamedTuple):
    """A vector added to the stream at one site."""

    site: int
    """2 * layer + {resid_pre 0, resid_mid 1, resid_post 2}."""
    vector: Float
    """[W]."""
    positions: Sequence[int] | slice
    """Which tokens."""


class Change(NamedTuple):
    """Any change of some rows of the stream at one site."""

    site: int
    """As in `Add`."""
    change: Callable[[torch.Tensor], torch.Tensor]
    """From rows [n, W] to rows [n, W]."""
    positions: Sequence[int]
    """Which tokens."""


class Run(NamedTuple):
    """One forward pass."""

    streams: dict[int, Float]
    """[n, W] by site."""
    logprobs: Float
    """[n, vocabulary]."""


class HfReference:
    """A Hugging Face model under hooks."""

    def __init__(self, name: str, path: Path) -> None:
        """Loads it in float32."""
        self._model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
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

    def _hook(self, stack: ExitStack, layer: nn.Module, number: int, act: object) -> None:
        def at_entry(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            act(0, args[0])  # type: ignore[operator]  # act is callable

        def at_mid(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            act(2 * number + 1, args[0])  # type: ignore[operator]  # as above

        def at_exit(_: nn.Module, __: object, out: torch.Tensor | tuple[torch.Tensor]) -> None:
            act(2 * number + 2, out if isinstance(out, torch.Tensor) else out[0])  # type: ignore[operator]  # as above

        if number == 0:
            stack.callback(layer.register_forward_pre_hook(at_entry).remove)
        if self._name != "gpt_neox":
            mid = getattr(layer, _MID.get(self._name, "post_attention_layernorm"))
            stack.callback(mid.register_forward_pre_hook(at_mid).remove)
        stack.callback(layer.register_forward_hook(at_exit).remove)
