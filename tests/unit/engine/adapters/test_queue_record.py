"""How long a request waits for earlier prompts, as vLLM's own scheduler computes them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from rheostat_engine.adapters import queue_record
from rheostat_engine.adapters.queue_record import RECORDED, QueueRecord, read

from .scripted_engine import BLOCK, MODEL

STEP = 64
"""Tokens that a step may compute."""


class Queue:
    """A scheduler whose steps take an eighth of a second each."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = EngineArgs(
            model=str(MODEL),
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=STEP,
            block_size=BLOCK,
            kv_cache_memory_bytes=1 << 24,
            enable_prefix_caching=False,
            enforce_eager=True,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = 100
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = Scheduler(
            config,
            KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], spec)]),
            StructuredOutputManager(config),
            BLOCK,
        )
        self.file = file
        self.now = 0.0
        self.seconds = 0.125
        """Of a step."""
        monkeypatch.setattr(queue_record, "time", SimpleNamespace(monotonic=lambda: self.now))
        QueueRecord(self.scheduler, file)

    def add(self, name: str, prompt: int, priority: int = 0) -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        self.scheduler.add_request(Request(name, [1] * prompt, params, None, priority=priority))

    def step(self) -> set[str]:
        """Takes a step; the requests that it computes."""
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        names = list(output.num_scheduled_tokens)
        self.now += self.seconds
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[
                    [7] if requests[name].num_computed_tokens >= requests[name].num_tokens else []
                    for name in names
                ],
            ),
        )
        return set(names)

    def wait_of(self, name: str) -> float:
        """Steps until a request is computed; then its recorded wait."""
        for _ in range(20):
            if name in self.step():
                return read(self.file)[name.partition("#")[0]]
        raise AssertionError(f"{name} was never computed")


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(tmp_path / "record", monkeypatch)


def test_steps_that_are_full_of_earlier_prompts_are_counted(queue: Queue) -> None:
    queue.add("long", 3 * STEP)
    queue.add(f"{RECORDED}1#0@7", 9)
    assert queue.wait_of(f"{RECORDED}1#0@7") == 3 * queue.seconds
    assert set(read(queue.file)) == {f"{RECORDED}1"}


def test_a_step_with_room_left_is_not_counted(queue: Queue) -> None:
    queue.add("short", 20)
    queue.add(f"{RECORDED}1", 9)
    assert queue.wait_of(f"{RECORDED}1") == 0.0


def test_a_step_in_progress_is_not_counted(queue: Queue) -> None:
    queue.add("long", 2 * STEP)
    queue.step()
    queue.add(f"{RECORDED}1", 9)
    assert queue.wait_of(f"{RECORDED}1") == queue.seconds


def test_at_most_a_quarter_of_a_second_of_a_stall_between_steps_counts(queue: Queue) -> None:
    queue.add("long", 2 * STEP)
    queue.add(f"{RECORDED}1", 9)
    queue.step()
    queue.now += 5.0  # something holds up the engine
    assert queue.wait_of(f"{RECORDED}1") == 0.25 + queue.seconds


def test_at_most_a_quarter_of_a_second_of_a_step_counts(queue: Queue) -> None:
    queue.seconds = 3.0
    queue.add("long", 2 * STEP)
    queue.add(f"{RECORDED}1", 9)
    assert queue.wait_of(f"{RECORDED}1") == 0.5


def test_a_step_with_later_prompts_is_not_counted(queue: Queue) -> None:
    queue.add(f"{RECORDED}1", 9)
    queue.add("later", 3 * STEP)
    waiting = queue.scheduler.waiting.pop_request()  # as if another came first
    for _ in range(2):
        assert queue.step() == {"later"}
    queue.scheduler.waiting.prepend_request(waiting)
    assert queue.wait_of(f"{RECORDED}1") == 0.0


def test_background_requests_do_not_count_as_earlier(queue: Queue) -> None:
    queue.add("background", 2 * STEP, priority=1)
    queue.add(f"{RECORDED}1", 9)
    assert queue.wait_of(f"{RECORDED}1") == 0.0


def test_nothing_is_written_of_other_requests(queue: Queue) -> None:
    queue.add("long", 2 * STEP)
    queue.add("other", 9)
    for _ in range(4):
        queue.step()
    assert read(queue.file) == {}
