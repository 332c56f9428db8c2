"""Stock vLLM and the same engine with sites, side by side on one device, and how long they take.

Two starts of the same engine differ by about a percent, so each kind is started several times.
"""

import asyncio
import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import (
    EXTRA_ARG,
    EngineSettings,
    ModelSites,
    Plan,
    Released,
    WorkerChannel,
    engine_kwargs,
)
from rheostat_server.tasks.allocator import keep_freed_memory

VECTOR = hashlib.sha256(b"bench").digest()
"""[rows, W], all different, loaded into every engine with sites."""

ROWS = 256
"""Rows of `VECTOR`."""

CAPTURE_BYTES = 512 << 20
"""The engine's own default."""


Vectors = Mapping[bytes, npt.NDArray[np.float32]]
"""Vectors, [rows, W] each, by digest."""

_Payload = dict[str, tuple[list[float], bytes]]
"""What `rheostat_load_vectors` takes."""


class Ran(NamedTuple):
    """What came of a batch."""

    seconds: float
    """From submission, or the load of its vectors, to the last token."""
    cached: list[int]
    """Prompt tokens of each request that the prefix cache held."""
    first_token: list[float]
    """Seconds from each request's arrival to its first token; empty without vLLM's statistics."""
    per_token: list[float]
    """Seconds per token of each request after its first one, by the engine's clock; empty without
    vLLM's statistics, or of one token alone."""
    lost_rows: int
    """Captured rows that found no room."""


class _Releases:
    """Counts what the workers let go of."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.count = 0
        self.lost_rows = 0

    def __call__(self, event: object) -> None:
        if isinstance(event, Released):
            with self._changed:
                self.count += 1
                self.lost_rows += event.lost_rows
                self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.count >= count, 60):
                raise TimeoutError(f"{self.count} of {count} requests were released")


class Engines:
    """Some starts of stock vLLM and as many of the engine with sites."""

    def __init__(
        self,
        model: Path,
        scratch: str,
        device: Literal["cpu", "cuda"],
        starts: int,
        options: dict[str, Any],
        *,
        capture_bytes: int = CAPTURE_BYTES,
        copies_in_flight: Sequence[int] = (),
        controllers: Sequence[str] = (),
        stock: bool = True,
    ) -> None:
        """Starts them all.

        Args:
            model: what they load.
            scratch: a folder for their channels.
            device: where they run.
            starts: how many of each kind.
            options: vLLM's arguments, the same for all.
            capture_bytes: memory of the ring that captured rows pass through.
            copies_in_flight: a setting of further engines with sites, which come after `starts`.
            controllers: plugins that the engines with sites have. None is too slow for them.
            stock: whether stock vLLM is started too.
        """
        from vllm import LLM

        keep_freed_memory()  # as the server does
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self._releases = _Releases()
        self.stock: list[LLM] = []
        self.sited: list[LLM] = []
        count = starts + len(copies_in_flight)
        for start in range(count):
            if stock and start < starts:
                self.stock.append(LLM(model=str(model), **options))
            settings = EngineSettings(
                channel=f"ipc://{scratch}/channel-{start}",
                capture_bytes=capture_bytes,
                controllers=tuple(controllers),
                controller_budget=1.0,
            )
            if start >= starts:
                settings = replace(settings, copies_in_flight=copies_in_flight[start - starts])
            channel = WorkerChannel(settings, ranks=1)
            channel.start(loop, self._releases)
            extension = engine_kwargs(settings, device=device)
            self.sited.append(LLM(model=str(model), **options, **extension))  # type: ignore[arg-type]  # vLLM's own types
            reports = self.sited[start].collective_rpc("rheostat_describe")
            channel.attach(reports)
        self.sites = ModelSites.from_reports(reports)
        rng = np.random.default_rng(0)
        vector = rng.normal(0, 0.01, (ROWS, self.sites.width)).astype("<f4")
        for start in range(count):
            self.load(start, {VECTOR: vector})
        self._made = 0

    @property
    def block_size(self) -> int:
        """Tokens per block of the KV cache."""
        return self.sited[0].llm_engine.vllm_config.cache_config.block_size

    def load(self, start: int, vectors: Vectors) -> None:
        """Brings vectors to the workers of an engine with sites, in one call."""
        self._load(start, _payload(vectors))

    def drop(self, start: int, digests: Sequence[bytes]) -> None:
        """Takes vectors from the workers of an engine with sites."""
        named = [digest.hex() for digest in digests]
        self.sited[start].collective_rpc("rheostat_drop_vectors", args=(named,))

    def forget_prompts(self, start: int, *, stock: bool) -> None:
        """Empties the prefix cache of an engine.

        Raises:
            RuntimeError: it still runs something.
        """
        if not (self.stock if stock else self.sited)[start].reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use")

    def prompts(self, batch: int, length: int) -> list[list[int]]:
        """Prompts that differ in every token from the 999 before them."""
        self._made += batch
        return [[(self._made + i + 13 * j) % 1000 + 5 for j in range(length)] for i in range(batch)]

    def run(
        self,
        start: int,
        prompts: Sequence[Sequence[int]],
        plans: Sequence[Plan | None] | None,
        *,
        tokens: int,
        loads: Sequence[Vectors] = (),
        read_cache: bool = True,
    ) -> Ran:
        """Runs a batch to its end; returns once the workers have let go of it.

        Args:
            start: which of the starts.
            prompts: token ids of each request.
            plans: one per request; None: stock vLLM runs it.
            tokens: how many each request generates.
            loads: vectors that come with the batch, one call of the workers each. The calls are
                part of its time, what the server does to make a vector is not.
            read_cache: whether it may find its prompts in the prefix cache.
        """
        from vllm import SamplingParams

        wires: list[dict[str, object] | None] = [None] * len(prompts)
        for i, plan in enumerate(plans or ()):
            if plan is not None:
                self._made += 1
                own = replace(plan, request_id=f"b{self._made}")
                wires[i] = {EXTRA_ARG: own.to_wire()}
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args=wire,
                skip_reading_prefix_cache=not read_cache,
            )
            for wire in wires
        ]
        inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
        engine = (self.stock if plans is None else self.sited)[start]
        payloads = [_payload(vectors) for vectors in loads]
        released = self._releases.count
        lost = self._releases.lost_rows
        begun = time.perf_counter()
        for payload in payloads:
            self._load(start, payload)
        outputs = engine.generate(inputs, params, use_tqdm=False)  # type: ignore[arg-type]  # plain token prompts
        seconds = time.perf_counter() - begun
        self._releases.wait_for(released + sum(wire is not None for wire in wires))
        return Ran(
            seconds,
            [output.num_cached_tokens or 0 for output in outputs],
            [output.metrics.first_token_latency for output in outputs if output.metrics],
            [
                (output.metrics.last_token_ts - output.metrics.first_token_ts) / (tokens - 1)
                for output in outputs
                if output.metrics and tokens > 1
            ],
            self._releases.lost_rows - lost,
        )

    def _load(self, start: int, payload: _Payload) -> None:
        self.sited[start].collective_rpc("rheostat_load_vectors", args=(payload,))


def _payload(vectors: Vectors) -> _Payload:
    return {
        digest.hex(): (
            np.linalg.norm(one.astype(np.float64), axis=1).tolist(),
            np.ascontiguousarray(one, "<f4").tobytes(),
        )
        for digest, one in vectors.items()
    }
