"""The tokens of a step are limited to what the last steps of prompts computed in 90 ms."""

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
    """A scheduler without requests, and a scripted clock."""

    def __init__(self, most: int = MOST, samples: int = 1024) -> None:
        self.clock = 0.0
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
        StepSeconds(cast(Any, self.scheduler), lambda: self.clock)

    @property
    def limit(self) -> int:
        """The limit of the next step, which is a step of no tokens."""
        self.begin(0, 0)
        return int(self.scheduler.max_num_scheduled_tokens)

    def begin(self, tokens: int, requests: int) -> Any:
        self.next = tokens, requests
        return self.scheduler.schedule(False)

    def end(self, output: Any, seconds: float) -> None:
        """The output of a step comes after so many seconds."""
        self.clock += seconds
        self.scheduler.update_from_output(output, None)

    def take(self, tokens: int, requests: int, seconds: float) -> None:
        self.end(self.begin(tokens, requests), seconds)


def test_vllms_limit_holds_until_a_step_of_prompts_was_measured() -> None:
    steps = Steps()
    assert steps.limit == MOST
    steps.take(1000, 10, 0.5)  # too few tokens
    steps.take(1024, 1000, 0.5)  # streams that decode
    assert steps.limit == MOST


def test_a_step_gets_the_tokens_that_the_last_would_have_computed_in_90_ms() -> None:
    steps = Steps()
    steps.take(8000, 250, 0.18)
    assert steps.limit == 4000
    steps.take(4000, 125, 0.06)
    assert steps.limit == 12_000 * 0.09 / 0.24


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


def test_a_host_that_needs_as_long_for_small_steps_lowers_the_limit_only_for_a_while() -> None:
    """Every step takes 40 ms, whatever its tokens, as with a small model."""
    steps = Steps()
    steps.take(1024, 32, 0.04)
    limits = []
    for _ in range(8):
        limits.append(steps.limit)
        steps.take(limits[-1], 32, 0.04)
    assert limits[0] == 2304
    assert limits[-1] == MOST


def test_the_time_of_a_step_begins_with_the_output_before() -> None:
    steps = Steps()
    first = steps.begin(4096, 128)
    steps.clock += 0.05
    second = steps.begin(4096, 128)
    steps.end(first, 0.04)
    steps.end(second, 0.09)
    assert steps.limit == 4096


def test_a_step_without_output_is_forgotten() -> None:
    steps = Steps()
    steps.begin(8192, 8)
    steps.take(8000, 250, 0.18)
    assert steps.limit == 4000


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
    StepSeconds(engine.scheduler, lambda: engine.clock / 1e3)
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
