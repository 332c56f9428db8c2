"""What is captured is never hit, what lies below it is, and vLLM looks requests up where it did."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from rheostat_engine import EXTRA_ARG, OPEN_END, Capture, Plan
from rheostat_engine.adapters.scheduler import install_block_keys, limit_hits
from rheostat_engine.plan.plan import CACHED_TOKENS_RECOMPUTED_ARG

from ..strategies import add

BLOCK = 4
PROMPT = [*range(100, 142)]
LONGEST = 40
"""What of the prompt is hit at most."""
WINDOW = 6
RELIES = "rheostat_engine.adapters.scheduler relies on it"
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


def request(plan: Plan | bytes | None, request_id: str = "v", **sampling: int) -> Request:
    """vLLM's request for the prompt."""
    wire = plan.to_wire() if isinstance(plan, Plan) else plan
    extra = None if wire is None else {EXTRA_ARG: wire}
    return Request(
        request_id,
        PROMPT,
        SamplingParams(max_tokens=99, extra_args=extra, **sampling),
        None,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256),
    )


def capture(*spans: tuple[int, int]) -> Plan:
    return Plan("r", (), (Capture((1,), spans),))


@dataclass
class Cache:
    """vLLM's manager of a model whose layers attend fully and, if `hybrid`, in a window too."""

    hybrid: bool = False
    manager: KVCacheManager = field(init=False)

    def __post_init__(self) -> None:
        specs = [FullAttentionSpec(**SHAPE)]
        if self.hybrid:
            specs.append(SlidingWindowSpec(**SHAPE, sliding_window=WINDOW))
        groups = [KVCacheGroupSpec([str(n)], spec) for n, spec in enumerate(specs)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=200,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        limit_hits(self.manager, None)

    def warm(self, plan: Plan | None = None) -> None:
        """A request computes the prompt and ends."""
        one = request(plan, "warm")
        self.manager.allocate_slots(one, len(PROMPT))
        self.manager.free(one)

    def hit(self, one: Request) -> tuple[int, int | None]:
        """Tokens that a request finds, and what its worker is told; the blocks are as many."""
        blocks, tokens, _ = self.manager.get_computed_blocks(one)
        assert {len(group) for group in blocks.blocks} <= {tokens // BLOCK}
        assert one.sampling_params is not None
        return tokens, (one.sampling_params.extra_args or {}).get(CACHED_TOKENS_RECOMPUTED_ARG)


def test_vllm_looks_a_request_up_by_the_method_that_is_replaced() -> None:
    assert [*inspect.signature(KVCacheManager.get_computed_blocks).parameters] == [
        "self",
        "request",
    ], RELIES
    source = inspect.getsource(Scheduler)
    assert source.count("self.kv_cache_manager = KVCacheManager(") == 1, RELIES
    assert source.count("self.kv_cache_manager =") == 1, RELIES
    lookup = inspect.getsource(Scheduler._get_local_prefix_cache_hit)
    assert "self.kv_cache_manager.get_computed_blocks(request)" in lookup, RELIES
    assert source.count(".find_longest_cache_hit") == 0, RELIES


def test_vllm_looks_a_request_up_before_it_tells_the_worker_of_it() -> None:
    source = inspect.getsource(Scheduler.schedule)
    told = source.index("NewRequestData.from_request(")
    assert source.index("self._get_local_prefix_cache_hit(request)") < told, RELIES


def test_vllm_hands_the_worker_the_sampling_parameters_that_the_request_has() -> None:
    one = request(None)
    data = NewRequestData.from_request(one, ([],))
    assert data.sampling_params is one.sampling_params, RELIES


def test_a_preempted_request_is_looked_up_once_all_that_it_computed_has_come_out() -> None:
    source = inspect.getsource(Scheduler.schedule)
    waits = source.index("if request.num_stale_output_tokens and not request.drop_stale_output:")
    assert waits < source.index("self._get_local_prefix_cache_hit(request)"), RELIES


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (None, (LONGEST, None)),
        (Plan("r", (add(1, scale=0.0),)), (LONGEST, None)),
        (capture((0, OPEN_END)), (0, LONGEST)),
        (capture((3, 4)), (0, LONGEST)),
        (capture((4, 5)), (4, 36)),
        (capture((19, 20), (30, 31)), (16, 24)),
        (capture((39, 40)), (36, 4)),
        (capture((40, 41)), (40, 0)),
        (capture((41, 42)), (40, 0)),
        (capture((42, OPEN_END)), (40, 0)),
        (Plan("r", (), (Capture((), ((0, 9),)), Capture((1,), ((25, 26),)))), (24, 16)),
    ],
)
def test_a_hit_ends_with_the_last_whole_block_before_what_is_captured(
    hybrid: bool, plan: Plan | None, expected: tuple[int, int | None]
) -> None:
    cache = Cache(hybrid)
    cache.warm()
    assert cache.hit(request(plan)) == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.integers(0, 60), hybrid=st.booleans())
