"""Other ways to compute the cells of a sweep: Hugging Face in batches, and TransformerLens.

Both run the weights that the server runs, in processes of their own. They are references for the
cells' values, too.
"""

import gc
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

_BATCH_TOKENS = 1 << 16
"""Tokens of a batch of Hugging Face's model. Its MLP takes about 50 KB for each in an 8B shape."""

Grid = npt.NDArray[np.float64]


class Prompts(NamedTuple):
    """Two prompts of equal length, and the answer that cells are graded by."""

    clean: list[int]
    corrupt: list[int]
    answer: int


class Cell(NamedTuple):
    """A row of `resid_post` that is replaced."""

    layer: int
    position: int


class Graded(NamedTuple):
    """Cells and their values."""

    seconds: float
    answer: Grid
    """[layers, positions]: ln p(answer). NaN where a cell was not run."""
    largest: Grid
    """[layers, positions]: the logarithm of the largest probability."""


class HuggingFace:
    """Hugging Face's model: a forward pass of a batch for each layer. Its methods are calls.

    A batch has the corrupt prompt once for each position, with that position's row of the layer
    replaced. The pass begins behind the replaced layer, since nothing changes below it.
    """

    def __init__(self, path: Path, dtype: str, *, random: bool) -> None:
        """Loads the model, or makes random weights for its config.

        Args:
            path: its folder.
            dtype: the element type of its weights.
            random: whether weights are made.
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        kind = getattr(torch, dtype)
        models: Any = AutoModelForCausalLM  # its methods have no types
        if random:
            with torch.device(self._device):
                self._model = models.from_config(AutoConfig.from_pretrained(path), dtype=kind)
        else:
            self._model = models.from_pretrained(path, dtype=kind).to(self._device)
        self._model.eval()
        self._layers = self._model.model.layers

    async def save(self, path: Path) -> None:
        """Writes the weights to a model's folder, whose config stays as it is."""
        config = (path / "config.json").read_bytes()
        self._model.save_pretrained(path)
        (path / "config.json").write_bytes(config)

    async def run(self, prompts: Prompts, positions: Sequence[int]) -> Graded:
        """Runs the cells of some positions, at every layer."""
        with self._torch.inference_mode():
            return self._run(prompts, positions)

    async def run_groups(self, prompts: Prompts, groups: Sequence[range]) -> Grid:
        """Runs the cells of some groups of positions: ln p(answer), [layers, groups]."""
        with self._torch.inference_mode():
            return self._columns(prompts, groups)[0]

    def _run(self, prompts: Prompts, wanted: Sequence[int]) -> Graded:
        began = time.monotonic()
        answer, largest = self._columns(prompts, [range(at, at + 1) for at in wanted])
        seconds = time.monotonic() - began
        shape = (len(self._layers), len(prompts.corrupt))
        graded = Graded(seconds, np.full(shape, np.nan), np.full(shape, np.nan))
        graded.answer[:, list(wanted)], graded.largest[:, list(wanted)] = answer, largest
        return graded

    def _columns(self, prompts: Prompts, columns: Sequence[range]) -> tuple[Grid, Grid]:
        """[layers, columns]: ln p(answer), and the logarithm of the largest probability."""
        torch = self._torch
        clean, corrupt = self._stream(prompts.clean), self._stream(prompts.corrupt)
        count = len(prompts.corrupt)
        replaced = torch.zeros(len(columns), count, 1, dtype=torch.bool, device=self._device)
        for number, column in enumerate(columns):
            replaced[number, column.start : column.stop] = True
        shape = (len(self._layers), len(columns))
        answer, largest = np.empty(shape), np.empty(shape)
        at_once = max(1, _BATCH_TOKENS // count)
        for layer in range(len(self._layers)):
            for first in range(0, len(columns), at_once):
                some = slice(first, first + at_once)
                rows = torch.where(replaced[some], clean[layer], corrupt[layer])
                logits = self._logits(rows, layer + 1)
                logprobs = logits.float().log_softmax(dim=-1)
                answer[layer, some] = logprobs[:, prompts.answer].cpu().numpy()
                largest[layer, some] = logprobs.amax(dim=-1).cpu().numpy()
        return answer, largest

    def _stream(self, tokens: Sequence[int]) -> "list[torch.Tensor]":
        """The stream [1, N, W] after each layer."""
        found: list[torch.Tensor] = []

        def keep(_module: object, _inputs: object, output: Any) -> None:
            found.append(output[0] if isinstance(output, tuple) else output)

        hooks = [layer.register_forward_hook(keep) for layer in self._layers]
        ids = self._torch.tensor([list(tokens)], device=self._device)
        self._model(input_ids=ids, use_cache=False, logits_to_keep=1)
        for hook in hooks:
            hook.remove()
        return found

    def _logits(self, rows: "torch.Tensor", first: int) -> "torch.Tensor":
        """The last position's logits [B, V], by the layers from `first` on."""
        model = self._model.model
        model.layers = self._layers[first:]
        try:
            found = self._model(inputs_embeds=rows, use_cache=False, logits_to_keep=1)
        finally:
            model.layers = self._layers
        logits: torch.Tensor = found.logits[:, -1]
        return logits


@asynccontextmanager
async def hugging_face(path: Path, dtype: str, *, random: bool) -> AsyncIterator[HuggingFace]:
    """Hugging Face's model."""
    yield HuggingFace(path, dtype, random=random)
    gc.collect()


def without_transformer_lens() -> str:
    """Why TransformerLens cannot run; empty if it can."""
    if find_spec("transformer_lens") is None:
        return "transformer_lens is not installed: pip install transformer-lens"
    return ""


class TransformerLens:
    """TransformerLens's own activation patching, one cell after another. Its methods are calls."""

    def __init__(self, path: Path) -> None:
        """Loads the model in float32 on the CPU."""
        import torch
        from transformer_lens import patching
        from transformer_lens.model_bridge import TransformerBridge

        self._torch, self._patching = torch, patching
        self._model = TransformerBridge.boot_transformers(
            str(path), device="cpu", dtype=torch.float32
        )

    async def run(self, prompts: Prompts, cells: Sequence[Cell]) -> Graded:
        """Runs some cells."""
        with self._torch.inference_mode():
            return self._run(prompts, cells)

    def _run(self, prompts: Prompts, cells: Sequence[Cell]) -> Graded:
        import pandas as pd

        tensor = self._torch.tensor
        began = time.monotonic()
        largest: list[float] = []

        def metric(logits: "torch.Tensor") -> "torch.Tensor":
            logprobs = logits[0, -1].float().log_softmax(dim=-1)
            largest.append(float(logprobs.max()))
            return logprobs[prompts.answer]

        wanted = "hook_resid_post"
        _, cache = self._model.run_with_cache(
            tensor([prompts.clean]), names_filter=lambda name: name.endswith(wanted)
        )
        found = self._patching.generic_activation_patch(
            model=self._model,
            corrupted_tokens=tensor([prompts.corrupt]),
            clean_cache=cache,
            patching_metric=metric,
            patch_setter=self._patching.layer_pos_patch_setter,
            activation_name="resid_post",
            index_df=pd.DataFrame(cells, columns=["layer", "pos"]),
        )
        seconds = time.monotonic() - began
        shape = (self._model.cfg.n_layers, len(prompts.corrupt))
        graded = Graded(seconds, np.full(shape, np.nan), np.full(shape, np.nan))
        for cell, value, most in zip(cells, found.tolist(), largest[-len(cells) :], strict=True):
            graded.answer[cell], graded.largest[cell] = value, most
        return graded


@asynccontextmanager
async def transformer_lens(path: Path) -> AsyncIterator[TransformerLens]:
    """TransformerLens's model."""
    yield TransformerLens(path)
