"""Hostile subscriptions and captures on a real server: typed errors only, and nothing is left."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest

import rheostat
from rheostat_wire.v1 import engine_service_pb2, engine_service_pb2_grpc, generation_service_pb2

from ...effort import FACTOR, at_length
from .conftest import Server, assert_empty
from .hostile_captures import ARTIFACTS, GENERATE, KEPT_REQUESTS, SHARES, SUBSCRIBE, attempts
from .test_fuzz import AT_ONCE, EXPECTED, OPTIONS, PYTHON, end_of

pytestmark = pytest.mark.integration

ATTEMPTS = 600 * FACTOR
STATS = engine_service_pb2.GetStatsRequest()
RELEASED = 30
"""Seconds in which subscriptions end whose readers went away; the server keeps them for 15."""
LOSSES = {grpc.StatusCode.DATA_LOSS, grpc.StatusCode.OUT_OF_RANGE}
"""What captures may end with besides: a sink that failed, a cursor that is gone."""


@at_length
def test_hostile_captures_end_with_typed_errors_and_leave_nothing(
    server: Server, engine: rheostat.Engine, spool: Path
) -> None:
    prompt = "The Eiffel Tower is in the city of"
    before = engine.generate(prompt, **OPTIONS)
    kept = rheostat.Capture("resid_post", layers=1, to=rheostat.Sink("disk", tag="kept"))
    for name in KEPT_REQUESTS:
        engine.generate(prompt, max_tokens=1, capture=kept, request_id=name)
    logged = server.log.stat().st_size
    with grpc.insecure_channel(server.target) as channel, ThreadPoolExecutor(AT_ONCE) as pool:
        ends = list(pool.map(partial(end_of, channel), attempts(0, ATTEMPTS)))
        stub = engine_service_pb2_grpc.EngineServiceStub(channel)
        deadline = time.monotonic() + RELEASED
        while stub.GetStats(STATS).subscription_count and time.monotonic() < deadline:
            time.sleep(0.1)
        stats = stub.GetStats(STATS)
    assert (stats.subscription_count, stats.spooled_row_count) == (0, 0)
    assert list(spool.glob("*.spool")) == []
    wrong = [end for end in ends if end.code not in EXPECTED | LOSSES or not end.typed]
    assert not wrong, wrong[:9]
    telling = [end for end in ends if PYTHON.search(end.details)]
    assert not telling, telling[:9]
    assert_empty(engine)
    log = server.log.read_bytes()[logged:].decode(errors="replace")
    assert "Traceback" not in log
    assert "incident" not in log
    after = engine.generate(prompt, **OPTIONS)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    for end in ends:
        if end.method == GENERATE and end.code is grpc.StatusCode.OK:
            assert generation_service_pb2.GenerateResponse.FromString(end.last).HasField("receipt")
    often = SHARES.keys() - {ARTIFACTS}  # many of which name a sink that does not exist
    count = Counter(end.method for end in ends if end.code is grpc.StatusCode.OK)
    assert all(count[method] > 0.05 * ATTEMPTS * SHARES[method] / 100 for method in often), count
    assert count[ARTIFACTS], count
    refused = Counter(end.method for end in ends if end.code is grpc.StatusCode.INVALID_ARGUMENT)
    assert refused[SUBSCRIBE], refused
    assert refused[GENERATE], refused
