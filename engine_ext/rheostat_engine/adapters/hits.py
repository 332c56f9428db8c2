"""How far a request that captures may read the prefix cache.

A token that comes from the cache is not computed, so there is no row of it to capture. vLLM's
scheduler looks a request up by one method of its `KVCacheManager`, which keeps a hit below the
request's last token. Where a hit is too long for what is captured, that method is asked again, as
if the request ended with the first token that must be computed: vLLM rounds and reconciles this hit
as any other, for a sliding window too.

Invariant: a hit ends at or below the first captured position that was not computed before. The
worker is told how much longer it would have been, with the plan.
"""

from typing import cast

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.request import Request

from rheostat_engine.acts import OPEN_END
from rheostat_engine.adapters.carried import carried
from rheostat_engine.plan import FORGONE_ARG

_LOOK_UP = "get_computed_blocks"

Hit = tuple[KVCacheBlocks, int, int]  # vLLM's own: the second is how many tokens are hit


def limit_hits(manager: KVCacheManager) -> None:
    """From now on this manager's hits leave what is captured to be computed."""
    stock = manager.get_computed_blocks

    def limited(request: Request) -> Hit:
        found = stock(request)
        ceiling = _ceiling(request)
        if ceiling == OPEN_END:
            return found
        whole = found[1]
        if whole > ceiling:
            found = stock(cast(Request, _Shorter(request, ceiling + 1)))
        _tell(request, whole - found[1])
        return found

    setattr(manager, _LOOK_UP, limited)


def _ceiling(request: Request) -> int:
    """The longest hit that a request may have.

    Once a token has come out, all before it have been computed, and what was captured of them has
    been delivered: a request that was preempted after that may read what it can.
    """
    plan = carried(request)
    return OPEN_END if plan is None or request.num_output_tokens else plan.first_captured


def _tell(request: Request, forgone: int) -> None:
    params = request.sampling_params
    if params is not None:
        params.extra_args = {**(params.extra_args or {}), FORGONE_ARG: forgone}


class _Shorter:
    """A request, as if it had fewer tokens."""

    def __init__(self, request: Request, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._request = request

    def __getattr__(self, name: str) -> object:
        return getattr(self._request, name)
