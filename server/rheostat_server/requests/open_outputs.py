"""Opens what a request's rows go to, before it starts."""

from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol

from rheostat_engine import ModelSites
from rheostat_server.capture.specs import ResolvedCapture, sink_groups
from rheostat_server.config import ServerConfig
from rheostat_server.delivery.delivery_buffer import Deliveries, DeliveryBuffer
from rheostat_server.delivery.response_rows import ADVICE, LOSSLESS
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.delivery.spill_manager import SpillManager
from rheostat_server.model_info import ModelInfo
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.sink_writer import (
    Recording,
    about_capture,
    open_recording,
    start_writer,
)
from rheostat_server.runs.store import Runs
from rheostat_server.sinks import Sinks
from rheostat_server.subscriptions.registry import Subscriptions
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import capture_pb2

_RUN_WRITERS = ThreadPoolExecutor(4, "run-writer")
"""Threads that copy rows into runs: they wait for no disk."""


class Openers(Protocol):
    """What it takes to open them."""

    config: ServerConfig
    info: ModelInfo
    sites: ModelSites
    sinks: Sinks
    runs: Runs
    subscriptions: Subscriptions
    deliveries: Deliveries
    spill_manager: SpillManager | None


async def open_outputs(active: ActiveRequest, manager: Openers) -> None:
    """Opens the response, subscriptions, sinks and runs that get the rows of a request.

    What is open when it raises is for `ActiveRequest.discard_outputs`.

    Raises:
        SubscriptionNotFound: the request sends rows to one that has ended meanwhile.
        ArtifactExists: the sink holds rows under the request's id and tag.
        SinkFailed: a sink does not take the request.
        RunExists: a run has been made meanwhile whose id the request gives to one.
        StoreFull: there is no room for another run.
    """
    admitted = active.admitted
    row_type = FloatType(manager.sites.dtype)
    for policy, inline in admitted.inline_captures.items():
        buffer = DeliveryBuffer(
            active.share,
            lambda _, error: active.overflow(error),
            manager.deliveries,
            news=active.response_rows.news,
            advice=ADVICE,
        )
        if manager.spill_manager is not None and policy == capture_pb2.OVERLOAD_SPILL:
            manager.spill_manager.open(buffer, active.overflow)
        feed = RowFeed(
            admitted.request_id, admitted.prompt.token_ids, inline, row_type, policy, buffer
        )
        active.response_rows.add(feed, buffer)
        active.outputs.add(feed, {index: index for index in inline})
    for target, captures in sink_groups(admitted.captures):
        recording = await open_recording(
            manager.sinks, admitted, target, captures, model=manager.info.name
        )
        _write(recording, captures, active, manager, manager.sinks.threads(target.sink))
    for index, capture in enumerate(admitted.captures):
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
    """Lets the rows of some captures go to a recording."""
    writer = start_writer(
        recording,
        active.admitted,
        captures,
        row_type=FloatType(manager.sites.dtype),
        share=active.share,
        deliveries=manager.deliveries,
        spill_manager=manager.spill_manager,
        fail=active.fail,
        threads=threads,
    )
    active.outputs.add_writer(writer)
