"""Cells read a part of a cached block, and nothing that is not theirs, by vLLM's scheduler."""

import inspect
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import model_runner

from rheostat_engine import EXTRA_ARG, OPEN_END, Act, Capture, Plan, Window
from rheostat_engine.adapters import partial_hits
from rheostat_engine.adapters.partial_hits import PartialHits, copies_parts
from rheostat_engine.adapters.scheduler import install_block_keys, limit_hits

from ..strategies import add

BLOCK = 4
RELIES = "rheostat_engine.adapters.partial_hits relies on it"
MODEL = Path(__file__).parents[4] / "server" / "rheostat_server" / "demo_model"
PROMPT = [*range(100, 122)]
"""Five blocks and two tokens."""
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}

Content = tuple[tuple[int, ...], tuple[tuple[int, float], ...]]
"""All that the KV of a token depends on: tokens, and positions and scales of acts."""


@pytest.fixture(autouse=True)
def _hooked() -> Iterator[None]:
    name = "generate_block_hash_extra_keys"
    stock = getattr(kv_cache_utils, name)
    kv_cache_utils.init_none_hash(sha256)
    install_block_keys()
    yield
    for module in (kv_cache_utils, block_pool):
        setattr(module, name, stock)


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    made = EngineArgs(
        model=str(MODEL),
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        async_scheduling=False,
        kv_cache_memory_bytes=1 << 24,
        enable_prefix_caching=True,
        enforce_eager=True,
    ).create_engine_config()
    made.cache_config.block_size = BLOCK
    return made


@dataclass(frozen=True)
class Steering:
    """Acts everywhere from a position on, and a cell's at one position."""

    everywhere: tuple[int, float] | None = None
    """The first position, and the scale."""
    cell: tuple[int, float] | None = None
    """The position, and the scale. The columns beside it are in the plan too."""
    captured: int | None = None
    """The first captured position."""

    def plan(self, name: str) -> Plan | None:
        """The plan of a request."""
        own: tuple[Act, ...] = ()
        captures: tuple[Capture, ...] = ()
        if self.everywhere is not None:
            first, scale = self.everywhere
            own = (add(1, scale=scale, where=((first, OPEN_END),)),)
        if self.captured is not None:
            captures = (Capture((1,), ((self.captured, OPEN_END),)),)
        if self.cell is None:
            return Plan(name, own, captures) if own or captures else None
        position, scale = self.cell
        columns = tuple(
            add(2, scale=scale, where=((at, at + 1),)) for at in range(position - 1, position + 3)
        )
        window = Window(position, position + 1, len(own))
        return Plan(name, (*own, *columns), captures, measured=False, window=window)

    def content(self, tokens: list[int], position: int) -> Content:
        """What the KV at a position depends on."""
        acts = []
        for at in range(position + 1):
            if self.everywhere is not None and at >= self.everywhere[0]:
                acts.append((at, self.everywhere[1]))
            if self.cell is not None and at == self.cell[0]:
                acts.append((at, self.cell[1]))
        return tuple(tokens[: position + 1]), tuple(acts)


