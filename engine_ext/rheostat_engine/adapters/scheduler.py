"""vLLM's own scheduler, with plans in the keys of the prefix cache.

A function of `kv_cache_utils` returns the extra keys of a block's hash. vLLM looks the function up
for every block, so our function, which adds a plan's key, replaces it. `hits` limits how far a
request may read the cache.

Invariant: requests without a plan, and blocks that no act touches, keep vLLM's keys. A request
whose plan can't be read shares no block.
"""

from collections.abc import Callable
from typing import Any, cast

from vllm.config import VllmConfig
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from rheostat_engine.adapters.carried import carried
from rheostat_engine.adapters.hits import limit_hits
from rheostat_engine.adapters.orphans import end_with_parent, leave_group
from rheostat_engine.adapters.step_messages import share_tables

_NAME = "generate_block_hash_extra_keys"

ExtraKeys = tuple[tuple[Any, ...] | None, int]  # vLLM's own type
KeyFunction = Callable[[Request, int, int, int], ExtraKeys]


def site_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:  # vLLM's own
    """Prepares this process, and makes the scheduler that vLLM would have made, with our parts."""
    install_block_keys()
    leave_group()
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
        plan = carried(request)
        touching = None if plan is None else plan.keys.key(start, end)
        if touching is None:
            return keys, next_mm_idx
        return (*(keys or ()), ("rheostat", touching)), next_mm_idx

    keyed.is_rheostat = True  # type: ignore[attr-defined]  # marks it for a second call
    for module in (kv_cache_utils, block_pool):
        setattr(module, _NAME, keyed)
