"""Hostile subscriptions and captures on a real server: typed errors only, and nothing is left."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest

import rheostat
from rheostat_wire.v1 import (
    engine_service_pb2,
    engine_service_pb2_grpc,
    generation_service_pb2,
)

from .conftest import assert_empty, serving
from .hostile_captures import ARTIFACTS, GENERATE, SHARES, SUBSCRIBE, attempts
from .test_fuzz import AT_ONCE, EXPECTED, OPTIONS, PYTHON, end_of

pytestmark = pytest.mark.integration

ATTEMPTS = 6_000
LOSSES = {grpc.StatusCode.DATA_LOSS, grpc.StatusCode.OUT_OF_RANGE}
"""What captures may end with besides: a sink that failed, a cursor that is gone."""


def test_hostile_captures_end_with_typed_errors_and_leave_nothing(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    sink = f"disk=filesystem:root={tmp_path / 'kept'}"
    options = ["--spool", str(spool), "--sink", sink, "--resume-window", "2"]
    prompt = "The Eiffel Tower is in the city of"
    with serving(tmp_path, *options) as server, rheostat.connect(server.target) as engine:
        before = engine.generate(prompt, **OPTIONS)
        logged = server.log.stat().st_size
        with grpc.insecure_channel(server.target) as channel, ThreadPoolExecutor(AT_ONCE) as pool:
            ends = list(pool.map(partial(end_of, channel), attempts(0, ATTEMPTS)))
            wrong = [end for end in ends if end.code not in EXPECTED | LOSSES or not end.typed]
            assert not wrong, wrong[:9]
            telling = [end for end in ends if PYTHON.search(end.details)]
            assert not telling, telling[:9]
            assert_empty(engine)
            stub = engine_service_pb2_grpc.EngineServiceStub(channel)
            for _ in range(100):
                stats = stub.GetStats(engine_service_pb2.GetStatsRequest())
                if not stats.subscription_count:
                    break
                time.sleep(0.1)
        assert (stats.subscription_count, stats.spooled_row_count) == (0, 0)
        assert list(spool.glob("*.spool")) == []
        log = server.log.read_bytes()[logged:].decode(errors="replace")
        assert "Traceback" not in log
        assert "incident" not in log
        after = engine.generate(prompt, **OPTIONS)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    for end in ends:
        if end.method == GENERATE and end.code is grpc.StatusCode.OK:
            assert generation_service_pb2.GenerateResponse.FromString(end.last).HasField("receipt")
    often = SHARES.keys() - {ARTIFACTS}  # which most requests have none of
    count = Counter(end.method for end in ends if end.code is grpc.StatusCode.OK)
    assert all(count[method] > 0.05 * ATTEMPTS * SHARES[method] / 100 for method in often), count
    assert count[ARTIFACTS], count
    refused = Counter(end.method for end in ends if end.code is grpc.StatusCode.INVALID_ARGUMENT)
    assert refused[SUBSCRIBE], refused
    assert refused[GENERATE], refused
