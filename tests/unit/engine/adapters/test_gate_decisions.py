"""Requests share KV behind gates that stay shut, and never KV under gates that were open.

`Engine` runs vLLM's scheduler. Its cache holds, for each slot, the token and who computed it under
an open gate. All requests generate the same tokens, so wrong keys would show.
"""

import inspect
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from rheostat_engine import EXTRA_ARG, OPEN_END, Act, Kind, Plan
from rheostat_engine.adapters.gate_decisions import DecidedBlocks, questions_of, with_decisions
from rheostat_engine.adapters.request_plan import request_plan
from rheostat_engine.adapters.scheduler import install_block_keys, limit_hits
from rheostat_engine.plan.gates import (
    Activation,
    Combine,
    Form,
    Gate,
    GateCondition,
    Hold,
    Normalise,
    Pool,
    Reading,
)

from ..strategies import DIGESTS, EVERYWHERE
from .scripted_engine import MODEL

BLOCK = 4
WINDOW = 6
RELIES = "rheostat_engine.adapters.gate_decisions relies on it"
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


@pytest.fixture(autouse=True)
def _hooked() -> Iterator[None]:
    """Plans enter the keys of blocks, as beside every scheduler of ours."""
    name = "generate_block_hash_extra_keys"
    stock = getattr(kv_cache_utils, name)
    kv_cache_utils.init_none_hash(sha256)
    install_block_keys()
    yield
    for module in (kv_cache_utils, block_pool):
        setattr(module, name, stock)


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return EngineArgs(
        model=str(MODEL),
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        block_size=BLOCK,
        kv_cache_memory_bytes=1 << 24,
        enable_prefix_caching=True,
        enforce_eager=True,
    ).create_engine_config()


def gated(end: int, *, late: bool = False, each: bool = False, steered: bool = False) -> Plan:
    """A plan whose gate is decided by the last token of a prompt, or by each token."""
    where = EVERYWHERE if each else ((end - 1, end),)
    reading = Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, 0)
    read = Act(Kind.READ, (DIGESTS[0],), ((0, (0,)),), where, reading=reading)
    at = () if each else (1, end - 1)
    condition = GateCondition((0,), Pool.LAST, Combine.ANY, 0.0, math.inf, *at)
    gate = Gate((condition,), Combine.ALL, Form.STEP, 0.5, 0.0, Hold.TOKEN if each else Hold.REST)
    act = Act(Kind.ADD, (DIGESTS[1],), ((4, (0,)),), EVERYWHERE)
    gated_act = replace(act, gate=gate._replace(late=end if late else 0))
    return Plan("r", (*([act] if steered else []), gated_act, read))


