"""vLLM's scheduler with background requests, and a worker whose steps take a scripted time."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from rheostat_engine.adapters.background import BackgroundPace, BackgroundQueue

BLOCK = 32
MODEL = Path(__file__).parents[4] / "server" / "rheostat_server" / "demo_model"
DECODE, PROMPT, EACH = 5.0, 12.0, 0.5
"""Milliseconds of a step that only decodes, more for one with a prompt, more for each prompt."""


@dataclass
class Engine:
    """vLLM's scheduler, and a worker whose steps take a scripted time."""

    config: VllmConfig
    after: float = 0.0
    """Milliseconds more of the step after such a step."""
    decode: float = DECODE
    each: float = EACH
    blocks: int = 4000
    """Blocks of KV memory. One of them is vLLM's own."""
    clock: float = 0.0
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    """Milliseconds, prompts in the background, others that ran."""
    number: int = 0
    computed: dict[str, int] = field(default_factory=dict)
    """Tokens of each request in the last step."""

    def __post_init__(self) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.config.cache_config.num_gpu_blocks = self.blocks
        self.scheduler = Scheduler(
            self.config,
            KVCacheConfig(self.blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            StructuredOutputManager(self.config),
            BLOCK,
            log_stats=True,
        )
        self.pace = BackgroundPace()
        BackgroundQueue(self.scheduler, self.pace, lambda: self.clock / 1e3)

    def add(self, count: int, *, background: bool, tokens: int, length: int = 27) -> list[str]:
        """Sends requests."""
        names = []
        for _ in range(count):
            self.number += 1
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            prompt = [(self.number * 31 + at) % 1900 for at in range(length)]
            name = f"{'cell' if background else 'stream'}-{self.number}"
            self.scheduler.add_request(
                Request(name, prompt, params, None, priority=int(background))
            )
            names.append(name)
        return names

    def step(self) -> list[str]:
        """Takes a step; the requests that began in it."""
        output = self.scheduler.schedule()
        began = [new.req_id for new in output.scheduled_new_reqs]
        seconds = self.decode + (PROMPT + self.each * len(began) if began else 0.0)
        if self.steps and self.steps[-1][1]:
            seconds += self.after
        others = sum(one.priority <= 0 for one in self.scheduler.running)
        cells = sum(name.startswith("cell") for name in began)
        names = list(output.num_scheduled_tokens)
        self.clock += seconds
        self.steps.append((seconds, cells, others))
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[
                    [] if self.scheduler.requests[name].is_prefill_chunk else [7] for name in names
                ],
            ),
        )
        self.computed = output.num_scheduled_tokens
        return began

    def beside(self) -> list[float]:
        """The times of all steps beside others."""
        return [seconds for seconds, _, others in self.steps if others]
