"""The tokens of a step are limited to what the device computes in 60 ms."""

import inspect
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler

from rheostat_engine.adapters import step_seconds
from rheostat_engine.adapters.step_seconds import StepSeconds

from .scripted_engine import Engine

RELIES = "rheostat_engine.adapters.step_seconds relies on it"
MOST = 8192


class Steps:
    """A scheduler without requests, and scripted clocks."""

    def __init__(self, most: int = MOST, samples: int = 1024) -> None:
        self.clock = self.cpu = 0.0
        self.next = (0, 0)
        """Tokens and requests of the next step."""
        self.scheduler: Any = SimpleNamespace(
            max_num_scheduled_tokens=most,
            max_num_running_reqs=samples,
            schedule=lambda throttle_prefills: SimpleNamespace(
                total_num_scheduled_tokens=self.next[0],
                num_scheduled_tokens=dict.fromkeys(range(self.next[1]), 1),
            ),
            update_from_output=lambda output, ran: {},
        )
        StepSeconds(cast(Any, self.scheduler), lambda: self.clock, lambda: self.cpu)

    @property
    def limit(self) -> int:
        """The limit of the next step, which is a step of no tokens."""
        self.begin(0, 0)
        return int(self.scheduler.max_num_scheduled_tokens)

    def begin(self, tokens: int, requests: int) -> Any:
        self.next = tokens, requests
        return self.scheduler.schedule(False)

    def work(self, seconds: float) -> None:
        """The host works."""
        self.clock += seconds
        self.cpu += seconds

    def end(self, output: Any, wait: float) -> None:
        """The output of a step comes after the core has waited for it."""
        self.clock += wait
        self.scheduler.update_from_output(output, None)

    def take(self, tokens: int, requests: int, seconds: float) -> None:
        self.end(self.begin(tokens, requests), seconds)


def speed(
    *, device: float, launch: float, prompt: float, length: int, count: int = 5000
) -> tuple[float, int]:
    """Tokens per second of prompts, and the last limit, with one step ahead as in vLLM's core.

    Args:
        device: seconds of the device for a token.
        launch: seconds of the host for a step.
        prompt: seconds of the host for a prompt.
        length: tokens of a prompt.
        count: prompts.
    """
    steps = Steps()
    limit = steps.scheduler.max_num_scheduled_tokens
    waiting, free, ahead = count, 0.0, []
    while waiting or ahead:
        if waiting and len(ahead) < 2:
            steps.begin(0, 0)
            limit = steps.scheduler.max_num_scheduled_tokens
            prompts = min(waiting, limit // length)
            waiting -= prompts
            output = steps.begin(prompts * length, prompts)
            free = max(free, steps.clock) + device * prompts * length
            steps.work(launch + prompt * prompts)
            free = max(free, steps.clock)
            ahead.append((output, free))
            if len(ahead) < 2 and waiting:
                continue
        output, ended = ahead.pop(0)
        steps.end(output, max(0.0, ended - steps.clock))
    return count * length / steps.clock, limit


def test_vllms_limit_holds_until_a_step_of_prompts_was_measured() -> None:
    steps = Steps()
    steps.take(1000, 10, 0.5)  # too few tokens
    steps.take(1024, 1000, 0.5)  # streams that decode
    assert steps.limit == MOST


def test_a_step_gets_the_tokens_that_the_device_would_compute_in_60_ms() -> None:
    steps = Steps()
    steps.take(8000, 250, 0.16)
    assert steps.limit == 3000
    steps.take(4000, 125, 0.08)
    assert steps.limit == 3000
    steps.take(4000, 125, 0.16)
    assert steps.limit == 2400


def test_a_step_for_which_the_core_did_not_wait_is_not_measured() -> None:
    steps = Steps()
    output = steps.begin(8000, 250)
    steps.work(0.5)
    steps.end(output, 0.004)
    assert steps.limit == MOST


def test_the_time_of_a_step_begins_with_the_output_before_if_the_core_waited_for_it() -> None:
    steps = Steps()
    first = steps.begin(4000, 125)
    steps.work(0.03)
    second = steps.begin(4000, 125)
    steps.work(0.03)
    steps.end(first, 0.02)
    steps.end(second, 0.08)
    assert steps.limit == 3000


def test_after_an_output_without_a_wait_it_begins_when_the_step_was_scheduled() -> None:
    steps = Steps()
    first = steps.begin(4000, 125)
    steps.work(0.04)
    second = steps.begin(4000, 125)
    steps.work(0.03)
    steps.end(first, 0.0)
    steps.end(second, 0.05)
    assert steps.limit == pytest.approx(3000, abs=1)


def test_the_device_is_busy_while_the_host_launches_the_next_step() -> None:
    steps = Steps()
    steps.take(8000, 250, 0.16)
    steps.begin(8000, 250)
    steps.work(0.1)
    assert steps.limit == 3125, "1.25 times the 0.05 s that the host took for a step"


def test_the_limit_is_never_below_2048_and_never_above_vllms() -> None:
    steps = Steps()
    steps.take(2048, 1, 5.0)
    assert steps.limit == 2048
    for _ in range(8):
        steps.take(8192, 1, 0.01)
    assert steps.limit == MOST


def test_each_sample_that_may_run_gets_a_token_in_every_step() -> None:
    steps = Steps(samples=3000)
    steps.take(4096, 4, 5.0)
    assert steps.limit == 3000


def test_a_step_without_output_is_forgotten() -> None:
    steps = Steps()
    steps.begin(8192, 8)
    steps.take(8000, 250, 0.16)
    assert steps.limit == 3000


def test_shorter_steps_cost_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"device": 1 / 44e3, "launch": 0.03, "prompt": 1.5e-4, "length": 40}
    small = {"device": 1 / 500e3, "launch": 0.025, "prompt": 1.5e-4, "length": 40}
    limited = [speed(**large), speed(**small)]
    monkeypatch.setattr(step_seconds, "_SECONDS", 100.0)
    unlimited = [speed(**large), speed(**small)]
    for (with_limit, _), (without, _) in zip(limited, unlimited, strict=True):
        assert with_limit == pytest.approx(without, rel=0.01)
    assert 2500 < limited[0][1] < 3000, "the device is slower: 60 ms are 2,640 tokens"
    assert limited[1][1] == MOST, "the host is slower"


def test_an_engine_of_small_steps_is_left_as_it_is() -> None:
    steps = Steps(2048)
    schedule = steps.scheduler.schedule
    StepSeconds(steps.scheduler)
    assert steps.scheduler.schedule is schedule


def test_vllm_computes_no_more_tokens_than_the_limit(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_seconds, "_LEAST", 256)
    engine = Engine(config, each=4.0)
    StepSeconds(engine.scheduler, lambda: engine.clock / 1e3, lambda: 0.0)
    names = engine.add(200, background=False, tokens=2, length=27)
    tokens = []
    while engine.scheduler.requests:
        engine.step()
        tokens.append(sum(engine.computed.values()))
    assert tokens[0] > 2000
    assert 256 <= max(tokens[1:]) < 700
    assert sum(tokens) == len(names) * 28, "each prompt token and the first generated one"


def test_vllm_reads_its_limit_in_each_step() -> None:
    source = inspect.getsource(Scheduler.schedule)
    assert "token_budget = self.max_num_scheduled_tokens" in source, RELIES