def test_what_is_hit_and_what_is_forgone_are_what_others_hit(first: int, hybrid: bool) -> None:
    cache = Cache(hybrid)
    cache.warm()
    tokens, cached_tokens_recomputed = cache.hit(request(capture((first, first + 1))))
    assert tokens == min(first // BLOCK * BLOCK, LONGEST)
    assert tokens + (cached_tokens_recomputed or 0) == LONGEST


def test_the_blocks_of_a_limited_hit_hold_a_request() -> None:
    for hybrid in (False, True):
        cache = Cache(hybrid)
        cache.warm()
        one = request(capture((19, 20)))
        blocks, tokens, _ = cache.manager.get_computed_blocks(one)
        free = cache.manager.block_pool.get_num_free_blocks()
        assert cache.manager.allocate_slots(one, len(PROMPT) - tokens, tokens, blocks) is not None
        assert cache.manager.block_pool.get_num_free_blocks() < free
        cache.manager.free(one)
        assert cache.hit(request(None)) == (LONGEST, None)


def test_nothing_is_forgone_where_nothing_is_cached_or_read() -> None:
    cache = Cache()
    assert cache.hit(request(capture((3, 4)))) == (0, 0)
    cache.warm()
    assert cache.hit(request(capture((3, 4)), prompt_logprobs=1)) == (0, 0)


def test_steering_that_nobody_else_has_is_no_hit_that_could_be_forgone() -> None:
    steered = Plan("r", (add(1, where=((10, 11),)),), (Capture((1,), ((6, 7), (30, 31))),))
    cache = Cache()
    cache.warm()
    assert cache.hit(request(steered)) == (4, 4)
    cache.warm(steered)
    assert cache.hit(request(steered)) == (4, 36)


def test_the_worker_is_told_of_the_lookup_that_let_the_request_in() -> None:
    cache = Cache()
    waiting = request(capture((19, 20)))
    assert cache.hit(waiting) == (0, 0)
    cache.warm()
    assert cache.hit(waiting) == (16, 24)
    assert cache.manager.reset_prefix_cache()
    assert cache.hit(waiting) == (0, 0)


def test_a_request_that_comes_back_reads_what_it_has_delivered() -> None:
    cache = Cache()
    cache.warm()
    one = request(capture((19, OPEN_END)))
    one.num_preemptions = 1
    assert cache.hit(one) == (16, 24)
    one.append_output_token_ids([1])
    assert cache.hit(one)[0] == LONGEST


def test_hits_are_counted_as_they_were_given() -> None:
    cache = Cache()
    cache.warm()
    one = request(capture((19, 20)))
    cache.manager.record_prefix_cache_stats(one, cache.hit(one)[0])
    stats = cache.manager.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.queries, stats.hits) == (len(PROMPT), 16)


def test_other_requests_and_plans_that_cannot_be_read_are_looked_up_as_ever() -> None:
    cache = Cache()
    cache.warm()
    one = request(None)
    assert one.sampling_params is not None
    assert cache.hit(one) == (LONGEST, None)
    assert one.sampling_params.extra_args is None
    assert cache.hit(request(b"no plan")) == (0, None)
