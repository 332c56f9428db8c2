"""vLLM's own scheduler, with a prefix cache that depends on the plans of requests.

Keys of blocks
    A function of `kv_cache_utils` returns the extra keys of a block's hash. vLLM looks the function
    up for every block, so our function, which adds a plan's key, replaces it.
Hits
    A token from the cache is not computed, so there is no row of it to capture. vLLM's scheduler
    looks up a request by one method of its `KVCacheManager`, which keeps a hit below the request's
    last token. If a hit is too long for the captures, the method is called again, as if the request
    ended with the first token that must be computed. vLLM then rounds and reconciles this hit like
    any other, for a sliding window too.

Invariants: requests without a plan, and blocks that no act touches, keep vLLM's keys. A request
whose plan can't be read shares no block. A hit ends at or below the first captured position that
was not computed before. The worker receives the number of tokens that the hit lost for this reason.
"""

from collections.abc import Callable
from typing import Any, cast

from vllm.config import VllmConfig
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from rheostat_engine.adapters.parent_watch import end_with_parent, leave_group
from rheostat_engine.adapters.request_plan import request_plan
from rheostat_engine.adapters.step_messages import share_tables
from rheostat_engine.plan.acts import OPEN_END
from rheostat_engine.plan.plan import CACHED_TOKENS_RECOMPUTED_ARG
from rheostat_engine.process_end import skip_last_collection

_NAME = "generate_block_hash_extra_keys"
_LOOK_UP = "get_computed_blocks"

ExtraKeys = tuple[tuple[Any, ...] | None, int]  # vLLM's own type
KeyFunction = Callable[[Request, int, int, int], ExtraKeys]
Hit = tuple[KVCacheBlocks, int, int]  # vLLM's own: the second is how many tokens are hit


def site_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:  # vLLM's own
    """Prepares this process, and makes the scheduler that vLLM would have made, with our parts."""
    install_block_keys()
    leave_group()
    skip_last_collection()
    end_with_parent(vllm_config)
    config = vllm_config.scheduler_config
    ours, config.scheduler_cls = config.scheduler_cls, None
    try:
        stock = cast(type[Scheduler], config.get_scheduler_cls())
    finally:
        config.scheduler_cls = ours
    scheduler = stock(vllm_config=vllm_config, **arguments)
    limit_hits(scheduler.kv_cache_manager)
    share_tables(scheduler)
    return scheduler


def install_block_keys() -> None:
    """Adds the keys of plans to the block hashes of this process."""
    stock: KeyFunction = getattr(kv_cache_utils, _NAME)
    if getattr(stock, "is_rheostat", False):
        return

    def keyed(request: Request, start: int, end: int, start_mm_idx: int) -> ExtraKeys:
        keys, next_mm_idx = stock(request, start, end, start_mm_idx)
        plan = request_plan(request)
        touching = None if plan is None else plan.keys.key(start, end)
        if touching is None:
            return keys, next_mm_idx
        return (*(keys or ()), ("rheostat", touching)), next_mm_idx

    keyed.is_rheostat = True  # type: ignore[attr-defined]  # marks it for a second call
    for module in (kv_cache_utils, block_pool):
        setattr(module, _NAME, keyed)


def limit_hits(manager: KVCacheManager) -> None:
    """Limits this manager's hits, so that captured positions are computed."""
    stock = manager.get_computed_blocks

    def limited(request: Request) -> Hit:
        hit = stock(request)
        ceiling = _ceiling(request)
        if ceiling == OPEN_END:
            return hit
        longest = hit[1]
        if longest > ceiling:
            hit = stock(cast(Request, _Shorter(request, ceiling + 1)))
        _store_count(request, longest - hit[1])
        return hit

    setattr(manager, _LOOK_UP, limited)


def _ceiling(request: Request) -> int:
    """The longest hit that a request may have.

    Once a request has generated a token, its captured rows of earlier positions have been sent. If
    it is preempted after that, it may read the whole cache.
    """
    plan = request_plan(request)
    return OPEN_END if plan is None or request.num_output_tokens else plan.first_captured


def _store_count(request: Request, cached_tokens_recomputed: int) -> None:
    params = request.sampling_params
    if params is not None:
        params.extra_args = {
            **(params.extra_args or {}),
            CACHED_TOKENS_RECOMPUTED_ARG: cached_tokens_recomputed,
        }


class _Shorter:
    """A request, as if it had fewer tokens."""

    def __init__(self, request: Request, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._request = request

    def __getattr__(self, name: str) -> object:
        return getattr(self._request, name)
