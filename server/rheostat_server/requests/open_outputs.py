"""Opens the receivers of a request's rows, before the request starts."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol

from rheostat_engine import ModelSites
from rheostat_server.capture.specs import ResolvedCapture, Target, sink_groups
from rheostat_server.config import ModelInfo
from rheostat_server.delivery.delivery_buffer import Deliveries, DeliveryBuffer
from rheostat_server.delivery.response_rows import ADVICE, LOSSLESS
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.delivery.spill_manager import SpillManager
from rheostat_server.errors import RheostatError
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.sink_writer import (
    Recording,
    SinkWriter,
    about_capture,
    open_recording,
)
from rheostat_server.runs.store import RunStore
from rheostat_server.sinks.registry import Sinks
from rheostat_server.subscriptions.registry import Subscriptions
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import capture_pb2

_RUN_WRITERS = ThreadPoolExecutor(4, "run-writer")
"""Threads that copy rows into runs. They never wait for a disk."""


class Openers(Protocol):
    """The parts of the request manager that receivers need."""

    info: ModelInfo
    sites: ModelSites
    sinks: Sinks
    runs: RunStore
    subscriptions: Subscriptions
    deliveries: Deliveries
    spill_manager: SpillManager | None


async def open_outputs(active: ActiveRequest, manager: Openers) -> None:
    """Opens the response, subscriptions, sinks and runs that get the rows of a request.

    If it raises, `ActiveRequest.discard_outputs` discards the receivers that are open already.

    Raises:
        SubscriptionNotFound: the request sends rows to a subscription that has ended meanwhile.
        ArtifactExists: a sink has rows under the request's id and tag.
        SinkFailed: a sink cannot be opened.
        RunExists: another run has this id now.
        StoreFull: there is too little memory for another run.
    """
    admitted = active.admitted
    row_type = FloatType(manager.sites.dtype)
    for policy, inline in admitted.inline_captures.items():
        buffer = _buffer(active, manager, policy, active.overflow, active.response_rows.news)
        feed = RowFeed(
            admitted.request_id, admitted.prompt.token_ids, inline, row_type, policy, buffer
        )
        active.response_rows.add(feed, buffer)
        active.outputs.add(feed, {index: index for index in inline})
    elsewhere = any(capture.target is not Target.INLINE for capture in admitted.captures)
    for target, captures in sink_groups(admitted.captures) if elsewhere else ():
        recording = await open_recording(
            manager.sinks, admitted, target, captures, model=manager.info.name
        )
        _write(recording, captures, active, manager, manager.sinks.threads(target.sink))
    for index, capture in enumerate(admitted.captures if elsewhere else ()):
        if capture.run is not None:
            draft = manager.runs.begin(
                capture.run,
                about_capture(index, capture),
                admitted.prompt.token_ids,
                admitted.labels,
                f"captures[{index}].run.run_id",
                lossless=capture.overload in LOSSLESS,
            )
            active.outputs.add_run(index, draft)
            _write(draft, {index: capture}, active, manager, _RUN_WRITERS)
    for observer_capture in admitted.observer_captures:
        subscription = observer_capture.subscription
        if observer_capture.own:
            manager.subscriptions.named(subscription.name, "captures")
        elif not subscription.taking:
            continue
        feed = subscription.feed(
            admitted.request_id,
            admitted.prompt.token_ids,
            observer_capture.captures,
            row_type,
            fail=active.fail if observer_capture.own else None,
        )
        after = len(subscription.captures.templates)
        active.outputs.add(feed, {number: number - after for number in observer_capture.own})
        if observer_capture.missed:
            subscription.miss(feed, observer_capture.missed)
        if active.unobserved and observer_capture.observed:
            subscription.refuse(feed, frozenset(observer_capture.captures) - observer_capture.own)


def _write(
    recording: Recording,
    captures: Mapping[int, ResolvedCapture],
    active: ActiveRequest,
    manager: Openers,
    threads: Executor,
) -> None:
    """Starts to write the rows of some captures, all with the same policy, to a recording."""
    admitted = active.admitted
    policy = next(iter(captures.values())).overload
    buffer = _buffer(active, manager, policy, lambda error: writer.overflow(error))
    row_type = FloatType(manager.sites.dtype)
    prompt = admitted.prompt.token_ids
    feed = RowFeed(admitted.request_id, prompt, captures, row_type, policy, buffer)
    abouts = {index: about_capture(index, capture) for index, capture in captures.items()}
    writer = SinkWriter(recording, abouts, feed, buffer, active.share, active.fail, threads)
    active.outputs.add_writer(writer)


def _buffer(
    active: ActiveRequest,
    manager: Openers,
    policy: capture_pb2.Overload.ValueType,
    overflow: Callable[[RheostatError], None],
    news: asyncio.Event | None = None,
) -> DeliveryBuffer:
    """A buffer in the memory of a request, which spills to disk if the policy says so."""
    buffer = DeliveryBuffer(
        active.share,
        lambda _, error: overflow(error),
        manager.deliveries,
        news=news,
        advice=ADVICE,
    )
    if manager.spill_manager is not None and policy == capture_pb2.OVERLOAD_SPILL:
        manager.spill_manager.open(buffer, overflow)
    return buffer
