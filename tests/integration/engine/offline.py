"""A real vLLM engine on CPU with the extension, driven batch by batch, for tests."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rheostat_engine import (
    EXTRA_ARG,
    Attached,
    ControllerDisabled,
    EngineSettings,
    Event,
    Gained,
    Installed,
    ModelSites,
    Plan,
    Released,
    Rows,
    SignalRows,
    WorkerChannel,
    engine_kwargs,
)

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@dataclass
class Outcome:
    """What came of one request."""

    token_ids: list[int]
    logprobs: list[dict[int, float]]
    """Log-probabilities of every token of the vocabulary, per generated token."""
    cached: int
    installed: Installed | None = None
    attached: list[Attached] = field(default_factory=list)
    gained: list[Gained] = field(default_factory=list)
    disabled: list[ControllerDisabled] = field(default_factory=list)
    released: Released | None = None
    rows: dict[int, dict[int, npt.NDArray[Any]]] = field(default_factory=dict)
    """Captured rows by site, then position."""
    signals: dict[int, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = field(
        default_factory=dict
    )
    """By position: the step's columns of readings, and of gates."""
    duplicates: int = 0
    """Rows and signals delivered more than once."""

    def logits(self, step: int = 0) -> npt.NDArray[np.float64]:
        """Log-probabilities of one generated token, [vocabulary]."""
        one = self.logprobs[step]
        return np.array([one[i] for i in range(len(one))])

    def stream(self, site: int) -> npt.NDArray[Any]:
        """Captured rows of a site by ascending position, [n, W]."""
        return np.stack([self.rows[site][p] for p in sorted(self.rows[site])])


