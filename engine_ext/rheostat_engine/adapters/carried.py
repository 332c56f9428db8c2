"""Plans of vLLM's requests, as the scheduler needs them.

Invariant: a plan is read once for each request. A request whose plan can't be read shares no block
and captures nothing. The scheduler does not raise, because the worker fails the request.
"""

from typing import NamedTuple
from weakref import WeakValueDictionary

from vllm.v1.request import Request

from rheostat_engine.acts import OPEN_END
from rheostat_engine.block_keys import BlockKeys, SteeredBlocks
from rheostat_engine.plan import EXTRA_ARG, Received, Sealed, captures_of, read, steering_of
from rheostat_engine.tables import CaptureTable

_CARRIED = "_rheostat_carried"


class Carried(NamedTuple):
    """The parts of a request's plan that the prefix cache depends on."""

    keys: BlockKeys
    """Keys of its blocks."""
    captures: CaptureTable | None
    """Its captures; None if it has none."""

    @property
    def first_captured(self) -> int:
        """See `CaptureTable.first`; `OPEN_END`: nothing is captured."""
        return OPEN_END if self.captures is None else self.captures.first


_BLOCKS: WeakValueDictionary[bytes, SteeredBlocks] = WeakValueDictionary()
"""Keys of blocks by the digest of a table of acts; requests with the table share them."""


def carried(request: Request) -> Carried | None:
    """Reads a request's plan, once; None if it has none."""
    if _CARRIED not in request.__dict__:
        request.__dict__[_CARRIED] = _read(request)
    found: Carried | None = request.__dict__[_CARRIED]
    return found


def _read(request: Request) -> Carried | None:
    params = request.sampling_params
    wire = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
    if wire is None:
        return None
    try:
        plan = read(wire)
        captures = None if plan.captures is None else captures_of(plan.captures)
        return Carried(BlockKeys(plan, _blocks(plan.acts)), captures)
    except ValueError:
        private = Received(request.request_id, 0, 0, None, None)
        return Carried(BlockKeys(private, None), None)


def _blocks(sealed: Sealed | None) -> SteeredBlocks | None:
    if sealed is None:
        return None
    found = _BLOCKS.get(sealed.digest)
    if found is None:
        found = _BLOCKS[sealed.digest] = SteeredBlocks(steering_of(sealed))
    return found