class Engine:
    """vLLM's scheduler, with outputs that come a step late if it schedules ahead."""

    def __init__(
        self, config: VllmConfig, *, ahead: bool = False, blocks: int = 100, window: bool = False
    ) -> None:
        specs: list[Any] = [FullAttentionSpec(**SHAPE)]
        if window:
            specs.append(SlidingWindowSpec(**SHAPE, sliding_window=WINDOW))
        config.cache_config.num_gpu_blocks = blocks
        groups = [KVCacheGroupSpec([str(at)], spec) for at, spec in enumerate(specs)]
        self.scheduler = (AsyncScheduler if ahead else Scheduler)(
            config,
            KVCacheConfig(blocks, [], groups),
            StructuredOutputManager(config),
            BLOCK,
            hash_block_size=BLOCK,
        )
        limit_hits(self.scheduler.kv_cache_manager, None)
        DecidedBlocks(self.scheduler)
        self.ahead = ahead
        self.outputs: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.kv: dict[tuple[int, int], tuple[int, str]] = {}
        """By block and offset: the token, and the request under whose open gate it was computed."""
        self.shut: dict[str, bool] = {}
        """Whether the gates of each request stay shut, in its present computation."""
        self.opens: Any = lambda name: False
        """Decides whether a request's gates open."""
        self.reports = True
        self.decided_again = 0
        """How often gates were decided again, because their request was preempted."""
        self.cached: dict[str, int] = {}
        """Tokens that each request found in the cache, the last time that it began."""

    def add(self, name: str, prompt: list[int], plan: Plan | None = None, tokens: int = 20) -> None:
        extra = None if plan is None else {EXTRA_ARG: replace(plan, request_id=name).to_wire()}
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra)
        hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=hasher))

    def step(self) -> None:
        output = self.scheduler.schedule()
        questions = questions_of(output)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        running = output.scheduled_cached_reqs
        starts |= zip(running.req_ids, running.num_computed_tokens, strict=True)
        self.cached |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        shut: list[str] = []
        sampled: list[list[int]] = []
        for name, count in output.num_scheduled_tokens.items():
            end = starts[name] + count
            decided = self._keys(name) and self._keys(name).decided_once
            if decided and starts[name] <= decided.position < end:
                self.decided_again += name in self.shut
                self.shut[name] = not self.opens(name)
            if name in questions:
                shut += [name] * (self.shut[name] and self.reports)
            self._compute(name, starts[name], end)
            prefills = self.scheduler.requests[name].is_prefill_chunk
            sampled.append([] if prefills else [token_at(end)])
        names = list(output.num_scheduled_tokens)
        made = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)
        made.rheostat_shut = shut  # type: ignore[attr-defined]  # as `with_decisions` sets it
        self.outputs.append((output, made))
        if not self.ahead or len(self.outputs) > 1:
            self.scheduler.update_from_output(*self.outputs.popleft())

    def _compute(self, name: str, start: int, end: int) -> None:
        """Reads all earlier KV of a request, and writes the KV of its next tokens."""
        request = self.scheduler.requests[name]
        (blocks, *_) = self.scheduler.kv_cache_manager.get_block_ids(name)
        prompt, first = request.prompt_token_ids, self._first_gated(name)
        assert prompt is not None
        for position in range(end):
            slot = blocks[position // BLOCK], position % BLOCK
            token = prompt[position] if position < len(prompt) else token_at(position)
            own = name if position >= first and not self.shut.get(name, False) else ""
            if position >= start:
                self.kv[slot] = token, own
            assert self.kv[slot] == (token, own), (name, position)

    def _keys(self, name: str) -> Any:
        plan = request_plan(self.scheduler.requests[name])
        return None if plan is None else plan.keys

    def _first_gated(self, name: str) -> int:
        keys = self._keys(name)
        return OPEN_END if keys is None else keys._steered.first_gated

    def preempt(self, request: Request) -> None:
        """Preempts a running request before the next step."""
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)

    def finish(self) -> None:
        """Runs everything to its end."""
        while self.scheduler.has_unfinished_requests():
            self.step()
        while self.outputs:
            self.scheduler.update_from_output(*self.outputs.popleft())

    def next_turn(self, prompt: list[int], tokens: int = 20, plan: Plan | None = None) -> int:
        """Tokens that the next turn finds in the cache."""
        answer = [token_at(position) for position in range(len(prompt), len(prompt) + tokens)]
        self.add("next", [*prompt, *answer, 7, 8, 9], plan, tokens=2)
        self.finish()
        return self.cached["next"]


def token_at(position: int) -> int:
    """Every request generates the same tokens."""
    return 500 + position


def test_vllm_hashes_caches_and_preempts_as_before() -> None:
    hashes = inspect.getsource(Request.update_block_hashes)
    assert "self.block_hashes.extend(self._block_hasher(self))" in hashes, RELIES
    assert "self.update_block_hashes()" in inspect.getsource(Request.append_output_token_ids)
    slots = inspect.getsource(KVCacheManager.allocate_slots)
    assert "self.coordinator.cache_blocks(request, num_tokens_to_cache)" in slots, RELIES
    assert "self.coordinator.cache_blocks(request, num_computed_tokens)" in inspect.getsource(
        KVCacheManager.cache_blocks
    ), RELIES
    parameters = [*inspect.signature(KVCacheCoordinator.cache_blocks).parameters]
    assert parameters == ["self", "request", "num_computed_tokens"], RELIES
    preempt = inspect.getsource(Scheduler._preempt_request)
    assert "request.num_computed_tokens = 0" in preempt, RELIES
    assert "request.num_preemptions += 1" in preempt, RELIES
    parameters = [*inspect.signature(Scheduler._preempt_request).parameters]
    assert parameters == ["self", "request", "timestamp", "drop_stale_output"], RELIES
    schedule = inspect.getsource(Scheduler.schedule)
    assert "self._preempt_request(" in schedule, RELIES
    assert "self._update_after_schedule(scheduler_output)" in schedule, RELIES
    parameters = [*inspect.signature(Scheduler.update_from_output).parameters]
    assert parameters == ["self", "scheduler_output", "model_runner_output"], RELIES


LENGTHS = range(9, 14)
SCHEDULES = 60


