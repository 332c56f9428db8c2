"""The plans of vLLM's requests in the scheduler.

Invariant: a request's plan is parsed once, and takes the place of its bytes, so that neither the
step's message nor a worker in this process parses it again. A request whose plan can't be parsed
shares no block and captures nothing. The scheduler does not raise, because the worker fails the
request.
"""

from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from vllm.v1.request import Request

from rheostat_engine.plan.acts import OPEN_END
from rheostat_engine.plan.block_keys import BlockKeys, SteeredBlocks
from rheostat_engine.plan.plan import (
    EXTRA_ARG,
    EncodedTable,
    ReceivedPlan,
    captures_of,
    read_plan,
    steering_of,
)
from rheostat_engine.plan.tables import CaptureTable

_ATTRIBUTE = "_rheostat_request_plan"


class RequestPlan(NamedTuple):
    """The parts of a request's plan on which the prefix cache depends."""

    keys: BlockKeys
    captures: CaptureTable | None

    @property
    def first_captured(self) -> int:
        """See `CaptureTable.first`; `OPEN_END`: nothing is captured."""
        return OPEN_END if self.captures is None else self.captures.first


_BLOCKS: WeakValueDictionary[bytes, SteeredBlocks] = WeakValueDictionary()
"""By the digest of a table of acts; shared by all requests with the table."""


def request_plan(request: Request) -> RequestPlan | None:
    """Parses a request's plan, once; None if it has none."""
    if _ATTRIBUTE not in request.__dict__:
        request.__dict__[_ATTRIBUTE] = _read(request)
    plan: RequestPlan | None = request.__dict__[_ATTRIBUTE]
    return plan


def with_plan_key(
    keys: tuple[Any, ...] | None,  # vLLM's own type
    key: str | None,
) -> tuple[Any, ...] | None:
    """The extra keys of a block, with the key of a plan; None: the plan has none."""
    return keys if key is None else (*(keys or ()), ("rheostat", key))


def _read(request: Request) -> RequestPlan | None:
    params = request.sampling_params
    if params is None or (wire := (params.extra_args or {}).get(EXTRA_ARG)) is None:
        return None
    try:
        plan = read_plan(wire)
        captures = None if plan.captures is None else captures_of(plan.captures)
        params.extra_args = {**(params.extra_args or {}), EXTRA_ARG: plan}
        return RequestPlan(BlockKeys(plan, _blocks(plan.acts)), captures)
    except ValueError:
        private = ReceivedPlan(request.request_id, private_from=0)
        return RequestPlan(BlockKeys(private, None), None)


def _blocks(encoded: EncodedTable | None) -> SteeredBlocks | None:
    if encoded is None:
        return None
    blocks = _BLOCKS.get(encoded.digest)
    if blocks is None:
        blocks = _BLOCKS[encoded.digest] = SteeredBlocks(steering_of(encoded))
    return blocks