@dataclass
class Engine:
    """vLLM's scheduler with our hits, and a worker that checks all KV which a step reads."""

    config: VllmConfig
    blocks: int = 400
    kv: dict[tuple[int, int], Content] = field(default_factory=dict)
    """By block and offset."""
    asked: dict[str, tuple[Steering, Request]] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    """Tokens that were computed when a request began."""
    copies: int = 0

    def __post_init__(self) -> None:
        self.config.cache_config.num_gpu_blocks = self.blocks
        self.scheduler = Scheduler(
            self.config,
            KVCacheConfig(self.blocks, [], [KVCacheGroupSpec(["1"], FullAttentionSpec(**SHAPE))]),
            StructuredOutputManager(self.config),
            BLOCK,
        )
        assert copies_parts(self.scheduler)
        parts = PartialHits(self.scheduler, sha256)
        limit_hits(self.scheduler.kv_cache_manager, parts)

    def add(
        self,
        steering: Steering,
        prompt: list[int] = PROMPT,
        tokens: int = 1,
        *,
        uncached: bool = False,
    ) -> str:
        """Sends a request; `uncached`: one that may not read the prefix cache."""
        name = f"r{len(self.asked)}"
        plan = steering.plan(name)
        extra = None if plan is None else {EXTRA_ARG: plan.to_wire()}
        request = Request(
            name,
            list(prompt),
            SamplingParams(
                max_tokens=tokens,
                ignore_eos=True,
                extra_args=extra,
                skip_reading_prefix_cache=uncached or None,
            ),
            None,
            block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256),
        )
        self.asked[name] = steering, request
        self.scheduler.add_request(request)
        return name

    def step(self) -> SchedulerOutput:
        """Takes a step."""
        output = self.scheduler.schedule()
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.hits[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = []
            self.tables[name] += [] if new_ids is None else new_ids[0]
        for copy in output.kv_cache_block_copies or ():
            self.copies += 1
            for offset in range(BLOCK):
                self.kv.pop((copy.dst_block_id, offset), None)
                if (copy.src_block_id, offset) in self.kv:
                    self.kv[copy.dst_block_id, offset] = self.kv[copy.src_block_id, offset]
        names = list(output.num_scheduled_tokens)
        ends = {}
        for name in names:
            request = self.asked[name][1]
            count = output.num_scheduled_tokens[name]
            ends[name] = request.num_computed_tokens
            for position in range(ends[name] - count, ends[name]):
                self.kv[self._place(name, position)] = self._wanted(name, position)
        for name in names:
            for position in range(ends[name]):
                assert self.kv[self._place(name, position)] == self._wanted(name, position)
        done = [ends[name] >= self.asked[name][1].num_tokens for name in names]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[[7] if one else [] for one in done],
            ),
        )
        return output

    def run(self, steering: Steering, prompt: list[int] = PROMPT, *, uncached: bool = False) -> int:
        """Runs a request alone; the tokens that it did not compute."""
        name = self.add(steering, prompt, uncached=uncached)
        while self.scheduler.has_unfinished_requests():
            self.step()
        return self.hits[name]

    def _place(self, name: str, position: int) -> tuple[int, int]:
        return self.tables[name][position // BLOCK], position % BLOCK

    def _wanted(self, name: str, position: int) -> Content:
        steering, request = self.asked[name]
        return steering.content(list(request.all_token_ids), position)


@pytest.mark.parametrize("everywhere", [None, (0, 2.0), (6, 2.0)])
@pytest.mark.parametrize("position", range(len(PROMPT)))
def test_a_cell_computes_what_follows_its_first_row(
    config: VllmConfig, position: int, everywhere: tuple[int, float] | None
) -> None:
    engine = Engine(config)
    engine.run(Steering(everywhere))
    hit = engine.run(Steering(everywhere, cell=(position, 3.0)))
    whole = len(PROMPT) // BLOCK * BLOCK
    # The last block is not full, and vLLM always computes the last token.
    assert hit == (position if position < whole else whole)
    assert engine.copies == (position % BLOCK > 0 and position < whole)


def test_another_cell_hits_nothing_of_a_cells_copy(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.run(Steering())
    assert engine.run(Steering(cell=(9, 3.0))) == 9
    assert engine.run(Steering(cell=(9, 4.0))) == 9
    assert engine.run(Steering(cell=(10, 3.0))) == 10
    assert engine.run(Steering(cell=(9, 3.0))) == 20
    assert engine.run(Steering()) == 20


def test_a_block_that_the_same_step_computes_is_not_copied(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.add(Steering())
    name = engine.add(Steering(cell=(9, 3.0)))
    engine.step()
    assert engine.hits[name] == 8
    assert not engine.copies
    assert engine.run(Steering(cell=(9, 4.0))) == 9


def test_a_block_of_other_steering_or_tokens_is_not_copied(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.run(Steering())
    assert engine.run(Steering((0, 2.0), cell=(9, 3.0))) == 0
    assert engine.run(Steering((9, 2.0), cell=(9, 3.0))) == 8
    other = [*PROMPT]
    other[8] += 1
    assert engine.run(Steering(cell=(10, 3.0)), other) == 8


def test_captured_rows_are_computed(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.run(Steering())
    assert engine.run(Steering(cell=(14, 3.0), captured=13)) == 13
    assert engine.run(Steering(cell=(14, 4.0), captured=21)) == 14


def test_a_cell_that_may_not_read_the_cache_computes_all_its_tokens(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.run(Steering())
    for position in (2, 9):  # in the first block, and behind whole blocks
        assert engine.run(Steering(cell=(position, 3.0)), uncached=True) == 0
    assert not engine.copies
    assert engine.run(Steering(cell=(2, 4.0))) == 2


def test_plans_without_a_window_hit_whole_blocks(config: VllmConfig) -> None:
    engine = Engine(config)
    engine.run(Steering())
    assert engine.run(Steering((9, 2.0))) == 8


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("blocks", [400, 24])
def test_all_kv_that_any_request_reads_is_its_own(
    config: VllmConfig, seed: int, blocks: int
) -> None:
    draw = random.Random(seed)
    engine = Engine(config, blocks)
    other = [*PROMPT[:10], *range(200, 213)]
    for _ in range(60):
        for _ in range(draw.randrange(4)):
            everywhere = draw.choice([None, None, (0, 2.0), (5, 2.0)])
            cell = draw.choice([None, (draw.randrange(22), draw.choice([3.0, 4.0]))])
            captured = draw.choice([None, None, draw.randrange(22)])
            engine.add(
                Steering(everywhere, cell, captured),
                draw.choice([PROMPT, other]),
                draw.choice([1, 1, 6]),
            )
        engine.step()
        if draw.random() < 0.05:
            engine.scheduler.reset_prefix_cache()
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    assert engine.copies > 5
    assert not engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    pool = engine.scheduler.kv_cache_manager.block_pool
    engine.step()  # ends the use of the last copies
    assert pool.get_num_free_blocks() == blocks - 1


def test_models_with_windows_and_servers_without_a_cache_copy_nothing(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.cache_config.num_gpu_blocks = 400
    specs = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=6)
    groups = [KVCacheGroupSpec([str(at)], spec) for at, spec in enumerate(specs)]
    structured = StructuredOutputManager(config)
    hybrid = Scheduler(config, KVCacheConfig(400, [], groups), structured, BLOCK)
    assert not copies_parts(hybrid)
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", False)
    uncached = Scheduler(config, KVCacheConfig(400, [], groups[:1]), structured, BLOCK)
    assert not copies_parts(uncached)


def test_vllm_copies_blocks_that_are_hit_in_part_before_a_step() -> None:
    allocate = inspect.getsource(SingleTypeKVCacheManager.allocate_new_blocks)
    assert "self._apply_cow(request_id, block_idx, source_block, cow_block)" in allocate, RELIES
    cache = inspect.getsource(SingleTypeKVCacheManager.cache_blocks)
    assert "self.block_pool.cache_full_blocks(\n            request=request," in cache, RELIES
    schedule = inspect.getsource(Scheduler.schedule)
    assert "self._free_cow_retained_blocks(" in schedule, RELIES
    for module in (gpu_model_runner, model_runner):
        assert "scheduler_output.kv_cache_block_copies" in inspect.getsource(module), RELIES
    assert partial_hits._stock_keys.__module__ == kv_cache_utils.__name__, RELIES
    assert UnitaryKVCacheCoordinator.enable_partial_hash_hits is False, RELIES
