"""Makes hostile calls of `hostile_monitoring` beside a neighbour, and checks what came of them."""

import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import NamedTuple

import grpc

import rheostat
from rheostat_bench.served_process import faults
from rheostat_wire.v1 import engine_service_pb2, engine_service_pb2_grpc, generation_service_pb2

from .hostile import GENERATE, SESSION, Attempt
from .test_fuzz import AT_ONCE, EXPECTED, PYTHON, End, end_of

RELEASED = 60
"""Seconds in which the server frees everything of calls that have ended."""
_LOST = "REASON_WATCH_LOST"
"""Why requests with our label are refused once their watch is lost. It is `UNAVAILABLE`."""
_OPTIONS = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "logprobs": 1}
_PROMPT = "The Eiffel Tower is in the city of"
_APART = 1e-3
"""Of log-probabilities: other neighbours, other sums."""


class Outcome(NamedTuple):
    """What came of all calls."""

    ends: Counter[str]
    """By method and end."""
    neighbour_streams: int
    problems: list[str]


def play(target: str, log: Path, attempts: Iterable[Attempt], first: int = 0) -> Outcome:
    """Makes calls, `AT_ONCE` at a time, and waits until the server holds nothing.

    Args:
        target: the server.
        log: its log.
        attempts: the calls.
        first: the number of the first call; problems name a call by its number.
    """
    logged = log.stat().st_size
    over = Event()
    with rheostat.connect(target) as engine:
        alone = engine.generate(_PROMPT, **_OPTIONS)

        def neighbour() -> list[rheostat.Generation]:
            found = []
            while not over.is_set():
                with engine.stream(_PROMPT, **_OPTIONS) as stream:
                    found.append(stream.result())
            return found

        with grpc.insecure_channel(target) as channel, ThreadPoolExecutor(AT_ONCE + 1) as pool:
            streams = pool.submit(neighbour)
            try:
                ends = list(pool.map(partial(end_of, channel), attempts))
            finally:
                engine.steering.set_global(None)
                over.set()
            problems = [
                f"call {number}: {problem}"
                for number, end in enumerate(ends, first)
                if (problem := _problem(end))
            ]
            problems += [_changed(alone, stream) for stream in streams.result()]
            problems += held(channel)
        problems.append(_changed(alone, engine.generate(_PROMPT, **_OPTIONS)))
    problems += [f"log: {line}" for line in faults(log, logged)]
    counts = Counter(f"{end.method} {_name(end)}" for end in ends)
    return Outcome(counts, len(streams.result()), [one for one in problems if one])


def _name(end: End) -> str:
    return end.code.name if end.code is not grpc.StatusCode.INVALID_ARGUMENT else end.reason


def _problem(end: End) -> str:
    """Says why a call should not have ended so; empty if it may."""
    lost = end.code is grpc.StatusCode.UNAVAILABLE and end.reason == _LOST
    gone = end.code in (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DATA_LOSS)
    if not (lost or gone or end.code in EXPECTED) or not end.typed:
        return f"{end.method} ended with {end.code.name} {end.reason}: {end.details}"
    if PYTHON.search(end.details):
        return f"{end.method} tells of its code: {end.details}"
    if end.code is grpc.StatusCode.OK and end.method in (GENERATE, SESSION):
        kind = (
            generation_service_pb2.GenerateResponse
            if end.method == GENERATE
            else generation_service_pb2.SessionResponse
        )
        if "receipt" not in str(kind.FromString(end.last)):
            return f"{end.method} ended without a receipt"
    return ""


def _changed(alone: rheostat.Generation, other: rheostat.Generation) -> str:
    """Whether the neighbour got something else than alone."""
    if other.token_ids != alone.token_ids or other.finish_reason != alone.finish_reason:
        return f"the neighbour got {other.text!r} ({other.finish_reason}), alone {alone.text!r}"
    assert alone.logprobs is not None
    assert other.logprobs is not None
    apart = max(
        abs(one.token.logprob - two.token.logprob)
        for one, two in zip(alone.logprobs, other.logprobs, strict=True)
    )
    return f"the neighbour's log-probabilities are {apart} apart" if apart > _APART else ""


def held(channel: grpc.Channel) -> list[str]:
    """What the server still holds after `RELEASED` seconds."""
    stub = engine_service_pb2_grpc.EngineServiceStub(channel)
    deadline = time.monotonic() + RELEASED
    while True:
        stats = stub.GetStats(engine_service_pb2.GetStatsRequest())
        held = {
            "running requests": stats.running_request_count,
            "waiting requests": stats.waiting_request_count,
            "bank rows": stats.used_bank_row_count,
            "leaks": stats.leaked_count,
            "subscriptions": stats.subscription_count,
            "bytes of requests": stats.request_buffer_bytes,
            "bytes of subscriptions": stats.subscription_buffer_bytes,
            "rows on disk": stats.spooled_row_count,
        }
        found = [f"held: {count} {name}" for name, count in held.items() if count]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)
