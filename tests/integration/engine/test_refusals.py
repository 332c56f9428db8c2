"""Configurations that the sites cannot follow stop the engine at startup, by name."""

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from .forked import forks
from .groups import FORKED
from .models import build
from .offline import OfflineEngine

pytestmark = [pytest.mark.integration, FORKED]


def why_not(model: Path, channel: str, options: dict[str, object]) -> str:
    """What an engine in this process says that does not start."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        OfflineEngine(model, channel, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_engine_with_speculative_decoding_does_not_start(
    models_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    # In a process of its own: n-grams bring numba, and vLLM starts no further engine beside that.
    # It imports this module by its name from here.
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    with ProcessPoolExecutor(1, forks()) as pool:
        told = pool.submit(
            why_not,
            build("llama", models_root),
            f"ipc://{tmp_path}/channel",
            {"speculative_config": ngram},
        ).result(timeout=300)
    assert told == (
        "SiteError: rheostat does not serve speculative decoding: serve without speculative_config"
    )
