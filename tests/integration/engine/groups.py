"""Groups of tests that one worker runs one after the other, because they use the same engine."""

from typing import Any

import pytest


def group_of(name: str, *, eager: bool) -> pytest.MarkDecorator:
    """Marks what uses the engine that `start(name, enforce_eager=eager)` starts.

    The engines of any other model than Llama are one group. Its reference must run before vLLM,
    which changes classes of Hugging Face's for some models.
    """
    return pytest.mark.xdist_group(f"{name} compiled" if name == "llama" and not eager else name)


PLAIN = group_of("llama", eager=True)
COMPILED = group_of("llama", eager=False)
BOTH = (pytest.param("eager", marks=PLAIN), pytest.param("compiled", marks=COMPILED))
"""Parameters of a fixture that starts one or the other."""

TIGHT: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 7,
    "num_gpu_blocks_override": 9,
    "enforce_eager": False,
}
"""Options of a compiled engine that cuts prompts in pieces and preempts requests."""
IN_TIGHT = pytest.mark.xdist_group("llama tight")
"""Uses the engine that `start(**TIGHT)` starts."""
FORKED = pytest.mark.xdist_group("test_split")
"""Forks its workers from the same process as `test_split`, which has imported vLLM."""
