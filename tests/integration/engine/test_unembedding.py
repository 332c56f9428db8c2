"""The lens of rows, and directions of tokens, against Hugging Face's own norm and head."""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers as hf
from torch import nn

from rheostat_engine import Point, Site

from .groups import group_of
from .models import LAYERS, VOCAB, WIDTH, build
from .offline import OfflineEngine
from .plans import capture, prompts

pytestmark = pytest.mark.integration

NAMES = ("llama", "gemma3", "gpt_neox", "phi", "cohere", "granite")
"""RMSNorms, one of them with weights around 0; LayerNorms; a bias and scales of the logits."""
TOKENS = (3, 17, 126)
TOLERANCE = 2e-4
"""In nats, and of logits; float32 here and there."""
PROMPT = prompts(1, 9, 10, seed=3)[0]
Array = npt.NDArray[Any]


def lens(
    engine: OfflineEngine, rows: Array, *, top_k: int = 5, reference: Array | None = None
) -> dict[str, Array]:
    """What the worker makes of rows [n, W]."""
    data = rows.astype("<f4").tobytes()
    against = b"" if reference is None else reference.astype("<f4").tobytes()
    (answer,) = engine.llm.collective_rpc("rheostat_lens", args=(data, top_k, TOKENS, against))
    whole = {"top_ids", "ranks"}
    return {
        name: np.frombuffer(raw, "<i4" if name in whole else "<f4").reshape(
            (len(rows), -1) if name in ("top_ids", "top_logprobs", "logprobs", "ranks") else -1
        )
        for name, raw in answer.items()
    }


def final_norm(model: Any) -> nn.Module:
    """Hugging Face's norm after the last block, read off each model's own forward."""
    names = ("norm", "final_layer_norm", "final_layernorm")
    return next(getattr(model.base_model, n) for n in names if hasattr(model.base_model, n))


def head(model: Any, final: torch.Tensor) -> torch.Tensor:
    """Hugging Face's logits of final rows."""
    logits: torch.Tensor = model.get_output_embeddings()(final)
    config = model.config
    scale = getattr(config, "logit_scale", None) or 1.0
    return logits * scale / getattr(config, "logits_scaling", 1.0)


def resid_post(engine: OfflineEngine, layers: Sequence[int]) -> tuple[Array, dict[int, float]]:
    """Rows [layers, tokens, W] of the prompt, and the log-probabilities of the next token."""
    sites = [Site(Point.RESID_POST, layer).index for layer in layers]
    (outcome,) = engine.run([PROMPT], [capture(*sites)], max_tokens=1)
    rows = [[outcome.rows[site][p] for p in range(len(PROMPT))] for site in sites]
    return np.array(rows, np.float32), outcome.logprobs[0]


def load(paths: Mapping[str, Path]) -> dict[str, Any]:
    """Loads Hugging Face's models. Runs where vLLM has not changed Hugging Face's classes."""
    return {
        name: hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for name, path in paths.items()
    }


@pytest.fixture(scope="session")
def references(models_root: Path) -> dict[str, Any]:
    """Hugging Face's models by name, all from one new process, which takes seconds to start."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        paths = {name: build(name, models_root) for name in NAMES}
        return executor.submit(load, paths).result(timeout=240)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=group_of(name, eager=True)) for name in NAMES]
)
def test_the_lens_is_the_models_own_head(
    name: str, start: Callable[..., OfflineEngine], references: Mapping[str, Any]
) -> None:
    reference = references[name]
    engine = start(name)
    assert engine.sites is not None
    assert (engine.sites.no_lens, engine.sites.no_directions) == ("", "")
    rows, next_token = resid_post(engine, range(LAYERS))
    flat = rows.reshape(-1, WIDTH)
    with torch.no_grad():
        logits = head(reference, final_norm(reference)(torch.from_numpy(flat)))
        expected = torch.log_softmax(logits, -1).numpy()
    read = lens(engine, flat, reference=flat[-1:])
    picked = np.take_along_axis(expected, read["top_ids"].astype(np.int64), 1)
    assert np.abs(read["top_logprobs"] - picked).max() < TOLERANCE
    assert np.abs(read["top_logprobs"] - -np.sort(-expected, 1)[:, :5]).max() < TOLERANCE
    assert np.abs(read["logprobs"] - expected[:, TOKENS]).max() < TOLERANCE
    ranks = 1 + (expected[:, None] > expected[:, TOKENS, None]).sum(-1)
    assert (np.abs(read["ranks"] - ranks) <= 1).all()  # neighbours may be equal to rounding
    p = np.exp(expected[-1:])
    divergences = (p * (expected[-1:] - expected)).sum(1)
    assert np.abs(read["divergences"] - divergences).max() < TOLERANCE
    own = read["logprobs"][-1]
    assert np.abs(own - [next_token[token] for token in TOKENS]).max() < TOLERANCE
    again = read["logprobs"] + read["log_normalizers"][:, None]
    assert np.abs(again - logits.numpy()[:, TOKENS]).max() < TOLERANCE

    ((weights, offsets),) = engine.llm.collective_rpc("rheostat_directions", args=(TOKENS,))
    directions = np.frombuffer(weights, "<f4").reshape(len(TOKENS), WIDTH)
    got = read["scales"][:, None] * (flat @ directions.T) + np.frombuffer(offsets, "<f4")
    assert np.abs(got - logits.numpy()[:, TOKENS]).max() < TOLERANCE


def test_capped_logits_are_read_and_have_no_directions(
    start: Callable[..., OfflineEngine], models_root: Path
) -> None:
    path = models_root / "capped"
    config = hf.Gemma2Config(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, final_logit_softcapping=2.0,
        attn_logit_softcapping=None, query_pre_attn_scalar=32, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    reference: Any = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(path, safe_serialization=True)
    engine = start("capped")
    assert engine.sites is not None
    assert engine.sites.no_lens == ""
    assert engine.sites.no_directions == ("the model caps its logits at 2, so they are not linear")
    rows, next_token = resid_post(engine, [LAYERS - 1])
    own = lens(engine, rows[0])["logprobs"][-1]
    assert np.abs(own - [next_token[token] for token in TOKENS]).max() < TOLERANCE
    assert engine.llm.collective_rpc("rheostat_directions", args=(TOKENS,)) == [None]
