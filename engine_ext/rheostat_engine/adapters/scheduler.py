"""vLLM's own scheduler, with keys of the prefix cache that say what touches each block.

vLLM asks a function of `kv_cache_utils` for what else enters a block's hash beside its tokens. It
is looked up there for every block, so one that adds a plan's key can stand in its place.

Invariant: requests without a plan, and blocks that nothing touches, keep vLLM's keys. A plan that
can't be read shares nothing.
"""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.request import Request

from rheostat_engine.adapters.orphans import end_with_parent
from rheostat_engine.block_keys import BlockKeys
from rheostat_engine.plan import EXTRA_ARG, Plan

_NAME = "generate_block_hash_extra_keys"
_KEYS = "_rheostat_block_keys"

ExtraKeys = tuple[tuple[Any, ...] | None, int]  # vLLM's own type
KeyFunction = Callable[[Request, int, int, int], ExtraKeys]


def site_scheduler(vllm_config: VllmConfig, **arguments: Any) -> SchedulerInterface:  # vLLM's own
    """The scheduler that vLLM would have made, in a process that has been made ready for it."""
    install_block_keys()
    end_with_parent(vllm_config)
    config = vllm_config.scheduler_config
    ours, config.scheduler_cls = config.scheduler_cls, None
    try:
        scheduler = config.get_scheduler_cls()
    finally:
        config.scheduler_cls = ours
    return scheduler(vllm_config=vllm_config, **arguments)


def install_block_keys() -> None:
    """From now on plans enter the hashes of this process's blocks."""
    stock: KeyFunction = getattr(kv_cache_utils, _NAME)
    if getattr(stock, "is_rheostat", False):
        return

    def keyed(request: Request, start: int, end: int, start_mm_idx: int) -> ExtraKeys:
        keys, next_mm_idx = stock(request, start, end, start_mm_idx)
        own = _keys_of(request)
        touching = None if own is None else own.key(start, end)
        if touching is None:
            return keys, next_mm_idx
        return (*(keys or ()), ("rheostat", touching)), next_mm_idx

    keyed.is_rheostat = True  # type: ignore[attr-defined]  # marks it for a second call
    for module in (kv_cache_utils, block_pool):
        setattr(module, _NAME, keyed)


def _keys_of(request: Request) -> BlockKeys | None:
    if _KEYS not in request.__dict__:
        request.__dict__[_KEYS] = _read_keys(request)
    keys: BlockKeys | None = request.__dict__[_KEYS]
    return keys


def _read_keys(request: Request) -> BlockKeys | None:
    params = request.sampling_params
    wire = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
    if wire is None:
        return None
    try:
        return BlockKeys(Plan.from_wire(wire))
    except ValueError:
        return BlockKeys(Plan(request.request_id, private_from=0))
