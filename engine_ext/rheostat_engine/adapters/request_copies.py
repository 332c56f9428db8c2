"""Adds requests that differ in their ids and in the windows of their plans as one message.

Why
    The engine's core receives messages in a thread of its own, beside a main thread that calls
    PyTorch. Receiving a request of 3 kB took 76 µs of CPU (on two CPU cores), most of it to decode
    the request. A sweep has a request for each cell, and the core's process is what limits its
    speed. The cells of neighbouring columns have one plan, and differ in its window.
How
    The first request is sent as vLLM sends it, with a list of the others in its `extra_args`. The
    core's thread makes the others as copies of the first, and puts them into the core's queue as if
    each had come alone.

Invariants: a request that the core can't process fails alone. A message with copies is one message
of vLLM, so it overtakes no other message.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from typing import NamedTuple

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import Request

from rheostat_engine.plan.plan import EXTRA_ARG, ReceivedPlan, Window, read_plan

_COPIES = "rheostat_copies"
"""The key of the copies in `SamplingParams.extra_args`."""

_PREPROCESS = "preprocess_add_request"


class RequestCopy(NamedTuple):
    """What a request has of its own."""

    request_id: str
    """Its id in the engine's core."""
    external_id: str
    """Its id outside of vLLM, which is the id of its plan."""
    start: int
    end: int
    """The window of its plan: the first position, and the position after the last."""


def with_copies(request: EngineCoreRequest, copies: Sequence[RequestCopy]) -> EngineCoreRequest:
    """A request whose message also brings copies of it. Its plan has a window."""
    params = _params(request)
    assert params.extra_args is not None
    changed, changed_params = copy(request), copy(params)
    changed_params.extra_args = {**params.extra_args, _COPIES: [list(one) for one in copies]}
    changed.sampling_params = changed_params
    return changed


def receive_copies() -> None:
    """Makes the engine's core in this process make the copies that messages bring."""
    stock = EngineCore.preprocess_add_request
    if getattr(stock, "is_rheostat", False):
        return

    def preprocess(core: EngineCore, request: EngineCoreRequest) -> tuple[Request, int]:
        params = request.sampling_params
        if params is None or not params.extra_args or _COPIES not in params.extra_args:
            return stock(core, request)
        copies = params.extra_args.pop(_COPIES)
        plan = params.extra_args[EXTRA_ARG] = read_plan(params.extra_args[EXTRA_ARG])
        assert isinstance(core, EngineCoreProc)  # others have no messages
        for made in _copies(request, plan, [RequestCopy(*one) for one in copies]):
            _put(core, made)
        return stock(core, request)

    def _put(core: EngineCoreProc, request: EngineCoreRequest) -> None:
        try:
            core.input_queue.put_nowait((EngineCoreRequestType.ADD, stock(core, request)))
        except Exception:  # as vLLM's thread does
            core._handle_request_preproc_error(request)

    preprocess.is_rheostat = True  # type: ignore[attr-defined]  # detects a second call
    setattr(EngineCore, _PREPROCESS, preprocess)


def _copies(
    request: EngineCoreRequest, plan: ReceivedPlan, copies: Iterable[RequestCopy]
) -> Iterable[EngineCoreRequest]:
    """Copies of a request with a plan."""
    params, window = _params(request), plan.window
    assert window is not None
    for own in copies:
        made, made_params = copy(request), copy(params)
        made_plan = plan._replace(
            request_id=own.external_id, window=Window(own.start, own.end, window.first_act)
        )
        made_params.extra_args = {**(params.extra_args or {}), EXTRA_ARG: made_plan}
        made.sampling_params = made_params
        made.request_id, made.external_req_id = own.request_id, own.external_id
        yield made


def _params(request: EngineCoreRequest) -> SamplingParams:
    params = request.sampling_params
    assert params is not None  # only pooling requests have none
    return params