class OfflineEngine:
    """vLLM's `LLM` with sites, and the side channel beside it."""

    def __init__(
        self,
        model: Path,
        channel: str,
        *,
        sited: bool = True,
        device: Literal["cpu", "cuda"] = "cpu",
        capture_bytes: int = 4 << 20,
        controllers: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        """Starts the engine; `sited=False` starts stock vLLM."""
        from vllm import LLM

        self._events: dict[str, list[Event]] = {}
        self._news = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._count = 0
        settings = EngineSettings(
            channel=channel,
            bank_bytes=4 << 20,
            capture_bytes=capture_bytes,
            controllers=controllers,
            controller_budget=0.25,
        )
        extension = engine_kwargs(settings, device=device) if sited else {}
        stages = int(options.get("pipeline_parallel_size", 1))
        self._channel = WorkerChannel(settings, ranks=stages) if sited else None
        if self._channel is not None:
            self._channel.start(self._loop, self._deliver)
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "block_size": 32,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_logprobs": -1,
            "seed": 0,
            "disable_log_stats": True,
        }
        if device == "cpu":
            defaults["kv_cache_memory_bytes"] = 128 << 20  # vLLM writes all of it at the start
        self.llm = LLM(model=str(model), **{**defaults, **options}, **extension)
        self.sites: ModelSites | None = None
        if self._channel is not None:
            reports = self.llm.collective_rpc("rheostat_describe")
            self._channel.attach(reports)
            self.sites = ModelSites.from_reports(reports)

    def close(self) -> None:
        """Stops the engine."""
        self.llm.llm_engine.engine_core.shutdown()
        if self._channel is not None:
            self._channel.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def load(self, vectors: Mapping[bytes, npt.NDArray[np.float32]]) -> None:
        """Brings vectors to the worker."""
        data = {
            digest.hex(): (
                np.linalg.norm(v.astype(np.float64), axis=1).tolist(),
                np.ascontiguousarray(v, "<f4").tobytes(),
            )
            for digest, v in vectors.items()
        }
        self.llm.collective_rpc("rheostat_load_vectors", args=(data,))

    def stats(self) -> dict[str, Any]:
        """The first worker's counts."""
        return self.stats_of_all()[0]

    def stats_of_all(self) -> list[dict[str, Any]]:
        """Every worker's counts, after it has released all tables that no request uses."""
        while any(self.llm.collective_rpc("rheostat_release", args=([],))):
            pass
        stats: list[dict[str, Any]] = self.llm.collective_rpc("rheostat_stats")
        return stats

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        plans: Sequence[Plan | None] | None = None,
        *,
        max_tokens: int = 4,
        skip_cache: bool = True,
        loras: Sequence[Any] | None = None,
        **sampling: Any,
    ) -> list[Outcome]:
        """Runs one batch to its end and waits until the workers have let go of it."""
        from vllm import SamplingParams

        plans = plans or [None] * len(prompts)
        inputs, params, ids = [], [], []
        for prompt, plan in zip(prompts, plans, strict=True):
            self._count += 1
            request_id = f"r{self._count}"
            one: dict[str, Any] = {"prompt_token_ids": list(prompt)}
            extra = None
            if plan is not None:
                plan = replace(plan, request_id=request_id)
                extra = {EXTRA_ARG: plan.to_wire()}
            inputs.append(one)
            ids.append(request_id if plan is not None else None)
            params.append(
                SamplingParams(
                    **{"temperature": 0.0, "ignore_eos": True, "logprobs": -1, **sampling},
                    max_tokens=max_tokens,
                    detokenize=False,
                    extra_args=extra,
                    skip_reading_prefix_cache=skip_cache or None,
                )
            )
        with self.held():
            self.llm.enqueue(inputs, params, use_tqdm=False, lora_request=loras)
        outputs = self.llm.wait_for_completion(use_tqdm=False)
        self.settle()
        return [self.outcome(o, i) for o, i in zip(outputs, ids, strict=True)]

    def settle(self) -> None:
        """Lets the workers hear of everything that has finished."""
        if _in_process():
            self.llm.llm_engine.step()  # nobody else tells them

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No step runs in the meantime, so that what arrives is batched alike every time."""
        core = self.llm.llm_engine.engine_core
        if _in_process():
            yield  # nothing runs unless it is told to
            return
        core.call_utility("pause_scheduler", "keep", False)
        try:
            yield
        finally:
            core.call_utility("resume_scheduler")

    def outcome(self, output: Any, request_id: str | None) -> Outcome:
        """What came of a request that has ended; waits for the last event of one with an id."""
        completion = output.outputs[0]
        outcome = Outcome(
            token_ids=list(completion.token_ids),
            logprobs=[{t: p.logprob for t, p in s.items()} for s in completion.logprobs or []],
            cached=output.num_cached_tokens or 0,
        )
        if request_id is None:
            return outcome
        with self._news:
            done = self._news.wait_for(
                lambda: any(isinstance(e, Released) for e in self._events.get(request_id, [])), 30
            )
        assert done, f"{request_id} was never released: {self._events.get(request_id)}"
        for event in self._events.pop(request_id):
            if isinstance(event, Installed):
                outcome.installed = event
            elif isinstance(event, Released):
                outcome.released = event
            elif isinstance(event, Attached):
                outcome.attached.append(event)
            elif isinstance(event, Gained):
                outcome.gained.append(event)
            elif isinstance(event, ControllerDisabled):
                outcome.disabled.append(event)
            elif isinstance(event, SignalRows):
                self._add_signals(outcome, event, request_id)
            else:
                assert isinstance(event, Rows), event
                self._add_rows(outcome, event)
        return outcome

    @staticmethod
    def _add_rows(outcome: Outcome, event: Rows) -> None:
        for site, data in zip(event.sites, event.data, strict=True):
            rows = outcome.rows.setdefault(site, {})
            for position, row in zip(event.positions.tolist(), data, strict=True):
                outcome.duplicates += position in rows
                rows[position] = row

    @staticmethod
    def _add_signals(outcome: Outcome, event: SignalRows, request_id: str) -> None:
        assert event.values is not None, "signals are lost"
        row = 0
        for name, start, count in zip(event.request_ids, event.starts, event.counts, strict=True):
            for position in range(start, start + count) if name == request_id else ():
                values = event.values[row + position - start]
                outcome.duplicates += position in outcome.signals
                outcome.signals[position] = values[: event.readings], values[event.readings :]
            row += count

    def _deliver(self, event: Event) -> None:
        names = event.request_ids if isinstance(event, SignalRows) else (event.request_id,)
        with self._news:
            for name in names:
                self._events.setdefault(name, []).append(event)
            self._news.notify_all()


def _in_process() -> bool:
    """Whether vLLM's engine runs in this process, when it is told to."""
    return os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Widens bfloat16, given as its bits, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@contextlib.contextmanager
def offline(model: Path, channel: str, **options: Any) -> Iterator[OfflineEngine]:
    """An engine that is stopped at the end."""
    engine = OfflineEngine(model, channel, **options)
    try:
        yield engine
    finally:
        engine.close()
