"""vLLM's scheduler, with a prefix cache that depends on the plans of requests.

Block keys
    `kv_cache_utils.generate_block_hash_extra_keys` returns the extra keys of a block's hash. vLLM
    looks the function up for every block. Our replacement adds the plan's key.
Cache hits
    A cached token is not computed, so its row can't be captured. The scheduler looks up hits with
    `KVCacheManager.get_computed_blocks`, which keeps a hit below the request's last token. If a hit
    is too long for the captures, the method is called again with the request truncated after the
    first token that must be computed. So vLLM rounds this hit like any other, also for a sliding
    window. A hit of a sweep's cell may end within a block; see `partial_hits`.

Invariants: requests without a plan, and blocks without acts, keep vLLM's keys. A request whose plan
can't be parsed shares no block. A hit ends at or below the first position that is read for a gate,
and at or below the first captured position that was not computed before. The worker receives the
number of tokens by which the hit was shortened.
"""

from typing import Any, cast

from vllm.config import VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from rheostat_engine.adapters.background import BackgroundPace, BackgroundQueue
from rheostat_engine.adapters.gains import carry_gains
from rheostat_engine.adapters.gate_decisions import DecidedBlocks
from rheostat_engine.adapters.holds import HeldRequests
from rheostat_engine.adapters.input_pauses import pause_input_in_launches
from rheostat_engine.adapters.message_queues import sleep_between_messages
from rheostat_engine.adapters.parent_watch import end_with_parent, leave_group
from rheostat_engine.adapters.partial_hits import Hit, PartialHits, copies_parts
from rheostat_engine.adapters.request_batches import receive_batches
from rheostat_engine.adapters.request_copies import receive_copies
from rheostat_engine.adapters.request_plan import RequestPlan, request_plan, with_plan_key
from rheostat_engine.adapters.step_messages import share_tables
from rheostat_engine.plan.acts import OPEN_END
from rheostat_engine.plan.plan import CACHED_TOKENS_RECOMPUTED_ARG
from rheostat_engine.process_end import skip_last_collection

_NAME = "generate_block_hash_extra_keys"

ExtraKeys = tuple[tuple[Any, ...] | None, int]  # vLLM's own type


def site_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:  # vLLM's own
    """Prepares this process, and creates vLLM's scheduler with our changes."""
    install_block_keys()
    receive_copies()
    receive_batches()
    pause_input_in_launches()
    leave_group()
    skip_last_collection()
    end_with_parent(vllm_config)
    sleep_between_messages(vllm_config.device_config.device_type)
    config = vllm_config.scheduler_config
    ours, config.scheduler_cls = config.scheduler_cls, None
    try:
        stock = cast(type[Scheduler], config.get_scheduler_cls())
    finally:
        config.scheduler_cls = ours
    scheduler = stock(vllm_config=vllm_config, **arguments)
    parts = None
    if copies_parts(scheduler):
        hashing = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        parts = PartialHits(scheduler, hashing)
    limit_hits(scheduler.kv_cache_manager, parts)
    share_tables(scheduler)
    if vllm_config.parallel_config.pipeline_parallel_size == 1:  # else other stages have gates too
        DecidedBlocks(scheduler)
    HeldRequests(scheduler)
    BackgroundQueue(scheduler, BackgroundPace())  # its requests enter the queue before holds look
    carry_gains(scheduler)
    return scheduler


def install_block_keys() -> None:
    """Adds the plans' block keys to the block hashes of this process."""
    stock = kv_cache_utils.generate_block_hash_extra_keys
    if getattr(stock, "is_rheostat", False):
        return

    def keyed(request: Request, start: int, end: int, start_mm_idx: int) -> ExtraKeys:
        keys, next_mm_idx = stock(request, start, end, start_mm_idx)
        plan = request_plan(request)
        key = None if plan is None else plan.keys.key(start, end)
        return with_plan_key(keys, key), next_mm_idx

    keyed.is_rheostat = True  # type: ignore[attr-defined]  # detects a second call
    for module in (kv_cache_utils, block_pool):
        setattr(module, _NAME, keyed)


def limit_hits(manager: KVCacheManager, parts: PartialHits | None) -> None:
    """Shortens the hits of this manager, so that captured positions are computed.

    Args:
        manager: the manager.
        parts: extends hits of cells; None: hits end with a block.
    """
    stock = manager.get_computed_blocks

    def limited(request: Request) -> Hit:
        plan = request_plan(request)
        if plan is None:
            return stock(request)
        hashed = plan.keys.keyed_end  # vLLM expects hashes of all full blocks
        known = request.num_tokens <= hashed + 1
        hit = stock(request if known else cast(Request, _TruncatedRequest(request, hashed + 1)))
        limit = _longest_hit(request, plan)
        unlimited = hit[1]
        if unlimited > limit:
            hit = stock(cast(Request, _TruncatedRequest(request, limit + 1)))
        elif parts is not None:
            hit = parts.extended(request, plan.keys, hit, limit)
        if limit != OPEN_END:
            _store_count(request, max(0, unlimited - hit[1]))
        return hit

    manager.get_computed_blocks = limited


def _longest_hit(request: Request, plan: RequestPlan) -> int:
    """The longest allowed hit of a request.

    Once a request has generated a token, the captured rows of its prompt have been sent. If it is
    preempted after that, they don't limit its hits. What gates read does, because their state
    begins anew.
    """
    captured = OPEN_END if request.num_output_tokens else plan.first_captured
    return min(plan.keys.first_read, captured)


def _store_count(request: Request, cached_tokens_recomputed: int) -> None:
    params = request.sampling_params
    if params is not None:
        params.extra_args = {
            **(params.extra_args or {}),
            CACHED_TOKENS_RECOMPUTED_ARG: cached_tokens_recomputed,
        }


class _TruncatedRequest:
    """A view of a request with fewer tokens."""

    def __init__(self, request: Request, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._request = request

    def __getattr__(self, name: str) -> object:
        return getattr(self._request, name)