@pytest.mark.parametrize("window", [False, True], ids=["", "window"])
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_an_answer_under_a_gate_that_stays_shut_is_shared_like_a_plain_one(
    config: VllmConfig, ahead: bool, late: bool, window: bool
) -> None:
    for length in LENGTHS:
        prompt, found = [*range(100, 100 + length)], []
        for plan in (None, gated(length, late=late)):
            engine = Engine(config, ahead=ahead, window=window)
            engine.add("first", prompt, plan)
            engine.finish()
            found.append(engine.next_turn(prompt))
        assert found[0] == found[1] >= (length + 19) // BLOCK * BLOCK


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("why", ["open", "no report"])
def test_an_answer_is_private_if_the_gate_opens_or_nothing_is_reported(
    config: VllmConfig, ahead: bool, late: bool, why: str
) -> None:
    for length in LENGTHS:
        prompt = [*range(100, 100 + length)]
        engine = Engine(config, ahead=ahead)
        engine.opens = lambda name: why == "open"
        engine.reports = why == "open"
        engine.add("first", prompt, gated(length, late=late))
        engine.finish()
        assert engine.next_turn(prompt) == (length if late else length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_an_answer_under_a_gate_of_each_token_is_private(config: VllmConfig, ahead: bool) -> None:
    prompt = [*range(100, 110)]
    engine = Engine(config, ahead=ahead)
    engine.add("first", prompt, gated(10, each=True))
    engine.finish()
    assert engine.next_turn(prompt) == 0


def test_ungated_steering_keeps_its_keys_beside_a_shut_gate(config: VllmConfig) -> None:
    prompt = [*range(100, 110)]
    both = gated(10, steered=True)
    engine = Engine(config)
    engine._first_gated = lambda name: OPEN_END  # type: ignore[method-assign]  # all alike
    engine.add("first", prompt, both)
    engine.finish()
    steered = replace(both, acts=both.acts[:1])
    assert engine.next_turn(prompt, plan=steered) == 28
    assert engine.next_turn(prompt) == 0


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_a_request_that_ends_with_its_first_token_has_cached_its_prompt(
    config: VllmConfig, ahead: bool
) -> None:
    prompt = [*range(100, 112)]
    engine = Engine(config, ahead=ahead)
    engine.add("first", prompt, gated(12), tokens=1)
    engine.finish()
    assert engine.next_turn(prompt, tokens=1) == 12


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_a_preempted_request_is_decided_again(config: VllmConfig, ahead: bool) -> None:
    prompt = [*range(100, 110)]
    engine = Engine(config, ahead=ahead)
    engine.add("first", prompt, gated(10), tokens=40)
    for _ in range(10):
        engine.step()
    request = engine.scheduler.requests["first"]
    engine.opens = lambda name: True
    before = len(request.block_hashes)
    assert before > 3
    engine.preempt(request)
    assert len(request.block_hashes) == 2
    engine.finish()  # what it computes now is marked as its own
    found = engine.next_turn(prompt, tokens=40)
    assert 8 < found <= 4 * before  # blocks of its first computation


class Answering(AsyncModelRunnerOutput):
    """An output that is still computed."""

    def get_output(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(["a"], {"a": 0})


def test_reports_travel_with_the_output_of_their_step() -> None:
    reports = iter([SimpleNamespace(shut=lambda: ["a"])] * 3 + [None])
    decisions: Any = SimpleNamespace(take=lambda: next(reports))
    at_once, empty = ModelRunnerOutput(["a"], {"a": 0}), ModelRunnerOutput([], {})
    assert with_decisions(at_once, decisions) is at_once
    later: Any = with_decisions(Answering(), decisions)
    assert [vars(one)["rheostat_shut"] for one in (at_once, later.get_output())] == [["a"]] * 2
    assert "rheostat_shut" not in vars(with_decisions(empty, decisions))
    assert with_decisions(None, decisions) is None


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_no_schedule_lets_anybody_read_kv_under_an_open_gate(
    config: VllmConfig, ahead: bool
) -> None:
    """`Engine` checks each slot that is read. Gates that are computed again may open or shut."""
    decided_again = hits = 0
    for seed in range(SCHEDULES):
        random = Random(seed)
        engine = Engine(config, ahead=ahead, blocks=random.randint(14, 30))
        engine.opens = lambda name: random.random() < 0.5  # noqa: B023  # this engine's
        for number in range(8):
            prompt = [*range(100, 109), *map(token_at, range(9, 9 + random.randint(0, 9)))]
            kind = {"late": random.random() < 0.3} if random.random() < 0.8 else {"each": True}
            plan = gated(len(prompt), **kind) if random.random() < 0.7 else None
            engine.add(f"r{number}", prompt, plan, random.randint(1, 24))
            for _ in range(random.randint(0, 12)):
                if engine.scheduler.running and random.random() < 0.2:
                    engine.preempt(random.choice(engine.scheduler.running))
                engine.step()
        engine.finish()
        decided_again += engine.decided_again
        hits += sum(map(bool, engine.cached.values()))
        decided = vars(engine.scheduler)["update_from_output"].__self__
        assert not decided._undecided
        assert not decided._hashers
    assert min(decided_again, hits) > 40
