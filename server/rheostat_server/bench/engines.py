"""Stock vLLM and the same engine with sites, side by side on one device, and how long they take.

Two starts of the same engine differ by about a percent, so each kind is started several times.
"""

import asyncio
import hashlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rheostat_engine import (
    EXTRA_ARG,
    EngineSettings,
    ModelSites,
    Plan,
    Released,
    WorkerChannel,
    engine_kwargs,
)

VECTOR = hashlib.sha256(b"bench").digest()
"""[rows, W], all different, loaded into every engine with sites."""

ROWS = 256
"""Rows of `VECTOR`."""


class _Releases:
    """Counts what the workers let go of."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.count = 0

    def __call__(self, event: object) -> None:
        if isinstance(event, Released):
            with self._changed:
                self.count += 1
                self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.count >= count, 60):
                raise TimeoutError(f"{self.count} of {count} requests were released")


class Engines:
    """Some starts of stock vLLM and as many of the engine with sites."""

    def __init__(
        self, model: Path, scratch: str, device: str, starts: int, options: dict[str, Any]
    ) -> None:
        """Starts them all.

        Args:
            model: what they load.
            scratch: a folder for their channels.
            device: "cuda" or "cpu".
            starts: how many of each kind.
            options: vLLM's arguments, the same for all.
        """
        from vllm import LLM

        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self._releases = _Releases()
        self.stock: list[LLM] = []
        self.sited: list[LLM] = []
        for start in range(starts):
            self.stock.append(LLM(model=str(model), **options))
            settings = EngineSettings(channel=f"ipc://{scratch}/channel-{start}")
            channel = WorkerChannel(settings, ranks=1)
            channel.start(loop, self._releases)
            extension = engine_kwargs(settings, device="cuda" if device == "cuda" else "cpu")
            self.sited.append(LLM(model=str(model), **options, **extension))  # type: ignore[arg-type]  # vLLM's own types
        reports = self.sited[0].collective_rpc("rheostat_describe")
        self.sites = ModelSites.from_reports(reports)
        rng = np.random.default_rng(0)
        vector = rng.normal(0, 0.01, (ROWS, self.sites.width)).astype("<f4")
        data = {VECTOR.hex(): (list(vector.shape), vector.tobytes())}
        for engine in self.sited:
            engine.collective_rpc("rheostat_load_vectors", args=(data,))
        self._made = 0

    def seconds(
        self,
        start: int,
        plans: Sequence[Plan | None] | None,
        *,
        batch: int,
        prompt: int,
        tokens: int,
    ) -> float:
        """How long a batch of generations takes, from submission to the last token.

        Args:
            start: which of the starts.
            plans: one per request; None: stock vLLM runs it.
            batch: requests.
            prompt: tokens of each prompt.
            tokens: tokens that each generates.
        """
        from vllm import SamplingParams

        prompts, params = [], []
        named = 0
        for i in range(batch):
            self._made += 1
            ids = [(7 * i + 13 * j + self._made) % 1000 + 5 for j in range(prompt)]
            plan = None if plans is None else plans[i]
            extra = None
            if plan is not None:
                named += 1
                own = Plan(f"b{self._made}", plan.acts, plan.captures)
                extra = {EXTRA_ARG: own.to_wire()}
            prompts.append({"prompt_token_ids": ids})
            params.append(
                SamplingParams(
                    temperature=0,
                    max_tokens=tokens,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args=extra,
                )
            )
        engine = (self.stock if plans is None else self.sited)[start]
        released = self._releases.count
        begun = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]  # plain token prompts
        taken = time.perf_counter() - begun
        if named:
            self._releases.wait_for(released + named)
        return taken
