"""Lets the cells of a sweep read a part of a cached block.

Why
    A hit of vLLM's full attention ends with a whole block. The cells of a sweep have the same
    tokens, and each replaces rows from another position on. Up to the last block border before that
    position, cells share the blocks of the unchanged prompt. The tokens between the border and the
    position would be computed for each cell: with blocks of 16 tokens, 7.5 on average.
How
    The hit is extended by the same block of the unchanged prompt, up to the first position of the
    plan's window. vLLM then gives the request a block of its own, into which the workers copy the
    cached one before the step. vLLM does so itself for models whose hashes cover less than a block.
Bound
    The last block of a prompt is cached only if it is full. So cells behind its border still
    compute all its tokens.

Invariants: nothing behind the first position of the window is read from the copied block. It was
computed in an earlier step, because copies are made before the forward pass of their step. Its hash
covers all that the request does outside of its window. The copy is never found under that hash.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    generate_block_hash_extra_keys,
    hash_block_tokens,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from rheostat_engine.adapters.request_plan import with_plan_key
from rheostat_engine.plan.block_keys import BlockKeys

Hit = tuple[KVCacheBlocks, int, int]  # vLLM's own; the second is the number of hit tokens
HashFunction = Callable[[Any], bytes]  # vLLM's own

# The name is replaced by `install_block_keys`; this is vLLM's own, which knows nothing of plans.
_stock_keys = generate_block_hash_extra_keys


def copies_parts(scheduler: Scheduler) -> bool:
    """Whether hits of this scheduler may end within a block."""
    coordinator = scheduler.kv_cache_manager.coordinator
    if type(coordinator) is not UnitaryKVCacheCoordinator or scheduler.connector is not None:
        return False
    (manager,) = coordinator.single_type_managers
    return (
        type(manager) is FullAttentionManager
        and not manager.use_eagle
        and manager.dcp_world_size == manager.pcp_world_size == 1
    )


class PartialHits:
    """Extends hits by a part of a block."""

    def __init__(self, scheduler: Scheduler, hash_function: HashFunction) -> None:
        """Watches which blocks a step computes.

        Args:
            scheduler: whose hits are extended; `copies_parts` is true of it.
            hash_function: hashes its blocks.
        """
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._size: int = scheduler.block_size
        self._hash_function = hash_function
        self._fresh_ranges: list[tuple[list[KVCacheBlock], int, int]] = []
        """Blocks that the step being scheduled computes: a request's blocks, start and end."""
        self._fresh: set[int] = set()
        """Ids of the blocks of entries that `_is_fresh` has removed from `_fresh_ranges`."""
        self._schedule = scheduler.schedule
        self._cache = self._pool.cache_full_blocks
        scheduler.schedule = self._begin_step
        self._pool.cache_full_blocks = self._note_fresh  # type: ignore[assignment]  # by keyword

    def extended(self, request: Request, keys: BlockKeys, hit: Hit, longest: int) -> Hit:
        """A hit of whole blocks, with a part of the next one if that is cached.

        Args:
            request: a request that was looked up.
            keys: the keys of its blocks.
            hit: its hit.
            longest: tokens that may be hit.
        """
        if not self._manager.prefix_cache_lookup_enabled(request):
            return hit
        blocks, start, boundary = hit
        end = min(keys.window_start, longest, request.num_tokens - 1)
        if not start < end < start + self._size <= request.num_tokens or start % self._size:
            return hit
        cached = self._unchanged(request, keys, start)
        if cached is None or self._is_fresh(cached):
            return hit
        whole: Sequence[KVCacheBlock] = blocks.blocks[0]
        return self._manager.create_kv_cache_blocks(([*whole, cached],)), end, boundary

    def _unchanged(self, request: Request, keys: BlockKeys, start: int) -> KVCacheBlock | None:
        """A cached block of the same tokens, without the acts of the request's window."""
        end = start + self._size
        extra = with_plan_key(
            _stock_keys(request, start, end, 0)[0], keys.outside_window(start, end)
        )
        number = start // self._size
        parent = request.block_hashes[number - 1] if number else None
        tokens = request.all_token_ids[start:end]
        wanted = hash_block_tokens(self._hash_function, parent, tokens, extra)
        found = self._pool.get_cached_block(wanted, [0])
        return found[0] if found else None

    def _begin_step(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._fresh_ranges.clear()
        self._fresh.clear()
        return self._schedule(throttle_prefills)

    def _note_fresh(
        self,
        *,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        **others: Any,  # vLLM's own, passed through
    ) -> None:
        self._cache(
            blocks=blocks,
            num_cached_blocks=num_cached_blocks,
            num_full_blocks=num_full_blocks,
            **others,
        )
        self._fresh_ranges.append((blocks, num_cached_blocks, num_full_blocks))

    def _is_fresh(self, block: KVCacheBlock) -> bool:
        """Whether the step being scheduled computes a block.

        The ids are listed only here, because most steps never ask.
        """
        for blocks, start, end in self._fresh_ranges:
            self._fresh.update(each.block_id for each in blocks[start:end])
        self._fresh_ranges.clear()
        return block.block_id in self._fresh
