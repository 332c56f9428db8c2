"""Rows of the stream of a real model on real text, as a capture brings them.

Invariant: all positions of every prompt are there, those of its continuation too, at every site.
"""

import asyncio
import threading
from typing import Any, NamedTuple

import numpy as np

from rheostat_bench.arms import EVERYWHERE, posts
from rheostat_bench.machine import Model, device, engine_options
from rheostat_engine import (
    EXTRA_ARG,
    Capture,
    EngineSettings,
    Event,
    ModelSites,
    Plan,
    Released,
    Rows,
    WorkerChannel,
    engine_kwargs,
)
from rheostat_wire.dtypes import StoredArray

PROMPTS = (
    "I am so happy. My day was",
    "I am so sad. The weather today is",
    "The Eiffel Tower is in the city of",
    "The capital of Chile is",
    "Miles Davis played the",
    "Jane Austen worked as a",
    "The train to the old town",
    "I feel",
)
"""Beginnings of texts that the demo model knows."""

_TOKENS = 120
_PATIENCE = 60.0


class Captured(NamedTuple):
    """What a model computed."""

    rows: StoredArray
    """[layers, positions, W]; bfloat16 as its bits in uint16."""
    runner: str
    """vLLM's runner that computed it."""


class _Delivered:
    """Collects what the worker sends, in the order in which it comes."""

    def __init__(self, requests: int) -> None:
        self._waiting = requests
        self.rows: list[Rows] = []
        self.complete = threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Rows):
            self.rows.append(event)
        if isinstance(event, Released):
            self._waiting -= 1
            if not self._waiting:
                self.complete.set()


def captured(model: Model, scratch: str, dtype: str) -> Captured:
    """`resid_post` of every layer over the prompts and their sampled continuations.

    Args:
        model: with weights and a tokenizer.
        scratch: a folder for the channel.
        dtype: what the model computes in.

    Raises:
        TimeoutError: the rows didn't come.
    """
    from vllm import LLM, SamplingParams

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    settings = EngineSettings(channel=f"ipc://{scratch}/rows-{dtype}")
    channel = WorkerChannel(settings, ranks=1)
    delivered = _Delivered(len(PROMPTS))
    channel.start(loop, delivered)
    options: dict[str, Any] = engine_options(
        model, engines=2, requests=len(PROMPTS), skip_tokenizer_init=False
    )
    options |= {"dtype": dtype, **engine_kwargs(settings, device=device())}
    engine = LLM(model=str(model.path), **options)
    reports = engine.collective_rpc("rheostat_describe")
    channel.attach(reports)
    sites = ModelSites.from_reports(reports)
    at = posts(sites)
    params = [
        SamplingParams(
            temperature=1,
            seed=number,
            max_tokens=_TOKENS,
            ignore_eos=True,
            extra_args={
                EXTRA_ARG: Plan(f"{number}", (), (Capture(tuple(at), EVERYWHERE),)).to_wire()
            },
        )
        for number in range(len(PROMPTS))
    ]
    engine.generate(list(PROMPTS), params, use_tqdm=False)
    if not delivered.complete.wait(_PATIENCE):
        raise TimeoutError("the rows did not come")
    by_site = [
        [rows.data[rows.sites.index(site)] for rows in delivered.rows if site in rows.sites]
        for site in at
    ]
    return Captured(np.stack([np.concatenate(parts) for parts in by_site]), sites.runner)
