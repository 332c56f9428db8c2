"""Opens what a request's rows go to, before it starts."""

from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol

from rheostat_engine import ModelSites
from rheostat_server.capture.deliveries import Deliveries
from rheostat_server.capture.inline import ADVICE, LOSSLESS
from rheostat_server.capture.reservoir import Reservoir
from rheostat_server.capture.sink_writer import (
    Recording,
    about_capture,
    open_recording,
    start_writer,
)
from rheostat_server.capture.specs import ResolvedCapture, sink_groups
from rheostat_server.capture.spillway import Spillway
from rheostat_server.capture.taps import Tap
from rheostat_server.config import ServerConfig
from rheostat_server.flight import Flight
from rheostat_server.model_info import ModelInfo
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
    spillway: Spillway | None


async def open_outlets(flight: Flight, host: Openers) -> None:
    """Opens the response, subscriptions, sinks and runs that get the rows of a request.

    What is open when it raises is for `Flight.abandon`.

    Raises:
        SubscriptionNotFound: the request sends rows to one that has ended meanwhile.
        ArtifactExists: the sink holds rows under the request's id and tag.
        SinkFailed: a sink does not take the request.
        RunExists: a run has been made meanwhile whose id the request gives to one.
        StoreFull: there is no room for another run.
    """
    admitted = flight.admitted
    held = FloatType(host.sites.dtype)
    for policy, inline in admitted.inline_captures.items():
        reservoir = Reservoir(
            flight.share,
            lambda _, error: flight.overflow(error),
            host.deliveries,
            news=flight.inline.bell,
            advice=ADVICE,
        )
        if host.spillway is not None and policy == capture_pb2.OVERLOAD_SPILL:
            host.spillway.open(reservoir, flight.overflow)
        tap = Tap(admitted.request_id, admitted.prompt.token_ids, inline, held, policy, reservoir)
        flight.inline.add(tap, reservoir)
        flight.outlets.add(tap, {index: index for index in inline})
    for target, captures in sink_groups(admitted.captures):
        recording = await open_recording(
            host.sinks, admitted, target, captures, model=host.info.name
        )
        _write(recording, captures, flight, host, host.sinks.threads(target.sink))
    for index, capture in enumerate(admitted.captures):
        if capture.run is not None:
            draft = host.runs.begin(
                capture.run,
                about_capture(index, capture),
                admitted.prompt.token_ids,
                admitted.labels,
                f"captures[{index}].run.run_id",
                lossless=capture.overload in LOSSLESS,
            )
            flight.outlets.add_run(index, draft)
            _write(draft, {index: capture}, flight, host, _RUN_WRITERS)
    for wish in admitted.wishes:
        subscription = wish.subscription
        if wish.own:
            host.subscriptions.named(subscription.name, "captures")
        elif not subscription.taking:
            continue
        tap = subscription.tap(
            admitted.request_id,
            admitted.prompt.token_ids,
            wish.captures,
            held,
            fail=flight.fail if wish.own else None,
        )
        after = len(subscription.captures.templates)
        flight.outlets.add(tap, {number: number - after for number in wish.own})
        if wish.missed:
            subscription.miss(tap, wish.missed)
        if flight.unobserved and wish.observed:
            subscription.refuse(tap, frozenset(wish.captures) - wish.own)


def _write(
    recording: Recording,
    captures: Mapping[int, ResolvedCapture],
    flight: Flight,
    host: Openers,
    threads: Executor,
) -> None:
    """Lets the rows of some captures go to a recording."""
    writer = start_writer(
        recording,
        flight.admitted,
        captures,
        held=FloatType(host.sites.dtype),
        share=flight.share,
        deliveries=host.deliveries,
        spillway=host.spillway,
        fail=flight.fail,
        threads=threads,
    )
    flight.outlets.add_writer(writer)
