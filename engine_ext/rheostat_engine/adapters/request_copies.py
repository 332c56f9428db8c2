"""Adds several requests with one message if they differ only in ids and plan windows.

Why
    The engine's core receives messages in a separate thread, beside a main thread that calls
    PyTorch. Receiving a request of 3 kB took 76 µs of CPU (on two CPU cores). Most of this was
    decoding. vLLM runs a request for each cell of a sweep, and the core's process limits the
    sweep's speed. Cells of neighbouring columns have the same plan, with different windows.
How
    The first request is sent as vLLM sends it. Its `extra_args` also list the other requests. For
    each of them, the core's thread copies the first request. It puts the copies into the core's
    input queue, as if each had come in its own message.

Invariants: a request that the core cannot process fails alone. vLLM sends a request and its copies
as one message, so the order of messages stays the same.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from typing import NamedTuple

from msgspec.structs import replace
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import Request

from rheostat_engine.plan.plan import EXTRA_ARG, ReceivedPlan, Window, read_plan

_COPIES = "rheostat_copies"
"""The key of the copies in `SamplingParams.extra_args`."""


class RequestCopy(NamedTuple):
    """The fields in which a copy differs from the first request."""

    request_id: str
    """Its id in the engine's core."""
    external_id: str
    """Its id outside of vLLM, which is also the id of its plan."""
    start: int
    """The first position of its plan's window."""
    end: int
    """The position after the last one of this window."""


def with_copies(request: EngineCoreRequest, copies: Sequence[RequestCopy]) -> EngineCoreRequest:
    """Returns a request whose message also carries copies of it. Its plan must have a window."""
    return with_extra(request, _COPIES, copies)


def with_extra(request: EngineCoreRequest, key: str, value: object) -> EngineCoreRequest:
    """A copy of a request with one more entry in its `SamplingParams.extra_args`."""
    changed, params = copy(request), copy(request.sampling_params)
    assert params is not None  # only pooling requests have none
    params.extra_args = {**(params.extra_args or {}), key: value}
    changed.sampling_params = params
    return changed


def receive_copies() -> None:
    """Makes the engine's core in this process create the copies that a message carries."""
    stock = EngineCore.preprocess_add_request
    if getattr(stock, "is_rheostat", False):
        return

    def preprocess(core: EngineCore, request: EngineCoreRequest) -> tuple[Request, int]:
        params = request.sampling_params
        if params is None or not params.extra_args or _COPIES not in params.extra_args:
            return stock(core, request)
        assert isinstance(core, EngineCoreProc)  # only this class receives messages
        copies = [RequestCopy(*fields) for fields in params.extra_args.pop(_COPIES)]
        try:
            plan = params.extra_args[EXTRA_ARG] = read_plan(params.extra_args[EXTRA_ARG])
        except ValueError:  # vLLM reports only the first request
            for fields in copies:
                copied = copy(request)
                copied.request_id = fields.request_id
                core._handle_request_preproc_error(copied)
            raise
        for copied in _make_copies(request, plan, copies):
            _put(core, copied)
        return stock(core, request)

    def _put(core: EngineCoreProc, request: EngineCoreRequest) -> None:
        try:
            core.input_queue.put_nowait((EngineCoreRequestType.ADD, stock(core, request)))
        except Exception:  # any error, as in vLLM's own input thread
            core._handle_request_preproc_error(request)

    preprocess.is_rheostat = True  # type: ignore[attr-defined]  # detects a second call
    EngineCore.preprocess_add_request = preprocess  # type: ignore[assignment]  # becomes a method


def _make_copies(
    request: EngineCoreRequest, plan: ReceivedPlan, copies: Iterable[RequestCopy]
) -> Iterable[EngineCoreRequest]:
    """Yields the copies of a request. `plan` is its plan, which has a window."""
    assert plan.window is not None
    for fields in copies:
        window = Window(fields.start, fields.end, plan.window.first_act)
        copied_plan = replace(plan, request_id=fields.external_id, window=window)
        copied = with_extra(request, EXTRA_ARG, copied_plan)
        copied.request_id, copied.external_req_id = fields.request_id, fields.external_id
        yield copied
