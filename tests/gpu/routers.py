"""What routers said of each expert, against numpy on the streams that were captured with it.

Which experts a token goes to is decided by what may be nearly equal, so another order of rounding
sends some tokens elsewhere, and their streams differ from there on. What a router says of a stream
that is at hand has no such steps.
"""

from pathlib import Path
from typing import Any

import numpy as np
from cases import difference, rows_of
from offline import Outcome
from safetensors.torch import load_file
from verdicts import REORDERED, Lines, at_most

from rheostat_engine import ROUTERS, Point, Site

CHOSEN = 2
"""Experts that a token goes to."""
EPSILON = 1e-6
"""Of Qwen3-MoE's norms."""


def trimmed(outcome: Outcome, experts: dict[int, int]) -> Outcome:
    """With a router's rows as wide as they are."""
    for layer, count in experts.items():
        rows = outcome.rows.get(ROUTERS + layer, {})
        outcome.rows[ROUTERS + layer] = {position: row[:count] for position, row in rows.items()}
    return outcome


def logits(weights: dict[str, Any], layer: int, stream: Any) -> Any:
    """What Qwen3-MoE's router says of `resid_mid`, in float64: [n, W] to [n, experts]."""
    prefix = f"model.layers.{layer}."
    norm = weights[f"{prefix}post_attention_layernorm.weight"].double().numpy()
    gate = weights[f"{prefix}mlp.gate.weight"].double().numpy()
    x = stream.astype(np.float64)
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPSILON) * norm
    return x @ gate.T


def chosen(outcome: Outcome, experts: dict[int, int], end: int) -> Any:
    """The experts that each token goes to, below a position: [layers, end, `CHOSEN`]."""
    rows = np.stack([rows_of(outcome, ROUTERS + layer, end) for layer in experts])
    return np.sort(np.argsort(-rows, axis=2, kind="stable")[:, :, :CHOSEN], axis=2)


def routed_alike(one: Outcome, other: Outcome, experts: dict[int, int], end: int) -> int:
    """How many of the first tokens go to the same experts in two runs, at most `end`."""
    if not experts:
        return end
    apart = (chosen(one, experts, end) != chosen(other, experts, end)).any(axis=(0, 2))
    return int(apart.argmax()) if apart.any() else end


def check_routers(model: Path, experts: dict[int, int], outcomes: list[Outcome]) -> Lines:
    """Rows of every layer's router.

    Args:
        model: a Qwen3-MoE with weights on disk.
        experts: how many, by layer; none in a model without mixtures.
        outcomes: captured at every site of the stream and every router.
    """
    if not experts:
        return {}
    weights = load_file(model / "model.safetensors")
    off = []
    for outcome in outcomes:
        for layer in experts:
            end = len(outcome.rows[ROUTERS + layer])
            said = rows_of(outcome, ROUTERS + layer, end)
            stream = rows_of(outcome, Site(Point.RESID_MID, layer).index, end)
            off.append(difference(said, logits(weights, layer, stream)))
    line = "routers, worst relative difference to numpy on the stream"
    return {line: at_most(max(off), REORDERED)}
